"""The score of each question, here and at the baseline. For flipped questions also the text, read from lm-eval's samples."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, Self

from markupsafe import escape
from pydantic import model_validator

from vllm_qualify.evidence import answers
from vllm_qualify.evidence.accuracy import asked_again, thought_without_answers
from vllm_qualify.evidence.answers import Answer
from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.evidence.pictures import NAMED
from vllm_qualify.evidence.thinking import CUT, REPLIES, read_replies
from vllm_qualify.judge.compare import BASELINE, answers_path, paired_gates
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.values import CountOrNone, Frozen, Share
from vllm_qualify.report.replies import apart
from vllm_qualify.secrets import plain

# With these limits a page, with all its text, opens in under two seconds and stays below 5 MB.
MOST_FLIPS, MOST_CHARACTERS, MOST_BYTES, MOST_QUESTIONS = 200, 2000, 1_000_000, 24_000
# The limits of the page of its own that the words get if they are more.
ALL_FLIPS, ALL_CHARACTERS, ALL_BYTES = 2000, 20_000, 10_000_000
# MMLU has 57 topics. A task with more of them has none to choose from.
MOST_TOPICS, MOST_TOPIC_CHARACTERS = 100, 100
# The fields of a document that are its question: ChartQA has `query`.
ASKED = ("question", "query")
# A question counts as right if more than this share of its answers was right.
HALF = 0.5
NOT_BROUGHT = "the words of the baseline's answers are not in this run's evidence: its scores alone were brought"

Way = Literal["lost", "gained"]
ScoreKey = tuple[str, str]
"""The metric and lm-eval's filter that an answer is scored by."""


class Excerpt(Frozen):
    """Outside text, and how many characters were cut. A prompt keeps its end, other text its beginning."""

    text: str
    cut: CountOrNone = 0


class Flip(Frozen):
    """A question that was right at the baseline and is wrong here, or the reverse. A text that is not available is None.

    `theirs` and `ours` are the answers. What a model thought before its answer is apart from it.
    """

    question: CountOrNone
    asked: Excerpt | None
    target: Excerpt | None
    theirs: Excerpt | None
    ours: Excerpt | None
    their_thinking: Excerpt | None = None
    our_thinking: Excerpt | None = None

    @property
    def texts(self) -> list[Excerpt]:
        texts = (self.asked, self.target, self.theirs, self.ours, self.their_thinking, self.our_thinking)
        return [each for each in texts if each]

    @property
    def bytes(self) -> int:
        """The size of its text as written on a page."""
        return sum(len(escape(plain(each.text)).encode(errors="replace")) for each in self.texts)


class ScoredQuestions(Frozen):
    """A task's questions with the scores of one filter; `against` is the baseline's run, if there is one.

    `numbers` are the questions. For each, `ours` and `theirs` have the mean score of its answers; None if it has no answer.
    Some questions may be left out, but `asked`, `lost` and `gained` count all of them. `topics` are what the task's own data
    says that questions are about. If there are any, `about` has for each of `numbers` the place of its topic in `topics`.
    `cut` are those with an answer here that was cut at the most tokens allowed; None if that is not known of each answer.
    """

    task: str
    metric: str
    filter: str
    against: str | None = None
    numbers: list[CountOrNone]
    ours: list[Share | None]
    theirs: list[Share | None] = []
    asked: CountOrNone
    lost: CountOrNone = 0
    gained: CountOrNone = 0
    topics: list[str] = []
    about: list[CountOrNone | None] = []
    cut: list[CountOrNone] | None = None
    flips: list[Flip] = []
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


def is_right(score: float) -> bool:
    return score > HALF


def questions(plan: CellPlan, evidence: Path) -> list[ScoredQuestions]:
    """The questions of each task with a gate, by that gate's filter. Unreadable ones are left out: the measurements say why."""
    return _all_tasks(plan, evidence, _Room(MOST_FLIPS, MOST_BYTES, MOST_QUESTIONS, MOST_CHARACTERS))


def all_words(plan: CellPlan, evidence: Path) -> list[ScoredQuestions]:
    """As `questions`, with the words of more questions that flipped, and more of each text."""
    return _all_tasks(plan, evidence, _Room(ALL_FLIPS, ALL_BYTES, MOST_QUESTIONS, ALL_CHARACTERS))


def has_more_words(tasks: Iterable[ScoredQuestions]) -> bool:
    """Whether `questions` left out words that `all_words` may have."""
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
    wanted = [(task, key) for task in plan.accuracy for key in _keys(plan, task)]
    tasks = []
    for task, key in wanted:
        room = whole.shared_by(len(wanted))
        try:
            tasks.append(_questions(plan, evidence, task, key, room))
        except UNUSABLE:
            continue
    return tasks


def _keys(plan: CellPlan, task: TaskPlan) -> list[ScoreKey]:
    """The scores of the gates against the baseline; if there are none, of all gates on the task's scores."""
    scored = [gate for gate in plan.gates if gate.task == task.name and METRICS[gate.metric].is_score]
    gates = (paired_gates(plan, task) if plan.baseline else []) or scored
    return list(dict.fromkeys((gate.metric, gate.filter) for gate in gates if gate.filter))


def _questions(plan: CellPlan, evidence: Path, task: TaskPlan, key: ScoreKey, room: _Room) -> ScoredQuestions:
    folder = evidence / "accuracy" / task.name
    here = _by_question(answers.read_answers(folder, task).answers)
    there, problem = _theirs(plan, evidence, task)
    name = ",".join(key)
    ours, theirs = _means(here, name), _means(there, name)
    ways = {number: way(score, theirs.get(number)) for number, score in ours.items()}
    flipped = sorted((number for number in ours if ways[number]), key=lambda number: _order(number, ways, ours, theirs))
    sides = (_Side(folder, here, ours), _Side(_their_folder(evidence, task), there, theirs))
    flips = _flips(flipped[: room.flips], *sides, name, room.characters)
    kept = _within(flips, room.bytes)
    numbers = _kept_numbers(ours, flipped, room.questions)
    counted = list(ways.values())
    topics, about = _topics(here, numbers)
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
        cut=_cut(folder, here, numbers),
        flips=kept,
        notes=list(_notes(problem, kept, asked_again(folder, task), thought_without_answers(folder, task))),
    )


def _notes(problem: str | None, flips: Sequence[Flip], *told: str) -> Iterator[str]:
    yield from (note for note in (*told, problem) if note)
    if any(flip.theirs is None for flip in flips):
        yield NOT_BROUGHT


def _by_question(answers: Iterable[Answer]) -> dict[int, list[Answer]]:
    by_question: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_question[answer.question].append(answer)
    return dict(by_question)


def _topics(by_question: dict[int, list[Answer]], numbers: Sequence[int]) -> tuple[list[str], list[int | None]]:
    """The topics, and the place of each question's topic among them; nothing if there are none, or too many to choose from."""
    named = {number: by_question[number][0].topic for number in numbers}
    topics = sorted({topic for topic in named.values() if topic})
    if not 1 < len(topics) <= MOST_TOPICS:
        return [], []
    places = {topic: place for place, topic in enumerate(topics)}
    about = [places[topic] if (topic := named[number]) else None for number in numbers]
    return [topic[:MOST_TOPIC_CHARACTERS] for topic in topics], about


def _cut(folder: Path, by_question: dict[int, list[Answer]], numbers: Sequence[int]) -> list[int] | None:
    """The questions with an answer that was cut; None if the replies of a step were not kept."""
    steps = {answer.step for answers in by_question.values() for answer in answers}
    if not all((folder / step / REPLIES).exists() for step in steps):
        return None
    cut = {(step, reply.prompt_hash) for step in steps for reply in read_replies(folder / step) if reply.finish_reason == CUT}
    return [number for number in numbers if any((each.step, each.prompt_hash) in cut for each in by_question[number])]


def _theirs(plan: CellPlan, evidence: Path, task: TaskPlan) -> tuple[dict[int, list[Answer]], str | None]:
    """The baseline's answers without the empty ones, or why there are none."""
    if plan.baseline is None or not paired_gates(plan, task):
        return {}, None
    try:
        kept = answers.load(evidence / BASELINE / answers_path(task.name)).answers
        return _by_question(answer for answer in kept if not answer.unanswered), None
    except UNUSABLE as error:
        return {}, f"the baseline's answers cannot be read: {in_words(error)}"


def _their_folder(evidence: Path, task: TaskPlan) -> Path:
    return (evidence / BASELINE / answers_path(task.name)).parent


def _means(by_question: dict[int, list[Answer]], name: str) -> dict[int, float]:
    return {number: fmean(answer.score(name) for answer in answers) for number, answers in sorted(by_question.items())}


Means = dict[int, float]


def _order(number: int, ways: dict[int, Way | None], ours: Means, theirs: Means) -> tuple[bool, float, int]:
    """The order of the flips: the lost ones first, then the largest difference first."""
    return ways[number] != "lost", -abs(ours[number] - theirs[number]), number


def _kept_numbers(ours: Means, flipped: Sequence[int], most: int) -> list[int]:
    """All questions; if there are too many, the flipped ones and then the first ones."""
    if len(ours) <= most:
        return list(ours)
    first = dict.fromkeys([*flipped, *ours])
    return sorted(list(first)[:most])


def _within(flips: Sequence[Flip], most_bytes: int) -> list[Flip]:
    kept, taken = [], 0
    for flip in flips:
        taken += flip.bytes
        if taken > most_bytes:
            break
        kept.append(flip)
    return kept


class _Side(NamedTuple):
    """The answers of one side, and the folder of the lm-eval files that contain them."""

    folder: Path
    answers: dict[int, list[Answer]]
    means: Means

    def telling(self, number: int, name: str) -> Answer:
        """The first answer with the same result as the question; one whose text is available, if there is one."""
        right = is_right(self.means[number])
        alike = [each for each in self.answers[number] if is_right(each.score(name)) == right]
        return next((each for each in alike if self.place(each)[0].is_file()), alike[0])

    def thoughts(self, shown: Sequence[Answer]) -> dict[str, str]:
        """What was thought before these answers, apart from them, by where they are from."""
        wanted = {(answer.step, answer.prompt_hash): answer.traced_to for answer in shown}
        return {
            wanted[step, reply.prompt_hash]: reply.thinking
            for step in {step for step, _ in wanted}
            for reply in read_replies(self.folder / step)
            if reply.thinking and (step, reply.prompt_hash) in wanted
        }

    def place(self, answer: Answer) -> tuple[Path, int]:
        path, _, line = answer.traced_to.rpartition(":")
        return self.folder / path, int(line)


def _flips(numbers: Sequence[int], ours: _Side, theirs: _Side, name: str, most: int) -> list[Flip]:
    answers = {number: (ours.telling(number, name), theirs.telling(number, name)) for number in numbers}
    here = _rows([ours.place(mine) for mine, _ in answers.values()])
    there = _rows([theirs.place(their) for _, their in answers.values()])
    our_thoughts = ours.thoughts([mine for mine, _ in answers.values()])
    their_thoughts = theirs.thoughts([their for _, their in answers.values()])
    return [
        _flip(
            number,
            _Said(here.get(ours.place(mine)), our_thoughts.get(mine.traced_to)),
            _Said(there.get(theirs.place(their)), their_thoughts.get(their.traced_to)),
            most,
        )
        for number, (mine, their) in answers.items()
    ]


def _rows(places: Iterable[tuple[Path, int]]) -> dict[tuple[Path, int], dict[str, Any]]:
    """lm-eval's rows at these lines. Each file is read once; missing files are left out."""
    wanted: dict[Path, set[int]] = defaultdict(set)
    for path, line in places:
        wanted[path].add(line)
    rows: dict[tuple[Path, int], dict[str, Any]] = {}
    for path, lines in wanted.items():
        if path.is_file():
            rows |= {(path, number): row for number, row in _rows_of(path, lines)}
    return rows


def _rows_of(path: Path, lines: set[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows at these lines. Only `\\n` ends a line of lm-eval: a reply can contain other line ends."""
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from ((number, json.loads(text)) for number, text in enumerate(file, start=1) if number in lines)


class _Said(NamedTuple):
    """One side's answer to a question: lm-eval's row, and what was thought apart from it."""

    row: dict[str, Any] | None
    thought: str | None

    def excerpts(self, most: int) -> tuple[Excerpt | None, Excerpt | None]:
        """What was thought, and the answer."""
        if self.row is None:
            return None, None
        reply = apart(_reply(self.row))
        thoughts = [each for each in (self.thought, reply.thinking) if each is not None]
        return _begin("\n\n".join(thoughts), most) if thoughts else None, _begin(reply.answer, most)


def _flip(number: int, ours: _Said, theirs: _Said, most: int) -> Flip:
    row = ours.row or theirs.row
    their_thinking, their_answer = theirs.excerpts(most)
    our_thinking, our_answer = ours.excerpts(most)
    return Flip(
        question=number,
        asked=_asked(row, most) if row else None,
        target=_begin(_text(row.get("target")), most) if row else None,
        theirs=their_answer,
        ours=our_answer,
        their_thinking=their_thinking,
        our_thinking=our_thinking,
    )


def _asked(row: dict[str, Any], most: int) -> Excerpt:
    """The question alone, with the names of its pictures, if the task has it; else the prompt's end, after the examples."""
    document = row.get("doc")
    fields = document if isinstance(document, dict) else {}
    question = next((fields[name] for name in ASKED if isinstance(fields.get(name), str)), None)
    if question is not None:
        pictures = [value for value in fields.values() if isinstance(value, str) and value.startswith(NAMED)]
        return _begin("\n".join([*pictures, question]), most)
    prompt = _text(row["arguments"]["gen_args_0"]["arg_0"])
    return _excerpt(prompt[-most:], prompt)


def _reply(row: dict[str, Any]) -> str:
    """The reply. If likelihoods were compared, lm-eval's result."""
    replies = [reply for replies in row["resps"] for reply in replies]
    if all(reply is None or isinstance(reply, str) for reply in replies):
        return "\n\n".join(reply or "" for reply in replies)
    return _text(row["filtered_resps"])


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _begin(text: str, most: int) -> Excerpt:
    return _excerpt(text[:most], text)


def _excerpt(part: str, whole: str) -> Excerpt:
    """The excerpt. Half of a surrogate pair, which JSON cannot contain, is escaped."""
    return Excerpt(text=part.encode(errors="backslashreplace").decode(), cut=len(whole) - len(part))
