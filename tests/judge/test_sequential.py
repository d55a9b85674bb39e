"""Critical values hold their error rate over all looks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vllm_qualify.judge.sequential import critical_values


def test_one_look_is_the_plain_test() -> None:
    assert critical_values([7.0], 0.05) == [pytest.approx(stats.norm.isf(0.05))]


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("information", [[1, 2, 3, 4, 5], [0.1, 0.2, 0.4, 0.6, 0.8, 1], [1, 1.01, 1.02, 10]])
def test_the_chance_to_be_above_at_any_look_is_alpha(information: list[float], alpha: float) -> None:
    steps = np.diff(np.array([0.0, *information]))
    scores = np.cumsum(np.random.default_rng(1).standard_normal((200_000, len(steps))) * np.sqrt(steps), axis=1)
    above = scores / np.sqrt(information) > np.array(critical_values(information, alpha))
    # three standard errors of the simulation
    assert above.any(axis=1).mean() == pytest.approx(alpha, abs=3 * math.sqrt(alpha / 200_000))


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.floats(0.01, 10), min_size=1, max_size=12))
def test_every_look_is_stricter_than_the_only_one_would_be(steps: list[float]) -> None:
    found = critical_values(list(np.cumsum(steps)), 0.05)
    assert len(found) == len(steps)
    assert all(value >= stats.norm.isf(0.05) - 1e-6 for value in found)


@pytest.mark.parametrize("information", [[], [0.0], [1, 1], [2, 1], [math.nan]])
def test_information_that_does_not_rise_is_refused(information: list[float]) -> None:
    with pytest.raises(ValueError, match="must rise"):
        critical_values(information, 0.05)


@pytest.mark.parametrize("alpha", [0.0, 0.5, -1.0, math.nan])
def test_an_alpha_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        critical_values([1.0], alpha)
