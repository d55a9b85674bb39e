"""Speed against the baseline: how many times worse, over repeats of both."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
from scipy import special

from vllm_qualify.evidence.measurement import Interval, around
from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.judge.between import MOST_FROM_HISTORY, Between, likely, reach, reach_of, with_history
from vllm_qualify.recipe.metrics import Direction

# With fewer repeats of either build Welch's degrees of freedom are too many: a noise that is small by chance counts too much.
LEAST_FOR_WELCH = 4
# Two starts may differ so much that nothing is known. No gate allows a factor of a million, and larger ones say no more.
MOST_OFF = math.log(1e6)
# Points of each variance's distribution where two are mixed.
POINTS_OF_EACH = 24
# The chance with which a cell's noise is taken for larger than that of its history though it is the same.
SURELY = 0.05
# How far a mean is off at most, by the chance that it is further off.
OffBy = Callable[[float], float]


class EarlierRuns(NamedTuple):
    """What earlier runs on a GPU type showed of one build's times, as variances of logarithms: of one repeat within a start, of
    starts, and of days. None is not known.
    """

    noise: Between | None = None
    starts: Between | None = None
    days: Between | None = None


NOTHING = EarlierRuns()


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


def in_turns(
    candidate: Sequence[float],
    baseline: Sequence[float],
    direction: Direction,
    at: Sides,
    starts: Sequence[int] | None = None,
    known: EarlierRuns = NOTHING,
) -> Worsening:
    """The worsening from repeats that were measured in turns: a change of the machine affects both repeats of a pair.

    `starts` has the start of each pair's servers. The error has the noise of pairs within a start, and what differs between
    starts (`judge.between`). If all pairs are of one start, and nothing is `known` of others, the interval is Student's t over
    the pairs' log ratios, and does not have what differs between starts.

    Raises:
        ValueError: there are fewer than two pairs, one build has more repeats than the other, or a repeat is 0.
    """
    _check_positive(candidate, baseline)
    logs = [_log_ratio(*pair, direction) for pair in zip(candidate, baseline, strict=True)]
    if len(logs) < 2:
        raise ValueError("a comparison needs two repeats of each")
    of_starts = [1] * len(logs) if starts is None else starts
    groups = _by_start(logs, of_starts)
    off_by = _off_by_starts(groups, *(_of_both(part) for part in (known.noise, known.starts)))
    return _worsening(fmean(logs), off_by, at)


def _of_both(part: Between | None) -> Between | None:
    """The variance of a difference of two builds, from that of one."""
    return part and part.model_copy(update={"variance": 2 * part.variance, "noise": 2 * part.noise})


def _off_by_starts(groups: Sequence[Sequence[float]], noise: Between | None, starts: Between | None) -> OffBy:
    """How far the mean of all values can be off, from the values of each start."""
    number, sizes = sum(map(len, groups)), [len(group) for group in groups]
    within = _noise(groups, noise)
    own = _between(groups, within) if len(groups) > 1 else []
    between, weight = with_history(own, starts), sum(size**2 for size in sizes) / number**2
    if within is None:
        return lambda alpha: reach_of(alpha, 0.0, weight, between)
    if between is None:
        return lambda alpha: -float(special.stdtrit(within.freedom, alpha)) * math.sqrt(within.variance / number)
    noises, their_chances = likely(within.variance, within.freedom, POINTS_OF_EACH)
    means, chances = likely(between.variance, between.freedom, POINTS_OF_EACH)
    # If the noise is larger than estimated, it also explains more of what differs between starts.
    explained = between.noise * (noises / within.variance if within.variance else np.ones_like(noises))
    variances = noises[None, :] / number + weight * np.maximum(0.0, means[:, None] - explained[None, :])
    together = (chances[:, None] * their_chances[None, :]).ravel()
    return lambda alpha: reach(alpha, variances.ravel(), together)


def _noise(groups: Sequence[Sequence[float]], history: Between | None) -> Between | None:
    """The variance of one value around its start's mean; None if neither the starts nor the history show it.

    If it is surely larger than that of the history, it counts alone.
    """
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return history
    own = sum((len(group) - 1) * variance(group) for group in groups if len(group) > 1) / freedom
    own_noise = Between(variance=own, noise=0.0, freedom=float(freedom))
    if history and own > history.variance * float(special.fdtri(freedom, history.freedom, 1 - SURELY)):
        return own_noise
    return with_history([own_noise], history)


def _between(groups: Sequence[Sequence[float]], within: Between | None) -> list[Between]:
    means, inverse = [fmean(group) for group in groups], fmean(1 / len(group) for group in groups)
    explained = within.variance * inverse if within else 0.0
    return [Between(variance=variance(means), noise=explained, freedom=len(groups) - 1.0)]


def from_history(
    candidate: Sequence[float],
    baseline: Sequence[float],
    direction: Direction,
    at: Sides,
    known: EarlierRuns = NOTHING,
    starts: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Worsening:
    """The worsening from repeats that were measured at another time. Each build has its own noise (Welch 1947, Biometrika 34).

    The degrees of freedom are Welch's if both builds have LEAST_FOR_WELCH repeats, else those of the build with fewer repeats
    (a bound by Mickey & Brown 1966, Ann. Math. Stat. 37). Errors were simulated with the levels of `evidence.repeats`, with
    looks from 2, 3, 4 or 5 to 10 repeats of the candidate, and with 3 to 10 repeats of the baseline. With a baseline as noisy
    as the candidate, errors were at most 1.03 times as frequent as allowed. With a baseline that has a third of the candidate's
    noise, and with 12 gates, they were up to 1.8 times as frequent.

    Each build was measured on one day. If it is `known` how much days differ, the error has that, twice. Else it has what
    differs between `starts`, the server's start of each repeat of both builds, if a build has several or history shows it.

    Raises:
        ValueError: a build has fewer than two repeats, or a repeat is 0.
    """
    _check_positive(candidate, baseline)
    logs = [[math.log(value) for value in values] for values in (candidate, baseline)]
    if min(map(len, logs)) < 2:
        raise ValueError("a comparison needs two repeats of each")
    of_starts = starts or tuple([1] * len(values) for values in logs)
    builds = [_Build(_by_start(*pair)) for pair in zip(logs, of_starts, strict=True)]
    squared = [build.squared for build in builds]
    few = 1 + min(build.freedom for build in builds)
    freedom = float(few - 1 if few < LEAST_FOR_WELCH else sum(build.freedom for build in builds))
    if few >= LEAST_FOR_WELCH and any(squared):
        freedom = sum(squared) ** 2 / sum(build.squared**2 / build.freedom for build in builds)
    one, other = map(fmean, logs)
    middle = one - other if direction == "lower" else other - one
    if known.days is not None:
        days = known.days.model_copy(update={"freedom": min(known.days.freedom, MOST_FROM_HISTORY)})
        return _worsening(middle, _off_by(sum(squared), freedom, days, 2.0), at)
    between = with_history([part for build in builds for part in build.between], known.starts)
    return _worsening(middle, _off_by(sum(squared), freedom, between, sum(build.weight for build in builds)), at)


class _Build(NamedTuple):
    """One build's logarithms, by the server's start."""

    groups: list[list[float]]

    @property
    def number(self) -> int:
        return sum(map(len, self.groups))

    @property
    def freedom(self) -> int:
        return self.number - len(self.groups)

    @property
    def squared(self) -> float:
        """The squared error of the mean that comes from within the starts."""
        if not self.freedom:
            raise ValueError("a comparison needs two repeats of a start of each")
        within = sum((len(group) - 1) * variance(group) for group in self.groups if len(group) > 1)
        return within / self.freedom / self.number

    @property
    def weight(self) -> float:
        return sum(len(group) ** 2 for group in self.groups) / self.number**2

    @property
    def between(self) -> list[Between]:
        """What its own starts show; nothing if it was started once."""
        return _between(self.groups, _noise(self.groups, None)) if len(self.groups) > 1 else []


def _by_start(values: Sequence[float], starts: Sequence[int]) -> list[list[float]]:
    return [[value for value, of in zip(values, starts, strict=True) if of == start] for start in dict.fromkeys(starts)]


def _off_by(squared: float, freedom: float, between: Between | None, weight: float) -> OffBy:
    """How far a difference can be off, from its squared error within starts, and `weight` times what is between them."""
    if between is None:
        return lambda alpha: -float(special.stdtrit(freedom, alpha)) * math.sqrt(squared)
    errors, their_chances = likely(squared, freedom, POINTS_OF_EACH)
    variances_between, chances = likely(between.variance, between.freedom, POINTS_OF_EACH)
    variances = errors[None, :] + weight * np.maximum(0.0, variances_between - between.noise)[:, None]
    together = (chances[:, None] * their_chances[None, :]).ravel()
    return lambda alpha: reach(alpha, variances.ravel(), together)


def _check_positive(*repeats: Sequence[float]) -> None:
    if not all(value > 0 for values in repeats for value in values):
        raise ValueError("a repeat is 0, and nothing is so many times nothing")


def _log_ratio(candidate: float, baseline: float, direction: Direction) -> float:
    ratio = math.log(candidate / baseline)
    return ratio if direction == "lower" else -ratio


def log_ratios(candidate: Sequence[float], baseline: Sequence[float], direction: Direction) -> list[float]:
    """The logarithm of how many times worse the candidate is, for each pair. Raises ValueError if a repeat is 0."""
    _check_positive(candidate, baseline)
    return [_log_ratio(*pair, direction) for pair in zip(candidate, baseline, strict=True)]


def _worsening(middle: float, off_by: OffBy, at: Sides) -> Worsening:
    value = math.expm1(middle)
    below, above = (min(off_by(alpha), MOST_OFF) for alpha in at)
    return Worsening(value, around(value, math.expm1(middle - below), math.expm1(middle + above)))
