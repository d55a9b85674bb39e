"""Speed against the baseline, on repeats that are made up."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.judge.between import OF_LOADS, spread
from vllm_qualify.judge.relative import NOTHING, EarlierRuns, Worsening, build_of, in_turns, of_builds, of_pairs, without_noise
from vllm_qualify.plan.cell import Between
from vllm_qualify.recipe.metrics import Direction

AT = Sides(below=0.0125, above=0.05)
TIMES, LONGER = [20.0, 20.3, 19.9], [22.0, 22.2, 22.1]


def from_history(
    candidate: Sequence[float], baseline: Sequence[float], direction: Direction, at: Sides, *others: Any, **starts: Any
) -> Worsening:
    """The worsening from repeats that were measured at another time."""
    return of_builds(candidate, baseline, direction, *others, **starts).worsening(at)


BOTH = pytest.mark.parametrize("judged", [in_turns, from_history])
Judged = Callable[..., Worsening]


@BOTH
@pytest.mark.parametrize(("longer_is", "direction"), [("worse", "lower"), ("better", "higher")])
def test_what_is_worse_lies_above_zero_and_what_is_better_below(judged: Judged, longer_is: str, direction: Direction) -> None:
    """A time that is longer, a rate that is lower: both 1.1 times worse."""
    longer, shorter = judged(LONGER, TIMES, direction, AT), judged(TIMES, LONGER, direction, AT)
    worse, better = (longer, shorter) if longer_is == "worse" else (shorter, longer)
    assert (worse.value, better.value) == pytest.approx((0.1, 1 / 1.1 - 1), abs=0.005)
    assert 0 < worse.interval.lower < worse.value < worse.interval.upper
    assert better.interval.upper < 0


@BOTH
def test_a_rate_is_as_much_worse_as_its_time(judged: Judged) -> None:
    rates, lower = ([1000 / time for time in times] for times in (TIMES, LONGER))
    one, other = judged(LONGER, TIMES, "lower", AT), judged(lower, rates, "higher", AT)
    assert one.value == pytest.approx(other.value)
    assert (one.interval.lower, one.interval.upper) == pytest.approx((other.interval.lower, other.interval.upper))


def test_pairs_cancel_what_touched_both() -> None:
    """The machine became slower by half, and the candidate is 1.05 times slower throughout."""
    drift = [1.0, 1.2, 1.3, 1.5]
    baseline = [20 * by for by in drift]
    candidate = [1.05 * time * (1 + noise) for time, noise in zip(baseline, (0.001, -0.001, 0.002, -0.002), strict=True)]
    paired, apart = in_turns(candidate, baseline, "lower", AT), from_history(candidate, baseline, "lower", AT)
    assert paired.value == pytest.approx(0.05, abs=0.001)
    assert paired.interval.lower > 0.04
    assert apart.interval.lower < 0


def test_repeats_in_turns_have_the_interval_of_students_test_and_those_beside_a_history_that_of_welchs() -> None:
    history, longer = [20.0, 20.1, 19.8, 20.4, 19.9, 22.0], [*LONGER, 22.3]
    paired = in_turns(LONGER, TIMES, "lower", AT), stats.ttest_rel(np.log(LONGER), np.log(TIMES))
    apart = from_history(longer, history, "lower", AT), stats.ttest_ind(np.log(longer), np.log(history), equal_var=False)
    for change, test in (paired, apart):
        assert change.interval.lower == pytest.approx(math.expm1(test.confidence_interval(1 - 2 * AT.below).low))
        assert change.interval.upper == pytest.approx(math.expm1(test.confidence_interval(1 - 2 * AT.above).high))


@pytest.mark.parametrize(("candidate", "history"), [(LONGER, [20.0, 21.0]), ([22.0, 23.0], TIMES)])
def test_beside_a_few_repeats_the_smaller_number_of_them_counts(candidate: list[float], history: list[float]) -> None:
    """Two repeats, and one degree of freedom."""
    change = from_history(candidate, history, "lower", AT)
    logs = [np.log(times) for times in (candidate, history)]
    error = math.sqrt(sum(each.var(ddof=1) / len(each) for each in logs))
    middle = logs[0].mean() - logs[1].mean()
    assert change.interval.lower == pytest.approx(math.expm1(middle - stats.t.isf(AT.below, 1) * error))
    assert change.interval.upper == pytest.approx(math.expm1(middle + stats.t.isf(AT.above, 1) * error))


@pytest.mark.parametrize(("direction", "value"), [("lower", 0.1), ("higher", 1 / 1.1 - 1)])
def test_without_noise_there_is_a_value_of_any_repeats(direction: Direction, value: float) -> None:
    assert without_noise([22.0], [20.0, 20.0], direction) == pytest.approx(value)
    for repeats in ([], [0.0]):
        with pytest.raises(ValueError, match="repeat"):
            without_noise(repeats, [20.0], direction)


@BOTH
def test_repeats_without_any_noise_have_an_interval(judged: Judged) -> None:
    change = judged([22.0, 22.0], [20.0, 20.0], "lower", AT)
    assert change.interval.lower == pytest.approx(change.value) == pytest.approx(change.interval.upper)


@BOTH
@pytest.mark.parametrize("repeats", [[], [20.0]])
def test_too_few_repeats_are_refused(judged: Judged, repeats: list[float]) -> None:
    with pytest.raises(ValueError, match="two repeats of each"):
        judged(repeats, repeats, "lower", AT)


def test_a_history_of_one_repeat_and_a_repeat_without_its_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="two repeats of each"):
        from_history(LONGER, [20.0], "lower", AT)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        in_turns(LONGER[:2], TIMES, "lower", AT)


def width(change: Worsening) -> float:
    return math.log1p(change.interval.upper) - math.log1p(change.interval.lower)


def part(variance: float, freedom: float = 20.0) -> Between:
    return Between(variance=variance, noise=0.0, freedom=freedom)


def over_starts(candidate: list[float], baseline: list[float], starts: list[int], known: EarlierRuns = NOTHING) -> Worsening:
    return of_pairs(candidate, baseline, "lower", starts, known).worsening(AT)


def test_starts_that_differ_count_by_their_number_and_not_by_that_of_their_repeats() -> None:
    """Pairs of two starts without any noise, 2 and 4 % slower: one start's repeats would be sure of either."""
    times = [20 * by for by in [1.02] * 5 + [1.04] * 5]
    change = over_starts(times, [20.0] * 10, [1] * 5 + [2] * 5)
    assert change.interval.lower < 0.02 < 0.04 < change.interval.upper
    assert width(change) > 3 * width(in_turns(times, [20.0] * 10, "lower", AT))
    many = over_starts([20 * by for by in [1.02, 1.04] * 5], [20.0] * 10, list(range(10)))
    assert many.value == pytest.approx(change.value)
    assert width(many) < width(change) / 3


def test_one_start_has_what_is_assumed_of_both_builds() -> None:
    """Without noise and with many repeats it is √2 times what is assumed of one."""
    change = over_starts([22.0] * 40, [20.0] * 40, [1] * 40)
    reach = spread(OF_LOADS, []).reach(AT.above, 0.0, 2.0)
    assert math.log1p(change.interval.upper) - math.log(1.1) == pytest.approx(reach, rel=1e-3)
    apart = from_history([22.0] * 40, [20.0] * 40, "lower", AT, starts=([1] * 40, [1] * 40))
    assert apart.interval.upper == pytest.approx(change.interval.upper)


def test_what_is_known_of_starts_makes_it_surer() -> None:
    calm, pair = EarlierRuns(starts=part(0.0005**2)), ([22.0, 22.0], [20.0, 20.0])
    assert width(over_starts(*pair, [1, 1], calm)) < width(over_starts(*pair, [1, 1])) / 2


def test_one_repeat_of_each_start_shows_no_other_noise_than_that_of_starts() -> None:
    change = over_starts(LONGER, TIMES, [1, 2, 3])
    assert change.value == pytest.approx(in_turns(LONGER, TIMES, "lower", AT).value)
    assert 0.05 < change.interval.lower < change.value < change.interval.upper


def test_noise_is_within_the_starts() -> None:
    """By hand: 1 and e are each half of one beside their mean, so the variance is a half, whatever starts differ by."""
    values = [1.0, math.e, 100.0, 100 * math.e]
    assert build_of(values, [1, 1, 2, 2]).noise == pytest.approx(0.5)
    assert build_of(values, [1, 2, 3, 4]).freedom == 0


def test_what_is_known_of_days_counts_for_both_builds() -> None:
    change = from_history([22.0, 22.0], [20.0, 20.0], "lower", AT, EarlierRuns(days=part(0.01**2)))
    # History has at most 10 degrees of freedom.
    expected = math.sqrt(2) * 0.01 * stats.t.isf(AT.above, 10)
    assert math.log1p(change.interval.upper) - math.log(1.1) == pytest.approx(expected, rel=3e-3)


@given(logs=st.lists(st.tuples(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1), st.integers(1, 3)), min_size=2, max_size=8))
def test_starts_have_no_order(logs: list[tuple[float, float, int]]) -> None:
    candidate, baseline = ([math.exp(each[build]) for each in logs] for build in (0, 1))
    starts = [each[2] for each in logs]
    one, other = (
        over_starts(candidate, baseline, [numbers[start] for start in starts])
        for numbers in ({1: 1, 2: 2, 3: 3}, {1: 7, 2: 1, 3: 4})
    )
    assert (one.interval.lower, one.interval.upper) == pytest.approx((other.interval.lower, other.interval.upper))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("judged", "history", "noise"), [(in_turns, 4, 0.01), (from_history, 10, 0.01), (from_history, 10, 0.03)]
)
def test_each_bound_is_wrong_as_often_as_its_side_says(judged: Judged, history: int, noise: float) -> None:
    """Four repeats of a candidate that is 1.05 times slower, whose noise is 1 %; the baseline's is its own."""
    rng, runs = np.random.default_rng(1), 4000
    intervals = [
        judged(1.05 * np.exp(0.01 * rng.standard_normal(4)), np.exp(noise * rng.standard_normal(history)), "lower", AT).interval
        for _ in range(runs)
    ]
    below, above = sum(one.lower > 0.05 for one in intervals) / runs, sum(one.upper < 0.05 for one in intervals) / runs
    # three standard errors of the simulation; Welch's degrees of freedom are near the truth, not it
    assert below == pytest.approx(AT.below, abs=3 * math.sqrt(AT.below / runs) + 0.002)
    assert above == pytest.approx(AT.above, abs=3 * math.sqrt(AT.above / runs) + 0.002)
