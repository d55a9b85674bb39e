"""Worlds in which answers are not what the paired comparison's simplest reading takes them to be."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.bench import worlds
from infra.bench.worlds import Chances

TOPICS = 30
# The standard deviation of the shift of a build's accuracy from start to start or from repetition to repetition, and of a
# topic's from repetition to repetition.
SHIFTED, SHARED = 0.003, 0.015
# A topic's change for good, as a standard deviation; the share of the questions that a concentrated loss is in.
OF_A_TOPIC, CONCENTRATED = 0.02, 0.05
# The part of a first repetition that is answered well.
FIRST = 0.2
# By how much each half of the topics is better or worse.
OF_A_HALF = 0.04


class Build(NamedTuple):
    """Each question's chance to be answered right, and what shifts many of them together.

    `between` and `each` are the standard deviations of the shift of each start and of each repetition, `shared` that of a
    topic's shift in one repetition. If the topics are not `named`, no comparison knows of them. With `at_first` the questions
    that a start is asked first are answered so.
    """

    chance: Chances
    between: float = 0.0
    each: float = 0.0
    topics: NDArray[np.int64] | None = None
    shared: float = 0.0
    named: bool = True
    at_first: Chances | None = None

    def started(self, rng: np.random.Generator) -> "Build":
        """The build as one start of its server has it."""
        shift = self.between * float(rng.standard_normal()) if self.between else 0.0
        return self._replace(chance=shifted(self.chance, shift) if shift else self.chance, between=0.0)

    def answered(self, rng: np.random.Generator, first: NDArray[np.int64] | None = None) -> Chances:
        """The scores of one repetition. `first` are the questions that the start was asked first, where these are in it."""
        chance = shifted(self.chance, self.each * float(rng.standard_normal())) if self.each else self.chance
        if self.topics is not None and self.shared:
            shifts = self.shared * rng.standard_normal(TOPICS)
            chance = np.concatenate([shifted(chance[self.topics == topic], shifts[topic]) for topic in range(TOPICS)])
        if self.at_first is not None and first is not None:
            chance = chance.copy()
            chance[first] = self.at_first[first]
        return worlds.drawn_answers(rng, chance)


class BuildPair(NamedTuple):
    """A baseline and a candidate."""

    baseline: Build
    candidate: Build


World = Callable[[np.random.Generator, int, float], BuildPair]


def shifted(chance: Chances, amount: float) -> Chances:
    """Chances with a mean that is higher by `amount`: all are moved towards 1, or towards 0, in one proportion."""
    mean = float(chance.mean())
    if amount <= 0:
        return chance * max(0.0, 1 + amount / mean)
    return 1 - (1 - chance) * max(0.0, 1 - amount / (1 - mean)) if mean < 1 else chance


def usual(flips: float) -> World:
    """Two repetitions of a build differ on a share `flips` of the answers."""
    return lambda rng, questions, lost: BuildPair(*map(Build, worlds.builds(rng, questions, flips, lost)))


def starts(between: float) -> World:
    """Each start of a server shifts its accuracy; flips of 1 %."""
    return lambda rng, questions, lost: BuildPair(*(Build(c, between) for c in worlds.builds(rng, questions, 0.01, lost)))


def repetitions(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """Each repetition shifts a build's accuracy; flips of 1 %."""
    return BuildPair(*(Build(chance, each=SHIFTED) for chance in worlds.builds(rng, questions, 0.01, lost)))


def heterogeneous(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """No question is sure: difficulties are of a Beta distribution, with flips of 3 %. The hard ones lose most."""
    chance = shifted(rng.beta(0.204, 0.020, questions), 0.0)
    chance = shifted(chance, worlds.BASE_ACCURACY - float(chance.mean()))
    changed = np.where(rng.random(questions) < 2 * worlds.CHURN, rng.permutation(chance), chance)
    least, most = 0.05, 20.0
    for _ in range(60):
        middle = (least * most) ** 0.5
        least, most = (middle, most) if (changed**middle).mean() > chance.mean() - lost else (least, middle)
    return BuildPair(Build(chance), Build(changed**least))


def steady(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """Builds that always answer alike, with 4 % of the answers changed for good."""
    return BuildPair(*map(Build, worlds.steady_builds(rng, questions, 0.04, lost)))


def topics(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """The questions of a topic change together, for good. On just these questions `lost` is lost; flips of 1 %."""
    baseline, candidate = worlds.builds(rng, questions, 0.01, lost)
    order, of = rng.permutation(questions), np.arange(questions) * TOPICS // questions
    shifts = OF_A_TOPIC * rng.standard_normal(TOPICS)
    moved = np.concatenate([shifted(candidate[order[of == topic]], shifts[topic]) for topic in range(TOPICS)])
    moved = shifted(moved, baseline.mean() - lost - moved.mean())
    return BuildPair(Build(baseline[order], topics=of), Build(moved, topics=of))


def topics_noise(*, named: bool) -> World:
    """The answers to a topic's questions are better or worse together, anew in each repetition; flips of 1 %."""

    def pair(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
        order, of = rng.permutation(questions), np.arange(questions) * TOPICS // questions
        both = worlds.builds(rng, questions, 0.01, lost)
        return BuildPair(*(Build(chance[order], topics=of, shared=SHARED, named=named) for chance in both))

    return pair


def concentrated(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """All that is lost is in a twentieth of the questions, each of which is wrong more often; flips of 1 %."""
    baseline, candidate = worlds.builds(rng, questions, 0.01, 0.0)
    right = np.flatnonzero(candidate == 1)
    struck = rng.choice(right, round(CONCENTRATED * questions), replace=False)
    candidate = candidate.copy()
    candidate[struck] -= lost / CONCENTRATED * (CONCENTRATED * questions / len(struck))
    return BuildPair(Build(baseline), Build(candidate))


def noisier(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """A baseline with flips of 1 %, and a candidate with 6 %."""
    baseline, candidate = worlds.builds(rng, questions, 0.01, lost)
    candidate = candidate.copy()
    # Two repetitions differ on 0.44 of the questions with a chance between 0.2 and 0.8.
    pairs = round(0.05 * questions / 0.88)
    chance = rng.uniform(0.2, 0.8, pairs)
    candidate[rng.choice(np.flatnonzero(candidate == 1), pairs, replace=False)] = chance
    candidate[rng.choice(np.flatnonzero(candidate == 0), pairs, replace=False)] = 1 - chance
    return BuildPair(Build(baseline), Build(candidate))


def late(flips: float) -> World:
    """A server that answers well at first: what is lost is in the last four fifths of a start's first repetition."""

    def pair(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
        baseline, candidate = worlds.builds(rng, questions, flips, 0.0)
        return BuildPair(Build(baseline), Build(shifted(candidate, -lost / (1 - FIRST)), at_first=candidate))

    return pair


def halves(flips: float) -> World:
    """Half of the topics are better by 4 points, and half are worse by as much and by what is lost."""

    def pair(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
        baseline, candidate = worlds.builds(rng, questions, flips, lost)
        order, of = rng.permutation(questions), np.arange(questions) * TOPICS // questions
        moved = candidate[order]
        better = of % 2 == 0
        moved = np.where(better, np.minimum(1.0, moved + (1 - moved) * OF_A_HALF), moved * (1 - OF_A_HALF))
        moved = shifted(moved, baseline.mean() - lost - moved.mean())
        return BuildPair(Build(baseline[order], topics=of), Build(moved, topics=of))

    return pair


def sampled(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """Answers are sampled: of four in ten questions none is sure, so that two repetitions differ on a tenth of all."""
    chance = np.where(rng.random(questions) < 0.4, rng.beta(1.0, 0.5, questions), rng.random(questions) < 0.9)
    return BuildPair(Build(chance), Build(shifted(chance, -lost)))


WORLDS: dict[str, World] = {
    "flips 1 %": usual(0.01),
    "flips 3 %": usual(0.03),
    "flips 5 %": usual(0.05),
    "heterogeneous": heterogeneous,
    "deterministic": steady,
    "starts of 0.15 points": starts(SHIFTED / 2),
    "starts of 0.3 points": starts(SHIFTED),
    "repetitions of 0.3 points": repetitions,
    "topics": topics,
    "noise of topics": topics_noise(named=True),
    "noise of topics without names": topics_noise(named=False),
    "concentrated": concentrated,
    "noisier": noisier,
    "sampled": sampled,
    "lost after a fifth": late(0.01),
    "half of the topics better": halves(0.01),
}
