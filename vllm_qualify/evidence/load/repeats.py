"""Looking at repeats more than once: levels for Student's t that hold the error rate over all looks, even with few repeats.

The levels of `sequential` are made for z. To use them with t is the significance level approach of Jennison & Turnbull (2000,
"Group Sequential Methods", section 4.4). But with few repeats, successive values of t depend on each other in another way than
those of z. With looks after 2 to 10 repeats, chance would cross these levels 1.20 to 1.27 times as often as it should; with
looks after 5 to 10, 1.07 to 1.14 times. So the levels here are those of the t statistics themselves.

They follow from one fact. For n normal repeats around 0 with the sum S and the sum of squares Q, t depends only on S/√Q. The
next repeat divided by √Q is distributed as Student's t with n degrees of freedom divided by √n, whatever came before, because
a direction and its length are independent. So S/√Q is a Markov chain. It is integrated as `sequential` does it for z
(Armitage, McPherson & Rowe 1969).
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

# One repeat does not show the noise.
LEAST_REPEATS = 2
# Cells of the numerical integration. Twice as many would change no level by a hundredth of it.
CELLS = 150
# A plan for more than so many repeats spends this share of its chance until then.
USUAL, EARLY = 10, 0.8


class _State(NamedTuple):
    """The chain if no look has ended it yet: S/√Q at the middle of each cell, and how likely each cell is."""

    ratios: np.ndarray
    masses: np.ndarray
    level: float


def repeat_sides(direction: Direction, levels: Levels, looks: range, count: int, *, left_out: int = 0) -> Sides | None:
    """The sides of an interval by Student's t after `count` repeats, one of the planned `looks`; None if there is no such look.

    At each look a part of each side's chance is spent. Over all looks the chance is held for the mean of normal logarithms:
    for the repeats of one build, and for pairs in turns. It is also held if only some of the looks are taken. For two builds of
    which one is not measured further, see `relative.of_builds`.

    Repeats that were `left_out` as warm-up do not count: the plan is then made for so many fewer. One repeat shows no noise,
    and spends nothing.
    """
    used, planned = count - left_out, range(looks.start - left_out, looks.stop - left_out)
    if count not in looks or used < LEAST_REPEATS:
        return None
    return sides_of(direction, level(planned, used, levels.false_pass), level(planned, used, levels.false_fail))


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
    """The interval that holds after all looks up to `count` repeats; None if no look had an interval.

    `at_look` gives the interval of one look, from its number of repeats without those `left_out`, and from its sides. The
    intervals of all looks hold together, each side with its chance. So their highest lower bound and their lowest upper bound
    hold too: later looks do not undo what one look has decided (Jennison & Turnbull 1989, "Interim analyses: the repeated
    confidence interval approach", JRSS B 51). The value at the end is always inside.
    """
    sides = ((done, repeat_sides(direction, levels, looks, done, left_out=left_out)) for done in looks if done <= count)
    bounds = [interval for done, at in sides if at and (interval := at_look(done - left_out, at))]
    if count not in looks or not bounds:
        return None
    return around(value, max(each.lower for each in bounds), min(each.upper for each in bounds))


def spent_share(count: int, most: int) -> float:
    """The share of the chance of an error that is spent after `count` of at most so many repeats.

    A plan for more than USUAL repeats is for what is noisy, or has many gates. Most releases are decided before, with looks
    that are nearly those of a plan for USUAL repeats.
    """
    if most <= USUAL:
        return count / most
    return EARLY * count / USUAL if count <= USUAL else EARLY + (1 - EARLY) * (count - USUAL) / (most - USUAL)


def level(looks: range, count: int, alpha: float) -> float:
    """The one-sided level of Student's t after `count` repeats: `alpha` is the chance that t exceeds it at any of the looks.

    Raises ValueError if there is no such look, or `alpha` is not between 0 and 0.5.
    """
    first, most = max(looks.start, LEAST_REPEATS), looks.stop - 1
    if count not in range(first, most + 1) or not 0 < alpha < 0.5:
        raise ValueError("a look is after as many repeats as planned, two or more, and alpha lies between 0 and 0.5")
    # In ascending order, so that each state finds the one before it in the cache.
    return [_chain_state(first, most, repeats, alpha).level for repeats in range(first, count + 1)][-1]


@lru_cache(maxsize=4096)
def _chain_state(first: int, most: int, count: int, alpha: float) -> _State:
    if count == first:
        level = alpha * spent_share(first, most)
        edges = _cell_edges(count, level)
        above = special.stdtr(count - 1, -math.sqrt(count - 1) * np.tan(edges))
    else:
        before = _chain_state(first, most, count - 1, alpha)
        more = spent_share(count, most) - spent_share(count - 1, most)
        level = _level_spending(before, count, alpha * more)
        edges = _cell_edges(count, level)
        above = before.masses @ _chance_above(before.ratios, count - 1, math.sqrt(count) * np.sin(edges))
    middles = (edges[1:] + edges[:-1]) / 2
    return _State(math.sqrt(count) * np.sin(middles), -np.diff(above), level)


def _cell_edges(count: int, level: float) -> np.ndarray:
    """The edges of the cells below a level's critical value, as angles.

    S/√Q is √n times the sine of an angle, t is √(n - 1) times its tangent.
    """
    stop = math.atan(-float(special.stdtrit(count - 1, level)) / math.sqrt(count - 1))
    # The cells near the critical value are narrow, because the next looks are reached from there.
    return -math.pi / 2 + (stop + math.pi / 2) * (1 - np.linspace(1, 0, CELLS + 1) ** 2)


def _level_spending(before: _State, count: int, spent: float) -> float:
    """The level at which the chance above its critical value is `spent`."""

    def excess(angle: float) -> float:
        ratio = np.array([math.sqrt(count) * math.sin(angle)])
        return float((before.masses @ _chance_above(before.ratios, count - 1, ratio))[0]) - spent

    angle = float(optimize.brentq(excess, -math.pi / 2, math.pi / 2, xtol=1e-10))
    return float(special.stdtr(count - 1, -math.sqrt(count - 1) * math.tan(angle)))


def _chance_above(ratios: np.ndarray, count: int, bounds: np.ndarray) -> np.ndarray:
    """The chance that the next S/√Q is above a bound, given a ratio after `count` repeats: a row per ratio, a column per bound.

    If the next repeat over √Q is the tangent of an angle, the next S/√Q is √(1 + ratio²) times the sine of a sum: of that angle
    and another one, whose tangent is the ratio.
    """
    length, turned = np.sqrt(1 + ratios**2)[:, None], np.arctan(ratios)[:, None]
    reached = np.arcsin(np.clip(bounds[None, :] / length, -1, 1))
    angles = (np.clip(angle - turned, -math.pi / 2, math.pi / 2) for angle in (reached, math.pi - reached))
    begin, end = (special.stdtr(count, math.sqrt(count) * np.tan(angle)) for angle in angles)
    return np.asarray(end - begin)
