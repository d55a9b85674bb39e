"""Simulate accuracy gates: this project's and its peers', on the same made-up builds."""

import itertools
import math
from bisect import bisect_left as bisect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from infra.bench import peers, worlds
from infra.bench.answer_worlds import Build
from vllm_qualify.evidence import answers
from vllm_qualify.evidence.measurement import Interval, share_interval
from vllm_qualify.evidence.sequential import Levels, Sides, sides
from vllm_qualify.judge import paired
from vllm_qualify.judge.between import Between
from vllm_qualify.judge.paired import Answers, Record
from vllm_qualify.judge.verdict import Checks, verdict_from
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.workload import LEAST_REPETITIONS, Accuracy

MOST_REPETITIONS = Accuracy(num_questions=1).most_repetitions
# How far below its reference the absolute gate lets a score of one run be: as TensorRT-LLM's threshold on 1,319 questions.
ABSOLUTE_MARGIN = 0.032

GateName = str


class Setting(NamedTuple):
    """One row of releases; `lost` and `margin` are shares of the questions."""

    questions: int
    flips: float
    lost: float
    margin: float


class EndedRelease(NamedTuple):
    """One release at one gate: its verdict, the answers of the candidate that were used, and the answers that were allowed."""

    verdict: Verdict
    asked: int
    allowed: int
    baseline_repetitions: int = 1
    starts: int = 1


class AskingRules(NamedTuple):
    """How answers are asked for: with `restarted` each repetition is on a start of its own. `history` is its GPU type's."""

    restarted: bool = False
    most: int = MOST_REPETITIONS
    history: Between | None = None


def release(
    rng: np.random.Generator, setting: Setting, levels: dict[str, Levels], *, beside_peers: bool
) -> dict[GateName, EndedRelease]:
    """Judge one candidate at the paired gate, at each of the named levels; with `beside_peers` also at the gates of one run."""
    chances = worlds.builds(rng, setting.questions, setting.flips, setting.lost)
    ended = compared_gates(rng, setting, chances, levels)
    return ended | _of_one_run(rng, chances, levels) if beside_peers else ended


def _of_one_run(
    rng: np.random.Generator, chances: worlds.ChancePair, levels: dict[str, Levels]
) -> dict[GateName, EndedRelease]:
    questions, reference = len(chances.baseline), float(chances.baseline.mean())
    right = int(worlds.drawn_answers(rng, chances.candidate).sum())
    verdicts = {f"absolute, {name}": _absolute(right, questions, reference, level) for name, level in levels.items()}
    verdicts |= {name: "pass" if passes(right, questions, reference) else "fail" for name, passes in peers.ACCURACY.items()}
    return {gate: EndedRelease(verdict, questions, questions) for gate, verdict in verdicts.items()}


def compared_gates(
    rng: np.random.Generator, setting: Setting, chances: worlds.ChancePair, levels: dict[str, Levels]
) -> dict[GateName, EndedRelease]:
    """The paired comparison of builds of one start each, with a new baseline."""
    asked = AskingRules()
    baseline = establish(rng, Build(chances.baseline), setting.margin, asked)
    return against(rng, setting, baseline, Build(chances.candidate), levels, asked)


def against(
    rng: np.random.Generator, setting: Setting, baseline: Answers, build: Build, levels: dict[str, Levels], asked: AskingRules
) -> dict[GateName, EndedRelease]:
    """The paired comparison with a baseline. It ends when it is decided at each of the levels, or knows enough."""
    planned = planned_looks(setting.questions, asked.most)
    growing = list[Answers]()
    more = _growing(rng, build, planned, asked)

    def answers_at_each_look() -> Iterator[Answers]:
        for number in itertools.count():
            if number == len(growing):
                growing.append(next(more))
            yield growing[number]

    ended = {}
    for name, level in levels.items():
        about = (setting.margin, level, len(planned), asked.history)
        all_looks = paired.looks(baseline, answers_at_each_look(), *about, over_starts=asked.restarted)
        for look in all_looks:
            verdict = below(look.interval, setting.margin)
            if verdict != "inconclusive" or look.is_last:
                break
        starts = math.ceil(look.loss.asked / setting.questions) if asked.restarted else 1
        ended[f"paired, {name}"] = EndedRelease(verdict, look.loss.asked, planned[-1], int(baseline.asked.max()), starts)
    return ended


def establish(rng: np.random.Generator, build: Build, margin: float, asked: AskingRules) -> Answers:
    """A baseline: all questions LEAST_REPETITIONS times, then again until its repetitions are enough for its own noise."""
    record = None
    for repetition, scores in enumerate(_repetitions(rng, build, asked), start=1):
        order = np.arange(len(scores))
        record = _added(record, build, order, scores, repetition - 1, asked)
        if repetition >= LEAST_REPETITIONS:
            answers = paired.answers_by_question(record)
            if repetition >= _needed(answers, margin, asked):
                return answers
    raise AssertionError("repetitions go on")


def _needed(baseline: Answers, margin: float, asked: AskingRules) -> int:
    """As `compare.repetitions_to_establish`."""
    return min(paired.repetitions_for(margin, baseline.noise, len(baseline.asked)), asked.most)


def _repetitions(rng: np.random.Generator, build: Build, asked: AskingRules) -> Iterator[worlds.Chances]:
    """The scores of each repetition."""
    started = build.started(rng)
    while True:
        yield started.answered(rng)
        started = build.started(rng) if asked.restarted else started


def history(rng: np.random.Generator, build: Build, starts: int) -> Between:
    """What so many starts of a build show of how much they differ, each asked everything twice."""
    record, order = None, np.arange(len(build.chance))
    for start in range(starts):
        started = build.started(rng)
        for _ in range(2):
            record = _added(record, build, order, started.answered(rng), start, AskingRules(restarted=True))
    assert record is not None
    means = paired.answers_by_question(record).start_means
    shown = float(np.var([each.mean for each in means], ddof=1))
    return Between(variance=shown, noise=means[0].noise, freedom=starts - 1.0, runs=starts)


def _added(
    record: Record | None, build: Build, block: NDArray[np.int64], scores: worlds.Chances, repetition: int, asked: AskingRules
) -> Record:
    same = np.full(len(block), repetition)
    start = same if asked.restarted else np.zeros_like(same)
    new = Record(block, scores[block], same, start, len(scores), build.topics)
    if record is None:
        return new
    return new._replace(
        question=np.concatenate([record.question, new.question]),
        score=np.concatenate([record.score, new.score]),
        repetition=np.concatenate([record.repetition, new.repetition]),
        start=np.concatenate([record.start, new.start]),
    )


@cache
def planned_looks(questions: int, repetitions: int) -> tuple[int, ...]:
    """The numbers of answers after which the gates are judged."""
    settings = Accuracy(num_questions=questions)
    all_steps = answers.steps(settings, questions, repetitions, sequential=True)
    return tuple(itertools.accumulate(len(step.questions) for step in all_steps))


def _growing(rng: np.random.Generator, build: Build, planned: Sequence[int], asked: AskingRules) -> Iterator[Answers]:
    """The candidate's answers at each look: the questions in a random order, a new one in each repetition."""
    record = None
    for repetition, scores in enumerate(_repetitions(rng, build, asked)):
        before, order = repetition * len(scores), rng.permutation(len(scores))
        cuts = [look - before for look in planned if before < look < before + len(scores)]
        for block in np.split(order, cuts):
            record = _added(record, build, block, scores, repetition, asked)
            yield paired.answers_by_question(record)


def below(interval: Interval, bound: float) -> Verdict:
    """The product's verdict on a value that may not be above its bound."""
    return _decided(surely=interval.upper <= bound, maybe=interval.lower <= bound)


def _absolute(right: int, questions: int, reference: float, levels: Levels) -> Verdict:
    """The verdict of the absolute gate: bounds for one look, no baseline."""
    interval, bound = share_interval(right, questions, _once(levels)), reference - ABSOLUTE_MARGIN
    return _decided(surely=interval.lower >= bound, maybe=interval.upper >= bound)


@cache
def _once(levels: Levels) -> Sides:
    return sides("higher", levels, [1.0], 0)


def _decided(*, surely: bool, maybe: bool) -> Verdict:
    return verdict_from(Checks(present=True, trusted=True, noise_known=True, surely_inside=surely, maybe_inside=maybe))


def fixed_answers(setting: Setting, wrong_pass: float, undecided: float, baseline_repetitions: int) -> float:
    """How many answers to each question a candidate needs for the two error rates, without early looks.

    `undecided` is the rate among releases without a loss. The result is infinite if the baseline has too few repetitions to
    reach the rates.
    """
    error = setting.margin / float(stats.norm.isf(wrong_pass) + stats.norm.isf(undecided))
    wanted = error**2 * setting.questions / (setting.flips / 2)
    most = 1000 * setting.questions
    enough = bisect(range(1, most), -wanted, key=lambda asked: -1 / _known(asked, setting, baseline_repetitions)) + 1
    return enough / setting.questions if enough < most else math.inf


def _known(asked: int, setting: Setting, baseline_repetitions: int) -> float:
    """One over the loss's variance, in units of one answer's variance divided by the number of questions."""
    whole, rest = divmod(asked, setting.questions)
    if not whole:
        return asked / setting.questions / ((1 + 1 / baseline_repetitions) * (2 - asked / setting.questions))
    inverse = (rest / (whole + 1) + (setting.questions - rest) / whole) / setting.questions
    return 1 / (1 / baseline_repetitions + inverse)
