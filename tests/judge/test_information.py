"""When a comparison knows enough, and when it will hardly be decided."""

from functools import partial

import numpy as np
import pytest
from scipy import stats

from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge.information import Reach, errors_in_margin, interval_of_loss, is_hardly_decided, share_of_information

MARGIN, LEVELS = 0.0075, Levels(false_pass=0.04, false_fail=0.01)


def normal(error: float) -> Reach:
    return lambda alpha: error * float(stats.norm.isf(alpha))


def test_a_margin_holds_the_reach_of_a_wrong_verdict_and_of_none() -> None:
    """By hand: half of the smaller level at the margin is 0.02, at 2.054, and 5 % are at 1.645."""
    assert errors_in_margin(LEVELS) == pytest.approx(2.0537 + 1.6449, abs=1e-3)
    whole = normal(MARGIN / errors_in_margin(LEVELS))
    assert share_of_information(whole, MARGIN, LEVELS, 0.05) == pytest.approx(1)
    assert share_of_information(lambda alpha: 2 * whole(alpha), MARGIN, LEVELS, 0.05) == pytest.approx(1 / 4)
    assert share_of_information(whole, MARGIN, LEVELS, 0.01) == pytest.approx((3.6986 / (2.0537 + 2.3263)) ** 2, abs=1e-3)
    assert share_of_information(normal(0.0), MARGIN, LEVELS, 0.05) == 1


@pytest.mark.parametrize(
    ("lost", "error", "at_most"),
    [
        pytest.param(0.0, MARGIN, LEVELS.false_fail, id="nothing, badly known"),
        pytest.param(0.0, MARGIN / 4, 1e-4, id="nothing, well known"),
        pytest.param(MARGIN, MARGIN / 4, LEVELS.false_fail_at_margin, id="what the gate allows"),
        pytest.param(MARGIN, 4 * MARGIN, LEVELS.false_fail_at_margin, id="what the gate allows, badly known"),
    ],
)
def test_a_release_without_a_loss_has_more_protection_than_one_at_its_margin(lost: float, error: float, at_most: float) -> None:
    def interval_at(levels: Levels, seen: float) -> Interval:
        return Interval(lower=seen - error * float(stats.norm.isf(levels.false_fail)), upper=1.0)

    rng, runs = np.random.default_rng(1), 20_000
    seen = rng.normal(lost, error, runs)
    fails = sum(interval_of_loss(partial(interval_at, seen=each), LEVELS).lower > MARGIN for each in seen)
    assert fails / runs <= at_most + 3 * (at_most / runs) ** 0.5


def test_only_a_difference_near_the_margin_is_hardly_decided() -> None:
    halfway = normal(MARGIN / errors_in_margin(LEVELS) * 2**0.5)
    assert [is_hardly_decided(lost, halfway, MARGIN, LEVELS) for lost in (0.0, MARGIN, 2 * MARGIN)] == [False, True, False]
    # What is hardly known may still be decided, and complete information is not hardly anything.
    assert not is_hardly_decided(MARGIN, normal(MARGIN), MARGIN, LEVELS)
    assert not is_hardly_decided(MARGIN, normal(MARGIN / errors_in_margin(LEVELS) / 2), MARGIN, LEVELS)


def test_the_chance_of_a_verdict_is_that_of_the_difference_when_the_information_is_complete() -> None:
    """Each difference that may be true is drawn, then what is seen of it in the end, with the rest of the information."""
    rng = np.random.default_rng(1)
    then = MARGIN / errors_in_margin(LEVELS)
    now = 1.3 * then
    rest = (1 / then**2 - 1 / now**2) ** -0.5
    shares = {}
    for room in (0.0, 2.0):
        true = rng.normal(MARGIN - room * then, now, 200_000)
        seen = (rng.normal(true, rest) / rest**2 + (MARGIN - room * then) / now**2) * then**2
        passes = seen <= MARGIN - then * stats.norm.isf(0.02)
        fails = seen >= MARGIN + then * stats.norm.isf(0.025)
        shares[room] = float((passes | fails).mean())
        assert is_hardly_decided(MARGIN - room * then, normal(now), MARGIN, LEVELS) is (shares[room] < 0.05)
    assert shares[0.0] < 0.05 < shares[2.0]


@pytest.mark.parametrize(
    ("lost", "least_error", "hardly"),
    [
        pytest.param(0.0, 0.0, False, id="enough is allowed"),
        pytest.param(0.0, MARGIN / 2, False, id="a margin of two errors in the end"),
        pytest.param(0.0, MARGIN / 1.4, True, id="a margin of fewer errors in the end"),
        pytest.param(-2 * MARGIN, MARGIN / 1.4, False, id="which a gain meets"),
        pytest.param(-2 * MARGIN, MARGIN, True, id="no more is allowed"),
    ],
)
def test_a_plan_that_allows_too_little_decides_hardly_anything(lost: float, least_error: float, *, hardly: bool) -> None:
    assert is_hardly_decided(lost, normal(0.75 * MARGIN), MARGIN, LEVELS, least_error) is hardly
