"""The score of each question, here and at the baseline."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, Self

from pydantic import model_validator

from vllm_qualify.evidence.accuracy import answers, samples
from vllm_qualify.evidence.accuracy.answers import Answer
from vllm_qualify.evidence.accuracy.measurements import describe_missing_answers, describe_retries
from vllm_qualify.evidence.accuracy.thinking import CUT, REPLIES, read_replies
from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.judge.compare.enough import paired_gates
from vllm_qualify.judge.compare.looks import group_by_question
from vllm_qualify.judge.compare.places import BASELINE, answers_path
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.values import CountOrZero, Frozen, Share
from vllm_qualify.report.flips import FirstReply, Flip, Side, is_right, keep_within, read_first_replies, read_flips

# With these limits a page, with all its text, opens in under two seconds and stays below 5 MB.
MOST_FLIPS, MOST_CHARACTERS, MOST_BYTES, MOST_QUESTIONS = 200, 2000, 1_000_000, 24_000
# The limits of the page of its own that the words get if they are more.
ALL_FLIPS, ALL_CHARACTERS, ALL_BYTES = 2000, 20_000, 10_000_000
# MMLU has 57 topics. A task with more of them has none to choose from.
MOST_TOPICS, MOST_TOPIC_CHARACTERS = 100, 100
# On the first screen, whatever the replies are: a wrong chat template shows in each.
FIRST_REPLIES, MOST_REPLY_CHARACTERS = 3, 140
NOT_BROUGHT = "the words of the baseline's answers are not in this run's evidence: its scores alone were brought"

Way = Literal["lost", "gained"]
ScoreKey = tuple[str, str]
"""The metric and lm-eval's filter that an answer is scored by."""


class ScoredQuestions(Frozen):
    """A task's questions with the scores of one filter. Some questions may be left out."""

    task: str
    metric: str
    filter: str
    against: str | None = None
    """the baseline's run"""
    numbers: list[CountOrZero]
    """the questions"""
    ours: list[Share | None]
    """for each of `numbers` the mean score of its answers; None if it has no answer"""
    theirs: list[Share | None] = []
    """the same at the baseline; empty without a baseline"""
    asked: CountOrZero
    """how many questions were asked, also those that are left out"""
    lost: CountOrZero = 0
    gained: CountOrZero = 0
    topics: list[str] = []
    """what questions are about, by the task's own data"""
    about: list[CountOrZero | None] = []
    """for each of `numbers` the place of its topic in `topics`, if there are topics"""
    cut: list[CountOrZero] | None = None
    """the questions with an answer here that was cut at the most tokens allowed; None if this is not known of each answer"""
    flips: list[Flip] = []
    first_replies: list[FirstReply] = []
    """the replies of this run to the first questions"""
    notes: list[str] = []

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.ours) != len(self.numbers) or (self.theirs and len(self.theirs) != len(self.numbers)):
            raise ValueError("each question has a score, and where there is a baseline also its")
        if not {flip.question for flip in self.flips} <= set(self.numbers):
            raise ValueError("a question that flipped is not among the questions")
        if self.about and len(self.about) != len(self.numbers):
            raise ValueError("where questions have topics, each has one or none")
        if not all(place is None or place < len(self.topics) for place in self.about):
            raise ValueError("a question has a topic that is not among the topics")
        return self

    @property
    def flipped(self) -> int:
        return self.lost + self.gained

    @property
    def ways(self) -> dict[int, Way | None]:
        """How each of `numbers` flipped."""
        theirs = self.theirs or [None] * len(self.numbers)
        return {number: way(*scores) for number, *scores in zip(self.numbers, self.ours, theirs, strict=True)}


def way(ours: float | None, theirs: float | None) -> Way | None:
    """How a question flipped, if at all. A question without an answer on one side has not flipped."""
    if ours is None or theirs is None or is_right(ours) == is_right(theirs):
        return None
    return "lost" if is_right(theirs) else "gained"


def score_questions(plan: CellPlan, evidence: Path) -> list[ScoredQuestions]:
    """The questions of each task with a gate, by that gate's filter. Unreadable ones are left out: the measurements say why."""
    return _all_tasks(plan, evidence, _Room(MOST_FLIPS, MOST_BYTES, MOST_QUESTIONS, MOST_CHARACTERS))


def all_words(plan: CellPlan, evidence: Path) -> list[ScoredQuestions]:
    """As `score_questions`, with the words of more questions that flipped, and more of each text."""
    return _all_tasks(plan, evidence, _Room(ALL_FLIPS, ALL_BYTES, MOST_QUESTIONS, ALL_CHARACTERS))


def has_more_words(tasks: Iterable[ScoredQuestions]) -> bool:
    """Whether `score_questions` left out words that `all_words` may have."""
    return any(len(each.flips) < each.flipped or any(text.cut for flip in each.flips for text in flip.texts) for each in tasks)


class _Room(NamedTuple):
    """The room for the questions of all tasks, or of one filter. Each text has at most so many `characters`."""

    flips: int
    bytes: int
    questions: int
    characters: int

    def shared_by(self, count: int) -> "_Room":
        return _Room(self.flips // count, self.bytes // count, self.questions // count, self.characters)


def _all_tasks(plan: CellPlan, evidence: Path, whole: _Room) -> list[ScoredQuestions]:
    wanted = [(task, key) for task in plan.accuracy for key in _score_keys(plan, task)]
    tasks = []
    for task, key in wanted:
        with suppress(*UNUSABLE):
            tasks.append(_score_task(plan, evidence, task, key, whole.shared_by(len(wanted))))
    return tasks


def _score_keys(plan: CellPlan, task: TaskPlan) -> list[ScoreKey]:
    """The scores of the gates against the baseline; if there are none, of all gates on the task's scores."""
    scored = [gate for gate in plan.gates if gate.task == task.name and METRICS[gate.metric].is_score]
    gates = (paired_gates(plan, task) if plan.baseline else []) or scored
    return list(dict.fromkeys((gate.metric, gate.filter) for gate in gates if gate.filter))


def _score_task(plan: CellPlan, evidence: Path, task: TaskPlan, key: ScoreKey, room: _Room) -> ScoredQuestions:
    folder = evidence / "accuracy" / task.name
    here = group_by_question(samples.read_answers(folder, task).answers)
    there, problem = _read_theirs(plan, evidence, task)
    name = ",".join(key)
    ours, theirs = _mean_scores(here, name), _mean_scores(there, name)
    ways = {number: way(score, theirs.get(number)) for number, score in ours.items()}
    # The lost ones first, then the largest difference first.
    order = {number: (ways[number] != "lost", -abs(ours[number] - theirs[number]), number) for number in ours if ways[number]}
    flipped = sorted(order, key=order.__getitem__)
    their_folder = (evidence / BASELINE / answers_path(task.name)).parent
    sides = (Side(folder, here, ours), Side(their_folder, there, theirs))
    flips = read_flips(flipped[: room.flips], *sides, name, room.characters)
    kept = keep_within(flips, room.bytes)
    # If there are too many, the flipped ones and then the first ones.
    numbers = sorted(list(dict.fromkeys([*flipped, *ours]))[: room.questions])
    counted = list(ways.values())
    topics, about = _find_topics(here, numbers)
    not_brought = NOT_BROUGHT if any(flip.theirs is None for flip in kept) else None
    notes = (describe_retries(folder, task), describe_missing_answers(folder, task), problem, not_brought)
    return ScoredQuestions(
        task=task.name,
        metric=key[0],
        filter=key[1],
        against=plan.baseline.run_id if plan.baseline and there else None,
        numbers=numbers,
        ours=[ours[number] for number in numbers],
        theirs=[theirs.get(number) for number in numbers] if there else [],
        asked=len(ours),
        lost=counted.count("lost"),
        gained=counted.count("gained"),
        topics=topics,
        about=about,
        cut=_find_cut(folder, here, numbers),
        flips=kept,
        first_replies=read_first_replies(list(ours)[:FIRST_REPLIES], sides[0], name, MOST_REPLY_CHARACTERS),
        notes=[note for note in notes if note],
    )


def _find_topics(by_question: dict[int, list[Answer]], numbers: Sequence[int]) -> tuple[list[str], list[int | None]]:
    """The topics, and the place of each question's topic among them; nothing if there are none, or too many to choose from."""
    named = {number: by_question[number][0].topic for number in numbers}
    topics = sorted({topic for topic in named.values() if topic})
    if not 1 < len(topics) <= MOST_TOPICS:
        return [], []
    places = {topic: place for place, topic in enumerate(topics)}
    about = [places[topic] if (topic := named[number]) else None for number in numbers]
    return [topic[:MOST_TOPIC_CHARACTERS] for topic in topics], about


def _find_cut(folder: Path, by_question: dict[int, list[Answer]], numbers: Sequence[int]) -> list[int] | None:
    """The questions with an answer that was cut; None if the replies of a step were not kept."""
    steps = {answer.step for answers in by_question.values() for answer in answers}
    if not all((folder / step / REPLIES).exists() for step in steps):
        return None
    cut = {(step, reply.prompt_hash) for step in steps for reply in read_replies(folder / step) if reply.finish_reason == CUT}
    return [number for number in numbers if any((each.step, each.prompt_hash) in cut for each in by_question[number])]


def _read_theirs(plan: CellPlan, evidence: Path, task: TaskPlan) -> tuple[dict[int, list[Answer]], str | None]:
    """The baseline's answers without the empty ones, or why there are none."""
    if plan.baseline is None or not paired_gates(plan, task):
        return {}, None
    try:
        kept = answers.load(evidence / BASELINE / answers_path(task.name)).answers
        return group_by_question(answer for answer in kept if not answer.unanswered), None
    except UNUSABLE as error:
        return {}, f"the baseline's answers cannot be read: {in_words(error)}"


def _mean_scores(by_question: dict[int, list[Answer]], name: str) -> dict[int, float]:
    return {number: fmean(answer.score(name) for answer in answers) for number, answers in sorted(by_question.items())}
