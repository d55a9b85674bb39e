"""Critical values hold their error rate over all looks."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vllm_qualify.evidence.measurement import share_interval
from vllm_qualify.evidence.sequential import Levels, Sides, critical_values, levels_of, rising, sides, sides_after
from vllm_qualify.recipe.gates import Gate, gate_of


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("information", [[1, 2, 3, 4, 5], [0.1, 0.2, 0.4, 0.6, 0.8, 1], [1, 1.01, 1.02, 10]])
def test_the_chance_to_be_above_at_any_look_is_alpha(information: list[float], alpha: float) -> None:
    steps = np.diff(np.array([0.0, *information]))
    scores = np.cumsum(np.random.default_rng(1).standard_normal((200_000, len(steps))) * np.sqrt(steps), axis=1)
    above = scores / np.sqrt(information) > np.array(critical_values(information, alpha))
    # three standard errors of the simulation
    assert above.any(axis=1).mean() == pytest.approx(alpha, abs=3 * math.sqrt(alpha / 200_000))


@settings(max_examples=50)
@given(steps=st.lists(st.floats(0.01, 10), min_size=1, max_size=12))
def test_every_look_is_stricter_than_the_only_one_would_be(steps: list[float]) -> None:
    assert critical_values(steps[:1], 0.05) == [pytest.approx(stats.norm.isf(0.05))], "one look is the plain test"
    values = critical_values(list(np.cumsum(steps)), 0.05)
    assert len(values) == len(steps)
    assert all(value >= stats.norm.isf(0.05) - 1e-6 for value in values)


@pytest.mark.parametrize(
    ("information", "alpha"),
    [
        *[(information, 0.05) for information in ([], [0.0], [1, 1], [2, 1], [math.nan])],
        *[([1.0], alpha) for alpha in (0.0, 0.5, -1.0, math.nan)],
    ],
)
def test_information_that_does_not_rise_and_an_alpha_that_is_none_are_refused(information: list[float], alpha: float) -> None:
    with pytest.raises(ValueError, match="must rise above 0"):
        critical_values(information, alpha)


@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_shares_that_were_found_rise_and_end_with_what_was_found_last(shares: list[float]) -> None:
    values = rising(shares)
    assert len(values) == len(shares)
    assert all(one < other for one, other in pairwise([0.0, *values]))
    assert values[-1] <= 1
    assert values[-1] >= shares[-1] - 1 / 64


def test_the_look_that_completes_the_information_has_the_whole_chance() -> None:
    """By hand: rounded down to 64ths, each at least a 128th after the one before, and the last one the whole."""
    assert rising([0.26, 0.25, 0.5, 1.0]) == [0.25, 0.25 + 1 / 128, 0.5, 1.0]
    assert rising([0.5, 1.0, 1.0]) == [0.5, 1 - 1 / 128, 1.0]
    assert sides_after("lower", Levels(), [1.0]) == pytest.approx(Sides(below=0.05, above=0.03))


@settings(max_examples=50)
@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_looks_that_are_taken_spend_no_more_than_the_chance(shares: list[float]) -> None:
    """Each look is at least as strict as if it alone had what it spends, and at most as strict as if none were before it."""
    values = rising(shares)
    at = sides_after("lower", Levels(), values)
    before = values[-2] if len(values) > 1 else 0.0
    assert 0.03 * (values[-1] - before) - 1e-7 <= at.above <= 0.03 * values[-1] + 1e-7


def gate(bound: float = 0.9) -> Gate:
    return gate_of(metric="exact_match", filter="strict-match", minimum=bound, unit="fraction")


CHECK = gate_of(metric="smoke_determinism", minimum=1, unit="bool")


@pytest.mark.parametrize("noisy", [1, 2, 4, 7])
def test_the_gates_of_a_release_share_its_false_alarms(noisy: int) -> None:
    """A check that holds or does not has no noise, and takes none of them. False passes are not shared."""
    levels = levels_of([gate()] * noisy + [CHECK] * 3)
    assert levels.false_fail * noisy == pytest.approx(0.05)
    assert levels.false_pass == 0.03


def test_who_tries_again_passes_less_easily_and_fails_no_more_easily() -> None:
    levels = [levels_of([gate()], tries) for tries in range(1000)]
    assert [level.false_pass for level in levels[:3]] == pytest.approx([0.03, 0.03 / 8, 0.03 / 27])
    # However often somebody tries, all tries together: 0.03 times zeta(3).
    assert sum(level.false_pass for level in levels) < 0.0361
    assert {level.false_fail for level in levels} == {0.05}


def test_without_a_noisy_gate_nothing_is_divided_by_nought() -> None:
    assert levels_of([]) == levels_of([CHECK]) == Levels(false_pass=0.03, false_fail=0.05)


def test_the_bad_side_has_the_level_of_passing() -> None:
    """Of a score the lower bound decides `pass`, of a time the upper one."""
    levels = Levels(false_pass=0.05, false_fail=0.01)
    assert sides("higher", levels, [1.0], 0) == pytest.approx(Sides(below=0.05, above=0.01))
    assert sides("lower", levels, [1.0], 0) == pytest.approx(Sides(below=0.01, above=0.05))


def test_the_sides_of_each_look_are_those_of_its_critical_value() -> None:
    information = [1.0, 2.0, 4.0]
    sides_of_looks = [sides("lower", Levels(), information, look) for look in range(3)]
    critical = critical_values(information, Levels().false_pass)
    assert [stats.norm.isf(at.above) for at in sides_of_looks] == pytest.approx(critical)


@pytest.mark.parametrize(("at", "right"), [(Sides(0.05, 0.05), 900), (Sides(0.05, 0.0125), 1200), (Sides(0.001, 0.2), 3)])
def test_a_share_has_wilsons_bounds_on_each_side(at: Sides, right: int) -> None:
    """scipy's, which are of two sides at once: twice the chance of one."""
    interval = share_interval(right, 1319, at)
    for bound, alpha, place in ((interval.lower, at.below, 0), (interval.upper, at.above, 1)):
        wilson = stats.binomtest(right, 1319).proportion_ci(1 - 2 * alpha, method="wilson")
        assert bound == pytest.approx(wilson[place])


@pytest.mark.parametrize(("right", "trials"), [(0, 100), (100, 100), (12.5, 13)])
def test_a_share_lies_within_its_bounds_between_0_and_1(right: float, trials: int) -> None:
    interval = share_interval(right, trials, Sides(0.05, 0.0125))
    assert 0 <= interval.lower <= right / trials <= interval.upper <= 1
    assert interval.lower < interval.upper


def test_each_bound_of_a_share_is_wrong_as_often_as_its_side_says() -> None:
    at, truth, runs = Sides(0.05, 0.0125), 0.9, 6000
    intervals = [share_interval(int(right), 1000, at) for right in np.random.default_rng(1).binomial(1000, truth, runs)]
    # three standard errors of the simulation, and what counts of whole answers leave of a normal law
    below, above = (
        sum(misses) / runs for misses in zip(*((one.lower > truth, one.upper < truth) for one in intervals), strict=True)
    )
    assert below == pytest.approx(at.below, abs=0.010)
    assert above == pytest.approx(at.above, abs=0.006)
