"""Compares the cell with its baseline and its anchor: measurements of what was lost, from the evidence of both.

Both must be alike: the same questions with the same prompts, and the same load by the same client on the same machine type.
Otherwise the comparison is invalid and says what differs.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence import accuracy, answers, starts
from vllm_qualify.evidence.answers import Answer, Answered
from vllm_qualify.evidence.load import figures, result, speculation
from vllm_qualify.evidence.measurement import UNUSABLE, Interval, Measurement, StageEvidence, in_words, invalid, valid
from vllm_qualify.evidence.sequential import levels_for, sides_of
from vllm_qualify.evidence.stages import parse_beside, parse_beside_in, scored_answers, scored_texts
from vllm_qualify.judge import likelihood, loads, paired, relative, steadiness, tokens
from vllm_qualify.judge.between import Between, History
from vllm_qualify.judge.loads import LoadPlan, Repeats
from vllm_qualify.judge.paired import Record
from vllm_qualify.judge.relative import EarlierRuns
from vllm_qualify.judge.unseen import rare_changes
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate, label_of
from vllm_qualify.recipe.metrics import (
    ANSWER_NLL,
    ANSWER_TOP1,
    GOODPUT,
    METRICS,
    SPEEDUP,
    SPEEDUP_BATCH1,
    TOP1_SHARES,
    Stage,
)
from vllm_qualify.recipe.workload import LEAST_REPETITIONS, USUAL_TOKENS, Accuracy, Load

OF_ANSWERS = (ANSWER_NLL, ANSWER_TOP1)
RATE = "output_throughput_tok_s"
# Whether a load is steady is judged by this: every load has it, and also at a rate it tells how busy the server is.
STEADY_BY = "e2el_mean_ms"
BASELINE, LOAD_STAGE, STARTS_STAGE = "baseline", "load.json", "starts.json"
# The baseline's stages that are compared by their measurements, each with its file in the folder `baseline`.
MEASURED: dict[Stage, str] = {"load": LOAD_STAGE, "starts": STARTS_STAGE}
# The folder of the anchor's answers, in the baseline's; and its stages with its scores, each with its file there.
ANCHOR, ACCURACY_STAGE = "anchor", "accuracy.json"
ANCHORED: dict[Stage, str] = {"accuracy": ACCURACY_STAGE, "starts": STARTS_STAGE}
# What an interval does not have, in the words of reports.
STARTS = "what differs from start to start of a server, since each build was started once"
ASSUMED = "what differs from start to start of this server: it is assumed, since the server was started once"
STARTS_OF_TWO = "what differs from start to start of a server, since one of the two was started once"
FIRST_STARTS = "what differs from start to start of a server, since only the answers of each build's first one are compared"
SAMPLES = "what the samples of one question and one start have in common, so that they count as if they had nothing"
TOGETHER = "what the answers of one repetition have in common beyond their topics"
DAYS = "what differs from day to day, since each build was measured on one"
# The settings of a task that its answers depend on. Hashes identify its questions.
SAME_QUESTIONS = (
    *("api", "num_fewshot", "num_questions", "max_gen_toks", "seed"),
    *("sampling", "system_prompt", "chat_template_kwargs", "reasoning_effort", "think_end", "stop"),
)
# The settings of a load that are not its workload: how long and how often it is measured, and where its prompts are.
# Each repeat has prompts of its own, and what they change is noise between repeats: so the name in the seeds does not matter.
NOT_OF_THE_WORKLOAD = {
    "repeats",
    "most_repeats",
    "time_budget_s",
    "min_duration_s",
    "time_limit_s",
    "prompts",
    "trace",
    "seeded_by",
}
# MLPerf Inference requires replies of at least 0.9 times the reference's length. Far longer ones are not the same work either.
LENGTHS = (0.9, 1.1)


def compare(
    plan: CellPlan, evidence: Path, measurements: Sequence[Measurement], gates: Sequence[Gate] | None = None
) -> list[Measurement]:
    """One measurement for each judged gate that is against another run, of `gates` or else of all."""
    judged = plan.judged if plan.is_compared else []
    comparing = [gate for gate in judged if gate.is_compared and (gates is None or gate in gates)]

    @cache
    def baseline_load() -> list[Measurement]:
        """The baseline's load, read once for all gates."""
        return parse_beside(plan, evidence) if plan.beside else _history(plan, evidence)

    @cache
    def unsteady() -> str | None:
        return _unsteady(plan, evidence, measurements, baseline_load)

    return [_compared(gate, plan, evidence, measurements, baseline_load, unsteady) for gate in comparing]


BaselineLoad = Callable[[], list[Measurement]]


def _compared(
    gate: Gate,
    plan: CellPlan,
    evidence: Path,
    measurements: Sequence[Measurement],
    baseline_load: BaselineLoad,
    unsteady: Callable[[], str | None],
) -> Measurement:
    about = {"task": gate.task, "filter": gate.filter, **_against(gate, plan)}
    try:
        ours = _own(gate, measurements)
        if ours.invalid_because is not None:
            return invalid(gate.metric, ours.invalid_because, ours.source, **about)
        if spoiled := next((row for row in _in_starts(gate, measurements) if row.invalid_because), None):
            return invalid(gate.metric, f"start {spoiled.start}: {spoiled.invalid_because}", spoiled.source, **about)
        match gate.against:
            case "answers" | "anchor":
                return _loss(gate, plan, evidence, about)
            case "tokens":
                return _longer(gate, plan, evidence, about)
            case "load":
                if problem := unsteady():
                    return invalid(gate.metric, problem, ours.source, **about)
                return _worsening(gate, plan, evidence, [ours, *_in_starts(gate, measurements)], baseline_load, about)
            case "likelihood":
                return _unlikelier(gate, plan, evidence, ours, about)
            case None:
                raise ValueError(f"{gate.label} is a gate on the metric itself")
    except UNUSABLE as error:
        return invalid(gate.metric, f"no usable comparison: {in_words(error)}", "", **about)


def _against(gate: Gate, plan: CellPlan) -> dict[str, Any]:
    if gate.is_against_anchor:
        return {"against": plan.held_against.run_id, "against_anchor": True}
    return {"against": plan.compared_with.run_id}


def _own(gate: Gate, measurements: Sequence[Measurement]) -> Measurement:
    """The cell's own measurement, which must be valid to be compared. Raises ValueError if there is none."""
    own = label_of(gate.metric, gate.task, gate.filter, against_baseline=False)
    before_filters = label_of(gate.metric, gate.task, None, against_baseline=False)
    rows = [measurement for measurement in measurements if measurement.label in (own, before_filters)]
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} measurements of {own}")
    return rows[0]


def _in_starts(gate: Gate, measurements: Iterable[Measurement]) -> list[Measurement]:
    """What further starts measured for a gate. What failed before its filter was known counts for all filters."""
    rows = [row for row in measurements if row.start and (row.metric, row.task) == (gate.metric, gate.task)]
    return [row for row in rows if row.filter in (gate.filter, None)]


class UnlikeError(ValueError):
    """The measurements of the cell and of its baseline are not alike."""

    def __repr__(self) -> str:
        return str(self)


def _task_of(plan: CellPlan, gate: Gate) -> TaskPlan:
    for task in plan.accuracy:
        if task.name == gate.task:
            return task
    raise UnlikeError(f"the run was not asked {gate.task}")


def not_established(plan: CellPlan, evidence: Path, measurements: Sequence[Measurement]) -> list[tuple[Gate, Measurement]]:
    """The gates for which this run cannot be the baseline of a later run, each with what is missing."""
    if not plan.establishes:
        return []
    unusable = []
    for gate in plan.comparing:
        try:
            own = _own(gate, measurements)
            problem = own.invalid_because
            if gate.is_over_starts:
                problem = problem or _lacking_start(gate, plan, evidence, measurements)
            if problem is None and gate.against == "answers":
                problem = _too_seldom(_first_answers(plan, evidence, gate))
            if problem is None and gate.against == "tokens":
                tokens.by_question(_first_answers(plan, evidence, gate).answers)
        except UNUSABLE as error:
            problem = in_words(error)
        if problem:
            about = {"task": gate.task, "filter": gate.filter, "against": plan.run_id}
            unusable.append((gate, invalid(gate.metric, f"it cannot be a baseline for this: {problem}", "", **about)))
    return unusable


def _first_answers(plan: CellPlan, evidence: Path, gate: Gate) -> Answered:
    """The cell's own answers of the first start. Raises one of UNUSABLE."""
    return answers.read_answers(evidence / "accuracy" / str(gate.task), _task_of(plan, gate))


def _lacking_start(gate: Gate, plan: CellPlan, evidence: Path, measurements: Iterable[Measurement]) -> str | None:
    """Which of the planned starts does not count for a gate, and why; None if all do, or the budget ended their loads."""
    reasons = {row.start: row.invalid_because for row in _in_starts(gate, measurements)}
    for number in range(starts.FIRST + 1, min(plan.starts, starts.OF_A_BASELINE) + 1):
        if number not in reasons and not (gate.against == "load" and _no_time(plan, evidence, number)):
            return f"start {number} did not measure it"
        if reasons.get(number):
            return f"start {number}: {reasons[number]}"
    return None


def _too_seldom(answered: Answered) -> str | None:
    asked = max(answer.repetition for answer in answered.answers)
    return f"its questions were asked {asked} times, and {LEAST_REPETITIONS} are needed" if asked < LEAST_REPETITIONS else None


def unusable_baseline(plan: CellPlan, folder: Path) -> str | None:
    """Why nothing can be compared with the answers in a `baseline` folder, whatever the cell will answer; else None."""
    for task in plan.accuracy:
        for gate in _of_answers(plan, task):
            other = _other(gate, plan)
            try:
                kept = answers.load(folder / other.path(task.name))
                if gate.against == "tokens":
                    tokens.by_question(kept.answers)
                else:
                    repetitions_to_establish(kept, task, gate)
            except UNUSABLE as error:
                return f"{other.word}: {in_words(error)}"
    return None


def likelihood_differs(plan: CellPlan) -> str | None:
    """Why the baseline's likelihoods cannot be compared with the cell's; else None. The other way round nothing is compared."""
    if not any(gate.against == "likelihood" for gate in plan.gates):
        return None
    then, now = plan.compared_with.likelihood, plan.likelihood
    if then is None:
        return "the baseline scored no texts"
    if now is None or not now.covers(then):
        return "the baseline scored other texts, or more answers"
    return None


def answers_path(task: str) -> str:
    """The path of a task's answers: the cell's own in the evidence folder, and the baseline's in its folder `baseline/`."""
    return f"accuracy/{task}/{accuracy.ANSWERS}"


def is_answers(path: str, task: str) -> bool:
    """Whether a file of the evidence has a task's answers, of any start."""
    return re.fullmatch(rf"(starts/\d+/)?{re.escape(answers_path(task))}", path) is not None


def _of_answers(plan: CellPlan, task: TaskPlan) -> list[Gate]:
    """The judged gates that compare the answers to a task with another run's, by their scores or by their tokens."""
    return [gate for gate in plan.judged if gate.task == task.name and gate.against in ("answers", "anchor", "tokens")]


def paired_gates(plan: CellPlan, task: TaskPlan) -> list[Gate]:
    return [gate for gate in plan.comparing if gate.task == task.name and gate.against == "answers"]


def repetitions(plan: CellPlan, evidence: Path, task: TaskPlan) -> int:
    """How often all questions of a task may be asked: within the recipe's bound if they are compared, else as often as samples.

    Asking ends sooner, when the comparison knows enough (`knows_enough`).
    """
    if plan.establishes:
        return task.repetitions
    for gate in paired_gates(plan, task):
        # Nothing can be compared with a baseline that is gone or shows no noise, and the comparison will say so.
        with suppress(*UNUSABLE):
            repetitions_to_establish(answers.load(evidence / BASELINE / answers_path(task.name)), task, gate)
            return task.settings.most_repetitions
    return task.least_repetitions


def repetitions_to_establish(answered: Answered, task: TaskPlan, gate: Gate) -> int:
    """How often all questions must be asked for the gate's margin, by the noise of these answers.

    Raises:
        ValueError: no question was answered twice.
    """
    scores = paired.answers_by_question(_record(_answered(answered), _key(gate), _questions(answered.answers)))
    if scores.spare == 0:
        raise UnlikeError("the baseline was asked each question once, so the noise is unknown: establish it anew")
    needed = paired.repetitions_for(_margin(gate), scores.noise, len(scores.asked))
    return min(needed, task.settings.most_repetitions)


def knows_enough(plan: CellPlan, evidence: Path, task: TaskPlan) -> bool:
    """Whether more answers of the same starts would tell a task's comparisons nothing that they need."""
    try:
        return all(_looked(gate, plan, evidence, task)[0].is_last_of_start for gate in paired_gates(plan, task))
    except UNUSABLE:
        # The comparison says why it is invalid, and its gate is decided by that.
        return False


class _Other(NamedTuple):
    """The run whose answers are compared with the cell's: its word, its folder in the baseline's, and how it was asked."""

    word: str
    folder: str
    accuracy: Sequence[Accuracy]

    def path(self, task: str) -> str:
        return f"{self.folder}{answers_path(task)}"

    def inside(self, evidence: Path) -> Path:
        return evidence / BASELINE / self.folder


def _other(gate: Gate, plan: CellPlan) -> _Other:
    if gate.is_against_anchor:
        return _Other("anchor", f"{ANCHOR}/", plan.held_against.accuracy)
    return _Other("baseline", "", plan.compared_with.accuracy)


def _loss(gate: Gate, plan: CellPlan, evidence: Path, about: dict[str, Any]) -> Measurement:
    task, other = _task_of(plan, gate), _other(gate, plan)
    history = _known(plan).starts.get(gate.label)
    source = f"{answers_path(task.name)} beside {BASELINE}/{other.path(task.name)}{_by_history([history])}"
    if problem := _asked_otherwise(other, task):
        return invalid(gate.metric, problem, source, **about)
    try:
        look, old, new = _looked(gate, plan, evidence, task)
    except UnlikeError as error:
        return invalid(gate.metric, str(error), source, **about)
    difference, interval, asked = look.loss, look.interval, len(new.answers)
    length = _length_ratio(new.answers, old.answers)
    # A sure loss stays a loss, whatever the length of the replies.
    # How much longer they may be says a gate on their tokens, where there is one.
    longest = math.inf if any(each.against == "tokens" for each in _of_answers(plan, task)) else LENGTHS[1]
    is_comparable = LENGTHS[0] <= length <= longest or interval.lower > _margin(gate)
    if not is_comparable and asked >= len(_questions(old.answers)):
        as_long = f"replies are {length:.2f} times as long as the {other.word}'s"
        problem = f"{as_long}, and comparable from {LENGTHS[0]} to {LENGTHS[1]}"
        return invalid(gate.metric, problem, source, **about)
    # A sure loss stays a loss here, too.
    if interval.lower <= _margin(gate) and (problem := _fading(gate, new.answers, task)):
        return invalid(gate.metric, problem, source, **about)
    traced = dict.fromkeys((answer.start, answer.traced_to.rpartition(":")[0]) for answer in new.answers)
    return valid(
        gate.metric,
        difference.value,
        source,
        sample_count=difference.asked,
        # With only a part of the questions, the lengths say little yet: the gate is undecided, and asking goes on.
        interval=interval if is_comparable else None,
        traced_to=[f"{starts.place(start)}accuracy/{task.name}/{path}" for start, path in sorted(traced)],
        not_in_interval=_not_in_loss(plan, gate, task, difference, (_starts_of(new), _starts_of(old))),
        **about,
    )


def _not_in_loss(plan: CellPlan, gate: Gate, task: TaskPlan, difference: paired.Loss, started: tuple[int, int]) -> list[str]:
    """The sources of noise that the interval of a loss lacks, with so many starts of the cell's server and of its baseline's.

    What the answers of one repetition have in common is a part of what differs between starts.
    """
    of_starts = [] if gate.label in _known(plan).starts else _of_few(plan, *started)
    if STARTS not in of_starts:
        deviation = difference.restless if max(started) > starts.FIRST else None
        return [*of_starts, *([restless_words(f"{100 * deviation:.1f} points")] if deviation else [])]
    is_sampled = task.sampling is not None and not task.sampling.is_greedy
    return [*of_starts, *([SAMPLES] if is_sampled else []), *([] if difference.together else [TOGETHER])]


def _fading(gate: Gate, answered: Iterable[Answer], task: TaskPlan) -> str | None:
    """Why the mean over repetitions is not that of a steady server: it answers worse with time, in one start. Else None."""
    scores: dict[int, list[float]] = {}
    for answer in answered:
        if answer.start == starts.FIRST:
            scores.setdefault(answer.repetition, []).append(answer.score(_key(gate)))
    most = max(map(len, scores.values()))
    # Of a repetition that was broken off the questions are others.
    means = [fmean(scores[repetition]) for repetition in sorted(scores) if len(scores[repetition]) == most]
    looks = range(1, max(task.settings.most_repetitions, len(means)) + 1)
    if steadiness.direction_of([means], looks) >= 0:
        return None
    fell = f"its score fell from {means[0]:.2%} in the first repetition to {means[-1]:.2%} in the last of {len(means)}"
    return f"the server answers worse the longer it runs: {fell}: look for what wears out, as a cache, and measure again"


def _longer(gate: Gate, plan: CellPlan, evidence: Path, about: dict[str, Any]) -> Measurement:
    """How many times as many tokens the answers have as the baseline's, less 1.

    It is judged once, when all questions were asked as often as they are at least: lengths are skewed, so that a few questions
    tell too little of the rest for an early verdict to hold its error rate.
    """
    task, path = _task_of(plan, gate), answers_path(str(gate.task))
    source = f"{path} beside {BASELINE}/{path}"
    new, old = _first_answers(plan, evidence, gate), answers.load(evidence / BASELINE / path)
    if problem := _asked_otherwise(_other(gate, plan), task) or _unlike(old, new, "baseline"):
        return invalid(gate.metric, problem, source, **about)
    try:
        theirs = tokens.by_question(old.answers)
    except tokens.NotKeptError as error:
        return invalid(gate.metric, f"the baseline's: {error}", source, **about)
    asked = [answer for answer in new.answers if answer.repetition <= task.least_repetitions]
    ours, levels = tokens.by_question(asked), levels_for(plan)
    at = sides_of(METRICS[gate.metric].compared_direction, levels.false_pass, levels.false_fail)
    value, interval = tokens.worsening([theirs[question] for question in ours], list(ours.values()), at)
    traced = dict.fromkeys(answer.traced_to.rpartition(":")[0] for answer in asked)
    return valid(
        gate.metric,
        value,
        source,
        sample_count=len(ours),
        interval=interval if len(asked) == task.least_repetitions * len(theirs) else None,
        traced_to=[f"accuracy/{task.name}/{file}" for file in traced],
        not_in_interval=[FIRST_STARTS, rare_changes(len(ours), levels.false_pass, "questions")],
        **about,
    )


def _looked(gate: Gate, plan: CellPlan, evidence: Path, task: TaskPlan) -> tuple[paired.Look, Answered, Answered]:
    """The look at all answers of the cell, with the other run's and the cell's. Raises one of UNUSABLE if there is none.

    The first start is looked at after each block of questions, and further ones when they have asked every question.
    """
    other = _other(gate, plan)
    new, old = starts.answers_of(evidence, task), _answers_of_other(other.inside(evidence), gate, task)
    if problem := _unlike(old, new, other.word):
        raise UnlikeError(problem)
    questions = _questions(old.answers)
    theirs = paired.answers_by_question(_record(_answered(old), _key(gate), questions))
    if theirs.spare == 0:
        raise UnlikeError(f"the {other.word} was asked each question once, so the noise is unknown: establish it anew")
    ours = _record(new.answers, _key(gate), questions)
    planned = _looks(task, len(questions), max(task.settings.most_repetitions, *ours.repetition + 1))
    first, *others = np.bincount(ours.start).tolist()
    if first not in planned:
        raise UnlikeError(f"{first} answers, where the gates are looked at after {planned}")
    taken = [asked for asked in planned if asked <= first]
    taken += [first + further for further in np.cumsum(others).tolist()]
    # The last look that there can be is at the last start that may be made.
    most = len(planned) if plan.starts == starts.FIRST else len(taken) + plan.starts - starts.FIRST - len(others)
    growing = (paired.answers_by_question(ours.until(asked)) for asked in taken)
    about = (_margin(gate), levels_for(plan), most, _known(plan).starts.get(gate.label))
    *_, last = paired.looks(theirs, growing, *about, over_starts=_is_over_starts(plan, gate, theirs))
    return last, old, new


def _is_over_starts(plan: CellPlan, gate: Gate, theirs: paired.Answers) -> bool:
    """Whether what differs between starts is in a comparison of answers. If each build is started once, it is not, and said."""
    return plan.starts > starts.FIRST or len(theirs.starts.shifts) > 1 or gate.label in _known(plan).starts


def restless_words(deviation: str) -> str:
    """What an interval lacks of starts that differ by so much."""
    by = f"that is about {deviation}, far more than is assumed, and so few show it badly"
    return f"all of what starts of this server differ by: {by}"


def _starts_of(answered: Answered) -> int:
    return len({answer.start for answer in answered.answers})


def _of_few(plan: CellPlan, ours: int, theirs: int) -> list[str]:
    """What an interval lacks with so many starts of the cell's server, and of its baseline's."""
    if ours > starts.FIRST:
        return []
    if plan.starts > starts.FIRST:
        return [ASSUMED]
    return [] if theirs > starts.FIRST else [STARTS]


def _answers_of_other(folder: Path, gate: Gate, task: TaskPlan) -> Answered:
    """The answers of the run whose files are in `folder`, from all its starts that count. Raises one of UNUSABLE."""
    kept = starts.kept_answers(folder, task.name)
    invalid_ones = {row.start for row in _further_of_other(folder, gate) if row.invalid_because}
    return kept.model_copy(update={"answers": [answer for answer in kept.answers if answer.start not in invalid_ones]})


def _further_of_other(folder: Path, gate: Gate) -> list[Measurement]:
    """What the further starts of another run measured for a gate. Older runs have none. Raises one of UNUSABLE."""
    path = folder / STARTS_STAGE
    measurements = StageEvidence.model_validate_json(path.read_bytes()).measurements if path.exists() else []
    return _in_starts(gate, measurements)


def _known(plan: CellPlan) -> History:
    """What earlier runs on this GPU type showed, by the labels of the plan's gates."""
    labels = [(label_of(gate.metric, gate.task, gate.filter, against_baseline=False), gate.label) for gate in plan.gates]
    by_source: dict[str, dict[str, Between]] = {"start": {}, "pair": {}, "day": {}, "repeat": {}}
    for known in plan.between:
        about = known.model_dump(include={"variance", "noise", "freedom"})
        for label in (label for own, label in labels if own == known.label):
            by_source[known.of][label] = Between(**about, runs=len(known.runs))
    return History(starts=by_source["start"], pairs=by_source["pair"], days=by_source["day"])


def _margin(gate: Gate) -> float:
    """The largest loss that the gate allows."""
    if gate.limits.at_most is None:
        raise ValueError(f"{gate.label} does not say what may be lost at most")
    return gate.limits.at_most


def _looks(task: TaskPlan, questions: int, repetitions: int) -> list[int]:
    steps = answers.steps(task.settings, questions, repetitions, sequential=task.sequential)
    return [int(asked) for asked in np.cumsum([len(step.questions) for step in steps])]


def _key(gate: Gate) -> str:
    return f"{gate.metric},{gate.filter}"


def _questions(answers: Iterable[Answer]) -> list[int]:
    return sorted({answer.question for answer in answers})


def _unlike(old: Answered, new: Answered, of: str) -> str | None:
    """Why the answers of two builds do not belong to the same questions, or None."""
    if (old.task_version, old.config_hash) != (new.task_version, new.config_hash):
        return f"the task {new.task} is not the {of}'s: its prompts or its scoring changed"
    before = {answer.question: (answer.doc_hash, answer.prompt_hash, answer.target_hash) for answer in old.answers}
    other = [
        answer.question
        for answer in new.answers
        if before.get(answer.question) != (answer.doc_hash, answer.prompt_hash, answer.target_hash)
    ]
    return f"{len(set(other))} questions are not the {of}'s, or have other prompts: {sorted(set(other))[:5]}" if other else None


def _record(answers: Sequence[Answer], key: str, questions: Sequence[int]) -> Record:
    """The answers' scores in their order. An empty answer counts as wrong."""
    places = {question: place for place, question in enumerate(questions)}
    topics = {answer.question: answer.topic for answer in answers}
    known = None not in topics.values() and topics.keys() == places.keys()
    return Record(
        question=np.array([places[answer.question] for answer in answers], dtype=np.int64),
        score=np.array([answer.score(key) for answer in answers], dtype=np.float64),
        repetition=_numbered([(answer.start, answer.repetition) for answer in answers]),
        start=_numbered([answer.start for answer in answers]),
        questions=len(questions),
        topics=_numbered([topics[question] for question in questions]) if known else None,
    )


def _numbered(values: Sequence[object]) -> paired.Counts:
    """The values as numbers from 0, in the order in which they appear."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def _answered(baseline: Answered) -> list[Answer]:
    """A baseline's answers without the empty ones, which would make it easier to match if they counted as wrong."""
    return [answer for answer in baseline.answers if not answer.unanswered]


def _length_ratio(new: Iterable[Answer], old: Iterable[Answer]) -> float:
    """The replies' mean length divided by that of the baseline's, over questions that both answered; 1 without replies."""
    ours, theirs = _lengths(new), _lengths(old)
    common = ours.keys() & theirs.keys()
    before = sum(theirs[question] for question in common)
    return sum(ours[question] for question in common) / before if before else 1.0


def _lengths(answers: Iterable[Answer]) -> dict[int, float]:
    lengths: dict[int, list[int]] = {}
    for answer in answers:
        if answer.length is not None and not answer.unanswered:
            lengths.setdefault(answer.question, []).append(answer.length)
    return {question: fmean(given) for question, given in lengths.items()}


def _worsening(
    gate: Gate,
    plan: CellPlan,
    evidence: Path,
    ours: list[Measurement],
    baseline_load: BaselineLoad,
    about: dict[str, Any],
) -> Measurement:
    """From the cell's measurements of each start, the first one first."""
    theirs = _of_baseline_load(gate, plan, evidence, baseline_load, ours)
    if spoiled := next((row for row in theirs if row.invalid_because is not None), None):
        return invalid(gate.metric, f"the baseline's: {spoiled.invalid_because}", spoiled.source, **about)
    if plan.beside:
        ours, theirs = map(list, zip(*map(_paired, ours, theirs), strict=True))
    ours_together, theirs_together = _together(ours), _together(theirs)
    compared, left_out = load_plan(gate, plan), _left_out(evidence, ours)
    return valid(
        gate.metric,
        relative.without_noise(ours_together.values, theirs_together.values, compared.direction),
        f"{ours[-1].source} beside {theirs[-1].source}{_by_history((compared.known.starts, compared.known.days))}",
        sample_count=sum(row.sample_count for row in (*ours, *theirs)),
        interval=loads.look(compared, ours_together, theirs_together, left_out).interval,
        ended_because=ours[0].ended_because or _no_time(plan, evidence, len(starts.further(evidence)) + starts.FIRST + 1),
        not_in_interval=_not_known(gate, plan, compared.known, ours_together, theirs_together),
        is_history=plan.beside is None,
        traced_to=[path for row in (*ours, *theirs) for path in row.traced_to],
        **about,
    )


def loads_of_gate(
    gate: Gate, plan: CellPlan, evidence: Path, measurements: Sequence[Measurement]
) -> tuple[LoadPlan, Repeats, Repeats]:
    """How a gate's loads are compared, and the repeats of the cell and of its baseline. Raises one of UNUSABLE."""
    ours = [_own(gate, measurements), *_in_starts(gate, measurements)]
    read = partial(parse_beside if plan.beside else _history, plan, evidence)
    theirs = _of_baseline_load(gate, plan, evidence, read, ours)
    if spoiled := next((row for row in (*ours, *theirs) if row.invalid_because is not None), None):
        raise ValueError(spoiled.invalid_because)
    if plan.beside:
        ours, theirs = map(list, zip(*map(_paired, ours, theirs), strict=True))
    return load_plan(gate, plan), _together(ours), _together(theirs)


def needs_no_start(gate: Gate, plan: CellPlan, evidence: Path, measurements: Sequence[Measurement]) -> bool:
    """Whether another start would tell a gate nothing that it needs: its margin is many standard errors."""
    with suppress(*UNUSABLE):
        if gate.against == "load":
            return loads.look(*loads_of_gate(gate, plan, evidence, measurements)).is_last
        return _looked(gate, plan, evidence, _task_of(plan, gate))[0].is_last
    # The comparison says why it is invalid.
    return False


def load_plan(gate: Gate, plan: CellPlan) -> LoadPlan:
    """How a gate's loads are compared. Raises ValueError if the gate has no margin."""
    history = _known(plan)
    known = EarlierRuns(history.starts.get(gate.label), history.days.get(gate.label))
    return LoadPlan(
        direction=METRICS[gate.metric].direction,
        margin=_margin(gate),
        levels=levels_for(plan),
        looks=plan.load.looks,
        most_starts=plan.starts,
        in_turns=plan.beside is not None,
        known=EarlierRuns(starts=history.pairs.get(gate.label)) if plan.beside else known,
    )


def _left_out(evidence: Path, ours: Sequence[Measurement]) -> int:
    """How many repeats of the cell's load do not count."""
    count = sum(result.count_of(starts.root(evidence, row.start or starts.FIRST) / figures.STAGE) for row in ours)
    return count - sum(len(row.repeats) for row in ours)


def _of_baseline_load(
    gate: Gate, plan: CellPlan, evidence: Path, baseline_load: BaselineLoad, ours: Sequence[Measurement]
) -> list[Measurement]:
    """The baseline's measurements by start: those in turns, else those of its own starts that count. Raises one of UNUSABLE."""
    first = _only(baseline_load(), gate.metric)
    if plan.beside is None:
        return [first, *(row for row in _further_of_other(evidence / BASELINE, gate) if row.invalid_because is None)]
    numbers = [row.start for row in ours if row.start]
    return [first, *(_only(parse_beside_in(plan, evidence, number), gate.metric) for number in numbers)]


def _unsteady(plan: CellPlan, evidence: Path, measurements: Iterable[Measurement], baseline_load: BaselineLoad) -> str | None:
    """Why the load's repeats are not those of steady servers; None if they are, or if it is not known.

    In turns, what both servers share is no reason. Raises one of UNUSABLE.
    """
    ours = [row for row in measurements if row.metric == STEADY_BY and row.against is None]
    theirs = _steady_by_of_baseline(plan, evidence, baseline_load, ours) if plan.beside else []
    if not ours or any(row.invalid_because for row in (*ours, *theirs)):
        # Each gate says it of its own metric.
        return None
    if plan.beside:
        ours, theirs = map(list, zip(*map(_paired, ours, theirs), strict=True))
    mine, others = ([row.repeats for row in side] for side in (ours, theirs))
    looks = starts.repeats_of_all(plan, sum(map(len, mine)))
    return steadiness.problem(mine, others, range(looks.start - _left_out(evidence, ours), looks.stop), STEADY_BY)


def _steady_by_of_baseline(
    plan: CellPlan, evidence: Path, baseline_load: BaselineLoad, ours: Sequence[Measurement]
) -> list[Measurement]:
    numbers = [row.start for row in ours if row.start]
    return [
        _only(baseline_load(), STEADY_BY),
        *(_only(parse_beside_in(plan, evidence, number), STEADY_BY) for number in numbers),
    ]


def _together(rows: Sequence[Measurement]) -> Repeats:
    """The repeats of all starts."""
    repeats = [(repeat, row.start or starts.FIRST) for row in rows for repeat in row.repeats]
    return Repeats([repeat for repeat, _ in repeats], [start for _, start in repeats])


def _no_time(plan: CellPlan, evidence: Path, number: int) -> str | None:
    """Why the budget allows no load in a start, if it may be made; else None."""
    with suppress(*UNUSABLE):
        if number <= plan.starts:
            return starts.too_long(starts.plan_of(plan, evidence, number).load, evidence, number)
    # It is not known how long the load took. Its own measurements say so.
    return None


def _by_history(known: Iterable[Between | None]) -> str:
    """In words, how many approved runs show how much starts and days differ; empty if only the comparison's own starts do."""
    runs = max((each.runs for each in known if each), default=0)
    return f"; how much starts differ, by {runs} approved run{'' if runs == 1 else 's'} too" if runs else ""


def _not_known(gate: Gate, plan: CellPlan, known: EarlierRuns, ours: Repeats, theirs: Repeats) -> list[str]:
    """The sources of noise that the interval lacks."""
    days = [DAYS] if plan.beside is None and known.days is None else []
    if plan.starts > starts.FIRST and (deviation := loads.restless(load_plan(gate, plan), ours, theirs)):
        days.append(restless_words(f"{deviation:.1%}"))
    theirs_alone = starts.FIRST if plan.beside else len(theirs.starts)
    return days if known.starts or known.days else [*_of_few(plan, len(ours.starts), theirs_alone), *days]


def _unlikelier(gate: Gate, plan: CellPlan, evidence: Path, ours: Measurement, about: dict[str, str | None]) -> Measurement:
    """The increase of the negative log-likelihood of answers or texts, or the agreement about the likeliest token."""
    read = scored_answers if gate.metric in OF_ANSWERS else scored_texts
    mine, theirs = read(plan, evidence), read(plan, evidence, of_baseline=True)
    if problem := likelihood.unlike(theirs, mine):
        raise UnlikeError(problem)
    levels = levels_for(plan)
    at = sides_of(METRICS[gate.metric].compared_direction, levels.false_pass, levels.false_fail)
    compared = likelihood.top1_agreement if gate.metric in TOP1_SHARES else likelihood.nll_increase
    value, interval = compared(theirs, mine, at)
    return valid(
        gate.metric,
        value,
        f"{ours.source} beside {BASELINE}/{ours.source}",
        sample_count=len(mine),
        interval=interval,
        traced_to=[ours.source],
        not_in_interval=[rare_changes(len(mine), levels.false_pass, "texts")],
        **about,
    )


def _paired(ours: Measurement, theirs: Measurement) -> tuple[Measurement, Measurement]:
    """Both measurements with only the repeats that both have: the first of either may have been left out as warm-up."""
    count = min(len(ours.repeats), len(theirs.repeats))
    one, other = (
        row.model_copy(update={"repeats": row.repeats[-count:], "traced_to": row.traced_to[-count:]}) for row in (ours, theirs)
    )
    return one, other


def _only(measurements: Iterable[Measurement], metric: str) -> Measurement:
    rows = [measurement for measurement in measurements if measurement.metric == metric and measurement.against is None]
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} measurements of {metric}")
    return rows[0]


def _history(plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The baseline's load as it was measured at its own time. Raises UnlikeError unless it was measured as this one was."""
    if problem := load_differs(plan):
        raise UnlikeError(problem)
    return StageEvidence.model_validate_json((evidence / BASELINE / LOAD_STAGE).read_bytes()).measurements


def task_differs(plan: CellPlan, task: TaskPlan) -> str | None:
    """Why the baseline's or the anchor's answers to a task cannot be compared with the cell's, by their settings; else None."""
    return next((problem for gate in _of_answers(plan, task) if (problem := _asked_otherwise(_other(gate, plan), task))), None)


def _asked_otherwise(other: _Other, task: TaskPlan) -> str | None:
    before = next((settings for settings in other.accuracy if settings.task == task.name), None)
    if before is None:
        return f"the {other.word} was not asked {task.name}"
    then, now = _as_asked(before), _as_asked(task.asked)
    changed = [f"{name} {then.get(name)}, now {now.get(name)}" for name in SAME_QUESTIONS if then.get(name) != now.get(name)]
    return f"the {other.word} was asked {task.name} in another way: {'; '.join(changed)}" if changed else None


def _as_asked(settings: Accuracy) -> dict[str, Any]:
    """What the answers depend on. A task's own longest reply, which older versions called 256, is in the hash of the task."""
    return {"max_gen_toks": USUAL_TOKENS} | settings.model_dump(include=set(SAME_QUESTIONS), exclude_none=True)


def load_differs(plan: CellPlan) -> str | None:
    """Why the baseline's load, as it was measured at its own time, cannot be compared with the cell's; else None."""
    then = plan.compared_with
    if then.fingerprint.id != plan.fingerprint.id:
        return f"the baseline was measured on {then.fingerprint.id}, and this is {plan.fingerprint.id}"
    if then.client_version != plan.client_version:
        return f"the baseline's load client was vLLM {then.client_version}, and this one is {plan.client_version}"
    if _workload(then.load, plan) != _workload(plan.load, plan):
        return "the baseline's load was another one: other lengths, concurrency, number of prompts, window, seed or SLO"
    return None


def speedup(plan: CellPlan, evidence: Path, measurements: Sequence[Measurement]) -> list[Measurement]:
    """The speedup by speculative decoding at the profile's load and at batch 1, if its stage is among the `measurements`."""
    measured_on = [row.fingerprint for row in measurements if METRICS[row.metric].stage == speculation.STAGE]
    if plan.undrafted is None or not measured_on:
        return []
    on = {"fingerprint": measured_on[0]}
    problem = None if measured_on[0] == plan.fingerprint.id else "it was not measured on the planned machine"
    gained_rows = [
        _gained(metric, name, plan.undrafted, plan, evidence) if problem is None else invalid(metric, problem, "")
        for metric, name in ((SPEEDUP, speculation.PROFILE), (SPEEDUP_BATCH1, speculation.BATCH1))
    ]
    return [gained.model_copy(update=on) for gained in gained_rows]


def _gained(metric: str, name: str, undrafted: ServerPlan, plan: CellPlan, evidence: Path) -> Measurement:
    levels = levels_for(plan)
    try:
        ours, theirs = speculation.rates(evidence / speculation.STAGE, name, plan.load, levels, (plan.server, undrafted))
        for whose, rate in (("", ours), ("without it: ", theirs)):
            if rate.invalid_because is not None:
                return invalid(metric, f"{whose}{rate.invalid_because}", rate.source)
        ours, theirs = _paired(ours, theirs)
        # The speedup is how much worse the server without speculative decoding is.
        at = speculation.sides_at_once(metric, levels)
        gained = relative.in_turns(theirs.repeats, ours.repeats, METRICS[RATE].direction, at)
    except UNUSABLE as error:
        return invalid(metric, f"no usable comparison: {in_words(error)}", "")
    return valid(
        metric,
        1 + gained.value,
        f"{ours.source} beside {theirs.source}",
        sample_count=ours.sample_count + theirs.sample_count,
        repeats=[with_it / without for with_it, without in zip(ours.repeats, theirs.repeats, strict=True)],
        interval=Interval(lower=1 + gained.interval.lower, upper=1 + gained.interval.upper),
        traced_to=[*ours.traced_to, *theirs.traced_to],
        not_in_interval=[STARTS_OF_TWO],
    )


def _workload(load: Load, plan: CellPlan) -> dict[str, object]:
    """The settings that a load's measurements depend on: of a file its content, and the SLO only if goodput is compared."""
    compares_goodput = any(gate.metric == GOODPUT and gate.is_against_baseline for gate in plan.gates)
    return load.model_dump(exclude=NOT_OF_THE_WORKLOAD if compares_goodput else NOT_OF_THE_WORKLOAD | {"slo"})
