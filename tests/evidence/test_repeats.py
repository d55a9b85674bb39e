"""Looks at repeats: Student's t at these levels is above its critical values as often as it may be, over all looks together."""

import math

import numpy as np
import pytest
from scipy import stats

from vllm_qualify.evidence.load.repeats import interval_over_looks, level, repeat_sides, spent_share
from vllm_qualify.evidence.measurement import Interval, geometric_mean, repeat_interval
from vllm_qualify.evidence.sequential import FALSE_PASS, Levels, Sides

RUNS = 400_000


def t_of(repeats: np.ndarray) -> np.ndarray:
    """Of each row, by its first repeats, from two on."""
    counts = np.arange(2, repeats.shape[1] + 1)
    means = np.cumsum(repeats, axis=1)[:, 1:] / counts
    squares = np.cumsum(repeats**2, axis=1)[:, 1:] / counts
    return np.asarray(means / np.sqrt((squares - means**2) / (counts - 1)))


@pytest.fixture(scope="module")
def ts() -> np.ndarray:
    """Of 2 to 10 repeats around 0, in many runs."""
    return t_of(np.random.default_rng(1).standard_normal((RUNS, 10)))


def crossed(ts: np.ndarray, looks: range, alpha: float) -> float:
    """In what share of the runs t is above its critical value at a look."""
    above = np.zeros(len(ts), dtype=bool)
    for count in looks:
        if count >= 2:
            above |= ts[:, count - 2] > stats.t.isf(level(looks, count, alpha), count - 1)
    return float(above.mean())


@pytest.mark.parametrize("least", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("gates", [1, 4, 12])
def test_the_error_over_all_looks_is_the_level(ts: np.ndarray, least: int, gates: int) -> None:
    alpha = 0.05 / gates
    # three standard errors of the simulation, and a hundredth for the integration
    allowed = 3 * math.sqrt(alpha / RUNS) + 0.01 * alpha
    assert crossed(ts, range(least, 11), alpha) == pytest.approx(alpha, abs=allowed)


@pytest.mark.parametrize("least", [2, 3, 5])
def test_repeats_without_the_first_err_as_seldom(ts: np.ndarray, least: int) -> None:
    """Each look then has one repeat less."""
    above = np.zeros(RUNS, dtype=bool)
    for count in range(least, 11):
        at = repeat_sides("lower", Levels(), range(least, 11), count, left_out=1)
        if count - 1 < 2:
            assert at is None
            continue
        assert at is not None
        above |= ts[:, count - 3] > stats.t.isf(at.above, count - 2)
    assert float(above.mean()) == pytest.approx(FALSE_PASS, abs=3 * math.sqrt(FALSE_PASS / RUNS) + 0.0005)


@pytest.mark.parametrize("looks", [range(5, 6), range(2, 3), range(3, 11), range(1, 5)])
def test_the_first_look_has_its_share_of_the_chance(looks: range) -> None:
    first, most = max(2, looks[0]), looks[-1]
    assert level(looks, first, 0.04) == pytest.approx(0.04 * first / most)


@pytest.mark.parametrize(("count", "alpha"), [(1, 0.05), (4, 0.05), (11, 0.05), (5, 0.0), (5, 0.5), (5, math.nan)])
def test_what_is_no_look_and_what_is_no_chance_is_refused(count: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="a look is after"):
        level(range(5, 11), count, alpha)


def test_a_plan_for_more_repeats_spends_most_before_them() -> None:
    """By hand: of 10 repeats a tenth at each; of 20 eight hundredths at each of the first 10, and two at each of the others."""
    assert [spent_share(count, 10) for count in (5, 10)] == [0.5, 1]
    assert [spent_share(count, 20) for count in (5, 10, 15, 20)] == pytest.approx([0.4, 0.8, 0.9, 1])
    assert spent_share(3, 3) == 1


@pytest.mark.parametrize("most", [10, 12, 20, 32])
def test_the_error_is_held_over_as_many_looks(most: int) -> None:
    """Over 40,000 simulated loads, with three standard errors of the simulation."""
    ts = t_of(np.random.default_rng(1).standard_normal((40_000, most)))
    assert crossed(ts, range(5, most + 1), 0.05) == pytest.approx(0.05, abs=3 * math.sqrt(0.05 / 40_000))


def test_one_repeat_is_no_look_and_spends_nothing() -> None:
    assert repeat_sides("lower", Levels(), range(1, 11), 1) is None
    assert repeat_sides("lower", Levels(), range(1, 11), 2) == repeat_sides("lower", Levels(), range(2, 11), 2)
    assert [repeat_sides("lower", Levels(), range(5, 11), count) for count in (0, 4, 11)] == [None] * 3


def test_the_bad_side_has_the_level_of_passing() -> None:
    """Of a rate the lower bound decides `pass`, of a time the upper one."""
    levels = Levels(false_pass=0.05, false_fail=0.01)
    assert repeat_sides("higher", levels, range(5, 6), 5) == Sides(below=0.05, above=0.01)
    assert repeat_sides("lower", levels, range(5, 6), 5) == Sides(below=0.01, above=0.05)


def over(repeats: list[float], looks: range, left_out: int = 0) -> Interval | None:
    used, count = repeats[left_out:], len(repeats)

    def at_look(number: int, at: Sides) -> Interval | None:
        return repeat_interval(used[:number], at)

    return interval_over_looks(geometric_mean(used), at_look, "lower", Levels(), looks, count, left_out=left_out)


STEADY, WILD = [10.0, 10.1, 9.9, 10.0, 10.1], [10.0, 12.0]


def test_what_one_look_has_decided_the_next_ones_do_not_undo() -> None:
    """After five repeats the value is surely under 10.5; two wild ones make it uncertain by themselves."""
    at = repeat_sides("lower", Levels(), range(5, 11), 7)
    assert at
    looks = over(STEADY, range(5, 11)), over(STEADY + WILD, range(5, 11)), repeat_interval(STEADY + WILD, at)
    five, seven, alone = (each for each in looks if each)
    assert five.upper < 10.5 < alone.upper
    assert five.lower <= seven.lower
    assert seven.upper == pytest.approx(max(five.upper, geometric_mean(STEADY + WILD)))


def test_without_a_look_there_is_no_interval_and_without_the_first_repeat_that_of_the_others() -> None:
    assert over(STEADY[:4], range(5, 11)) is None
    assert over(STEADY + WILD, range(5, 7)) is None
    assert over([10.0], range(1, 11)) is None
    assert over([30.0, *STEADY], range(6, 11), left_out=1) == over(STEADY, range(5, 10))


def test_the_bounds_of_all_looks_together_are_wrong_as_seldom_as_their_sides_say() -> None:
    """The truth is 1."""
    runs, rng = 2000, np.random.default_rng(3)
    intervals = [over([float(each) for each in np.exp(rng.standard_normal(10) * 0.01)], range(5, 11)) for _ in range(runs)]
    for wrong in (
        sum(each is not None and each.lower > 1 for each in intervals),
        sum(each is not None and each.upper < 1 for each in intervals),
    ):
        assert wrong / runs <= 0.05 + 3 * math.sqrt(0.05 / runs)
