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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import special

from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import Direction
from vllm_qualify.recipe.values import Frozen

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = Lazy("scipy.optimize")

# The chance that a release is called `fail` though it meets every bound, over all of its gates.
FALSE_FAIL_OF_RELEASE = 0.05
# The chance that a gate is passed though its bound is missed. A release must pass them all, so this is not shared out.
FALSE_PASS = 0.05

# Standard errors that the grid reaches below zero, and its points.
REACH, POINTS = 8.0, 401
Grid = tuple[np.ndarray, np.ndarray]


class Levels(Frozen):
    """The chances of a wrong verdict of one gate, over all looks at it."""

    false_pass: float = FALSE_PASS
    false_fail: float = FALSE_FAIL_OF_RELEASE


def levels_of(gates: Sequence[Gate]) -> Levels:
    """The levels of each of a release's gates: the false rejection of the release is shared out among them (Bonferroni)."""
    noisy = sum(gate.has_noise for gate in gates)
    return Levels(false_fail=FALSE_FAIL_OF_RELEASE / max(1, noisy))


class Sides(NamedTuple):
    """The chances that the truth lies below an interval, and above it."""

    below: float
    above: float


def sides(direction: Direction, levels: Levels, information: Sequence[float], look: int) -> Sides:
    """The sides of an interval at one of several planned looks, counted from 0.

    The bound on the bad side decides `pass`, the one on the good side `fail`. `information` is as `critical_values` takes it.
    """
    passing, failing = (_nominal(information, look, alpha) for alpha in (levels.false_pass, levels.false_fail))
    return sides_of(direction, passing, failing)


def sides_of(direction: Direction, passing: float, failing: float) -> Sides:
    """By the chances of a wrong `pass` and of a wrong `fail`."""
    return Sides(passing, failing) if direction == "higher" else Sides(failing, passing)


def _nominal(information: Sequence[float], look: int, alpha: float) -> float:
    """What of `alpha` a bound at just this look has, as if there were no other."""
    return float(special.ndtr(-critical_values(information, alpha)[look]))


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
    found = [-float(special.ndtri(alpha * shares[0]))]
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
    return scores, _density(scores, math.sqrt(share))


def _next(grid: Grid, step: float, stop: float, share: float) -> Grid:
    scores, density = grid
    wanted = _points(share, stop)
    spread = _density(wanted[:, None] - scores[None, :], step)
    return wanted, np.asarray(np.trapezoid(spread * density[None, :], scores, axis=1))


def _density(scores: np.ndarray, scale: float) -> np.ndarray:
    """Of a normal distribution around zero."""
    return np.asarray(np.exp(-((scores / scale) ** 2) / 2) / math.sqrt(2 * math.pi) / scale)


def _points(share: float, stop: float) -> np.ndarray:
    return np.linspace(-REACH * math.sqrt(share), stop, POINTS)


def _solve(grid: Grid, step: float, root: float, spent: float) -> float:
    """The critical value above which just `spent` of what is left lies."""
    scores, density = grid

    def excess(critical: float) -> float:
        above = special.ndtr((scores - critical * root) / step)
        return float(np.trapezoid(above * density, scores)) - spent

    return float(optimize.brentq(excess, -REACH, REACH, xtol=1e-6))
