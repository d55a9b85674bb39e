"""Loads of a cell against those of its baseline: looks after repeats of one start, or after each of several starts."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from vllm_qualify.evidence.load.repeats import interval_over_looks
from vllm_qualify.evidence.measurement import Interval, geometric_mean
from vllm_qualify.evidence.sequential import Levels, Sides, rising, sides_after
from vllm_qualify.judge import paired, relative, steadiness
from vllm_qualify.judge.between import OF_LOADS
from vllm_qualify.judge.relative import NOTHING, Difference, EarlierRuns
from vllm_qualify.recipe.metrics import Direction

# The load of a start goes on while the noise of its repeats asks for more, if the whole of them is spread over so many starts.
OVER_STARTS = 4


class Look(NamedTuple):
    """The interval of a comparison after the last start so far, None without noise.

    After a look that `is_last` another start would not help.
    """

    interval: Interval | None
    is_last: bool


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

    def until(self, start: int) -> "Repeats":
        """Those of the starts up to this one."""
        return self.first(max(place for place, each in enumerate(self.started, start=1) if each == start))

    def first(self, used: int) -> "Repeats":
        return Repeats(self.values[:used], self.started[:used])


def look(plan: LoadPlan, ours: Repeats, theirs: Repeats, left_out: int = 0) -> Look:
    """The look after all repeats of the cell. `left_out` of its first ones were warm-up. Raises ValueError as `relative`.

    With one start a trend of its repeats counts, too. Further starts are too short for one: each begins anew.
    """
    if plan.most_starts > 1:
        return _after_starts(plan, ours, theirs)
    count, over_starts = len(ours.values) + left_out, not plan.in_turns and len(theirs.starts) > 1
    usual = theirs.values if plan.in_turns else [geometric_mean(theirs.values)] * count
    worsened = relative.log_ratios(ours.values, usual[: len(ours.values)], plan.direction)

    def at_look(used: int, at: Sides) -> Interval:
        interval = _difference(plan, ours.first(used), theirs, over_starts=over_starts).worsening(at).interval
        return steadiness.with_trend(interval, worsened, [used], plan.looks[-1])

    value = relative.without_noise(ours.values, theirs.values, plan.direction)
    return Look(interval_over_looks(value, at_look, "lower", plan.levels, plan.looks, count, left_out=left_out), is_last=False)


def _after_starts(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> Look:
    """Each start spends its share of the information that the margin needs, as a look at answers does (`judge.paired`)."""
    shares: list[float] = []
    for number, start in enumerate(ours.starts, start=1):
        so_far = ours.until(start)
        if len(so_far.values) < 2:
            return Look(None, is_last=False)
        difference = _difference(plan, so_far, theirs, over_starts=True)
        share = paired.share_of_information(difference.off_by, math.log1p(plan.margin), plan.levels)
        shares.append(1.0 if number == plan.most_starts else share)
    at = sides_after("lower", plan.levels, rising(shares))
    return Look(difference.worsening(at).interval, shares[-1] >= 1)


def _difference(plan: LoadPlan, ours: Repeats, theirs: Repeats, *, over_starts: bool) -> Difference:
    over_starts = over_starts or plan.known.starts is not None
    if plan.in_turns:
        beside = theirs.first(len(ours.values))
        started = ours.started if over_starts else None
        return relative.of_pairs(ours.values, beside.values, plan.direction, started, plan.known)
    starts = (ours.started, theirs.started) if over_starts else None
    return relative.of_builds(ours.values, theirs.values, plan.direction, plan.known, starts)


def restless(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> float | None:
    """By how much starts differ, in turns pairs of them, as a share of the time; None if it is not far more than is assumed."""
    if plan.in_turns:
        ratios = relative.log_ratios(ours.values, theirs.values, plan.direction)
        builds, assumed = [relative.build_of([math.exp(ratio) for ratio in ratios], ours.started)], relative.OF_PAIRS
    else:
        builds, assumed = [relative.build_of(build.values, build.started) for build in (ours, theirs)], OF_LOADS
    return relative.restless(builds, assumed, plan.known.starts)


def is_noisy(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> bool:
    """Whether the last start should have another repeat, by the noise of all starts so far.

    The margin needs so many repeats of this noise; a start has its part of them. It depends on the noise alone, and not on the
    difference, so that it changes no error rate.
    """
    of_start = ours.started.count(ours.started[-1])
    return of_start < math.ceil(repeats_needed(plan, ours, theirs) / OVER_STARTS)


def repeats_needed(plan: LoadPlan, ours: Repeats, theirs: Repeats) -> float:
    """How many repeats of the cell the margin needs, of all starts together, if starts do not differ."""
    if plan.in_turns:
        noise = relative.noise_of_pairs(ours.values, theirs.values, ours.started)
    else:
        noise = 2 * relative.noise_of_build(ours.values, ours.started)
    return noise * (paired.MARGIN_IN_ERRORS / math.log1p(plan.margin)) ** 2
