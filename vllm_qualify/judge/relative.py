"""Speed against the baseline: how many times worse, over repeats of both."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import special

from vllm_qualify.evidence.measurement import Interval, around
from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.recipe.metrics import Direction


class Worsening(NamedTuple):
    """How many times worse the candidate is, less 1: 0.05 is 1.05 times the time, or a rate divided by 1.05."""

    value: float
    interval: Interval


def in_turns(candidate: Sequence[float], baseline: Sequence[float], direction: Direction, at: Sides) -> Worsening:
    """From repeats that were measured in turns: what changed on the machine meanwhile touched both of a pair.

    Student's t over the pairs' log ratios.

    Raises:
        ValueError: fewer than two pairs, not as many repeats of the one as of the other, or one that is 0.
    """
    _check_positive(candidate, baseline)
    logs = [_log_ratio(*pair, direction) for pair in zip(candidate, baseline, strict=True)]
    if len(logs) < 2:
        raise ValueError("a comparison needs two repeats of each")
    return _worsening(fmean(logs), stdev(logs) / math.sqrt(len(logs)), len(logs) - 1, at)


def from_history(candidate: Sequence[float], baseline: Sequence[float], direction: Direction, at: Sides) -> Worsening:
    """From repeats that were measured at another time, each build's noise its own (Welch 1947, Biometrika 34).

    Raises:
        ValueError: fewer than two repeats of either, or one that is 0.
    """
    _check_positive(candidate, baseline)
    groups = [[math.log(value) for value in values] for values in (candidate, baseline)]
    if min(map(len, groups)) < 2:
        raise ValueError("a comparison needs two repeats of each")
    squared = [stdev(logs) ** 2 / len(logs) for logs in groups]
    freedom = float(sum(len(logs) - 1 for logs in groups))
    if sum(squared):
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
