"""Repeats that rise or fall with time: the exact test, where a trend leads, and what a comparison of loads makes of both."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.builders.comparisons import (
    LOAD,
    QUESTIONS,
    ask,
    captured_load,
    in_turns,
    interval_of,
    keep_baseline,
    keep_history,
    loss_gate,
    one,
    reason,
    worsening_gate,
)
from tests.builders.comparisons import cell_plan as cell_plan_of
from tests.builders.loads import copy_repeat, scale
from tests.lm_eval_files import RIGHT, WRONG, right_but
from vllm_qualify.evidence.accuracy.blocks import BLOCKS
from vllm_qualify.evidence.load import result
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.judge import steadiness
from vllm_qualify.judge.steadiness import CHANCE, change_of, direction_of, leads_to, problem, with_trend, with_trend_of_starts
from vllm_qualify.judge.verdict import is_decided

LOOKS = range(5, 20)


@pytest.mark.parametrize("chance", [0.1, 0.02, 0.003])
def test_of_one_start_and_one_look_it_is_kendalls_exact_test(chance: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        values = rng.standard_normal(7) + 0.5 * np.arange(7)
        tau, p_value = stats.kendalltau(np.arange(7), values, method="exact")
        assert direction_of([values.tolist()], range(7, 8), chance) == (np.sign(tau) if p_value <= chance else 0)


@pytest.mark.parametrize(
    ("sizes", "looks", "chance"),
    [
        ((6,), range(4, 7), 0.05),
        ((4, 3), range(4, 8), 0.05),
        ((3, 3), range(3, 7), 0.1),
        ((3, 2, 3), range(3, 12), 0.2),
        ((5, 2), range(4, 15), 0.02),
    ],
)
def test_over_looks_and_starts_no_more_than_meant_are_a_trend(sizes: tuple[int, ...], looks: range, chance: float) -> None:
    orders = itertools.product(*(list(itertools.permutations(map(float, range(size)))) for size in sizes))
    found = [direction_of(order, looks, chance) for order in orders]
    assert 0 < sum(map(abs, found)) <= chance * len(found)
    # A part of the chance is left for later looks.
    first = [direction_of([order], looks, chance) for order in itertools.permutations(map(float, range(sizes[0])))]
    assert sum(map(abs, first)) <= chance * sizes[0] / (looks.stop - 1) * len(first)
    assert found.count(1) == found.count(-1)


def test_a_trend_of_each_start_counts_and_what_differs_between_starts_does_not() -> None:
    starts = [[level + 0.1 * number for number in range(3)] for level in (5.0, -3.0, 40.0, 7.0, 0.0, -9.0)]
    assert direction_of(starts, range(3, 19)) == 1
    assert direction_of([start[::-1] for start in starts], range(3, 19)) == -1
    assert direction_of([[level] * 3 for level in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)], range(3, 19)) == 0, "equal is no trend"
    rising_levels = [[float(level), level + 0.2, level + 0.1] for level in range(6)]
    assert direction_of(rising_levels, range(3, 19)) == 0
    rising = [float(number) for number in range(8)]
    assert [direction_of([values], range(8, 11)) for values in (rising, rising[:7])] == [1, 0], "before its first look is none"


NOISES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, number: rng.standard_normal(number),
    "skewed": lambda rng, number: rng.exponential(size=number),
    "neighbours": lambda rng, number: rng.standard_normal(number) + 5 * (rng.random(number) < 0.1),
}


@pytest.mark.parametrize("noise", NOISES)
def test_a_steady_load_is_seldom_called_unsteady(noise: str) -> None:
    rng, loads = np.random.default_rng(11), 3000
    found = [direction_of([NOISES[noise](rng, number).tolist() for number in (10, 3, 3, 3)], LOOKS) for _ in range(loads)]
    assert sum(map(abs, found)) / loads <= CHANCE + 3 * math.sqrt(CHANCE / loads)


def test_a_line_leads_to_its_end() -> None:
    line = [0.001 * number for number in range(6)]
    assert leads_to(line, 10) == pytest.approx(0.009)
    assert leads_to(line, 99) == pytest.approx(0.011), "it looks ahead as long as it saw"
    assert leads_to(line, 2) == pytest.approx(0.005), "what was measured counts, however few were planned"
    assert leads_to(line[:2], 10) is None
    assert change_of([line, line[:3]]) == pytest.approx(0.005)


def test_with_noise_it_leads_a_standard_error_further() -> None:
    values = np.array([0.1, -0.2, 0.4, 0.3, -0.1, 0.5])
    line = stats.linregress(np.arange(6), values)
    at, middle = 9.0, 2.5
    residuals = values - line.intercept - line.slope * np.arange(6)
    noise = float((residuals**2).sum()) / 4
    error = math.sqrt(noise / 6 + (line.stderr * (at - middle)) ** 2)
    assert leads_to(values.tolist(), 10) == pytest.approx(line.intercept + line.slope * at + error)


def test_a_trend_raises_an_upper_bound_and_never_lowers_one() -> None:
    interval, rising = Interval(lower=-0.01, upper=0.03), [0.0, 0.01, 0.02, 0.03, 0.04]
    assert with_trend(interval, rising[:3], [3], 3) == interval
    raised = with_trend(interval, rising[:3], [3], 6)
    assert (raised.lower, raised.upper) == pytest.approx((-0.01, math.expm1(0.05)))
    assert with_trend(interval, rising, [5], 9).upper == pytest.approx(math.expm1(0.08))
    assert with_trend(interval, rising, [3, 5], 9).upper == pytest.approx(math.expm1(0.05)), "no later look undoes a decision"
    assert with_trend(interval, rising[::-1], [5], 9) == interval
    assert with_trend(interval, [0.5], [1], 6) == interval


FLAT, RISING = [[100.0 + 0.1 * (number % 2) for number in range(10)]], [[100.0 + number for number in range(10)]]
FALLING = [[109.0 - number for number in range(10)]]


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            RISING,
            FLAT,
            "this run's server +9.0%, the baseline's server +0.0%: this run's server gets slower, as one that leaks: look",
        ),
        (FALLING, FLAT, "this run's server gets faster, as one that still warms up: raise num_warmups"),
        (FLAT, RISING, "the baseline's server gets slower, as one that leaks: look at its memory"),
        (FLAT, FALLING, "the baseline's server gets faster, as one that still warms up: raise num_warmups"),
        (
            RISING,
            [],
            "from the first repeat to the last this run's server +9.0%: this run's server gets slower, as one that leaks",
        ),
    ],
)
def test_a_trend_is_said_with_server_size_and_remedy(ours: list[list[float]], theirs: list[list[float]], words: str) -> None:
    said = problem(ours, theirs, range(5, 11), "e2el_mean_ms")
    assert said is not None
    assert said.startswith("e2el_mean_ms changes with time, from the first repeat to the last ")
    assert words in said


# --- A comparison of loads


SETTINGS = LOAD.model_copy(update={"repeats": 3, "most_repeats": 10})
GATE = worsening_gate("tpot_mean_ms")


def repeats(folder: Path, times: list[float]) -> None:
    """As many repeats as times, each so many times as slow as a captured one."""
    captured_load(folder)
    for repeat, slower in enumerate(times, start=1):
        if repeat > 2:
            copy_repeat(folder, repeat, of=2 - repeat % 2)
        scale(folder, repeat, slower)


STEADY = [1.0, 1.004, 0.998, 1.002, 0.997, 1.003, 1.001, 0.999]
LEAKS = [1 + 0.01 * number for number in range(8)]


def test_a_load_in_turns_of_which_one_server_leaks_is_invalid(evidence: Path) -> None:
    repeats(evidence / "load", LEAKS)
    repeats(evidence / "load" / result.BESIDE, STEADY)
    row = one(in_turns([GATE], load=SETTINGS), evidence, "load")
    assert "this run's server gets slower, as one that leaks" in reason(row)
    assert is_decided(GATE, [row])


def test_a_load_in_turns_whose_servers_slow_down_together_counts(evidence: Path) -> None:
    repeats(evidence / "load", [each * other for each, other in zip(LEAKS, STEADY, strict=True)])
    repeats(evidence / "load" / result.BESIDE, LEAKS)
    assert one(in_turns([GATE], load=SETTINGS), evidence, "load").value == pytest.approx(0, abs=0.01)


def test_a_load_beside_history_that_slows_down_is_invalid(evidence: Path, tmp_path: Path) -> None:
    repeats(tmp_path / "then" / "load", STEADY)
    keep_history(evidence, tmp_path / "then" / "load", SETTINGS)
    repeats(evidence / "load", LEAKS)
    for repeat in range(1, 9):
        # What rises must be more than what the two captured repeats differ by.
        scale(evidence / "load", repeat, 1 + 0.1 * repeat)
    row = one(cell_plan_of([GATE], load=SETTINGS), evidence, "load")
    assert "this run's server gets slower, as one that leaks" in reason(row)


def test_a_trend_that_is_not_sure_still_keeps_a_gate_open(evidence: Path) -> None:
    """Five repeats are too few for the test, and their mean alone would pass."""
    repeats(evidence / "load", [1 + 0.01 * number for number in range(5)])
    repeats(evidence / "load" / result.BESIDE, STEADY[:5])
    gate, more = worsening_gate("tpot_mean_ms", 0.06), LOAD.model_copy(update={"repeats": 5, "most_repeats": 10})
    row = one(in_turns([gate], load=more), evidence, "load")
    assert row.value == pytest.approx(0.02, abs=0.002)
    assert interval_of(row).upper == pytest.approx(0.11, abs=0.01)
    assert not is_decided(gate, [row])
    last = one(in_turns([gate], load=more.model_copy(update={"most_repeats": 5})), evidence, "load")
    assert is_decided(gate, [last]), "it is at the last repeat that there may be"


def test_bounds_are_made_once_for_each_course_of_a_load() -> None:
    assert steadiness._bounds_of_trend((5,), 5, 10, 0.01) is steadiness._bounds_of_trend((5,), 5, 10, 0.01)


# --- A comparison of answers


def test_a_server_that_answers_worse_with_each_repetition_is_invalid(evidence: Path) -> None:
    """On the whole the loss may be within the margin."""
    keep_baseline(evidence, right_but([]))
    ask(evidence, lambda question, repetition: WRONG if question in QUESTIONS[: repetition - 1] else RIGHT, steps=9 * BLOCKS)
    message = reason(one(cell_plan_of([loss_gate(0.2)]), evidence))
    assert "the server answers worse the longer it runs: its score fell from 100.00% in the first repetition to" in message
    assert "to 80.00% in the last of 9" in message


def test_a_server_that_surely_loses_has_lost_though_it_fades(evidence: Path) -> None:
    keep_baseline(evidence, right_but([]))
    ask(evidence, lambda question, repetition: WRONG if question in QUESTIONS[: repetition + 20] else RIGHT, steps=9 * BLOCKS)
    assert interval_of(one(cell_plan_of([loss_gate(0.2)]), evidence)).lower > 0.2


def test_a_repetition_that_was_broken_off_is_no_step_of_a_trend(evidence: Path) -> None:
    """Six that fall are not sure yet, and a seventh would be."""
    keep_baseline(evidence, right_but([]))
    ask(evidence, lambda question, at: WRONG if question in QUESTIONS[: at - 1] or at == 7 else RIGHT, steps=6 * BLOCKS + 1)
    assert one(cell_plan_of([loss_gate(0.2)]), evidence).value is not None


def test_scores_that_go_up_and_down_do_not_fade(evidence: Path) -> None:
    """And what was asked in part of a last repetition is no repetition."""
    keep_baseline(evidence, right_but([]))
    order = (4, 1, 3, 0, 5, 2, 4, 1, 3)
    ask(evidence, lambda question, at: WRONG if question in QUESTIONS[: order[at - 1]] else RIGHT, steps=8 * BLOCKS + 1)
    assert one(cell_plan_of([loss_gate(0.2)]), evidence).value == pytest.approx(23 / 8 / 40, abs=0.02)


# --- Where the trend of several starts leads


def test_the_trend_of_several_starts_leads_to_the_repeat_after_the_longest() -> None:
    """By hand: both starts have -1 a repeat and rests of ±0.1; the mean is -0.8, and 1.2 repeats before the fourth."""
    starts = [[0.1, -1.2, -1.9], [0.0, -1.0]]
    slope = (1.0 * (0.1 + 1.9) + 0.5 * (0.0 + 1.0)) / 2.5
    rests = [0.1 + 1.0 - slope, -1.2 + 1.0, -1.9 + 1.0 + slope, 0.5 - slope / 2, -0.5 + slope / 2]
    noise = sum(rest**2 for rest in rests) / (5 - 2 - 1)
    ahead = 3 - (0 + 1 + 2 + 0 + 1) / 5
    leads = -0.8 - slope * ahead - float(stats.t.ppf(float(stats.norm.cdf(1)), 2)) * math.sqrt(noise * (1 / 5 + ahead**2 / 2.5))
    found = with_trend_of_starts(Interval(lower=-0.1, upper=0.5), starts)
    assert found.lower == pytest.approx(math.expm1(leads))
    assert found.upper == 0.5


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param([[0.02, 0.03]], id="too few repeats for an error"),
        pytest.param([[0.02], [0.03], [0.04]], id="one repeat a start"),
        pytest.param([[0.01, 0.02, 0.03], [0.01, 0.02], [0.02, 0.03]], id="it rises"),
        pytest.param([[0.03, 0.01, 0.029], [0.02, 0.03], [0.031, 0.02]], id="three starts, and chance explains it"),
    ],
)
def test_what_is_no_trend_of_several_starts_leads_nowhere(starts: list[list[float]]) -> None:
    interval = Interval(lower=-0.5, upper=0.5)
    assert with_trend_of_starts(interval, starts) == interval


def test_of_three_starts_without_a_trend_chance_moves_few_intervals() -> None:
    """One error, on one side: 16 %."""
    rng, wide = np.random.default_rng(2), Interval(lower=10.0, upper=11.0)
    moved = sum(
        with_trend_of_starts(wide, [rng.standard_normal(size).tolist() for size in (3, 2, 2)]) != wide for _ in range(4000)
    )
    assert moved / 4000 == pytest.approx(0.159, abs=0.02)
