"""Verdicts: no evidence never passes, and every metric is judged in its direction."""

import math
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.directions import COSTS, HIGHER_IS_BETTER, LOWER_IS_BETTER
from vllm_qualify.evidence import measurement
from vllm_qualify.evidence.measurement import Interval, Measurement, geometric_mean, invalid, share_interval, valid
from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.judge.expectations import judge, measurement_table
from vllm_qualify.judge.verdict import WORST_FIRST, Checks, verdict_from, worst_verdict
from vllm_qualify.recipe.gates import Gate, Verdict, gate_of
from vllm_qualify.recipe.metrics import METRICS, Metric

AT = Sides(0.05, 0.05)
ACCURACY = gate_of(metric="exact_match", task="gsm8k", filter="strict-match", minimum=0.9, unit="fraction")
TTFT = gate_of(metric="ttft_p99_ms", maximum=100.0, unit="ms")
SMOKE = gate_of(metric="smoke_usage", minimum=1.0, unit="bool")


def repeat_interval(repeats: list[float]) -> Interval:
    interval = measurement.repeat_interval(repeats, AT)
    assert interval is not None
    return interval


def accuracy(right: int, of: int, **others: Any) -> Measurement:
    about = {"task": "gsm8k", "filter": "strict-match", "sample_count": of, "interval": share_interval(right, of, AT)} | others
    return valid("exact_match", right / of, "accuracy/results.json", **about)


def measure_repeats(metric: str, repeats: list[float]) -> Measurement:
    about = {"repeats": repeats, "interval": measurement.repeat_interval(repeats, AT), "sample_count": 100}
    return valid(metric, geometric_mean(repeats), "load/bench-*.json", **about)


def verdict_of(gate: Gate, *measurements: Measurement) -> Verdict:
    judgement = judge([gate], measurements, "cell")
    assert judgement.verdict == judgement.gates[0].verdict
    return judgement.verdict


@pytest.mark.parametrize(
    ("gate", "measurements", "expected"),
    [
        (ACCURACY, [accuracy(480, 500)], "pass"),
        (ACCURACY, [accuracy(400, 500)], "fail"),
        (ACCURACY, [accuracy(452, 500)], "inconclusive"),
        (ACCURACY, [], "invalid"),
        (ACCURACY, [accuracy(480, 500, filter="flexible-extract")], "invalid"),
        (ACCURACY, [accuracy(480, 500), accuracy(480, 500)], "invalid"),
        (ACCURACY, [accuracy(480, 500).model_copy(update={"sample_count": 0})], "invalid"),
        (ACCURACY, [invalid("exact_match", "no samples", "x", task="gsm8k", filter="strict-match")], "invalid"),
        (ACCURACY, [valid("exact_match", math.nan, "x", task="gsm8k", filter="strict-match", sample_count=500)], "invalid"),
        (ACCURACY, [valid("exact_match", math.inf, "x", task="gsm8k", filter="strict-match", sample_count=500)], "invalid"),
        (ACCURACY, [accuracy(480, 500, interval=None)], "inconclusive"),
        (TTFT, [measure_repeats("ttft_p99_ms", [50, 52, 51])], "pass"),
        (TTFT, [measure_repeats("ttft_p99_ms", [150, 152, 151])], "fail"),
        (TTFT, [measure_repeats("ttft_p99_ms", [60, 160, 90])], "inconclusive"),
        (TTFT, [measure_repeats("ttft_p99_ms", [50])], "inconclusive"),
        (TTFT, [measure_repeats("ttft_p90_ms", [50, 52, 51])], "invalid"),
        (SMOKE, [valid("smoke_usage", 1.0, "x", sample_count=2)], "pass"),
        (SMOKE, [valid("smoke_usage", 0.0, "x", sample_count=2)], "fail"),
    ],
)
def test_a_gate_over_a_table(gate: Gate, measurements: list[Measurement], expected: Verdict) -> None:
    assert verdict_of(gate, *measurements) == expected


ENDED = "time_budget_s 100 ended the load after 2 repeats in 80 s: another may take 45 s"


@pytest.mark.parametrize(
    ("row", "verdict", "message"),
    [
        (measure_repeats("ttft_p99_ms", [90.0, 120.0]), "inconclusive", f"the bound lies within the interval: {{}}; {ENDED}"),
        (
            measure_repeats("ttft_p99_ms", [50.0, 51.0]).model_copy(update={"interval": None}),
            "inconclusive",
            f"it ended before the first planned look: {{}}; {ENDED}",
        ),
        (measure_repeats("ttft_p99_ms", [50.0]), "inconclusive", f"measured once, which shows no noise: {{}}; {ENDED}"),
        (measure_repeats("ttft_p99_ms", [50.0, 51.0]), "pass", "the whole interval meets the bound"),
        (measure_repeats("ttft_p99_ms", [150.0, 151.0]), "fail", "the whole interval misses the bound"),
    ],
)
def test_what_a_budget_left_undecided_is_inconclusive_and_names_it(row: Measurement, verdict: Verdict, message: str) -> None:
    (gate,) = judge([TTFT], [row.model_copy(update={"ended_because": ENDED})], "cell").gates
    assert (gate.verdict, gate.because) == (verdict, message.format("what was measured does not decide"))
    assert gate.value == row.value


def test_the_reason_of_an_invalid_measurement_is_reported_at_each_gate_also_if_no_filter_was_known() -> None:
    """The second one is of a stage that failed before its filters were known."""
    rows = [invalid("ttft_p99_ms", "3 of 20 requests completed", "x"), invalid("exact_match", "lm-eval left no result", "x")]
    gates = judge([TTFT, ACCURACY], rows, "cell").gates
    assert [(gate.verdict, gate.because) for gate in gates] == [("invalid", row.invalid_because) for row in rows]


def test_the_smallest_visible_change_is_the_way_from_the_value_to_the_judged_bound() -> None:
    repeats = [50.0, 52.0, 51.0]
    accuracies, latencies = share_interval(480, 500, AT), repeat_interval(repeats)
    gates = judge([ACCURACY, TTFT], [accuracy(480, 500), measure_repeats("ttft_p99_ms", repeats)], "cell").gates
    expected = [0.96 - accuracies.lower, latencies.upper - geometric_mean(repeats)]
    assert [gate.smallest_visible_change for gate in gates] == pytest.approx(expected)


def test_every_metric_is_better_in_the_direction_that_people_expect() -> None:
    costs = {name for name, metric in METRICS.items() if metric.unit in COSTS}
    assert not costs & HIGHER_IS_BETTER
    assert {name: metric.direction for name, metric in METRICS.items()} == {
        **dict.fromkeys(HIGHER_IS_BETTER, "higher"),
        **dict.fromkeys(LOWER_IS_BETTER | costs, "lower"),
    }


def bound_of(metric: Metric) -> tuple[Gate, Measurement, Measurement]:
    """A gate, a good value, and one that is 20 % worse. The bound lies halfway between the two values.

    A check is either 1 or 0, and its bound is 1.
    """
    higher, name_filter = metric.name in HIGHER_IS_BETTER, "none" if metric.is_score else None
    good, bound, worsened = (0.8, 0.72, 0.64) if higher else (0.8, 0.88, 0.96)
    if metric.unit == "bool":
        good, bound, worsened = 1.0, 1.0, 0.0
    about = {"metric": metric.name, "unit": metric.unit, "filter": name_filter}
    absolute, compared = ("minimum", "min_top1_agreement") if higher else ("maximum", "max_nll_increase")
    gate = gate_of(**{**about, compared if metric.stage == "likelihood" else absolute: bound})
    others = {"against": "a run"} if metric.stage == "likelihood" else {}

    def measured(value: float) -> Measurement:
        interval = {"lower": value * 0.99, "upper": min(value * 1.01, 1.0)}
        return valid(metric.name, value, "x", filter=name_filter, sample_count=500, interval=interval, **others)

    return gate, measured(good), measured(worsened)


@cache
def at_the_bounds() -> dict[str, tuple[Verdict, Verdict]]:
    """By metric the verdicts on a good value and on a worse one. All gates at once: what a suite takes is mostly its start."""
    gates, good, worsened = zip(*map(bound_of, METRICS.values()), strict=True)
    both = [[each.verdict for each in judge(gates, values, "cell").gates] for values in (good, worsened)]
    return dict(zip(METRICS, zip(*both, strict=True), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", METRICS)
def test_a_worsening_of_20_percent_is_seen_in_every_metric(name: str) -> None:
    assert at_the_bounds()[name] == ("pass", "fail")


def test_every_way_to_pass_goes_through_every_check() -> None:
    names = list(Checks.model_fields)
    passing = [
        values
        for values in product([True, False], repeat=len(names))
        if verdict_from(Checks(**dict(zip(names, values, strict=True)))) == "pass"
    ]
    assert passing == [(True,) * len(names)]


def test_a_cell_is_as_good_as_its_worst_gate_and_nothing_without_gates() -> None:
    for first, second in product(WORST_FIRST, repeat=2):
        assert worst_verdict([first, second]) == min(first, second, key=WORST_FIRST.index)
    assert worst_verdict([]) == "invalid"
    assert not judge([], [accuracy(480, 500)], "cell").passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -0.1, 1.1, "0.95", None, True], ids=str)
@pytest.mark.parametrize("column", ["value", "lower", "upper"])
def test_a_table_with_a_bad_number_is_never_approved(column: str, bad: Any) -> None:
    """Also one that came past the models, as from another hand."""
    good = accuracy(480, 500)
    assert good.interval is not None
    bounds = good.interval.model_dump() | ({column: bad} if column != "value" else {})
    fields: dict[str, Any] = {**dict(good), "interval": Interval.model_construct(**bounds)}
    if column == "value":
        fields["value"] = bad
    assert not judge([ACCURACY], [Measurement.model_construct(**fields)], "cell").passed


@pytest.mark.thorough
@settings(max_examples=200)
@given(value=st.floats() | st.floats(0, 1) | st.none(), reason=st.none() | st.text(min_size=1))
def test_a_measurement_has_a_finite_value_or_a_reason(value: float | None, reason: str | None) -> None:
    def build() -> Measurement:
        return Measurement(
            metric="exact_match", value=value, unit="fraction", sample_count=1, source="x", invalid_because=reason
        )

    if (value is None) == (reason is None) or not (value is None or 0 <= value <= 1):
        with pytest.raises(ValidationError):
            build()
    else:
        assert build().value == value


@settings(max_examples=100)
@given(st.lists(st.floats(min_value=1e-3, max_value=1e6), min_size=2, max_size=9))
def test_the_interval_of_repeats_holds_their_typical_value_and_is_never_below_zero(repeats: list[float]) -> None:
    interval = repeat_interval(repeats)
    assert 0 <= interval.lower <= geometric_mean(repeats) * (1 + 1e-9)
    assert interval.upper >= geometric_mean(repeats) * (1 - 1e-9)


def test_intervals_agree_with_published_figures() -> None:
    # Wilson's interval for 5 of 10 at 90 %: Brown, Cai, DasGupta 2001, formula (4), with z = 1.6449
    z, share, n = 1.6448536, 0.5, 10
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    bounds = share_interval(5, 10, AT)
    assert [bounds.lower, bounds.upper] == pytest.approx([middle - half, middle + half], abs=1e-6)
    # Student's t at .95 with 2 degrees of freedom is 2.91999
    upper = repeat_interval([math.e**1, math.e**2, math.e**3]).upper
    assert math.log(upper) == pytest.approx(2 + 2.91999 / math.sqrt(3), abs=1e-4)


def test_the_table_has_a_row_for_each_measurement_and_marks_the_invalid() -> None:
    table = measurement_table([accuracy(1, 2), invalid("itl_p99_ms", "why", "x")])
    assert list(table["label"]) == ["exact_match (gsm8k, strict-match)", "itl_p99_ms"]
    assert list(table["valid"]) == [True, False]
    assert math.isnan(table["value"][1])


def test_the_suite_and_its_result_are_kept_and_are_json() -> None:
    judgement = judge([ACCURACY], [accuracy(480, 500)], "reference/bf16/cpu/balanced")
    assert judgement.suite["name"] == "reference/bf16/cpu/balanced"
    again = type(judgement).model_validate_json(judgement.model_dump_json())
    assert again.gates == judgement.gates
    expectations, results = judgement.suite["expectations"], judgement.validation["results"]
    assert isinstance(expectations, list)
    assert isinstance(results, list)
    assert len(expectations) == len(results) > 0
