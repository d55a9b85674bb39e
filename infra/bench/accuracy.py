"""Simulate accuracy gates: this project's and its peers', on the same made-up builds."""

import itertools
import math
from bisect import bisect_left as bisect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy import stats

from infra.bench import peers, worlds
from vllm_qualify.evidence import answers
from vllm_qualify.evidence.measurement import Interval, share_interval
from vllm_qualify.evidence.sequential import Levels, Sides, sides
from vllm_qualify.judge import paired
from vllm_qualify.judge.paired import Answers
from vllm_qualify.judge.verdict import Checks, verdict_from
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.workload import LEAST_REPETITIONS, Accuracy

MOST_REPETITIONS = Accuracy(num_questions=1).most_repetitions
# How far below its reference the absolute gate lets a score of one run be: as TensorRT-LLM's threshold on 1,319 questions.
ABSOLUTE_MARGIN = 0.032

Gate = str


class Setting(NamedTuple):
    """One row of releases; `lost` and `margin` are shares of the questions."""

    questions: int
    flips: float
    lost: float
    margin: float


class Ended(NamedTuple):
    """One release at one gate: its verdict, the answers of the candidate that were used, and the answers that were allowed."""

    verdict: Verdict
    asked: int
    allowed: int
    baseline_repetitions: int = 1


def release(rng: np.random.Generator, setting: Setting, levels: dict[str, Levels], *, beside_peers: bool) -> dict[Gate, Ended]:
    """Judge one candidate at the paired gate, at each of the named levels; with `beside_peers` also at the gates of one run."""
    chances = worlds.builds(rng, setting.questions, setting.flips, setting.lost)
    ended = compared(rng, setting, chances, levels)
    return ended | _of_one_run(rng, chances, levels) if beside_peers else ended


def _of_one_run(rng: np.random.Generator, chances: worlds.Pair, levels: dict[str, Levels]) -> dict[Gate, Ended]:
    questions, reference = len(chances.baseline), float(chances.baseline.mean())
    right = int(worlds.answered(rng, chances.candidate).sum())
    verdicts = {f"absolute, {name}": _absolute(right, questions, reference, level) for name, level in levels.items()}
    verdicts |= {name: "pass" if passes(right, questions, reference) else "fail" for name, passes in peers.ACCURACY.items()}
    return {gate: Ended(verdict, questions, questions) for gate, verdict in verdicts.items()}


def compared(rng: np.random.Generator, setting: Setting, chances: worlds.Pair, levels: dict[str, Levels]) -> dict[Gate, Ended]:
    """The paired comparison, with a new baseline."""
    return against(rng, setting, establish(rng, chances.baseline, setting.margin), chances.candidate, levels)


def against(
    rng: np.random.Generator, setting: Setting, baseline: Answers, chance: worlds.Chances, levels: dict[str, Levels]
) -> dict[Gate, Ended]:
    """The paired comparison with a baseline. It ends when it is decided at each of the levels."""
    asked_before = int(baseline.asked.max())
    planned = looks(setting.questions, _needed(baseline, setting.margin))
    ended: dict[Gate, Ended] = {}
    for look, candidate in enumerate(_growing(rng, chance, planned)):
        found = paired.loss(baseline, candidate, setting.margin)
        for name, level in levels.items():
            gate = f"paired, {name}"
            if gate in ended and ended[gate].verdict != "inconclusive":
                continue
            at = bounds(planned, setting.questions, asked_before, level)[look]
            verdict = below(paired.interval_of(found, at), setting.margin)
            ended[gate] = Ended(verdict, found.asked, planned[-1], asked_before)
        if all(one.verdict != "inconclusive" for one in ended.values()):
            break
    return ended


def establish(rng: np.random.Generator, chance: worlds.Chances, margin: float) -> Answers:
    """A baseline: all questions LEAST_REPETITIONS times, then again until its repetitions are enough for its own noise."""
    total, repetitions = np.zeros(len(chance)), 0
    while True:
        total, repetitions = total + worlds.answered(rng, chance), repetitions + 1
        found = Answers(total, total, np.full(len(chance), repetitions))
        if repetitions >= LEAST_REPETITIONS and repetitions >= _needed(found, margin):
            return found


def _needed(baseline: Answers, margin: float) -> int:
    """As `compare.baseline_repetitions`."""
    return min(paired.repetitions_for(margin, baseline.noise, len(baseline.asked)), MOST_REPETITIONS)


@cache
def looks(questions: int, repetitions: int) -> tuple[int, ...]:
    """The numbers of answers after which the gates are judged."""
    settings = Accuracy(num_questions=questions)
    found = answers.steps(settings, questions, repetitions, sequential=True)
    return tuple(itertools.accumulate(len(step.questions) for step in found))


def _growing(rng: np.random.Generator, chance: worlds.Chances, planned: Sequence[int]) -> Iterator[Answers]:
    """The candidate's answers at each look: the questions in a random order, a new one in each repetition."""
    total, asked = np.zeros(len(chance)), np.zeros(len(chance), dtype=np.int64)
    orders = [rng.permutation(len(chance)) for _ in range(planned[-1] // len(chance))]
    for block in np.split(np.concatenate(orders), planned[:-1]):
        total[block] += worlds.answered(rng, chance[block])
        asked[block] += 1
        yield Answers(total, total, asked)


@cache
def bounds(planned: Sequence[int], questions: int, baseline_repetitions: int, levels: Levels) -> list[Sides]:
    known = paired.information(planned, questions, baseline_repetitions)
    return [sides("lower", levels, known, look) for look in range(len(planned))]


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
    found = bisect(range(1, most), -wanted, key=lambda asked: -1 / _known(asked, setting, baseline_repetitions)) + 1
    return found / setting.questions if found < most else math.inf


def _known(asked: int, setting: Setting, baseline_repetitions: int) -> float:
    return paired.information([asked], setting.questions, baseline_repetitions)[0]
