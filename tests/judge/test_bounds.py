"""Bounds that a run suggests: outside of its interval by what it can see, and none where it sees nothing."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders.captured_runs import judged, run
from vllm_qualify.evidence.accuracy import answers
from vllm_qualify.evidence.accuracy.lm_eval_process import ANSWERS
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.measurement import Interval, Measurement
from vllm_qualify.judge.bounds import Bound, Hurts, find_named, outside_bound, suggest_bounds
from vllm_qualify.recipe.gates import Gate, gate_of
from vllm_qualify.recipe.metrics import METRICS, StageName
from vllm_qualify.runs.folder import Run

__all__ = ["judged", "run"]
NOTHING = Hurts()


@pytest.mark.parametrize(
    ("metric", "value", "lower", "upper", "bound"),
    [
        # 0.912 is 0.023 above its lower end, so the bound is at 0.889 - 0.023 = 0.866 or below.
        ("exact_match", 0.912, 0.889, 0.931, 0.86),
        ("output_throughput_tok_s", 12608.4, 12523.9, 12692.9, 12430),
        ("ttft_p99_ms", 333.8, 331.6, 336.0, 339),
        ("tpot_p50_ms", 34.64, 34.41, 34.87, 35.1),
        ("truncated_answers", 0.0, 0.0, 0.00703, 0.015),
        # Without any noise it still is not the value.
        ("ttft_p50_ms", 20.0, 20.0, 20.0, 21),
        ("exact_match", 1.0, 1.0, 1.0, 0.9),
        # Memory that shrinks: no bound is negative.
        ("soak_host_memory_growth_mib_h", -50.0, -60.0, -40.0, 0.0),
    ],
)
def test_a_bound_by_hand(metric: str, value: float, lower: float, upper: float, bound: float) -> None:
    assert outside_bound(value, Interval(lower=lower, upper=upper), METRICS[metric]) == pytest.approx(bound, abs=1e-12)


WIDTHS = st.floats(1e-6, 0.4)


@given(value=st.floats(1e-3, 1e6), below=WIDTHS, above=WIDTHS)
def test_a_bound_is_outside_by_what_the_run_sees_and_hardly_more(value: float, below: float, above: float) -> None:
    ends = Interval(lower=value * (1 - below), upper=value * (1 + above))
    least, most = (outside_bound(value, ends, METRICS[name]) for name in ("request_throughput_req_s", "ttft_p50_ms"))
    (seen_below, seen_above), little = (value - ends.lower, ends.upper - value), 1e-9 * value
    assert ends.lower - 2 * seen_below - little <= least <= ends.lower - seen_below + little
    assert ends.upper + seen_above - little <= most <= ends.upper + 2 * seen_above + little


def bounds_of(run: Run, own: Sequence[Gate] = (), hurts: Hurts = NOTHING, **rows: Measurement) -> dict[str, Bound]:
    """By label; `rows` replace the measurements with their metrics."""
    stages = [
        stage.model_copy(update={"measurements": [rows.get(row.metric, row) for row in stage.measurements]})
        for stage in run.stages()
    ]
    return {bound.label: bound for bound in suggest_bounds(run.plan, stages, run.evidence, own, hurts)}


def row_of(run: Run, stage: StageName, metric: str, **changes: object) -> Measurement:
    found = run.stage(stage)
    assert found is not None
    row = next(row for row in found.measurements if row.metric == metric)
    return Measurement.model_validate(row.model_dump() | changes)


def test_only_metrics_that_a_recipe_may_gate_have_bounds(run: Run) -> None:
    metrics = {label.split()[0] for label in bounds_of(run)}
    assert {"exact_match", "truncated_answers", "output_throughput_tok_s", "ttft_p50_ms"} <= metrics
    assert not [name for name in metrics if name.startswith(("smoke_", "contract_", "startup_"))]


def test_what_cannot_be_trusted_or_is_too_noisy_has_no_bound_but_the_reason(run: Run) -> None:
    invalid = row_of(run, "load", "ttft_p50_ms", value=None, interval=None, repeats=[], invalid_because="2 requests failed")
    once = row_of(run, "load", "tpot_p50_ms", interval=None)
    wide = row_of(run, "load", "output_throughput_tok_s", value=971.8, interval={"lower": 480.0, "upper": 2750.0}, repeats=[])
    slow = row_of(run, "load", "e2el_p50_ms", value=500.0, interval={"lower": 200.0, "upper": 760.0}, repeats=[])
    bounds = bounds_of(run, ttft_p50_ms=invalid, tpot_p50_ms=once, output_throughput_tok_s=wide, e2el_p50_ms=slow)
    for label, reason in (
        ("ttft_p50_ms", "2 requests failed"),
        ("tpot_p50_ms", "which shows no noise"),
        ("output_throughput_tok_s", "too noisy: the run sees no change under 492 tok/s"),
        ("e2el_p50_ms", "too noisy: the run sees no change under 260 ms"),
    ):
        assert (bounds[label].state, bounds[label].gate) == ("none", None)
        assert reason in bounds[label].reason


def test_shares_that_say_nothing_have_no_bound(run: Run) -> None:
    nothing = row_of(run, "accuracy", "truncated_answers", value=0.5, interval={"lower": 0.1, "upper": 0.9})
    bound = bounds_of(run, truncated_answers=nothing)["truncated_answers (gsm8k)"]
    assert bound.gate is None
    assert "too noisy: all would meet a bound 40 pp outside" in bound.reason


@pytest.mark.parametrize(("maximum", "said"), [(30_000, "tighter"), (1, "looser")])
def test_a_gate_of_the_recipe_is_kept_and_the_suggestion_only_shown(run: Run, maximum: float, said: str) -> None:
    own = gate_of(metric="ttft_p50_ms", maximum=maximum, unit="ms")
    row = row_of(run, "load", "ttft_p50_ms", value=100.0, interval={"lower": 95.0, "upper": 105.0}, repeats=[])
    bounds = bounds_of(run, [own], ttft_p50_ms=row)
    kept = bounds["ttft_p50_ms"]
    assert (kept.state, kept.own) == ("kept", own)
    assert f"the run suggests a {said} one" in kept.reason
    assert kept not in list(find_named(list(bounds.values()), ["ttft_p50_ms"]))
    # Nor is a gate of the same kind added.
    assert not [label for label, bound in bounds.items() if label.startswith("ttft_") and bound.is_usual and bound != kept]


def test_the_usual_ones_are_one_score_of_each_task_and_one_of_each_kind(run: Run) -> None:
    usual = [label for label, bound in bounds_of(run).items() if bound.is_usual and bound.state == "proposed"]
    for kind in ("exact_match", "ttft_", "tpot_"):
        assert len([label for label in usual if label.startswith(kind)]) <= 1
    assert not [label for label in usual if label.startswith(("itl_", "e2el_", "looping_"))]


STRICT = "exact_match (gsm8k, flexible-extract)"
OWN = gate_of(metric="exact_match", task="gsm8k", filter="flexible-extract", minimum=0.1, unit="fraction")


def test_nothing_is_compared_unless_the_user_says_what_hurts(run: Run) -> None:
    assert not [label for label in bounds_of(run, [OWN]) if "against" in label]


@pytest.fixture
def asked(run: Run) -> Run:
    """The run with its answers, of which some are to a question that was asked twice."""
    (task,), folder = run.plan.accuracy, run.evidence / "accuracy" / "gsm8k"
    answers.write(read_answers(folder, task, 1), folder / ANSWERS)
    return run


def test_a_small_loss_costs_more_answers_than_a_large_one(asked: Run) -> None:
    costs = []
    for loss in (0.5, 0.4, 0.3):
        bound = bounds_of(asked, [OWN], Hurts(loss=loss))[f"{STRICT} against the baseline"]
        assert bound.price is not None
        costs.append(bound.price.answers or 0)
    assert sorted(costs) == costs
    assert costs[0] < costs[-1]


def test_a_loss_that_the_questions_cannot_show_gets_no_gate_but_the_number_of_questions(asked: Run) -> None:
    """Eight questions: a loss of one in a thousand cannot be seen, however often they are asked."""
    bound = bounds_of(asked, [OWN], Hurts(loss=0.001))[f"{STRICT} against the baseline"]
    assert (bound.state, bound.gate) == ("none", None)
    assert "8 questions asked 10 times do not show it: ask " in bound.reason


def test_a_worsening_has_the_price_of_its_repeats(run: Run) -> None:
    """By hand: the standard deviation of two repeats is the square root of their variance of logarithms."""
    (own,) = [gate_of(metric="ttft_p50_ms", maximum=30_000, unit="ms")]
    steady = row_of(run, "load", "ttft_p50_ms", value=100.0, interval={"lower": 99.0, "upper": 101.0}, repeats=[99.9, 100.1])
    noisy = row_of(run, "load", "ttft_p50_ms", value=100.0, interval={"lower": 60.0, "upper": 160.0}, repeats=[60.0, 160.0])
    label, hurts = "ttft_p50_ms against the baseline", Hurts(worsening=0.05)
    cheap, dear = (bounds_of(run, [own], hurts, ttft_p50_ms=row)[label] for row in (steady, noisy))
    assert cheap.price is not None
    assert (cheap.state, cheap.price.repeats) == ("proposed", 2)
    load = run.stage("load")
    assert load is not None
    assert cheap.price.minutes == pytest.approx(load.duration_s / 60)
    assert dear.state == "none"
    assert "its repeats scatter" in dear.reason


def test_answers_that_are_gone_have_no_price(run: Run) -> None:
    bound = bounds_of(run, [OWN], Hurts(loss=0.1))[f"{STRICT} against the baseline"]
    assert (bound.state, bound.price) == ("none", None)
    assert "its price is not known" in bound.reason


def test_a_loss_that_is_more_than_the_run_answers_gets_no_gate(asked: Run) -> None:
    """A model that answers nothing right can lose nothing, and a gate on its loss would pass whatever comes."""
    bounds = bounds_of(asked, [OWN], Hurts(loss=0.99))
    bound = bounds[f"{STRICT} against the baseline"]
    assert (bound.state, bound.gate) == ("none", None)
    assert "no such loss can come: ask what this model can answer" in bound.reason
