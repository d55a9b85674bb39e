"""What differs from start to start of a server, as a part of an interval.

Each start shifts what a build shows: by other kernels, another placement, another neighbour. More answers or repeats of one
start do not show that; only a second start does. Two starts show a standard deviation with one degree of freedom, and an
interval from these alone decides nothing. So a deviation is assumed before anything is measured: half of Student's t around 0,
whose scale is a usual deviation, and whose tail leaves larger ones possible (Gelman 2006, "Prior distributions for variance
parameters in hierarchical models", Bayesian Analysis 1). The starts of the comparison, and those that history knows, then say
how likely each deviation is. The error is a mixture of normal distributions, one for each deviation, with its chance.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.values import Count, Frozen, NotNegative, Positive

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = Lazy("scipy.optimize")

Array = NDArray[np.float64]
# History counts for at most so many degrees of freedom, so that the starts of a cell that is unlike the others still show it.
MOST_FROM_HISTORY = 10.0
# The chance, on each side, with which a comparison's starts are taken to be unlike its history though they are not.
UNLIKE = 0.1
# Starts that differ by so many times what is assumed are told of: few of them show that badly.
RESTLESS = 3.0
# Points at which a variance's distribution is taken. More lie where it is large.
POINTS = 80


class Assumed(NamedTuple):
    """The deviation of one build's starts before any was seen: half of Student's t with this `scale` and `freedom`.

    The scale is in shares of the questions, or in logarithms of times.
    """

    scale: float
    freedom: float = 3.0


# A tenth of a point. Ten pairs of runs of a build on gsm8k differed by 0.15 to 0.44 points with the noise of the answers in it
# (docs/design/0009), which at flips of 1 to 3 % is all or nearly all of it. It is assumed, not measured by itself.
OF_ANSWERS = Assumed(0.001)
# Starts of one build on an H200 differed by 0.45 % (docs/measured.md). They were of one machine, so the scale is √2 times that.
OF_LOADS = Assumed(0.0064)


class Between(Frozen):
    """The variance of the means of starts, from `runs` runs with so many degrees of `freedom` together.

    `noise` is the part of it that the answers or the repeats within each start explain. Both are in squared shares of the
    questions, or of squared logarithms of times.
    """

    variance: NotNegative
    noise: NotNegative
    freedom: Positive
    runs: Count = 1

    @property
    def part(self) -> float:
        """What starts add: the variance without noise (method of moments)."""
        return max(0.0, self.variance - self.noise)


class History(Frozen):
    """What approved runs of a cell, or of ones alike, showed, by the labels of gates.

    That is how much starts of one build differ, `pairs` of starts in loads in turns, and days.
    """

    starts: dict[str, Between] = {}
    pairs: dict[str, Between] = {}
    days: dict[str, Between] = {}


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
    return weighed_spread(assumed, builds, history).spread


class WeighedSpread(NamedTuple):
    """A spread, and the logarithm of how likely it makes what was seen of starts, which weighs it among others."""

    spread: Spread
    log_likelihood: float


def weighed_spread(assumed: Assumed, builds: Iterable[Sequence[StartMean]], history: Between | None = None) -> WeighedSpread:
    """As `spread`."""
    squared, chances = _half_t(assumed.freedom)
    variances, seen = assumed.scale**2 * squared, [means for means in builds if len(means) > 1]
    logs = sum((_log_likelihood(means, variances) for means in seen), np.zeros(POINTS))
    if history is not None and not is_unlike(seen, history):
        freedom, whole = min(history.freedom, MOST_FROM_HISTORY), variances + history.noise
        logs = logs - freedom / 2 * (np.log(whole) + history.variance / whole)
    likely = chances * np.exp(logs - logs.max())
    return WeighedSpread(Spread(variances, likely / likely.sum()), float(logs.max() + np.log(likely.sum())))


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
    noise = fmean(start.noise for means in builds for start in means)
    expected = history.part + noise
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


def likely(variance: float, freedom: float, points: int = POINTS) -> tuple[Array, Array]:
    """Values of the true variance that an estimate allows, and the chance of each: it is distributed as s² f / χ²."""
    inverse, chances = _inverse(freedom, points)
    return variance * inverse, chances


@lru_cache(maxsize=1024)
def _inverse(freedom: float, points: int) -> tuple[Array, Array]:
    middles = (np.arange(points) + 0.5) / points
    chances = 3 * middles**2
    inverse: Array = np.asarray(freedom / special.chdtri(freedom, 1 - middles**3), dtype=np.float64)
    return inverse, chances / chances.sum()


def reach(alpha: float, variances: Array, chances: Array) -> float:
    """How far an error exceeds 0 with the chance `alpha`, if it is normal with one of these variances.

    Raises:
        ValueError: `alpha` is not between 0 and 0.5.
    """
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
