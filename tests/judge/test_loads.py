"""Looks at loads of several starts, on repeats that are made up."""

import math

import pytest

from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge import relative
from vllm_qualify.judge.between import Between
from vllm_qualify.judge.loads import LoadPlan, Repeats, is_noisy, look, repeats_needed
from vllm_qualify.judge.relative import EarlierRuns

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


def test_one_start_alone_passes_nothing_near_its_margin_and_more_that_agree_do() -> None:
    """By what is assumed two starts may differ by 2 %."""
    one, two = (look(plan(), *times(1.01, starts)) for starts in (1, 3))
    assert one.interval is not None
    assert two.interval is not None
    assert one.interval.upper > 0.025
    assert two.interval.upper < 0.025


def test_a_slowdown_that_starts_can_explain_is_no_fail_of_one_start_and_a_large_one_is() -> None:
    small, large = (look(plan(), *times(slower, 1)).interval for slower in (1.04, 1.3))
    assert small is not None
    assert large is not None
    assert small.lower < 0.025 < large.lower


def test_starts_of_which_some_have_a_slower_clock_fail_nothing() -> None:
    """Three of five starts 4 % slower: nobody knows whether the release is."""
    ours, theirs = repeats([1.04] * 3, [1.0] * 2, [1.04] * 2, [1.0] * 2, [1.04] * 2), repeats([1.0] * 3, *[[1.0] * 2] * 4)
    interval = look(plan(), ours, theirs).interval
    assert interval is not None
    assert interval.lower < 0.025 < interval.upper


def test_the_last_look_is_when_enough_is_known_or_at_the_last_start() -> None:
    assert not look(plan(), *times(1.0, 1)).is_last
    assert look(plan(), *times(1.0, 6)).is_last
    assert look(plan(most_starts=2), *times(1.0, 2)).is_last


def test_with_one_start_planned_starts_are_left_out_unless_history_knows_them() -> None:
    alone = look(plan(most_starts=1), *times(1.0, 1)).interval
    restless = EarlierRuns(starts=Between(variance=0.02**2, noise=0.0, freedom=10.0))
    known = look(plan(most_starts=1, known=restless), *times(1.0, 1)).interval
    assert alone is not None
    assert known is not None
    assert known.upper - known.lower > 2 * (alone.upper - alone.lower)


def test_a_single_repeat_shows_nothing() -> None:
    assert look(plan(), repeats([1.0]), repeats([1.0])).interval is None


def test_a_noisy_start_goes_on_until_it_has_its_part_of_the_repeats() -> None:
    """By hand: the noise of these pairs is ln²(1.02) · 2 / 2 times two, and (3.95 / ln 1.025)² times that are 20.5 repeats."""
    quiet, noisy = times(1.0, 2), (repeats([1.02, 1 / 1.02], [1.02, 1 / 1.02]), repeats([1.0] * 2, [1.0] * 2))
    assert not is_noisy(plan(), *quiet)
    expected = 2 * math.log(1.02) ** 2 * (3.95 / math.log(1.025)) ** 2
    assert repeats_needed(plan(), *noisy) == pytest.approx(expected)
    assert is_noisy(plan(), *noisy)
    more = (repeats([1.02, 1 / 1.02] * 3, [1.02, 1 / 1.02] * 3), repeats([1.0] * 6, [1.0] * 6))
    assert not is_noisy(plan(), *more)


def test_beside_history_each_build_has_its_own_starts() -> None:
    ours, theirs = times(1.0, 2)
    close = look(plan(in_turns=False), ours, theirs).interval
    apart = look(plan(in_turns=False), ours, repeats([0.9] * 3, [1.1] * 2)).interval
    assert close is not None
    assert apart is not None
    assert apart.upper > 2 * close.upper
