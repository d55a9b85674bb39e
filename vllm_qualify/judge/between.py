"""What differs from start to start of a server, as a part of an interval.

Each start shifts what a build shows: by other kernels, another placement, another neighbour. More answers or repeats of one
start do not show that; only a second start does. Its variance is estimated from the means of starts, less what their own noise
explains, and so from few degrees of freedom. To take the estimate for the truth would make intervals too narrow, just where
chance made it small. So every variance that the estimate allows counts, each with its chance: σ² is distributed as s²·f/χ² with
f degrees of freedom, and the error as a mixture of normal distributions (generalized confidence intervals: Weerahandi 1993,
JASA 88). Without other noise this is Student's t, and with many degrees of freedom it is the normal distribution.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

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
MOST_FROM_HISTORY = 30.0
# Points at which a variance's distribution is taken. More lie where χ² is small, and the variance large.
POINTS = 64


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
    """What earlier runs on a GPU type showed, by the labels of gates: how much starts of a server differ, and days.

    Of loads also the `noise`, the variance of one repeat within a start. All are of one build.
    """

    starts: dict[str, Between] = {}
    days: dict[str, Between] = {}
    noise: dict[str, Between] = {}


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
        runs=max(part.runs for part in components),
    )


def with_history(own: Iterable[Between], history: Between | None) -> Between | None:
    """The estimate from a comparison's own starts and the history of its GPU type."""
    known = [] if history is None else [history.model_copy(update={"freedom": min(history.freedom, MOST_FROM_HISTORY)})]
    return pooled([*own, *known])


def likely(variance: float, freedom: float, points: int = POINTS) -> tuple[Array, Array]:
    """Values of the true variance that an estimate allows, and the chance of each."""
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


def reach_of(alpha: float, variance: float, weight: float, between: Between | None) -> float:
    """As `reach`: for a known variance, and with it `weight` times that between starts."""
    if between is None or weight == 0:
        return -float(special.ndtri(alpha)) * math.sqrt(variance)
    variances, chances = likely(between.variance, between.freedom)
    return reach(alpha, variance + weight * np.maximum(0.0, variances - between.noise), chances)
