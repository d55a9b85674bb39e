"""Speed against the baseline: how many times worse, over repeats of both."""

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
from scipy import special

from vllm_qualify.evidence.measurement import Interval, around
from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.judge.between import OF_LOADS, Assumed, StartMean, possible_variances, reach, weighed_spread
from vllm_qualify.judge.information import Reach
from vllm_qualify.plan.cell import Between
from vllm_qualify.recipe.metrics import Direction

# With fewer repeats of either build Welch's degrees of freedom are too many: a noise that is small by chance counts too much.
LEAST_FOR_WELCH = 4
# Two starts may differ so much that nothing is known. No gate allows a factor of a million, and larger ones say no more.
MOST_OFF = math.log(1e6)
# Points of the distribution of each build's noise, by the number of builds.
POINTS_OF_EACH = {1: 16, 2: 8}
# Both builds of a pair are started, and each start differs.
OF_PAIRS = OF_LOADS._replace(scale=math.sqrt(2) * OF_LOADS.scale)
# History counts for at most so many degrees of freedom between days, so that it is not exact however long it is.
MOST_OF_DAYS = 10.0


class EarlierRuns(NamedTuple):
    """What earlier runs showed, as variances of logarithms: of starts, or in turns of pairs of them, and of days.

    None is not known.
    """

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


class Difference(NamedTuple):
    """The difference of two builds' mean logarithms, positive if the candidate is worse, and how far it can be off."""

    middle: float
    off_by: Reach

    def worsening(self, at: Sides) -> Worsening:
        value = math.expm1(self.middle)
        below, above = (min(self.off_by(alpha), MOST_OFF) for alpha in at)
        return Worsening(value, around(value, math.expm1(self.middle - below), math.expm1(self.middle + above)))


def in_turns(candidate: Sequence[float], baseline: Sequence[float], direction: Direction, at: Sides) -> Worsening:
    """The worsening from pairs of one start of each server, as `of_pairs`."""
    return of_pairs(candidate, baseline, direction).worsening(at)


def of_pairs(
    candidate: Sequence[float],
    baseline: Sequence[float],
    direction: Direction,
    starts: Sequence[int] | None = None,
    known: EarlierRuns = NOTHING,
) -> Difference:
    """The difference of repeats that were measured in turns: a change of the machine affects both repeats of a pair.

    `starts` has the start of each pair's servers, None for pairs of one start. Then the error is Student's t over the pairs'
    log ratios, and does not have what differs between starts. Else it has that, by `between.spread`.

    Raises ValueError if there are fewer than two pairs, one build has more repeats than the other, or a repeat is 0.
    """
    logs = log_ratios(candidate, baseline, direction)
    if len(logs) < 2:
        raise ValueError("a comparison needs two repeats of each")
    build = Build(by_start(logs, starts or [1] * len(logs)))
    if starts is None:
        return Difference(fmean(logs), _off_by_repeats(build.squared, build.freedom))
    return Difference(fmean(logs), _off_by_starts([build], OF_PAIRS, known.starts))


def of_builds(
    candidate: Sequence[float],
    baseline: Sequence[float],
    direction: Direction,
    known: EarlierRuns = NOTHING,
    starts: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Difference:
    """The difference of repeats of different times. Each build has its own noise (Welch 1947, Biometrika 34).

    The degrees of freedom are Welch's if both builds have LEAST_FOR_WELCH repeats, else those of the build with fewer repeats
    (a bound by Mickey & Brown 1966, Ann. Math. Stat. 37). Errors were simulated with the levels of `evidence.repeats`, with
    looks from 2, 3, 4 or 5 to 10 repeats of the candidate, and with 3 to 10 repeats of the baseline. With a baseline as noisy
    as the candidate, errors were at most 1.03 times as frequent as allowed. With a baseline that has a third of the candidate's
    noise, and with 12 gates, they were up to 1.8 times as frequent.

    Each build was measured on one day. If it is `known` how much days differ, the error has that, twice. Else it has what
    differs between `starts`, the server's start of each repeat of both builds, unless these are None.

    Raises ValueError if a build has fewer than two repeats, or a repeat is 0.
    """
    _check_positive(candidate, baseline)
    logs = [[math.log(value) for value in values] for values in (candidate, baseline)]
    if min(map(len, logs)) < 2:
        raise ValueError("a comparison needs two repeats of each")
    of_starts = starts or tuple([1] * len(values) for values in logs)
    builds = [Build(by_start(*pair)) for pair in zip(logs, of_starts, strict=True)]
    one, other = map(fmean, logs)
    middle = one - other if direction == "lower" else other - one
    if starts and known.days is None:
        return Difference(middle, _off_by_starts(builds, OF_LOADS, known.starts))
    squared, freedom = sum(build.squared for build in builds), _degrees_of_freedom(builds)
    if known.days is None:
        return Difference(middle, _off_by_repeats(squared, freedom))
    days = known.days.model_copy(update={"freedom": min(known.days.freedom, MOST_OF_DAYS)})
    return Difference(middle, _off_by_days(squared, freedom, days))


def _degrees_of_freedom(builds: Sequence["Build"]) -> float:
    squared, fewest = [build.squared for build in builds], min(build.freedom for build in builds)
    if fewest + 1 < LEAST_FOR_WELCH:
        return float(fewest)
    if not any(squared):
        return float(sum(build.freedom for build in builds))
    return sum(squared) ** 2 / sum(build.squared**2 / build.freedom for build in builds)


class Build(NamedTuple):
    """One build's logarithms, or those of its ratios to another one, by the server's start."""

    groups: list[list[float]]

    @property
    def number(self) -> int:
        return sum(map(len, self.groups))

    @property
    def freedom(self) -> int:
        return self.number - len(self.groups)

    @property
    def noise(self) -> float:
        """The variance of one repeat around the mean of its start. Raises ValueError if no start has two."""
        if not self.freedom:
            raise ValueError("a comparison needs two repeats of a start of each")
        return sum((len(group) - 1) * variance(group) for group in self.groups if len(group) > 1) / self.freedom

    @property
    def squared(self) -> float:
        """The squared error of the mean that comes from within the starts."""
        return self.noise / self.number

    @property
    def weight(self) -> float:
        return sum(len(group) ** 2 for group in self.groups) / self.number**2

    def start_means(self, noise: float) -> list[StartMean]:
        """The means of its starts, if one repeat has this variance."""
        return [StartMean(fmean(group), noise / len(group)) for group in self.groups]


def build_of(values: Sequence[float], starts: Sequence[int]) -> Build:
    """A build of repeats, by their logarithms. Raises ValueError if a repeat is 0."""
    _check_positive(values)
    return Build(by_start([math.log(value) for value in values], starts))


def by_start(values: Sequence[float], starts: Sequence[int]) -> list[list[float]]:
    return [[value for value, of in zip(values, starts, strict=True) if of == start] for start in dict.fromkeys(starts)]


def _off_by_repeats(squared: float, freedom: float) -> Reach:
    """How far a difference can be off by the noise of repeats alone, from its squared error: Student's t."""
    return lambda alpha: -float(special.stdtrit(freedom, alpha)) * math.sqrt(squared)


def _off_by_starts(builds: Sequence[Build], assumed: Assumed, history: Between | None) -> Reach:
    """How far the difference of the builds' means can be off, with what differs between starts.

    Each noise within the starts that the repeats allow counts with its chance, and with each of them each deviation of starts:
    a larger noise explains more of what differs between means. Of two builds, each has a noise of its own.
    """
    weight = sum(build.weight for build in builds)
    variances, chances, logs = [], [], []
    for noises, chance in _possible_noises(builds):
        error = sum(noise / build.number for noise, build in zip(noises, builds, strict=True))
        means = [build.start_means(noise) for noise, build in zip(noises, builds, strict=True)]
        starts, log_likelihood = weighed_spread(assumed, means, history)
        variances.append(error + weight * starts.variances)
        chances.append(chance * starts.chances)
        logs.append(log_likelihood)
    likelihoods = np.exp(np.array(logs) - max(logs))
    together = np.concatenate([each * likelihood for each, likelihood in zip(chances, likelihoods, strict=True)])
    return lambda alpha: reach(alpha, np.concatenate(variances), together / together.sum())


def _possible_noises(builds: Sequence[Build]) -> Iterator[tuple[tuple[float, ...], float]]:
    """The variances of one repeat of each build that are possible, with their chance."""
    # With one repeat of each start the noise counts as a part of what differs between starts.
    none, points = (np.zeros(1), np.ones(1)), POINTS_OF_EACH[len(builds)]
    each = [possible_variances(build.noise, build.freedom, points) if build.freedom else none for build in builds]
    for together in itertools.product(*(zip(*of_build, strict=True) for of_build in each)):
        noises, chances = zip(*together, strict=True)
        yield tuple(map(float, noises)), math.prod(map(float, chances))


def _off_by_days(squared: float, freedom: float, days: Between) -> Reach:
    """How far a difference can be off, from its squared error within a day, and twice what is between days."""
    errors, their_chances = possible_variances(squared, freedom)
    variances_between, chances = possible_variances(days.variance, days.freedom)
    variances = errors[None, :] + 2.0 * np.maximum(0.0, variances_between - days.noise)[:, None]
    together = (chances[:, None] * their_chances[None, :]).ravel()
    return lambda alpha: reach(alpha, variances.ravel(), together)


def _check_positive(*repeats: Sequence[float]) -> None:
    if not all(value > 0 for values in repeats for value in values):
        raise ValueError("a repeat is 0, and nothing is so many times nothing")


def log_ratios(candidate: Sequence[float], baseline: Sequence[float], direction: Direction) -> list[float]:
    """The logarithm of how many times worse the candidate is, for each pair. Raises ValueError if a repeat is 0."""
    _check_positive(candidate, baseline)
    sign = 1 if direction == "lower" else -1
    return [sign * math.log(one / other) for one, other in zip(candidate, baseline, strict=True)]
