"""Looking more than once: bounds that let a comparison stop as soon as it is decided, and still hold its error rate.

A running estimate is judged at planned looks. If each look had the full level, the verdict would be wrong far too often. Here
the level is spent over the looks (Lan & DeMets 1983, "Discrete sequential boundaries for clinical trials", Biometrika 70). Each
critical value follows from the ones before it by numerical integration (Armitage, McPherson & Rowe 1969; Jennison & Turnbull
2000, "Group Sequential Methods", chapter 19).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import special

from vllm_qualify.lazy import Lazy
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import Direction
from vllm_qualify.recipe.values import Frozen

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = Lazy("scipy.optimize")

# The chance that a release is called `fail` though it meets every bound, over all of its gates.
FALSE_FAIL_OF_RELEASE = 0.05
# The chance that a gate is passed though its bound is missed. A release must pass all gates, so this is not shared out.
FALSE_PASS = 0.05

# How many standard errors the grid reaches below zero, and its number of points.
REACH, POINTS = 8.0, 401
Grid = tuple[np.ndarray, np.ndarray]


class Levels(Frozen):
    """The chances of a wrong verdict of one gate, over all looks at it."""

    false_pass: float = FALSE_PASS
    false_fail: float = FALSE_FAIL_OF_RELEASE


def levels_of(gates: Sequence[Gate], tries: int = 0) -> Levels:
    """The levels of each of a release's gates, of a release that did not pass `tries` times before.

    The gates share the release's chance of a wrong `fail` (Bonferroni). Who tries again has another chance of a wrong `pass`,
    so the k-th try gets FALSE_PASS / k³. However many tries there are, all together have at most FALSE_PASS times ζ(3), 6.0 %,
    since the chance of any of several is at most their sum.
    """
    noisy = sum(gate.has_noise for gate in gates)
    return Levels(false_pass=FALSE_PASS / (tries + 1) ** 3, false_fail=FALSE_FAIL_OF_RELEASE / max(1, noisy))


_INSTEAD: ContextVar[Levels | None] = ContextVar("levels instead of a plan's own", default=None)


def levels_for(plan: CellPlan) -> Levels:
    return _INSTEAD.get() or levels_of(plan.judged, plan.unpassed)


@contextmanager
def at_levels(levels: Levels) -> Iterator[None]:
    """Within the block, all intervals have these levels. A verdict is never made so: see `judge.chance`."""
    token = _INSTEAD.set(levels)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


class Sides(NamedTuple):
    """The chances that the true value is below an interval, and above it."""

    below: float
    above: float


def sides(direction: Direction, levels: Levels, information: Sequence[float], look: int) -> Sides:
    """The sides of an interval at one of several planned looks, counted from 0.

    The bound on the bad side decides `pass`, that on the good side decides `fail`. `information` is as for `critical_values`.
    """
    passing, failing = (_nominal(information, look, alpha) for alpha in (levels.false_pass, levels.false_fail))
    return sides_of(direction, passing, failing)


def sides_of(direction: Direction, passing: float, failing: float) -> Sides:
    """The sides that have these chances of a wrong `pass` and of a wrong `fail`."""
    return Sides(passing, failing) if direction == "higher" else Sides(failing, passing)


def _nominal(information: Sequence[float], look: int, alpha: float) -> float:
    """The level that the bound of this look would have if it were the only look."""
    return float(special.ndtr(-critical_values(information, alpha)[look]))


def critical_values(information: Sequence[float], alpha: float) -> list[float]:
    """One critical value of z for each look. The last look has the whole information.

    `information` is one over the estimate's variance at each look, in any unit, and must rise. At a share t of the whole,
    `alpha` * t is spent. Under the hypothesis, `alpha` is the chance that z exceeds its critical value at any of the looks.

    Raises:
        ValueError: the information does not rise, or `alpha` is not between 0 and 0.5.
    """
    rising = all(one < other for one, other in zip((0.0, *information), information, strict=False))
    if not information or not rising or not 0 < alpha < 0.5:
        raise ValueError("the information must rise above 0 from look to look, and alpha lie between 0 and 0.5")
    return list(_critical_values(tuple(value / information[-1] for value in information), alpha))


@lru_cache(maxsize=256)
def _critical_values(shares: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    found = [-float(special.ndtri(alpha * shares[0]))]
    grid = _first(shares[0], found[0])
    for before, share in pairwise(shares):
        step = math.sqrt(share - before)
        critical = _solve(grid, step, math.sqrt(share), alpha * (share - before))
        grid = _next(grid, step, critical * math.sqrt(share), share)
        found.append(critical)
    return tuple(found)


def _first(share: float, critical: float) -> Grid:
    """The density of the score if the comparison goes on after the first look. A score is z times √information."""
    scores = _points(share, critical * math.sqrt(share))
    return scores, _density(scores, math.sqrt(share))


def _next(grid: Grid, step: float, stop: float, share: float) -> Grid:
    scores, density = grid
    wanted = _points(share, stop)
    spread = _density(wanted[:, None] - scores[None, :], step)
    return wanted, np.asarray(np.trapezoid(spread * density[None, :], scores, axis=1))


def _density(scores: np.ndarray, scale: float) -> np.ndarray:
    """The density of a normal distribution around zero."""
    return np.asarray(np.exp(-((scores / scale) ** 2) / 2) / math.sqrt(2 * math.pi) / scale)


def _points(share: float, stop: float) -> np.ndarray:
    return np.linspace(-REACH * math.sqrt(share), stop, POINTS)


def _solve(grid: Grid, step: float, root: float, spent: float) -> float:
    """The critical value that the score exceeds with the chance `spent`."""
    scores, density = grid

    def excess(critical: float) -> float:
        above = special.ndtr((scores - critical * root) / step)
        return float(np.trapezoid(above * density, scores)) - spent

    return float(optimize.brentq(excess, -REACH, REACH, xtol=1e-6))
