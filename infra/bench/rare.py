"""Simulate what few answers carry: rare and massive changes of likelihoods, and answers that change together in a repetition.

    .venv/bin/python -m infra.bench.rare [RELEASES]

It takes some minutes for each hundred releases.
"""

import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy import special

from infra.bench import worlds
from infra.bench.accuracy import below, planned_looks
from infra.bench.answer_worlds import shifted
from infra.bench.plans import Task
from infra.bench.worlds import Chances
from vllm_qualify.evidence.likelihood import per_token
from vllm_qualify.evidence.sequential import Levels, sides_of
from vllm_qualify.judge import paired
from vllm_qualify.judge.paired import Answers, Record
from vllm_qualify.recipe.accuracy import LEAST_REPETITIONS
from vllm_qualify.recipe.gates import Verdict

# A release with four gates.
LEVELS = Levels(false_fail=0.0125)
# --- Likelihoods
DRAWS, JUST_PAST, LENGTHS, MASSIVE_NAT = 2000, 1.01, 0.5, 3.0
SIZES = {"alike": math.inf, "varied": 4.0, "wild": 1.0}
# --- Answers
QUESTIONS, MARGIN, PAST, LOST = 1319, 0.0075, 0.0076, 0.015
MOST_REPETITIONS = 10
TASK = Task(QUESTIONS, MOST_REPETITIONS, MARGIN)
TOPICS = 30


def rare_changes(rng: np.random.Generator, number: int, share: float, shape: float) -> tuple[float, float]:
    """How often a massive change of a share of the texts passes just past its bound: by Student's t, and by the product."""
    at, student, now = sides_of("lower", LEVELS.false_pass, LEVELS.false_fail), 0, 0
    for _ in range(DRAWS):
        tokens = np.maximum(1, rng.lognormal(4.5, LENGTHS, number).round())
        sizes = np.ones(number) if math.isinf(shape) else rng.gamma(shape, 1 / shape, number)
        totals = MASSIVE_NAT * tokens * sizes * (rng.random(number) < share)
        bound = MASSIVE_NAT * share / JUST_PAST
        value, interval = per_token(totals.tolist(), list(map(int, tokens)), at)
        error = float(np.sqrt(((totals - value * tokens) ** 2).sum() / (number - 1) / number) / tokens.mean())
        student += value - float(special.stdtrit(number - 1, at.above)) * error <= bound
        now += interval is not None and interval.upper <= bound
    return student / DRAWS, now / DRAWS


class TogetherWorld(NamedTuple):
    """A build's chances of a right answer, and the standard deviations of what a repetition's answers share.

    `of_topics` is that of each of TOPICS topics, which nobody named, and `of_all` that of all questions.
    """

    flips: float
    of_topics: float = 0.0
    of_all: float = 0.0

    def repetition(self, rng: np.random.Generator, chance: Chances) -> Chances:
        shifts, topic = self.of_topics * rng.standard_normal(TOPICS), np.arange(len(chance)) * TOPICS // len(chance)
        if self.of_topics:
            chance = np.concatenate([shifted(chance[topic == number], shifts[number]) for number in range(TOPICS)])
        if self.of_all:
            chance = shifted(chance, self.of_all * float(rng.standard_normal()))
        return worlds.drawn_answers(rng, chance)


class TogetherEnd(NamedTuple):
    """How a release ended, and how often its questions and its baseline's were asked."""

    verdict: Verdict
    asked: float
    baseline: int


def released(rng: np.random.Generator, world: TogetherWorld, lost: float) -> TogetherEnd:
    """One candidate against a new baseline, each of one start, as the product asks them."""
    pair = worlds.builds(rng, QUESTIONS, world.flips, lost)
    order = rng.permutation(QUESTIONS)
    baseline = _baseline(rng, world, pair.baseline[order])
    planned = planned_looks(TASK)
    growing = _growing(rng, world, pair.candidate[order], planned)
    verdict: Verdict = "inconclusive"
    for look in paired.looks(baseline, growing, MARGIN, LEVELS, len(planned), over_starts=False):
        verdict = below(look.interval, MARGIN)
        if verdict != "inconclusive" or look.is_last_of_start or look.loss.asked == planned[-1]:
            break
    return TogetherEnd(verdict, look.loss.asked / QUESTIONS, int(baseline.asked.max()))


def _baseline(rng: np.random.Generator, world: TogetherWorld, chance: Chances) -> Answers:
    """As `eligible.repetitions_to_establish` has it asked."""
    repetitions = [world.repetition(rng, chance) for _ in range(LEAST_REPETITIONS)]
    while True:
        answers = paired.answers_by_question(_record([(np.arange(QUESTIONS), scores) for scores in repetitions]))
        needed = paired.repetitions_for(MARGIN, answers.noise, QUESTIONS, LEVELS)
        if len(repetitions) >= min(needed, MOST_REPETITIONS):
            return answers
        repetitions.append(world.repetition(rng, chance))


def _growing(rng: np.random.Generator, world: TogetherWorld, chance: Chances, planned: tuple[int, ...]) -> Iterator[Answers]:
    asked = [(rng.permutation(QUESTIONS), world.repetition(rng, chance)) for _ in range(MOST_REPETITIONS)]
    record = _record(asked)
    return (paired.answers_by_question(record.first_answers(look)) for look in planned)


def _record(asked: list[tuple[np.ndarray, Chances]]) -> Record:
    """The answers of repetitions, each with its order and its scores."""
    question, score = (np.concatenate(parts) for parts in zip(*((order, of[order]) for order, of in asked), strict=True))
    repetition = np.repeat(np.arange(len(asked)), QUESTIONS)
    return Record(question, score, repetition, np.zeros_like(question), QUESTIONS)


TOGETHER = {
    "quiet, flips 1 %": TogetherWorld(0.01),
    "quiet, flips 3 %": TogetherWorld(0.03),
    "quiet, flips 5 %": TogetherWorld(0.05),
    "30 topics, 1 point": TogetherWorld(0.01, of_topics=0.01),
    "30 topics, 2 points": TogetherWorld(0.01, of_topics=0.02),
    "each repetition, 0.3 points": TogetherWorld(0.01, of_all=0.003),
    "each repetition, 0.3 points, flips 3 %": TogetherWorld(0.03, of_all=0.003),
}


def _table_of_likelihoods() -> Iterator[str]:
    for share, numbers in ((0.01, (100, 200, 500, 2000)), (0.05, (200,)), (0.2, (200,))):
        for number in numbers:
            both = [rare_changes(np.random.default_rng(9), number, share, shape) for shape in SIZES.values()]
            cells = " | ".join(f"{100 * student:.1f} → {100 * now:.1f}" for student, now in both)
            yield f"| {100 * share:.0f} % of {number} | {100 * (1 - share) ** number:.1f} | {cells} |"


def _row(name: str, world: TogetherWorld, releases: int) -> str:
    past, unchanged, lost = (
        [released(rng, world, loss) for _ in range(releases)]
        for rng, loss in ((np.random.default_rng(17), loss) for loss in (PAST, 0.0, LOST))
    )

    def share(ends: list[TogetherEnd], verdict: Verdict) -> str:
        return f"{100 * float(np.mean([end.verdict == verdict for end in ends])):.1f}"

    asked = [float(np.mean([end.asked for end in ends])) for ends in (unchanged, lost)]
    baseline = float(np.mean([end.baseline for end in unchanged]))
    figures = [share(past, "pass"), share(unchanged, "fail"), share(unchanged, "inconclusive"), share(lost, "fail")]
    return f"| {name} | {' | '.join(figures)} | {asked[0]:.1f}, {asked[1]:.1f} | {baseline:.1f} |"


def main() -> None:
    releases = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print("| changed | none drawn | alike | varied | wild |\n|---|---|---|---|---|")
    for line in _table_of_likelihoods():
        print(line, flush=True)
    print("\n| world | just past passes | fails without a loss | undecided | 1.5 points caught | answers | baseline |")
    print("|---|---|---|---|---|---|---|")
    for name, world in TOGETHER.items():
        print(_row(name, world, releases), flush=True)


if __name__ == "__main__":
    main()
