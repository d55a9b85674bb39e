"""What differs between starts: its variance from few starts, and how far an error then reaches."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from vllm_qualify.judge.between import MOST_FROM_HISTORY, Between, likely, pooled, reach, reach_of, with_history


def between(variance: float, noise: float = 0.0, freedom: float = 5.0, runs: int = 1) -> Between:
    return Between(variance=variance, noise=noise, freedom=freedom, runs=runs)


def test_what_noise_explains_is_no_part_of_it() -> None:
    assert between(5.0, 2.0).part == 3
    assert between(2.0, 5.0).part == 0


@pytest.mark.parametrize(
    "changed", [{"variance": -1.0}, {"noise": -1.0}, {"freedom": 0.0}, {"variance": math.inf}, {"runs": 0}]
)
def test_an_impossible_variance_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Between.model_validate({"variance": 1.0, "noise": 0.0, "freedom": 1.0} | changed)


def test_several_runs_count_by_their_degrees_of_freedom() -> None:
    """By hand: (3 · 4 + 1 · 8) / 4 and (3 · 1 + 1 · 3) / 4."""
    pooled_variance = pooled([between(4.0, 1.0, 3.0), between(8.0, 3.0, 1.0)])
    assert pooled_variance == between(5.0, 1.5, 4.0)
    assert pooled([]) is None


def test_a_long_history_does_not_hide_a_cells_own_starts() -> None:
    long = between(1.0, 0.0, 1000.0, runs=300)
    pooled_variance = with_history([between(10.0, 0.0, 6.0)], long)
    assert pooled_variance is not None
    assert pooled_variance.freedom == MOST_FROM_HISTORY + 6
    assert pooled_variance.variance == pytest.approx((30 * 1 + 6 * 10) / 36)
    assert with_history([], None) is None


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 9, 30])
@pytest.mark.parametrize("alpha", [0.05, 0.0125, 0.001])
def test_without_other_noise_it_is_students_t(freedom: int, alpha: float) -> None:
    value = reach_of(alpha, 0.0, 1.0, between(4.0, 0.0, float(freedom)))
    assert value == pytest.approx(2 * stats.t.isf(alpha, freedom), rel=5e-4)


def test_with_many_degrees_of_freedom_it_is_normal() -> None:
    value = reach_of(0.05, 1.0, 0.5, between(10.0, 4.0, 1e6))
    assert value == pytest.approx(2 * stats.norm.isf(0.05), rel=1e-3)
    assert reach_of(0.05, 4.0, 0.5, None) == pytest.approx(2 * stats.norm.isf(0.05))


def test_a_variance_that_is_known_to_be_none_reaches_nowhere() -> None:
    assert reach_of(0.05, 0.0, 1.0, between(0.0, 1.0)) == 0
    assert reach(0.05, np.zeros(3), np.full(3, 1 / 3)) == 0


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_chance_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"between 0 and 0\.5"):
        reach(alpha, np.ones(1), np.ones(1))


@given(variance=st.floats(1e-6, 1e3), freedom=st.floats(3, 200))
def test_likely_variances_have_the_mean_of_their_distribution(variance: float, freedom: float) -> None:
    """That of s²·f/χ² is s²·f/(f - 2)."""
    values, chances = likely(variance, freedom, 4096)
    assert chances.sum() == pytest.approx(1)
    assert float(values @ chances) == pytest.approx(variance * freedom / (freedom - 2), rel=0.1)


@given(
    variance=st.floats(0, 10),
    noise=st.floats(0, 10),
    freedom=st.floats(1, 60),
    known=st.floats(0, 10),
    weight=st.floats(0.01, 2),
    alpha=st.floats(0.0005, 0.4),
)
def test_it_reaches_further_for_a_smaller_chance_and_a_larger_variance(
    variance: float, noise: float, freedom: float, known: float, weight: float, alpha: float
) -> None:
    part = between(variance, noise, freedom)
    value = reach_of(alpha, known, weight, part)
    # The numerical integration has an error of this size where nearly nothing is known to vary.
    least = (1 - 1e-6) * value - 1e-6
    assert value >= (1 - 1e-6) * reach_of(alpha, known, weight, None) - 1e-6
    assert reach_of(alpha / 2, known, weight, part) >= least
    assert reach_of(alpha, known + 1, weight, part) >= least
    assert reach_of(alpha, known, weight, between(variance + 1, noise, freedom)) >= least


@pytest.mark.thorough
@pytest.mark.parametrize("starts", [3, 5])
@pytest.mark.parametrize("part", [0.0, 0.5, 4.0])
def test_the_error_rate_is_held_whatever_starts_add(starts: int, part: float) -> None:
    """The mean of starts, with noise of variance 1 each: 5 % of 4,000 are further off, with room for the simulation's noise."""
    rng, missed = np.random.default_rng(1), 0
    for _ in range(4000):
        means = rng.normal(0, math.sqrt(1 + part), starts)
        variance_between = between(float(means.var(ddof=1)), 1.0, starts - 1.0)
        missed += bool(means.mean() > reach_of(0.05, 1 / starts, 1 / starts, variance_between))
    assert missed / 4000 <= 0.06
