"""Speed against the baseline: how many times worse, over repeats of both."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import special

from vllm_qualify.evidence.measurement import Interval, around
from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.recipe.metrics import Direction

# With fewer repeats of either build Welch's degrees of freedom are too many: a noise that is small by chance counts too much.
LEAST_FOR_WELCH = 4


class Worsening(NamedTuple):
    """How many times worse the candidate is, less 1: 0.05 is 1.05 times the time, or a rate divided by 1.05."""

    value: float
    interval: Interval


def without_noise(candidate: Sequence[float], baseline: Sequence[float], direction: Direction) -> float:
    """How many times worse the candidate is, less 1. Raises ValueError without a repeat of each, or if a repeat is 0."""
    _check_positive(candidate, baseline)
    if not candidate or not baseline:
        raise ValueError("a comparison needs a repeat of each")
    one, other = (fmean(math.log(value) for value in values) for values in (candidate, baseline))
    return math.expm1(one - other if direction == "lower" else other - one)


def in_turns(candidate: Sequence[float], baseline: Sequence[float], direction: Direction, at: Sides) -> Worsening:
    """The worsening from repeats that were measured in turns: a change of the machine affects both repeats of a pair.

    The interval is Student's t over the pairs' log ratios.

    Raises:
        ValueError: there are fewer than two pairs, one build has more repeats than the other, or a repeat is 0.
    """
    _check_positive(candidate, baseline)
    logs = [_log_ratio(*pair, direction) for pair in zip(candidate, baseline, strict=True)]
    if len(logs) < 2:
        raise ValueError("a comparison needs two repeats of each")
    return _worsening(fmean(logs), stdev(logs) / math.sqrt(len(logs)), len(logs) - 1, at)


def from_history(candidate: Sequence[float], baseline: Sequence[float], direction: Direction, at: Sides) -> Worsening:
    """The worsening from repeats that were measured at another time. Each build has its own noise (Welch 1947, Biometrika 34).

    The degrees of freedom are Welch's if both builds have LEAST_FOR_WELCH repeats, else those of the build with fewer repeats
    (a bound by Mickey & Brown 1966, Ann. Math. Stat. 37). Errors were simulated with the levels of `evidence.repeats`, with
    looks from 2, 3, 4 or 5 to 10 repeats of the candidate, and with 3 to 10 repeats of the baseline. With a baseline as noisy
    as the candidate, errors were at most 1.03 times as frequent as allowed. With a baseline that has a third of the candidate's
    noise, and with 12 gates, they were up to 1.8 times as frequent.

    Raises:
        ValueError: a build has fewer than two repeats, or a repeat is 0.
    """
    _check_positive(candidate, baseline)
    groups = [[math.log(value) for value in values] for values in (candidate, baseline)]
    if min(map(len, groups)) < 2:
        raise ValueError("a comparison needs two repeats of each")
    squared = [stdev(logs) ** 2 / len(logs) for logs in groups]
    few = min(map(len, groups))
    freedom = float(few - 1 if few < LEAST_FOR_WELCH else sum(len(logs) - 1 for logs in groups))
    if few >= LEAST_FOR_WELCH and any(squared):
        freedom = sum(squared) ** 2 / sum(part**2 / (len(logs) - 1) for part, logs in zip(squared, groups, strict=True))
    one, other = (math.exp(fmean(logs)) for logs in groups)
    return _worsening(_log_ratio(one, other, direction), math.sqrt(sum(squared)), freedom, at)


def _check_positive(*repeats: Sequence[float]) -> None:
    if not all(value > 0 for values in repeats for value in values):
        raise ValueError("a repeat is 0, and nothing is so many times nothing")


def _log_ratio(candidate: float, baseline: float, direction: Direction) -> float:
    ratio = math.log(candidate / baseline)
    return ratio if direction == "lower" else -ratio


def _worsening(middle: float, error: float, freedom: float, at: Sides) -> Worsening:
    below, above = (-float(special.stdtrit(freedom, alpha)) * error for alpha in at)
    value = math.expm1(middle)
    return Worsening(value, around(value, math.expm1(middle - below), math.expm1(middle + above)))
