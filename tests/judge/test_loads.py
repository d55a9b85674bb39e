"""Looks at loads of several starts, on repeats that are made up."""

import math

import pytest

from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge import relative
from vllm_qualify.judge.loads import LoadPlan, Repeats, is_noisy, look, repeats_needed
from vllm_qualify.judge.relative import EarlierRuns
from vllm_qualify.plan.cell import Between

LEVELS = Levels(false_fail=0.0125)


def plan(most_starts: int = 8, in_turns: bool = True, margin: float = 0.025, known: EarlierRuns | None = None) -> LoadPlan:
    looks = range(3, 11)
    return LoadPlan("lower", margin, LEVELS, looks, most_starts, in_turns, known or relative.NOTHING)


def repeats(*by_start: list[float]) -> Repeats:
    values = [(value, number) for number, start in enumerate(by_start, start=1) for value in start]
    return Repeats([value for value, _ in values], [start for _, start in values])


def times(slower: float, starts: int, noise: float = 0.002) -> tuple[Repeats, Repeats]:
    """Three repeats on the first start and two on each other one, alternately somewhat slower and faster than they are."""
    numbers = [3] + [2] * (starts - 1)
    ours = [[slower * (1 + noise * (-1) ** place) for place in range(number)] for number in numbers]
    return repeats(*ours), repeats(*([1.0] * number for number in numbers))


def interval_of(planned: LoadPlan, ours: Repeats, theirs: Repeats) -> Interval:
    interval = look(planned, ours, theirs).interval
    assert interval is not None
    return interval


def test_one_start_alone_decides_nothing_near_its_margin_and_more_that_agree_do() -> None:
    """By what is assumed two starts may differ by 2 %."""
    one, three = (interval_of(plan(), *times(1.01, starts)) for starts in (1, 3))
    assert three.upper < 0.025 < one.upper
    # What starts can explain is no fail, and a large slowdown is.
    small, large = (interval_of(plan(), *times(slower, 1)) for slower in (1.04, 1.3))
    assert small.lower < 0.025 < large.lower


def test_starts_of_which_some_have_a_slower_clock_fail_nothing() -> None:
    """Three of five starts 4 % slower: nobody knows whether the release is."""
    ours, theirs = repeats([1.04] * 3, [1.0] * 2, [1.04] * 2, [1.0] * 2, [1.04] * 2), repeats([1.0] * 3, *[[1.0] * 2] * 4)
    interval = interval_of(plan(), ours, theirs)
    assert interval.lower < 0.025 < interval.upper


def test_the_last_look_is_when_enough_is_known_or_at_the_last_start() -> None:
    assert not look(plan(), *times(1.0, 1)).is_last
    assert look(plan(), *times(1.0, 6)).is_last
    assert look(plan(most_starts=2), *times(1.0, 2)).is_last


def test_with_one_start_planned_starts_are_left_out_unless_history_knows_them() -> None:
    alone = interval_of(plan(most_starts=1), *times(1.0, 1))
    restless = EarlierRuns(starts=Between(variance=0.02**2, noise=0.0, freedom=10.0))
    known = interval_of(plan(most_starts=1, known=restless), *times(1.0, 1))
    assert known.upper - known.lower > 2 * (alone.upper - alone.lower)


@pytest.mark.parametrize("measured", [repeats(), repeats([1.0])], ids=["nothing", "a single repeat"])
def test_fewer_than_two_repeats_show_nothing(measured: Repeats) -> None:
    assert look(plan(), measured, measured).interval is None


def test_a_noisy_start_goes_on_until_it_has_its_part_of_the_repeats() -> None:
    """By hand: the noise of these pairs is 2 · ln²(1.03), and ((2.170 + 1.645) / ln 1.025)² times that are 42 repeats."""
    quiet, noisy = times(1.0, 2), (repeats([1.03, 1 / 1.03], [1.03, 1 / 1.03]), repeats([1.0] * 2, [1.0] * 2))
    assert not is_noisy(plan(), *quiet)
    expected = 2 * math.log(1.03) ** 2 * ((2.1701 + 1.6449) / math.log(1.025)) ** 2
    assert repeats_needed(plan(), *noisy) == pytest.approx(expected, rel=1e-3)
    assert is_noisy(plan(), *noisy)
    more = (repeats([1.03, 1 / 1.03] * 3, [1.03, 1 / 1.03] * 3), repeats([1.0] * 6, [1.0] * 6))
    assert not is_noisy(plan(), *more)


def test_a_candidate_that_warms_up_after_each_start_is_measured_on_and_does_not_fail() -> None:
    """Its repeats are slower by 6, 4 and 2 %, and those of a server that stays so by 4 % each."""
    sides = [
        (repeats(of_start, *[of_start[:2]] * 3), repeats([1.0] * 3, *[[1.0] * 2] * 3))
        for of_start in ([1.06, 1.041, 1.021], [1.041, 1.04, 1.041])
    ]
    warming, staying = (interval_of(plan(), *side) for side in sides)
    assert warming.lower <= 0.025 < staying.lower
    assert [(look(plan(), *side).is_leaning, is_noisy(plan(), *side)) for side in sides] == [(True, True), (False, False)]
    assert not look(plan(), *sides[0]).is_last


def test_who_comes_no_nearer_after_many_starts_fails() -> None:
    """Slower by 9 and 4.5 % in the two repeats of each start."""
    sides = [(repeats(*[[1.09, 1.045]] * starts), repeats(*[[1.0] * 2] * starts)) for starts in (7, 8)]
    few, many = (look(plan(most_starts=16), *side) for side in sides)
    assert (few.is_leaning, few.is_last, many.is_leaning) == (True, False, False)
    lowers = [interval_of(plan(most_starts=16), *side).lower for side in sides]
    assert lowers[0] <= 0.025 < lowers[1]


def test_of_two_starts_that_are_all_chance_explains_no_trend() -> None:
    """Slower by 20 %, with repeats that rise and fall. Were a third start allowed, the next look would tell more."""
    ours, theirs = repeats([1.19, 1.22, 1.19], [1.21, 1.19]), repeats([1.0] * 3, [1.0] * 2)
    all_of_them, one_more = (interval_of(plan(most_starts=starts), ours, theirs) for starts in (2, 16))
    assert one_more.lower < all_of_them.lower


def test_beside_history_each_build_has_its_own_starts() -> None:
    ours, theirs = times(1.0, 2)
    close, apart = (interval_of(plan(in_turns=False), ours, each) for each in (theirs, repeats([0.9] * 3, [1.1] * 2)))
    assert apart.upper > 2 * close.upper


@pytest.mark.parametrize(
    ("days", "is_last"), [pytest.param(0.001, False, id="that differ little"), pytest.param(0.02, True, id="that differ much")]
)
def test_starts_go_on_where_noise_is_open_and_end_where_days_are(days: float, *, is_last: bool) -> None:
    """More starts measure through noise, and never through what differs between days."""
    known = EarlierRuns(days=Between(variance=days**2, noise=0.0, freedom=10.0))
    assert look(plan(in_turns=False, known=known), *times(1.0, 3, noise=0.02)).is_last is is_last
