"""Made-up builds: how likely each answers a question right."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Chances = NDArray[np.float64]

BASE_ACCURACY = 0.91
# The share of all scores that moves down, and the share that moves up, even if nothing is lost in all.
CHURN = 0.005
# How much more than the loss is lost, and gained again on other questions; as a share of the loss.
REGAINED = 0.25


class ChancePair(NamedTuple):
    """Each question's chance to be answered right, by the baseline and by the candidate."""

    baseline: Chances
    candidate: Chances


def builds(rng: np.random.Generator, questions: int, flips: float, lost: float) -> ChancePair:
    """A baseline of BASE_ACCURACY, two repetitions of which differ on a share `flips`, and a candidate.

    Unstable questions have a chance drawn from Beta(2, 1), mostly above a half, so that two repetitions differ on a third of
    them. The chance of all other questions is 0 or 1. The candidate's mean chance is lower by exactly `lost`: some questions
    move down, by CHURN and 1 + REGAINED times `lost` in all; others move up, by CHURN and REGAINED times `lost`. Half of the
    questions that move are then always wrong, or always right. The other half is only wrong or right more often, so that the
    candidate is somewhat noisier than the baseline.
    """
    chance = _baseline(rng, questions, flips)
    order = rng.permutation(questions)
    # Two separate parts, so that no question moves both ways. The larger part is for moving up, since few questions are wrong.
    third = questions // 3
    worse = _moved(rng, chance, order[:third], questions * (CHURN + lost * (1 + REGAINED)))
    better = 1 - _moved(rng, 1 - chance, order[third:], questions * (CHURN + lost * REGAINED))
    return ChancePair(chance, worse + better - chance)


def steady_builds(rng: np.random.Generator, questions: int, changed: float, lost: float) -> ChancePair:
    """Two builds that always answer alike. A share `changed` of the questions, and `lost` more, changes for good.

    So it is where batches do not change what is computed (VLLM_BATCH_INVARIANT=1), and on CPUs.
    """
    order = rng.permutation(questions)
    right, wrong = np.split(order, [round(BASE_ACCURACY * questions)])
    baseline = np.zeros(questions)
    baseline[right] = 1.0
    candidate = baseline.copy()
    both = round(changed * questions / 2)
    candidate[right[: both + round(lost * questions)]] = 0.0
    candidate[wrong[:both]] = 1.0
    return ChancePair(baseline, candidate)


def _baseline(rng: np.random.Generator, questions: int, flips: float) -> Chances:
    unstable = rng.beta(2, 1, round(3 * flips * questions))
    right = round(BASE_ACCURACY * questions - unstable.sum())
    return np.concatenate([unstable, np.ones(right), np.zeros(questions - right - len(unstable))])


def _moved(rng: np.random.Generator, chance: Chances, order: NDArray[np.int64], amount: float) -> Chances:
    """Move chances down by `amount` in all, beginning with the questions that are first in `order`."""
    kept = np.where(rng.random(len(order)) < 0.5, 0.0, rng.random(len(order)))
    down = chance[order] * (1 - kept)
    before = np.cumsum(down) - down
    moved = chance.copy()
    moved[order] -= np.clip(amount - before, 0.0, down)
    return moved


def drawn_answers(rng: np.random.Generator, chance: Chances) -> Chances:
    """The scores of one answer to each question."""
    return (rng.random(len(chance)) < chance).astype(float)
