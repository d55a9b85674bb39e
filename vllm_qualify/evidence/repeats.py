"""Looking at repeats more than once: levels for Student's t that hold the error rate over all looks, with few repeats too.

The levels of `sequential` are made for z. Used with t they are the significance level approach of Jennison & Turnbull (2000,
"Group Sequential Methods", section 4.4). But a t of few repeats depends on the one before it in another way: with looks after 2
to 10 repeats they would be crossed by chance 1.20 to 1.27 times as often as they should, with 5 to 10 1.07 to 1.14 times. So
here the levels are those of the t statistics themselves.

They follow from one fact. Of n normal repeats around 0 with the sum S and the sum of squares Q, t depends on S/√Q alone. The
next repeat over √Q is Student's t with n degrees of freedom over √n, whatever came before: a direction and its length are
independent. So S/√Q is a Markov chain, which is integrated as `sequential` does it for z (Armitage, McPherson & Rowe 1969).
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import special

from vllm_qualify.evidence.measurement import Interval, around
from vllm_qualify.evidence.sequential import Levels, Sides, sides_of
from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.metrics import Direction

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = Lazy("scipy.optimize")

# Of one repeat nobody knows the noise.
LEAST_REPEATS = 2
# Cells of the numerical integration. Twice as many change no level by a hundredth of it.
CELLS = 150
Array = np.ndarray


class _State(NamedTuple):
    """The chain where no look has ended it: S/√Q at the middle of each cell, and how likely it is there."""

    ratios: Array
    masses: Array
    level: float


def repeat_sides(direction: Direction, levels: Levels, looks: range, count: int, *, left_out: int = 0) -> Sides | None:
    """The sides of an interval by Student's t after `count` repeats, one of the planned `looks`; None where there is none.

    Of the chance of each side n/N is spent after n of the N repeats, and over all looks it is held for the mean of normal
    logarithms: of one build's repeats, and of pairs in turns. It is held too if only some of the looks are taken, as older runs
    took those after the first repeats and after the last ones. How it is for two builds of which one is measured no further,
    `relative.from_history` says.

    Repeats that were `left_out` as warm-up are of no look: the plan is then one for so many fewer. One repeat shows no noise,
    and spends nothing.
    """
    used, planned = count - left_out, range(looks.start - left_out, looks.stop - left_out)
    if count not in looks or used < LEAST_REPEATS:
        return None
    passing, failing = (level(planned, used, alpha) for alpha in (levels.false_pass, levels.false_fail))
    return sides_of(direction, passing, failing)


def interval_over_looks(
    value: float,
    at_look: Callable[[int, Sides], Interval | None],
    direction: Direction,
    levels: Levels,
    looks: range,
    count: int,
    *,
    left_out: int = 0,
) -> Interval | None:
    """The interval that holds after all looks up to `count` repeats; None where there was none.

    `at_look` gives that of one look, from its number of repeats without those `left_out`, and its sides. All of them hold
    together, each side with its chance, and so do their highest lower and their lowest upper bound: what one look has decided,
    the next ones do not undo (Jennison & Turnbull 1989, "Interim analyses: the repeated confidence interval approach", JRSS B
    51). The value at the end is always inside.
    """
    sides = ((done, repeat_sides(direction, levels, looks, done, left_out=left_out)) for done in looks if done <= count)
    found = [interval for done, at in sides if at and (interval := at_look(done - left_out, at))]
    if count not in looks or not found:
        return None
    return around(value, max(each.lower for each in found), min(each.upper for each in found))


def level(looks: range, count: int, alpha: float) -> float:
    """The one-sided level of Student's t after `count` repeats, so that `alpha` is the chance to be above at any of the looks.

    Raises:
        ValueError: there is no such look, or `alpha` is not between 0 and 0.5.
    """
    first, most = max(looks.start, LEAST_REPEATS), looks.stop - 1
    if count not in range(first, most + 1) or not 0 < alpha < 0.5:
        raise ValueError("a look is after as many repeats as planned, two or more, and alpha lies between 0 and 0.5")
    # One after another, so that each finds the one before it at hand.
    return [_state(first, most, repeats, alpha).level for repeats in range(first, count + 1)][-1]


@lru_cache(maxsize=4096)
def _state(first: int, most: int, count: int, alpha: float) -> _State:
    if count == first:
        found = alpha * first / most
        edges = _edges(count, found)
        above = special.stdtr(count - 1, -math.sqrt(count - 1) * np.tan(edges))
    else:
        before = _state(first, most, count - 1, alpha)
        found = _spending(before, count, alpha / most)
        edges = _edges(count, found)
        above = before.masses @ _above(before.ratios, count - 1, math.sqrt(count) * np.sin(edges))
    middles = (edges[1:] + edges[:-1]) / 2
    return _State(math.sqrt(count) * np.sin(middles), -np.diff(above), found)


def _edges(count: int, level: float) -> Array:
    """Of the cells below a level's critical value: angles. S/√Q is √n times their sine, t is √(n - 1) times their tangent."""
    stop = math.atan(-float(special.stdtrit(count - 1, level)) / math.sqrt(count - 1))
    # Narrow ones at the critical value: from there the next looks are reached.
    return -math.pi / 2 + (stop + math.pi / 2) * (1 - np.linspace(1, 0, CELLS + 1) ** 2)


def _spending(before: _State, count: int, spent: float) -> float:
    """The level above whose critical value just `spent` of what is left lies."""

    def excess(angle: float) -> float:
        ratio = np.array([math.sqrt(count) * math.sin(angle)])
        return float((before.masses @ _above(before.ratios, count - 1, ratio))[0]) - spent

    angle = float(optimize.brentq(excess, -math.pi / 2, math.pi / 2, xtol=1e-10))
    return float(special.stdtr(count - 1, -math.sqrt(count - 1) * math.tan(angle)))


def _above(ratios: Array, count: int, bounds: Array) -> Array:
    """The chance that the next S/√Q is above each of the bounds, a column each, from each of the ratios after `count` repeats.

    With the next repeat over √Q as the tangent of an angle, it is √(1 + ratio²) times the sine of that angle and another one.
    """
    length, turned = np.sqrt(1 + ratios**2)[:, None], np.arctan(ratios)[:, None]
    reached = np.arcsin(np.clip(bounds[None, :] / length, -1, 1))
    begin, end = (np.clip(angle - turned, -math.pi / 2, math.pi / 2) for angle in (reached, math.pi - reached))
    return np.asarray(_below(end, count) - _below(begin, count))


def _below(angles: Array, count: int) -> Array:
    return np.asarray(special.stdtr(count, math.sqrt(count) * np.tan(angles)))
