"""Whether repeats of a load rise or fall with time: one server warms up or leaks, and the other does not.

A mean over such repeats is that of no state of a server. The test is by ranks (Mann 1945, "Nonparametric tests against trend",
Econometrica 13): S is the number of pairs of repeats of which the later one is higher, less those of which it is lower. Pairs
are of one start, and S is summed over starts (Hirsch & Slack 1984, "A nonparametric trend test for seasonal data with serial
dependence", Water Resources Research 20), so that what differs between starts does not matter.

If the repeats have no trend, all their orders are equally likely. Then the k-th repeat of a start adds to S one of -(k-1),
-(k-3), … k-1, each equally likely, whatever came before (Rényi 1962). So S is a random walk with known steps, and its bounds
over all looks are exact sums. Whatever the distribution of the noise is, they hold, if repeats do not depend on each other.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy import special

from vllm_qualify.evidence.load.repeats import spent_share as spent_after
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.starts import LEAST
from vllm_qualify.judge.information import OF_A_DEVIATION

# The chance that a load without a trend is called unsteady, over all looks. If each repeat is half like the one before it
# (autocorrelation 0.5), the chance is about three times as large: `infra/bench/steadiness.py` simulates both.
CHANCE = 0.003
# A slope and its error need so many values.
LEAST_FOR_SLOPE = 3
# How many standard errors ahead of its trend a load may still be. With none, a leak that has just begun would pass too often.
ERRORS_AHEAD = 1.0

WHOSE = ("this run's server", "the baseline's server")
SLOWER, SLOWER_REMEDY = "gets slower, as one that leaks", "look at its memory, its cache and its clocks, and run a soak"
FASTER, FASTER_REMEDY = "gets faster, as one that still warms up", "raise num_warmups"

Starts = Sequence[Sequence[float]]


def direction_of(starts: Starts, looks: range, chance: float = CHANCE) -> int:
    """1 if the values of all `starts` surely rise with time, -1 if they fall, 0 if neither is sure.

    `looks` are the planned numbers of values of all starts together after which this is asked, and the values so far are asked
    about at each of them. Equal values count as neither.
    """
    bounds = _bounds_of_trend(tuple(map(len, starts)), looks.start, looks.stop - 1, chance)
    steps = [np.sign(value - np.asarray(values[:number])).sum() for values in starts for number, value in enumerate(values)]
    scores = np.cumsum(steps)
    return next((int(np.sign(score)) for score, bound in zip(scores, bounds, strict=True) if abs(score) >= bound), 0)


@lru_cache(maxsize=1024)
def _bounds_of_trend(sizes: tuple[int, ...], first: int, most: int, chance: float) -> list[float]:
    """The least |S| that is a trend after each of the values; infinite where it is not asked or no order is so unlikely.

    The chance is spent as that of a load's intervals is.
    """
    steps = [before for size in sizes for before in range(size)]
    # The chances of S from -reach to reach, if no look has found a trend yet.
    reach, spent, bounds = sum(steps), 0.0, list[float]()
    scores = np.abs(np.arange(-reach, reach + 1))
    chances = np.where(scores == 0, 1.0, 0.0)
    for count, step in enumerate(steps, start=1):
        kernel = np.zeros(2 * step + 1)
        kernel[::2] = 1 / (step + 1)
        chances = np.convolve(chances, kernel)[step : step + len(scores)]
        beyond = np.bincount(scores, chances)[::-1].cumsum()[::-1]
        allowed = chance * spent_after(count, most) - spent if count >= first else 0.0
        bound = next((score for score, likely in enumerate(beyond) if 0 < likely <= allowed), None)
        bounds.append(math.inf if bound is None else bound)
        if bound is not None:
            spent += float(beyond[bound])
            chances = np.where(scores >= bound, 0.0, chances)
    return bounds


def change_of(starts: Starts) -> float:
    """How much the values change from the first to the last one of the longest start, by one slope for all of them."""
    return _fit_slope(starts)[0] * (max(map(len, starts)) - 1)


def leads_to(values: Sequence[float], planned: int) -> float | None:
    """Where the trend of one start's values leads by the last one that is `planned`, and ERRORS_AHEAD standard errors more.

    It looks ahead at most as long as values were seen. None for fewer than LEAST_FOR_SLOPE values.
    """
    count = len(values)
    if count < LEAST_FOR_SLOPE:
        return None
    slope, spread, squares = _fit_slope([values])
    ahead = min(max(planned, count), 2 * count) - 1 - (count - 1) / 2
    noise = squares / (count - 2)
    return float(np.mean(values)) + slope * ahead + ERRORS_AHEAD * math.sqrt(noise * (1 / count + ahead**2 / spread))


def with_trend(interval: Interval, worsened: Sequence[float], looked: Sequence[int], planned: int) -> Interval:
    """The interval of a worsening, up to where the trend leads that the logarithms `worsened` of one start have.

    After each of the numbers of values `looked` at it may lead elsewhere: what one look has decided, no later one undoes.
    """
    known = [ahead for count in looked if (ahead := leads_to(worsened[:count], planned)) is not None]
    return interval.model_copy(update={"upper": max(interval.upper, math.expm1(min(known)))}) if known else interval


def with_trend_of_starts(interval: Interval, starts: Starts, least: int = LEAST) -> Interval:
    """The interval of a worsening, down to where the trend leads that the logarithms of all `starts` have in common.

    That is where it leads by the repeat after the longest start, and one error less, by Student's t. From the `least` number of
    starts on, which may decide a gate, a trend must fall by more than its error: what chance explains forbids no `fail`.
    """
    count, longest = sum(map(len, starts)), max(map(len, starts))
    slope, spread, squares = _fit_slope(starts)
    freedom = count - len(starts) - 1
    if freedom < 1 or not spread:
        return interval
    noise = squares / freedom
    error_of_slope, one_error = math.sqrt(noise / spread), -float(special.stdtrit(freedom, OF_A_DEVIATION))
    if len(starts) >= least and slope > -one_error * error_of_slope:
        return interval
    mean, place = (float(np.mean(np.concatenate(each))) for each in (starts, [np.arange(len(values)) for values in starts]))
    ahead = longest - place
    leads = mean + slope * ahead - one_error * math.hypot(math.sqrt(noise / count), ahead * error_of_slope)
    return interval.model_copy(update={"lower": min(interval.lower, math.expm1(leads))})


def problem(ours: Starts, theirs: Starts, looks: range, name: str) -> str | None:
    """Why the repeats of a load are not those of steady servers, in words; None if no trend is sure.

    `ours` and `theirs` are the times of each start's repeats, `theirs` those in turns with ours, or nothing. Then what both
    servers share is no trend.
    """
    logs, others = ([[math.log(time) for time in start] for start in side] for side in (ours, theirs))
    ratios = (
        [[one - other for one, other in zip(*pair, strict=True)] for pair in zip(logs, others, strict=True)] if theirs else logs
    )
    if not direction_of(ratios, looks):
        return None
    changes = [change_of(side) for side in ((logs, others) if theirs else (logs,))]
    who = max(range(len(changes)), key=lambda side: abs(changes[side]))
    words = [f"{whose} {math.expm1(change):+.1%}" for whose, change in zip(WHOSE, changes, strict=False)]
    what, remedy = (SLOWER, SLOWER_REMEDY) if changes[who] > 0 else (FASTER, FASTER_REMEDY)
    return f"{name} changes with time, from the first repeat to the last {', '.join(words)}: {WHOSE[who]} {what}: {remedy}"


def _fit_slope(starts: Starts) -> tuple[float, float, float]:
    """The slope per value by least squares, with a level for each start; the sums of squares of time, and around the slope."""
    pairs = [(np.arange(len(values)) - (len(values) - 1) / 2, np.asarray(values, dtype=float)) for values in starts]
    spread = sum(float(time @ time) for time, _ in pairs)
    slope = sum(float(time @ values) for time, values in pairs) / spread if spread else 0.0
    rests = [values - np.mean(values) - slope * time for time, values in pairs]
    return slope, spread, float(sum(rest @ rest for rest in rests))
