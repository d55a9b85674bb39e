"""Builds that are made up: how likely each answers a question right, and how long its load takes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Chances = NDArray[np.float64]

BASE_ACCURACY = 0.91
# Of the questions, in shares of their scores: what moves down and up even where nothing is lost in all.
CHURN = 0.005
# Of what is lost in all, how much more is lost and gained again elsewhere.
REGAINED = 0.25


class Pair(NamedTuple):
    """Each question's chance to be answered right, by the baseline and by the candidate."""

    baseline: Chances
    candidate: Chances


def builds(rng: np.random.Generator, questions: int, flips: float, lost: float) -> Pair:
    """A baseline of BASE_ACCURACY, two repetitions of which differ on a share `flips`, and a candidate.

    Of unstable questions the chance is of Beta(2, 1), mostly above a half, so that two repetitions differ on a third of them;
    of the others it is 0 or 1. The candidate's mean chance is less by just `lost`: in all, questions move down by CHURN and 1 +
    REGAINED times what is lost, others up by CHURN and REGAINED times that. Half of those that move are then always wrong, or
    always right; the others only more often, so that the candidate is somewhat noisier than the baseline.
    """
    chance = _baseline(rng, questions, flips)
    order = rng.permutation(questions)
    # Apart, so that no question moves down and up. More of them may move up, as few are wrong.
    third = questions // 3
    worse = _moved(rng, chance, order[:third], questions * (CHURN + lost * (1 + REGAINED)))
    better = 1 - _moved(rng, 1 - chance, order[third:], questions * (CHURN + lost * REGAINED))
    return Pair(chance, worse + better - chance)


def _baseline(rng: np.random.Generator, questions: int, flips: float) -> Chances:
    unstable = rng.beta(2, 1, round(3 * flips * questions))
    right = round(BASE_ACCURACY * questions - unstable.sum())
    return np.concatenate([unstable, np.ones(right), np.zeros(questions - right - len(unstable))])


def _moved(rng: np.random.Generator, chance: Chances, order: NDArray[np.int64], amount: float) -> Chances:
    """Chances moved down by `amount` in all, those of the questions first in `order` most."""
    kept = np.where(rng.random(len(order)) < 0.5, 0.0, rng.random(len(order)))
    down = chance[order] * (1 - kept)
    before = np.cumsum(down) - down
    moved = chance.copy()
    moved[order] -= np.clip(amount - before, 0.0, down)
    return moved


def answered(rng: np.random.Generator, chance: Chances) -> Chances:
    """The scores of one answer to each question."""
    return (rng.random(len(chance)) < chance).astype(float)


class Times(NamedTuple):
    """Of repeats that were measured in pairs."""

    candidate: list[float]
    baseline: list[float]


def times(rng: np.random.Generator, repeats: int, slowdown: float, noise: float, drift: float) -> Times:
    """`noise` is the standard deviation of a repeat's logarithm, `drift` that of what touches both of a pair."""
    common = drift * rng.standard_normal(repeats)
    candidate, baseline = (np.exp(common + noise * rng.standard_normal(repeats)) for _ in range(2))
    return Times([float(time) * (1 + slowdown) for time in candidate], [float(time) for time in baseline])
