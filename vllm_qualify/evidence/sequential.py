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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import special

from vllm_qualify.lazy import Lazy
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS, Direction
from vllm_qualify.recipe.values import Frozen

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = Lazy("scipy.optimize")

# The chance that a release is called `fail` though it lost nothing and meets every bound, over all of its gates.
FALSE_FAIL_OF_RELEASE = 0.05
# The chance that a gate against another run fails if just so much is lost as it allows. Who loses that much at several gates is
# no good release that must be spared, so this is not shared out.
FALSE_FAIL_AT_MARGIN = 0.05
# The chance that a gate is passed though its bound is missed. A release must pass all gates, so this is not shared out.
# At most 5 % are wanted. Two hundredths are kept for what no interval holds exactly, as estimated variances and many tries are.
FALSE_PASS = 0.03

# How many standard errors the integration reaches below zero, and its points.
REACH = 6.0
NODES, WIDTHS = np.polynomial.legendre.leggauss(96)
# Shares of the information that are found are rounded down to these, so that looks that are nearly alike are integrated once.
# Each look has at least so much more than the one before it.
ROUNDED, LEAST_STEP = 1 / 64, 1 / 128
RISES = "the information must rise above 0 from look to look, and alpha lie between 0 and 0.5"


class Levels(Frozen):
    """The chances of a wrong verdict of one gate, over all looks at it.

    `false_fail` is for a release that meets the bound. Of a gate against another run it is for a release that lost nothing, and
    `false_fail_at_margin` for one that lost what the gate allows.
    """

    false_pass: float = FALSE_PASS
    false_fail: float = FALSE_FAIL_OF_RELEASE
    false_fail_at_margin: float = FALSE_FAIL_AT_MARGIN

    @property
    def at_margin(self) -> "Levels":
        """The levels of the bound that is held against a gate's margin."""
        return self.model_copy(update={"false_fail": max(self.false_fail, self.false_fail_at_margin)})


def levels_of(gates: Sequence[Gate], tries: int = 0) -> Levels:
    """The levels of each of a release's gates, of a release that did not pass `tries` times before.

    The gates share the release's chance of a wrong `fail` (Bonferroni). Who tries again has another chance of a wrong `pass`,
    so the k-th try gets FALSE_PASS / k³. However many tries there are, all together have at most FALSE_PASS times ζ(3), 3.6 %,
    since the chance of any of several is at most their sum.
    """
    noisy = sum(gate.has_noise for gate in gates)
    return Levels(false_pass=FALSE_PASS / (tries + 1) ** 3, false_fail=FALSE_FAIL_OF_RELEASE / max(1, noisy))


_INSTEAD: ContextVar[Levels | None] = ContextVar("levels instead of a plan's own", default=None)


def levels_for(plan: CellPlan) -> Levels:
    return _INSTEAD.get() or levels_of(plan.judged_gates, plan.unpassed)


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
    return sides_after(direction, levels, _information_shares(information)[: look + 1])


def sides_after(direction: Direction, levels: Levels, shares: Sequence[float]) -> Sides:
    """The sides of an interval at the last of the looks so far, which had these rising shares of the whole information."""
    # The level that the bound of this look would have if it were the only look.
    nominal = (special.ndtr(-_critical_value(tuple(shares), alpha)) for alpha in (levels.false_pass, levels.false_fail))
    return sides_of(direction, *map(float, nominal))


def rising(shares: Sequence[float]) -> list[float]:
    """Shares of the information, as they were found at the looks so far, as shares that rise.

    What is found varies with chance, and each look spends something. If the information was already complete before the last
    of these looks, the last one has the whole: looking could have ended before, and did not.
    """
    raised: list[float] = []
    for share in shares:
        whole = share if share >= 1 else math.floor(share / ROUNDED) * ROUNDED
        raised.append(max(whole, (raised[-1] if raised else 0.0) + LEAST_STEP))
    return [min(share, 1 - left * LEAST_STEP) for left, share in zip(range(len(raised) - 1, -1, -1), raised, strict=True)]


def sides_of(direction: Direction, passing: float, failing: float) -> Sides:
    """The sides that have these chances of a wrong `pass` and of a wrong `fail`."""
    return Sides(passing, failing) if direction == "higher" else Sides(failing, passing)


def sides_at_once(metric: str, levels: Levels) -> Sides:
    """The sides of an interval that is judged only once, after all was measured."""
    return sides_of(METRICS[metric].direction, levels.false_pass, levels.false_fail)


def critical_values(information: Sequence[float], alpha: float) -> list[float]:
    """One critical value of z for each look. The last look has the whole information.

    `information` is one over the estimate's variance at each look, in any unit, and must rise. At a share t of the whole,
    `alpha` * t is spent. Under the hypothesis, `alpha` is the chance that z exceeds its critical value at any of the looks.
    Raises ValueError if the information does not rise, or `alpha` is not between 0 and 0.5.
    """
    shares = _information_shares(information)
    return [_critical_value(shares[:number], alpha) for number in range(1, len(shares) + 1)]


def _information_shares(information: Sequence[float]) -> tuple[float, ...]:
    if not information or information[-1] <= 0:
        raise ValueError(RISES)
    return tuple(value / information[-1] for value in information)


@lru_cache(maxsize=2**15)
def _critical_value(shares: tuple[float, ...], alpha: float) -> float:
    """The critical value at the last of the looks: the score exceeds it there for the first time with this look's chance."""
    share, before = shares[-1], shares[-2] if len(shares) > 1 else 0.0
    if not (0 <= before < share <= 1 and 0 < alpha < 0.5):
        raise ValueError(RISES)
    (scores, masses), step, root = _integrate_looks(shares[:-1], alpha), math.sqrt(share - before), math.sqrt(share)

    def excess(critical: float) -> float:
        return float(special.ndtr((scores - critical * root) / step) @ masses) - alpha * (share - before)

    return float(optimize.brentq(excess, -REACH, 2 * REACH, xtol=1e-11))


@lru_cache(maxsize=2**15)
def _integrate_looks(shares: tuple[float, ...], alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores after looks that did not end the comparison, and how likely each is. A score is z times √information."""
    if not shares:
        return np.zeros(1), np.ones(1)
    scores, masses = _integrate_looks(shares[:-1], alpha)
    share, before = shares[-1], shares[-2] if len(shares) > 1 else 0.0
    start, stop = -REACH * math.sqrt(share), _critical_value(shares, alpha) * math.sqrt(share)
    # Gauss-Legendre's points and widths from far below zero to the critical value.
    points, widths = start + (stop - start) / 2 * (NODES + 1), (stop - start) / 2 * WIDTHS
    scale = math.sqrt(share - before)
    densities = np.exp(-(((points[:, None] - scores[None, :]) / scale) ** 2) / 2) / math.sqrt(2 * math.pi) / scale
    return points, widths * (densities @ masses)
