"""What the answers of one repetition have in common, as a part of an interval.

Answers that change together in one repetition, such as those to questions of a topic that nobody named, make the means of
repetitions differ by more than independent answers would. So each repetition counts as one draw, as a start of a server does:
the variance of the means, less what independent answers explain, with few degrees of freedom: it is distributed as s² f / χ²
(generalized confidence intervals: Weerahandi 1993, JASA 88). Where a server is started more than once, the means of starts have
this in them, and it does not count a second time.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_qualify.judge.between import Array, Between, likely, reach

Counts = NDArray[np.int64]
# The share of the questions that a repetition must have asked, so that its mean counts.
WHOLE = 0.9


class Part(NamedTuple):
    """A source of noise of which only few draws are known: `weight` times its variance is in the squared error."""

    weight: float
    between: Between

    def reach(self, alpha: float, variance: float) -> float:
        """How far an error exceeds 0 with the chance `alpha`: of a known variance and of this part."""
        values, chances = likely(self.between.variance, self.between.freedom)
        return reach(alpha, variance + self.weight * np.maximum(0.0, values - self.between.noise), chances)


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


def pooled(parts: Iterable[Between]) -> Between | None:
    """Several estimates as one, each weighted by its degrees of freedom; None without any."""
    components = list(parts)
    if not components:
        return None
    freedom = sum(part.freedom for part in components)
    return Between(
        variance=sum(part.freedom * part.variance for part in components) / freedom,
        noise=sum(part.freedom * part.noise for part in components) / freedom,
        freedom=freedom,
    )
