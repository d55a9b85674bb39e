"""What the answers of one repetition have in common, as a part of an interval.

Answers that change together in one repetition, such as those to questions of a topic that nobody named, make the means of
repetitions differ by more than independent answers would. So each repetition counts as one draw, as a start of a server does:
the variance of the means, less what independent answers explain, with its few degrees of freedom (see `judge.between`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_qualify.judge.between import POINTS, Array, Between, likely, reach, reach_of

Counts = NDArray[np.int64]
# The share of the questions that a repetition must have asked, so that its mean counts.
WHOLE = 0.9


class Part(NamedTuple):
    """A source of noise of which only few draws are known: `weight` times its variance is in the squared error."""

    weight: float
    between: Between


class Repeated(NamedTuple):
    """The repetitions that a build's answers are from.

    `weight` is the sum of the squares of their shares of the answers. `variance` is that of the means of the whole ones around
    those of their starts, from so many degrees of `freedom`.
    """

    weight: float = 1.0
    variance: float = 0.0
    freedom: int = 0


ONE_REPETITION = Repeated()


def repeated(question: Counts, score: Array, repetition: Counts, start: Counts, questions: int) -> Repeated:
    """The repetitions of answers, each with its question, score, repetition and start; shapes are (answers,).

    All but scores are numbered from 0.
    """
    sizes = np.bincount(repetition)
    weight = float(((sizes / sizes.sum()) ** 2).sum())
    whole = sizes[repetition] >= WHOLE * questions
    of_starts = [np.flatnonzero(whole & (start == number)) for number in range(int(start.max()) + 1)]
    apart = [_apart(question[rows], score[rows], repetition[rows]) for rows in of_starts if len(rows)]
    freedom = sum(len(shifts) - 1 for shifts in apart)
    squares = math.fsum(float(shifts @ shifts) for shifts in apart)
    return Repeated(weight, squares / freedom if freedom else 0.0, freedom)


def _apart(question: Counts, score: Array, repetition: Counts) -> Array:
    """How far the mean of each repetition of a start lies from the mean of all. Each question counts by its usual score."""
    usual = np.bincount(question, score) / np.maximum(np.bincount(question), 1)
    _, numbers = np.unique(repetition, return_inverse=True)
    shifts = np.bincount(numbers, score - usual[question]) / np.bincount(numbers)
    return np.asarray(shifts - shifts.mean(), dtype=np.float64)


def reach_of_parts(alpha: float, variance: float, parts: Sequence[Part]) -> float:
    """As `between.reach_of`, with several parts that are independent of one another."""
    if not parts:
        return reach_of(alpha, variance, 0.0, None)
    points = POINTS // len(parts)
    variances, chances = np.array([variance]), np.ones(1)
    for part in parts:
        values, their_chances = likely(part.between.variance, part.between.freedom, points)
        added = part.weight * np.maximum(0.0, values - part.between.noise)
        variances = (variances[:, None] + added[None, :]).ravel()
        chances = (chances[:, None] * their_chances[None, :]).ravel()
    return reach(alpha, variances, chances)
