"""Worlds in which answers are not what the paired comparison's simplest reading takes them to be."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.bench import worlds
from infra.bench.worlds import Chances

TOPICS = 30
# The standard deviation of the shift of a build's accuracy from start to start, and of a topic's from repetition to repetition.
BETWEEN_STARTS, SHARED = 0.003, 0.015
# A topic's change for good, as a standard deviation; the share of the questions that a concentrated loss is in.
OF_A_TOPIC, CONCENTRATED = 0.02, 0.05


class Build(NamedTuple):
    """Each question's chance to be answered right, and what shifts many of them together.

    `between` is the standard deviation of the shift of each start, `shared` that of a topic's shift in one repetition.
    """

    chance: Chances
    between: float = 0.0
    topics: NDArray[np.int64] | None = None
    shared: float = 0.0

    def started(self, rng: np.random.Generator) -> "Build":
        """The build as one start of its server has it."""
        shift = self.between * float(rng.standard_normal()) if self.between else 0.0
        return self._replace(chance=shifted(self.chance, shift), between=0.0)

    def answered(self, rng: np.random.Generator) -> Chances:
        """The scores of one repetition."""
        chance = self.chance
        if self.topics is not None and self.shared:
            shifts = self.shared * rng.standard_normal(TOPICS)
            chance = np.concatenate([shifted(chance[self.topics == topic], shifts[topic]) for topic in range(TOPICS)])
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


def starts(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """Each start of a server shifts its accuracy; flips of 1 %."""
    return BuildPair(*(Build(chance, BETWEEN_STARTS) for chance in worlds.builds(rng, questions, 0.01, lost)))


def topics(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """The questions of a topic change together, for good. On just these questions `lost` is lost; flips of 1 %."""
    baseline, candidate = worlds.builds(rng, questions, 0.01, lost)
    order, of = rng.permutation(questions), np.arange(questions) * TOPICS // questions
    shifts = OF_A_TOPIC * rng.standard_normal(TOPICS)
    moved = np.concatenate([shifted(candidate[order[of == topic]], shifts[topic]) for topic in range(TOPICS)])
    moved = shifted(moved, baseline.mean() - lost - moved.mean())
    return BuildPair(Build(baseline[order], topics=of), Build(moved, topics=of))


def topics_noise(rng: np.random.Generator, questions: int, lost: float) -> BuildPair:
    """The answers to a topic's questions are better or worse together, anew in each repetition; flips of 1 %."""
    of = np.arange(questions) * TOPICS // questions
    order = rng.permutation(questions)
    return BuildPair(*(Build(chance[order], topics=of, shared=SHARED) for chance in worlds.builds(rng, questions, 0.01, lost)))


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
