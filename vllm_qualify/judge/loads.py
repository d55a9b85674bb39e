"""Loads of a cell against those of its baseline: looks after repeats of one start, or after each of several starts."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from vllm_qualify.evidence.load.repeats import interval_over_looks
from vllm_qualify.evidence.measurement import Interval, geometric_mean
from vllm_qualify.evidence.sequential import Levels, Sides, rising, sides_after
from vllm_qualify.evidence.starts import LEAST
from vllm_qualify.judge import information, relative, steadiness
from vllm_qualify.judge.between import OF_LOADS, RESTLESS, spread
from vllm_qualify.judge.relative import NOTHING, Build, Difference, EarlierRuns
from vllm_qualify.recipe.metrics import Direction

# The load of a start goes on while the noise of its repeats asks for more, if the whole of them is spread over so many starts.
OVER_STARTS = 10
# So many repeats of a start, and so many starts, show whether it warms up. Who does not by then is not spared for a trend.
LEAST_FOR_TREND, STARTS_FOR_TREND = 5, 8
# When the information is complete, a release without a loss has no verdict with this chance. The promise is strict: a load that
# is slower by twice the margin fails in 95 % of the cases.
UNDECIDED_WHEN_COMPLETE = 0.005


class LoadsLook(NamedTuple):
    """The interval of a comparison after the last start so far, None without noise.

    After a look that `is_last` another start would not help. A gate that `is_leaning` would fail, did its repeats not get
    better with time: they may be those of a server that warms up.
    """

    interval: Interval | None
    is_last: bool
    is_leaning: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """How loads are compared: the largest `margin` of the time, and how often the cell's server is started at most.

    `looks` are the numbers of repeats after which a load of one start is judged. With `in_turns` each repeat has one of the
    baseline beside it, of a start of its own.
    """

    direction: Direction
    margin: float
    levels: Levels
    looks: range
    most_starts: int
    in_turns: bool
    known: EarlierRuns = NOTHING


@dataclass(frozen=True)
class Repeats:
    """The repeats of one build in their order, and the start of each."""

    values: list[float]
    started: list[int]

    @property
    def starts(self) -> list[int]:
        return list(dict.fromkeys(self.started))

    def first(self, used: int) -> "Repeats":
        return Repeats(self.values[:used], self.started[:used])


def look(plan: LoadPlan, ours: Repeats, theirs: Repeats, left_out: int = 0) -> LoadsLook:
    """The look after all repeats of the cell. `left_out` of its first ones were warm-up. Raises ValueError as `relative`.

    A trend of the repeats counts, too. With one start it may forbid a `pass`; further starts are too short to show a leak, and
    there it may forbid a `fail`.
    """
    if plan.most_starts > 1:
        return _after_starts(plan, ours, theirs)
    count, over_starts = len(ours.values) + left_out, not plan.in_turns and len(theirs.starts) > 1
    worsened = _log_worsenings(plan, ours, theirs)

    def at_look(used: int, at: Sides) -> Interval:
        interval = _measure_difference(plan, ours.first(used), theirs, over_starts=over_starts).worsening(at).interval
        return steadiness.with_trend(interval, worsened, [used], plan.looks[-1])

    value = relative.without_noise(ours.values, theirs.values, plan.direction)

    def at_levels(levels: Levels) -> Interval | None:
        return interval_over_looks(value, at_look, "lower", levels, plan.looks, count, left_out=left_out)

    return LoadsLook(information.interval_of_loss(at_levels, plan.levels), is_last=False)


def _after_starts(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> LoadsLook:
    """Each start spends its share of the information that the margin needs, as a look at answers does (`judge.paired`)."""
    shares: list[float] = []
    if len(ours.values) < 2 or ours.started.count(ours.started[0]) < 2:
        return LoadsLook(None, is_last=False)
    margin, levels, made = math.log1p(plan.margin), plan.levels, len(ours.starts)
    for number, start in enumerate(ours.starts, start=1):
        so_far = ours.first(len(ours.started) - ours.started[::-1].index(start))
        difference = _measure_difference(plan, so_far, theirs, over_starts=True)
        share = information.share_of_information(difference.off_by, margin, levels, UNDECIDED_WHEN_COMPLETE)
        shares.append(1.0 if number == plan.most_starts else share)
    least_error = _least_error(plan, difference, made, len(theirs.starts))
    about = (difference.middle, difference.off_by, margin, levels, least_error)
    is_last = shares[-1] >= 1 or information.is_hardly_decided(*about)
    spent = rising(shares)
    steady = information.interval_of_loss(lambda at: difference.worsening(sides_after("lower", at, spent)).interval, levels)
    if made >= STARTS_FOR_TREND:
        return LoadsLook(steady, is_last)
    worsened = relative.by_start(_log_worsenings(plan, ours, theirs), ours.started)
    interval = steadiness.with_trend_of_starts(steady, worsened, min(LEAST, plan.most_starts))
    is_leaning = interval.lower <= plan.margin < steady.lower
    return LoadsLook(interval, is_last and not (is_leaning and made < plan.most_starts), is_leaning)


def _log_worsenings(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> list[float]:
    """The logarithm of how many times worse each repeat is: than the one beside it, or than the baseline's mean."""
    count = len(ours.values)
    usual = theirs.values[:count] if plan.in_turns else [geometric_mean(theirs.values)] * count
    return relative.log_ratios(ours.values, usual, plan.direction)


def _least_error(plan: LoadPlan, difference: Difference, ours: int, theirs: int) -> float:
    """About the standard error after the cell's last start, if those to come are like `ours` so far; `theirs` are made.

    What differs between days stays, however often a server is started.
    """
    squared, of_baseline = difference.off_by(information.OF_A_DEVIATION) ** 2, 0.0 if plan.in_turns else 1 / theirs
    of_days = 0.0 if plan.in_turns or plan.known.days is None else min(squared, 2 * plan.known.days.part)
    left = (1 / max(plan.most_starts, ours) + of_baseline) / (1 / ours + of_baseline)
    return math.sqrt(of_days + (squared - of_days) * left)


def _measure_difference(plan: LoadPlan, ours: Repeats, theirs: Repeats, *, over_starts: bool) -> Difference:
    over_starts = over_starts or plan.known.starts is not None
    if plan.in_turns:
        beside = theirs.first(len(ours.values))
        started = ours.started if over_starts else None
        return relative.of_pairs(ours.values, beside.values, plan.direction, started, plan.known)
    starts = (ours.started, theirs.started) if over_starts else None
    return relative.of_builds(ours.values, theirs.values, plan.direction, plan.known, starts)


def restless(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> float | None:
    """By how much starts differ, in turns pairs of them, as a share of the time; None if it is not far more than is assumed.

    None with one start of each, too.
    """
    assumed, builds = relative.OF_PAIRS if plan.in_turns else OF_LOADS, _builds_of(plan, ours, theirs)
    if all(len(build.groups) == 1 for build in builds):
        return None
    means = [build.start_means(build.noise if build.freedom else 0.0) for build in builds]
    deviation = spread(assumed, means, plan.known.starts).deviation
    return deviation if deviation > RESTLESS * assumed.scale else None


def _builds_of(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> list[Build]:
    """Both builds, the cell's first; in turns, that of the pairs' ratios instead."""
    if plan.in_turns:
        return [Build(relative.by_start(relative.log_ratios(ours.values, theirs.values, plan.direction), ours.started))]
    return [relative.build_of(build.values, build.started) for build in (ours, theirs)]


def is_noisy(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> bool:
    """Whether the last start should have another repeat, by the noise of all starts so far.

    The margin needs so many repeats of this noise; a start has its part of them. It depends on the noise alone, and not on the
    difference, so that it changes no error rate. But a start is long enough for a trend where only a trend forbids a `fail`.
    """
    of_start = ours.started.count(ours.started[-1])
    if of_start < LEAST_FOR_TREND and plan.most_starts > 1 and _after_starts(plan, ours, theirs).is_leaning:
        return True
    return of_start < math.ceil(repeats_needed(plan, ours, theirs) / OVER_STARTS)


def repeats_needed(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> float:
    """How many repeats of the cell the margin needs, of all starts together, if starts do not differ."""
    build = _builds_of(plan, ours, theirs)[0]
    noise = (build.noise if build.freedom else 0.0) * (1 if plan.in_turns else 2)
    return noise * (information.errors_in_margin(plan.levels) / math.log1p(plan.margin)) ** 2
