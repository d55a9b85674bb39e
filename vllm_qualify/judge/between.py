"""What differs from start to start of a server, as a part of an interval.

Each start shifts what a build shows: by other kernels, another placement, another neighbour. More answers or repeats of one
start do not show that; only a second start does. Two starts show a standard deviation with one degree of freedom, and an
interval from these alone decides nothing. So a deviation is assumed before anything is measured: half of Student's t around 0,
whose scale is a usual deviation, and whose tail leaves larger ones possible (Gelman 2006, "Prior distributions for variance
parameters in hierarchical models", Bayesian Analysis 1). The starts of the comparison, and those that history knows, then say
how likely each deviation is. The error is a mixture of normal distributions, one for each deviation, with its chance.

Answers that change together in one repetition, such as those to questions of a topic that nobody named, make the means of
repetitions differ by more than independent answers would. So each repetition counts as one draw, as a start of a server does:
the variance of the means, less what independent answers explain, with few degrees of freedom: it is distributed as s² f / χ²
(generalized confidence intervals: Weerahandi 1993, JASA 88). Where a server is started more than once, the means of starts have
this in them, and it does not count a second time.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vllm_qualify.lazy import Lazy
from vllm_qualify.plan.cell import Between

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = Lazy("scipy.optimize")

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
# History counts for at most so many degrees of freedom. Then the cell's own starts outweigh a history that is unlike them.
MOST_FROM_HISTORY = 1.0
# The chance, on each side, with which a comparison's starts are taken to be unlike its history though they are not.
UNLIKE = 0.1
# Starts that differ by so many times what is assumed are told of: few of them show that badly.
RESTLESS = 3.0
# Points at which a variance's distribution is taken. More lie where it is large.
POINTS = 80
# The share of the questions that a start or a repetition must have asked, so that its mean counts among the others'.
WHOLE = 0.9


class Assumed(NamedTuple):
    """The deviation of one build's starts before any was seen: half of Student's t with this `scale` and `freedom`.

    The scale is in shares of the questions, or in logarithms of times.
    """

    scale: float
    freedom: float = 3.0


# 0.18 points. Ten pairs of runs of a build on gsm8k differed by 0.15 to 0.44 points, with the noise of the answers in it
# (docs/design/0009), which at flips of 1 to 3 % is all or nearly all of it. It is assumed, not measured by itself.
OF_ANSWERS = Assumed(0.0018)
# Starts of one build on an H200 differed by 0.45 % (docs/measured.md). They were of one machine, so the scale is 1.6 times
# that.
OF_LOADS = Assumed(0.0072)


class StartMean(NamedTuple):
    """The mean of one start, and the variance that the noise within the start gives it."""

    mean: float
    noise: float


class Spread(NamedTuple):
    """The variances of starts that are possible, and the chance of each; shapes (points,)."""

    variances: Array
    chances: Array

    @property
    def deviation(self) -> float:
        """The deviation of starts by their mean variance."""
        return float(np.sqrt(self.variances @ self.chances))

    def reach(self, alpha: float, variance: float, weight: float) -> float:
        """How far an error exceeds 0 with the chance `alpha`: of a known variance, and `weight` times that of starts."""
        return reach(alpha, variance + weight * self.variances, self.chances)


NO_SPREAD = Spread(np.zeros(1), np.ones(1))
"""Starts are taken to differ by nothing: what is measured once, and says so."""


def spread(assumed: Assumed, builds: Iterable[Sequence[StartMean]], history: Between | None = None) -> Spread:
    """How much starts differ, by what is assumed, by the starts of each build, and by history if they are not unlike it.

    The likelihood of a build's starts is that of normal means around an unknown one (restricted maximum likelihood: Patterson &
    Thompson 1971, Biometrika 58); that of history is of a variance that is distributed as χ².
    """
    return weighed_spread(assumed, builds, history)[0]


def weighed_spread(
    assumed: Assumed, builds: Iterable[Sequence[StartMean]], history: Between | None = None
) -> tuple[Spread, float]:
    """As `spread`, with the logarithm of how likely it makes what was seen of starts, which weighs it among others."""
    squared, chances = _half_t(assumed.freedom)
    variances, seen = assumed.scale**2 * squared, [means for means in builds if len(means) > 1]
    logs = sum((_log_likelihood(means, variances) for means in seen), np.zeros(POINTS))
    if history is not None and not is_unlike(seen, history):
        freedom, whole = min(history.freedom, MOST_FROM_HISTORY), variances + history.noise
        logs = logs - freedom / 2 * (np.log(whole) + history.variance / whole)
    likely = chances * np.exp(logs - logs.max())
    return Spread(variances, likely / likely.sum()), float(logs.max() + np.log(likely.sum()))


def _log_likelihood(means: Sequence[StartMean], variances: Array) -> Array:
    values, noises = (np.array(each) for each in zip(*means, strict=True))
    whole = variances[:, None] + noises[None, :]
    weights = 1 / whole
    middle = (weights @ values) / weights.sum(axis=1)
    apart = ((values[None, :] - middle[:, None]) ** 2 * weights).sum(axis=1)
    result: Array = -(np.log(whole).sum(axis=1) + np.log(weights.sum(axis=1)) + apart) / 2
    return result


def is_unlike(builds: Iterable[Sequence[StartMean]], history: Between) -> bool:
    """Whether starts differ surely more than history has it, or surely less: then history says nothing of them."""
    several = [[start.mean for start in means] for means in builds if len(means) > 1]
    freedom = sum(len(means) - 1 for means in several)
    if not freedom:
        return False
    own = sum(float(np.var(means)) * len(means) for means in several) / freedom
    expected = history.part + fmean(start.noise for means in builds for start in means)
    if expected == 0:
        return own > 0
    above = float(special.fdtrc(freedom, history.freedom, own / expected))
    return not UNLIKE < above < 1 - UNLIKE


@lru_cache(maxsize=16)
def _half_t(freedom: float) -> tuple[Array, Array]:
    """The squares of half of Student's t at POINTS, and their chances."""
    middles = (np.arange(POINTS) + 0.5) / POINTS
    chances = 3 * middles**2
    deviations = -special.stdtrit(freedom, middles**3 / 2)
    return np.asarray(deviations**2, dtype=np.float64), chances / chances.sum()


def possible_variances(variance: float, freedom: float, points: int = POINTS) -> tuple[Array, Array]:
    """Values of the true variance that an estimate allows, and the chance of each: it is distributed as s² f / χ²."""
    inverse, chances = _inverse_chi_square(freedom, points)
    return variance * inverse, chances


@lru_cache(maxsize=1024)
def _inverse_chi_square(freedom: float, points: int) -> tuple[Array, Array]:
    middles = (np.arange(points) + 0.5) / points
    chances = 3 * middles**2
    inverse: Array = np.asarray(freedom / special.chdtri(freedom, 1 - middles**3), dtype=np.float64)
    return inverse, chances / chances.sum()


def reach(alpha: float, variances: Array, chances: Array) -> float:
    """How far an error exceeds 0 with the chance `alpha`, between 0 and 0.5, if it is normal with one of these variances."""
    if not 0 < alpha < 0.5:
        raise ValueError("the chance of an error lies between 0 and 0.5")
    scale = float(np.sqrt(variances.max()))
    if scale == 0:
        return 0.0
    deviations = np.sqrt(np.maximum(variances, 0.0)) / scale
    wide = deviations > 0
    deviations, chances = deviations[wide], chances[wide]

    def excess(bound: float) -> float:
        return float(chances @ special.ndtr(-bound / deviations)) - alpha

    # A little more than the normal distribution with the largest of them, for rounding.
    most = -float(special.ndtri(alpha)) + 1e-6
    # If most of the variances are 0, an error above 0 may be rarer than `alpha`. If one is far larger than the rest, the bound
    # is a tiny part of `scale`, and only a relative tolerance keeps it exact.
    return 0.0 if excess(0.0) <= 0 else scale * float(optimize.brentq(excess, 0.0, most, xtol=1e-20, rtol=1e-9))


class RepetitionNoise(NamedTuple):
    """A source of noise of which only few draws are known: `weight` times its variance is in the squared error."""

    weight: float
    between: Between

    def reach(self, alpha: float, variance: float) -> float:
        """How far an error exceeds 0 with the chance `alpha`: of a known variance and of this part."""
        values, chances = possible_variances(self.between.variance, self.between.freedom)
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


def find_repetitions(question: Counts, score: Array, repetition: Counts, start: Counts, questions: int) -> Repeated:
    """The repetitions of answers, each with its question, score, repetition and start, numbered from 0; shapes (answers,)."""
    sizes = np.bincount(repetition)
    weight = float(((sizes / sizes.sum()) ** 2).sum())
    whole = sizes[repetition] >= WHOLE * questions
    of_starts = [np.flatnonzero(whole & (start == number)) for number in range(int(start.max()) + 1)]
    apart = [_shifts_of_repetitions(question[rows], score[rows], repetition[rows]) for rows in of_starts if len(rows)]
    freedom = sum(len(shifts) - 1 for shifts in apart)
    squares = math.fsum(float(shifts @ shifts) for shifts in apart)
    return Repeated(weight, squares / freedom if freedom else 0.0, freedom)


def _shifts_of_repetitions(question: Counts, score: Array, repetition: Counts) -> Array:
    """How far the mean of each repetition of a start lies from the mean of all. Each question counts by its usual score."""
    usual = np.bincount(question, score) / np.maximum(np.bincount(question), 1)
    _, numbers = np.unique(repetition, return_inverse=True)
    shifts = np.bincount(numbers, score - usual[question]) / np.bincount(numbers)
    return np.asarray(shifts - shifts.mean(), dtype=np.float64)


def pool_estimates(parts: Sequence[Between]) -> Between | None:
    """Several estimates as one, each weighted by its degrees of freedom; None without any."""
    if not parts:
        return None
    freedoms = [part.freedom for part in parts]
    variance, noise = np.average([(part.variance, part.noise) for part in parts], axis=0, weights=freedoms).tolist()
    return Between(variance=variance, noise=noise, freedom=sum(freedoms))
