"""Slopes with intervals, held against lines and noise that are known."""

import math

import numpy as np
import pytest
from scipy import stats

from infra.bench.trend import ROUNDS, alike, by_least_squares, by_waves, false_alarms
from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.evidence.trend import slope_of

NARROW = Sides(0.05, 0.05)


def test_the_slope_of_a_line_is_its_own_and_certain() -> None:
    times = [0.1 * number**1.5 for number in range(30)]
    slope = slope_of(times, [3 - 2 * time for time in times])
    ends = slope.interval(NARROW)
    assert (slope.per_time, ends.lower, ends.upper) == pytest.approx((-2, -2, -2))
    unchanged = slope_of(range(20), [512.0] * 20).interval(NARROW)
    assert (unchanged.lower, unchanged.upper) == (0, 0)


def test_the_slope_is_that_of_least_squares() -> None:
    random = np.random.default_rng(1)
    times, values = np.sort(random.uniform(0, 5, 40)), random.standard_normal(40)
    assert slope_of(list(times), list(values)).per_time == pytest.approx(stats.linregress(times, values).slope)


def test_a_lower_chance_of_an_error_makes_its_side_wider() -> None:
    slope = slope_of(range(ROUNDS), list(alike(np.random.default_rng(2), 0.3)))
    ends, wider = slope.interval(NARROW), slope.interval(Sides(0.001, 0.05))
    assert wider.lower < ends.lower < slope.per_time < ends.upper == wider.upper


@pytest.mark.thorough
def test_false_alarms_stay_near_what_is_meant_where_neighbours_are_alike() -> None:
    """4,000 series: the standard error of each share is at most 0.5 of a percent."""
    assert 0.04 < false_alarms(by_waves, lambda random: alike(random, 0.0), 3) < 0.065
    assert false_alarms(by_waves, lambda random: alike(random, 0.6), 4) < 0.08
    assert false_alarms(by_least_squares, lambda random: alike(random, 0.6), 4) > 0.15, "plain least squares fails this"


def test_a_slope_is_found() -> None:
    """The series rises by 5 standard deviations of its noise from its first value to its last."""
    rise = np.arange(ROUNDS) * 5 / ROUNDS
    found = false_alarms(by_waves, lambda random: alike(random, 0.3) + rise, 5)
    assert found > 0.99


@pytest.mark.parametrize(
    ("times", "values"),
    [
        (range(14), [1.0] * 14),
        (range(20), [1.0] * 19),
        (range(20), [1.0] * 19 + [math.nan]),
        ([*range(19), 18], [1.0] * 20),
        ([*range(19), math.inf], [1.0] * 20),
    ],
)
def test_what_shows_no_slope_is_refused(times: range, values: list[float]) -> None:
    with pytest.raises(ValueError, match="a slope needs"):
        slope_of(times, values)
