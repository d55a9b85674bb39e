"""What differs between starts: its variance from few starts, and how far an error then reaches."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from vllm_qualify.judge.between import (
    MOST_FROM_HISTORY,
    NO_SPREAD,
    POINTS,
    Assumed,
    Spread,
    StartMean,
    is_unlike,
    possible_variances,
    reach,
    spread,
)
from vllm_qualify.plan.cell import Between, BetweenStarts

USUAL = Assumed(0.01)


def make_between(variance: float, noise: float = 0.0, freedom: float = 5.0) -> Between:
    return Between(variance=variance, noise=noise, freedom=freedom)


def test_what_noise_explains_is_no_part_of_it() -> None:
    assert make_between(5.0, 2.0).part == 3
    assert make_between(2.0, 5.0).part == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"variance": -1.0},
        {"noise": -1.0},
        {"freedom": 0.0},
        {"variance": math.inf},
        {"variance": math.nan},
        {"freedom": math.inf},
        {"of": "week"},
    ],
)
def test_an_impossible_history_is_no_part_of_a_plan(changed: dict[str, object]) -> None:
    about = {"label": "ttft_p50_ms", "variance": 1.0, "noise": 0.0, "freedom": 1.0, "runs": ["earlier"]}
    with pytest.raises(ValidationError, match="1 validation error"):
        BetweenStarts.model_validate(about | changed)


def mean(found: Spread) -> float:
    return float(found.variances @ found.chances)


def starts(*means: float, noise: float = 1e-8) -> list[StartMean]:
    return [StartMean(each, noise) for each in means]


@pytest.mark.parametrize("alpha", [0.2, 0.05, 0.0125])
@pytest.mark.parametrize("freedom", [1.0, 3.0, 30.0])
def test_what_is_assumed_is_half_of_students_t(freedom: float, alpha: float) -> None:
    """The chance of a deviation over a bound is twice that of Student's t, as nearly as so many points have it."""
    found = spread(Assumed(0.01, freedom), [])
    over = float(found.chances[np.sqrt(found.variances) > 0.01 * stats.t.isf(alpha, freedom)].sum())
    assert over == pytest.approx(2 * alpha, abs=3 / POINTS)


def test_starts_that_are_alike_make_large_deviations_unlikely_and_others_make_them_likely() -> None:
    nothing, alike, unlike = (mean(spread(USUAL, [each])) for each in ([], starts(0, 1e-4, -1e-4), starts(0, 0.05, -0.05)))
    assert alike < nothing < unlike
    assert unlike == pytest.approx(0.05**2, rel=1)
    assert mean(spread(USUAL, [starts(0.3)])) == nothing, "one start shows nothing of others"


def test_noise_is_no_difference_between_starts() -> None:
    noisy, quiet = (mean(spread(USUAL, [starts(0, 0.05, -0.05, noise=noise)])) for noise in (0.05**2, 1e-8))
    assert noisy < quiet / 5


def test_many_starts_show_their_variance_whatever_is_assumed() -> None:
    shown = starts(*(0.03 * np.random.default_rng(1).standard_normal(400)))
    for scale in (0.003, 0.3):
        assert mean(spread(Assumed(scale), [shown])) == pytest.approx(0.03**2, rel=0.5)


def test_the_starts_of_two_builds_count_each_around_its_own_mean() -> None:
    """A loss is no difference between starts."""
    apart = spread(USUAL, [starts(0, 1e-3), starts(0.5, 0.501)])
    assert mean(apart) == pytest.approx(mean(spread(USUAL, [starts(0, 1e-3), starts(0, 1e-3)])))


def test_a_history_that_is_alike_counts_and_a_long_one_no_more() -> None:
    nothing, calm = mean(spread(USUAL, [])), make_between(1e-6, 0.0, 10.0)
    assert mean(spread(USUAL, [], calm)) < nothing / 2
    longer = calm.model_copy(update={"freedom": 1000.0})
    assert mean(spread(USUAL, [], longer)) == mean(spread(USUAL, [], calm.model_copy(update={"freedom": MOST_FROM_HISTORY})))


@pytest.mark.parametrize(
    ("history", "shown"),
    [(make_between(1e-6, 0.0, 20.0), starts(0, 0.03, -0.03)), (make_between(1e-2, 0.0, 20.0), starts(0, 1e-4, -1e-4, 1e-4))],
    ids=["of calmer starts", "of wilder starts"],
)
def test_a_history_that_the_starts_are_unlike_is_dropped(history: Between, shown: list[StartMean]) -> None:
    assert is_unlike([shown], history)
    assert mean(spread(USUAL, [shown], history)) == mean(spread(USUAL, [shown]))


def test_a_history_without_any_difference_is_unlike_starts_that_differ() -> None:
    none = make_between(0.0, 0.0, 5.0)
    assert is_unlike([starts(0, 0.01, noise=0.0)], none)
    assert not is_unlike([starts(0, 0, noise=0.0)], none)


def test_starts_that_nothing_is_assumed_of_add_nothing_and_no_variance_reaches_nowhere() -> None:
    assert NO_SPREAD.reach(0.05, 4.0, 0.5) == pytest.approx(2 * stats.norm.isf(0.05), rel=1e-4)
    assert reach(0.05, np.zeros(3), np.full(3, 1 / 3)) == 0


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_chance_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"between 0 and 0\.5"):
        reach(alpha, np.ones(1), np.ones(1))


@given(variance=st.floats(1e-6, 1e3), freedom=st.floats(3, 200))
def test_likely_variances_have_the_mean_of_their_distribution(variance: float, freedom: float) -> None:
    """That of s²·f/χ² is s²·f/(f - 2)."""
    values, chances = possible_variances(variance, freedom, 4096)
    assert chances.sum() == pytest.approx(1)
    assert float(values @ chances) == pytest.approx(variance * freedom / (freedom - 2), rel=0.1)


MEANS = st.lists(st.floats(-0.1, 0.1), min_size=0, max_size=5)


@given(one=MEANS, other=MEANS, noise=st.floats(0, 1e-2), known=st.floats(0, 1), alpha=st.floats(0.0005, 0.4))
def test_it_reaches_further_for_a_smaller_chance_and_more_weight(
    one: list[float], other: list[float], noise: float, known: float, alpha: float
) -> None:
    found = spread(USUAL, [starts(*one, noise=noise), starts(*other, noise=noise)])
    assert found.chances.sum() == pytest.approx(1)
    value = found.reach(alpha, known, 0.5)
    # The numerical integration has an error of this size where nearly nothing is known to vary.
    least = (1 - 1e-6) * value - 1e-6
    assert value >= (1 - 1e-6) * NO_SPREAD.reach(alpha, known, 0.0) - 1e-6
    assert found.reach(alpha / 2, known, 0.5) >= least
    assert found.reach(alpha, known + 1, 0.5) >= least
    assert found.reach(alpha, known, 1.0) >= least


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "deviation", "most"), [(2, 0.0, 0.055), (2, 0.01, 0.055), (4, 0.015, 0.07), (8, 0.05, 0.08), (4, 0.05, 0.12)]
)
def test_the_error_rate_is_held_where_starts_differ_about_as_assumed(number: int, deviation: float, most: float) -> None:
    """The mean of starts is further off in 5 % of 4,000, with room for the simulation's noise.

    Starts that differ by five times as much as is assumed are further off in up to 11 %, where there are four of them.
    """
    rng, missed = np.random.default_rng(1), 0
    for _ in range(4000):
        means = rng.normal(0, math.hypot(0.005, deviation), number)
        found = spread(USUAL, [starts(*means, noise=0.005**2)])
        missed += bool(means.mean() > found.reach(0.05, 0.005**2 / number, 1 / number))
    assert missed / 4000 <= most
