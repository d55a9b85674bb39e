"""Looking more than once: bounds that let a comparison stop as soon as it is decided, its error rate held.

A running estimate is judged at planned looks. Judged each time at the same level it would be wrong far too often; here the
level is spent over the looks (Lan & DeMets 1983, "Discrete sequential boundaries for clinical trials", Biometrika 70), and each
critical value follows from the ones before it by numerical integration (Armitage, McPherson & Rowe 1969; Jennison & Turnbull
2000, "Group Sequential Methods", chapter 19).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy import optimize, stats

# Standard errors that the grid reaches below zero, and its points.
REACH, POINTS = 8.0, 401
Grid = tuple[np.ndarray, np.ndarray]


def critical_values(information: Sequence[float], alpha: float) -> list[float]:
    """One critical value of z for each look; the last look is at the whole information.

    `information` is one over the estimate's variance at each look, rising, in any unit. At a share t of the whole, `alpha` * t
    is spent. The chance that z, under the hypothesis, is above its critical value at any of the looks is `alpha`.

    Raises:
        ValueError: the information does not rise, or `alpha` is not between 0 and 0.5.
    """
    rising = all(one < other for one, other in zip((0.0, *information), information, strict=False))
    if not information or not rising or not 0 < alpha < 0.5:
        raise ValueError("the information must rise above 0 from look to look, and alpha lie between 0 and 0.5")
    return list(_critical_values(tuple(value / information[-1] for value in information), alpha))


@lru_cache(maxsize=256)
def _critical_values(shares: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    found = [float(stats.norm.isf(alpha * shares[0]))]
    grid = _first(shares[0], found[0])
    for before, share in pairwise(shares):
        step = math.sqrt(share - before)
        critical = _solve(grid, step, math.sqrt(share), alpha * (share - before))
        grid = _next(grid, step, critical * math.sqrt(share), share)
        found.append(critical)
    return tuple(found)


def _first(share: float, critical: float) -> Grid:
    """The density of the score where the comparison went on after the first look. A score is z times √information."""
    scores = _points(share, critical * math.sqrt(share))
    return scores, stats.norm.pdf(scores, scale=math.sqrt(share))


def _next(grid: Grid, step: float, stop: float, share: float) -> Grid:
    scores, density = grid
    wanted = _points(share, stop)
    spread = stats.norm.pdf((wanted[:, None] - scores[None, :]) / step) / step
    return wanted, np.asarray(np.trapezoid(spread * density[None, :], scores, axis=1))


def _points(share: float, stop: float) -> np.ndarray:
    return np.linspace(-REACH * math.sqrt(share), stop, POINTS)


def _solve(grid: Grid, step: float, root: float, spent: float) -> float:
    """The critical value above which just `spent` of what is left lies."""
    scores, density = grid

    def excess(critical: float) -> float:
        above = stats.norm.sf((critical * root - scores) / step)
        return float(np.trapezoid(above * density, scores)) - spent

    return float(optimize.brentq(excess, -REACH, REACH, xtol=1e-6))
