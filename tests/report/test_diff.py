"""Two reports side by side: they name what differs, and only like is compared with like."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.builders.changed import changed
from tests.directions import HIGHER_IS_BETTER
from tests.report.builder import (
    HOSTILE,
    SCRIPT,
    baseline_of,
    detailed_report,
    image_report,
    not_passed_report,
    passed_report,
    waiver_of,
)
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.evidence.measurement import Interval, Measurement, invalid, valid
from vllm_qualify.judge.compare.settings import load_differs
from vllm_qualify.plan.cell import LikelihoodPlan
from vllm_qualify.recipe.accuracy import Likelihood
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.load import Load, Slo
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.report.diff import (
    NO_NOISE_KNOWN,
    WITHIN_NOISE,
    Change,
    Moved,
    ReportDiff,
    changed_gates,
    changed_settings,
    diff,
    words_of_change,
)
from vllm_qualify.report.model import Report
from vllm_qualify.report.terminal import show_diff
from vllm_qualify.report.words import words_of_bound

OTHER_GPU = Fingerprint(
    gpu_type="h100", name="NVIDIA H100", count=1, memory_mib=81559, compute_capability="9.0", driver="575.51.03"
)
RATE = "output_throughput_tok_s"


def _replace_measurements(report: Report, *measurement: Measurement) -> Report:
    """With these in place of the load's measurements of the same names."""
    fresh = {row.label: row for row in measurement}
    stages = report.stages
    rows = [[fresh.get(row.label, row) for row in stage.measurements] for stage in stages]
    return changed(report, stages=[changed(stage, measurements=each) for stage, each in zip(stages, rows, strict=True)])


def _find_moved(compared: ReportDiff, label: str) -> Moved:
    (moved,) = (each for each in compared.measurements if each.label == label)
    return moved


def _make_rate(value: float, reach: float | None = 0.01) -> Measurement:
    interval = Interval(lower=value * (1 - reach), upper=value * (1 + reach)) if reach is not None else None
    return valid(RATE, value, "load/", sample_count=3000, interval=interval)


def _print_diff(compared: ReportDiff, width: int = 120, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    show_diff(compared, Console(file=file, width=width, legacy_windows=False))
    return raw.getvalue().decode(encoding)


# --- what went in


def test_a_report_beside_itself_differs_in_nothing(approved: Report) -> None:
    difference = diff(approved, approved)
    parts = difference.model_dump(exclude={"diff_version", "a", "b", "measurements"})
    assert [part for part, differs in parts.items() if differs] == []
    assert len(parts) == 11
    assert {moved.trend for moved in difference.measurements} == {"equal"}
    assert len(difference.measurements) >= len([row for stage in approved.stages for row in stage.measurements])


def test_an_image_is_reported_with_tag_digest_and_client(approved: Report) -> None:
    difference = {change.what: change for change in diff(approved, image_report()).release}
    engine = image_report().plan.cell.release.engine
    assert engine.image is not None
    assert difference["image.reference"].b == engine.image.reference
    assert difference["engine.digest"].a == approved.plan.cell.release.engine.digest
    assert difference["engine.digest"].b == engine.digest
    assert "v0.31.0" not in str(difference["client image"].b)
    assert str(difference["client image"].b).startswith("registry.example:5000/vllm/vllm-openai@sha256:")


def test_options_and_variables_of_the_server_are_added_removed_and_changed_one_by_one(approved: Report) -> None:
    arguments = dict(approved.plan.server.arguments)
    del arguments["kv-cache-dtype"]
    compilation: dict[str, Any] = {"pass_config": {"fuse_allreduce_rms": False}, "cudagraph_mode": "FULL_AND_PIECEWISE"}
    arguments |= {"max-num-seqs": 320, "async-scheduling": True, "compilation-config": compilation}
    environment = {"NCCL_DEBUG": "INFO", "VLLM_USE_V2": "1"}
    difference = diff(approved, changed(approved, "plan.server", arguments=arguments, environment=environment))
    assert difference.server == [
        Change(what="kv-cache-dtype", kind="removed", a="fp8"),
        Change(what="compilation-config.pass_config.fuse_allreduce_rms", kind="changed", a=True, b=False),
        Change(what="max-num-seqs", kind="changed", a=256, b=320),
        Change(what="async-scheduling", kind="added", b=True),
    ]
    assert [(change.what, change.kind) for change in difference.environment] == [
        ("VLLM_LOGGING_LEVEL", "removed"),
        ("NCCL_DEBUG", "changed"),
        ("VLLM_USE_V2", "added"),
    ]


def test_a_text_is_not_the_number_that_it_looks_like_and_zero_is_not_missing() -> None:
    assert changed_settings({"x": 1}, {"x": "1"}) == [Change(what="x", kind="changed", a=1, b="1")]
    assert changed_settings({"x": False, "y": 0}, {"x": None}) == [
        Change(what="x", kind="removed", a=False),
        Change(what="y", kind="removed", a=0),
    ]
    shown = _print_diff(diff(*(changed(passed_report(), "plan.server", environment={"X": value}) for value in ("1", "on"))))
    assert '~ X: "1" → on' in shown


def test_gates_and_waivers_are_compared_by_their_bounds(approved: Report) -> None:
    kept = [gate for gate in approved.plan.gates if gate.metric != "tpot_p99_ms" and gate.metric != "ttft_p99_ms"]
    gates = [*kept, gate_of(metric="ttft_p99_ms", maximum=500.0, unit="ms")]
    other = changed(approved, "plan", gates=gates, waivers=[waiver_of("ttft_p99_ms", "Grace", SCRIPT)])
    assert [(change.what, change.kind) for change in diff(approved, other).gates] == [
        ("ttft_p99_ms", "changed"),
        ("tpot_p99_ms", "removed"),
        ("waiver of ttft_p99_ms", "added"),
    ]


def test_tools_are_compared(approved: Report) -> None:
    older = changed(approved, stages=[changed(stage, tools={"lm-eval": "0.4.12"}) for stage in approved.stages])
    difference = diff(older, approved)
    assert Change(what="lm-eval", kind="changed", a="0.4.12", b="0.4.13") in difference.tools
    assert [unlike.stages for unlike in difference.unlike] == [["accuracy"]]


# --- what cannot be compared


@pytest.mark.parametrize(
    ("change", "stages", "reason"),
    [
        (lambda report: changed(report, "plan", fingerprint=OTHER_GPU), {"serve", "load"}, "B on NVIDIA H100"),
        (lambda report: changed(report, "plan.load", input_len=2048), {"load"}, "input_len 1024 and 2048"),
        (lambda report: changed(report, "plan.load", max_concurrency=32), {"load"}, "max_concurrency 64 and 32"),
        (
            lambda report: changed(report, "plan", client=image_report().plan.client),
            {"load"},
            "load client was vLLM 0.32.0, B's 0.31.0",
        ),
    ],
)
def test_what_was_measured_in_another_way_is_neither_better_nor_worse(
    approved: Report, change: Callable[[Report], Report], stages: set[str], reason: str
) -> None:
    difference = diff(approved, change(_replace_measurements(approved, _make_rate(20000.0))))
    assert {
        moved.stage for moved in difference.measurements if moved.trend == "unclear" and moved.a.value is not None
    } == stages
    moved = _find_moved(difference, RATE)
    assert (moved.trend, reason in moved.because) == ("unclear", True)
    assert moved.ratio == pytest.approx(20000.0 / 12608.4)
    shown = " ".join(_print_diff(difference).split())
    assert shown.index("Not comparable") < shown.index(reason) < shown.index("measurement A B")


def _with_baseline(report: Report, run_id: str, **settings: Any) -> Report:
    likelihood = LikelihoodPlan(settings=Likelihood(**settings))
    return changed(report, "plan", baseline=baseline_of(report.plan, run_id), likelihood=likelihood)


def test_likelihoods_of_other_texts_are_not_compared(approved: Report) -> None:
    a = _with_baseline(approved, "run-1")
    assert diff(a, a).unlike == []
    (other,) = diff(a, _with_baseline(approved, "run-2")).unlike
    assert (other.stages, other.because) == (["likelihood"], "A scored the answers of run run-1, B those of run-2")
    (fewer,) = diff(a, _with_baseline(approved, "run-1", num_answers=7)).unlike
    assert (fewer.stages, fewer.because) == (["likelihood"], "other texts were scored: num_answers 500 and 7")


@pytest.mark.parametrize(("metric", "trend"), [("answer_nll_nat_per_tok", "worse"), ("answer_top1_share", "better")])
def test_more_of_a_comparison_is_worse_and_more_agreement_is_better(approved: Report, metric: str, trend: str) -> None:
    less, more = (
        valid(metric, value, "x", sample_count=9, against="run-1", interval={"lower": value, "upper": value})
        for value in (0.2, 0.3)
    )

    before, now = (changed(approved, "judgement", comparisons=[row]) for row in (less, more))
    assert _find_moved(diff(before, now), f"{metric} against the baseline").trend == trend


def test_other_questions_another_slo_or_another_price_change_only_what_depends_on_them(approved: Report) -> None:
    (task,) = approved.plan.accuracy
    asked = diff(approved, changed(approved, "plan", accuracy=[changed(task, "settings", num_fewshot=8)]))
    trends = {moved.trend for moved in asked.measurements if moved.stage == "accuracy" and moved.a.task == "gsm8k"}
    assert trends == {"unclear"}
    assert "num_fewshot 5 and 8" in asked.unlike[0].because
    served = diff(approved, changed(approved, "plan.load", slo=Slo(ttft_ms=500.0)))
    assert [(unlike.metric, unlike.stages) for unlike in served.unlike] == [("goodput_req_s", ["load"])]
    assert _find_moved(asked, RATE).trend == _find_moved(served, RATE).trend == "equal"
    a = detailed_report()
    dearer, stricter = changed(a, "plan", price_usd_gpu_hour=3.0), changed(a, "plan.sweep", slo={"ttft_p99_ms": 500.0})
    assert _find_moved(diff(a, dearer), "slo_cost_usd_mtok").trend == "unclear"
    assert _find_moved(diff(a, dearer), "slo_concurrency_req").trend == "equal"
    assert _find_moved(diff(a, stricter), "slo_concurrency_req").trend == "unclear"


OTHERWISE: dict[str, Any] = {
    "input_len": 2048,
    "output_len": 512,
    "length_spread": 0.5,
    "api": "chat",
    "trace": "other.jsonl",
    "trace_speed": 2.0,
    "request_rate": 12.0,
    "burstiness": 0.5,
    "shared_prefix_len": 128,
    "num_warmups": 0,
    "repeats": 3,
    "most_repeats": 20,
    "time_budget_s": 600.0,
    "window": "whole",
    "min_duration_s": 90.0,
    "seed": 7,
    "time_limit_s": 60.0,
    "slo": Slo(ttft_ms=500.0),
    "max_concurrency": 32,
    "num_prompts": 2048,
    "prompts": "other.jsonl",
    "prompts_sha256": "ab" * 32,
    "seeded_by": "another",
    "turns": 4,
    "counted_from": "second chunk",
}


def test_every_setting_of_a_load_is_tried() -> None:
    assert OTHERWISE.keys() == Load.model_fields.keys()


@pytest.mark.parametrize("name", OTHERWISE)
def test_two_loads_are_alike_here_exactly_where_the_judge_takes_them_for_alike(approved: Report, name: str) -> None:
    other = changed(approved, "plan.load", **{name: OTHERWISE[name]})
    judged = load_differs(changed(other.plan, baseline=baseline_of(approved.plan)))
    assert (judged is not None) == (_find_moved(diff(approved, other), RATE).trend == "unclear")


# --- what came out


@pytest.mark.parametrize(
    ("a", "b", "trend", "because"),
    [
        (_make_rate(10000.0), _make_rate(12000.0), "better", ""),
        (_make_rate(12000.0), _make_rate(10000.0), "worse", ""),
        (_make_rate(10000.0), _make_rate(10100.0), "better", WITHIN_NOISE),
        (_make_rate(10000.0, None), _make_rate(12000.0), "better", NO_NOISE_KNOWN),
        (_make_rate(10000.0), _make_rate(10000.0), "equal", ""),
        (_make_rate(10000.0), invalid(RATE, "7 preemptions", "load/"), "unclear", "B is invalid: 7 preemptions"),
        (invalid(RATE, "3 failed", "load/"), _make_rate(10000.0), "unclear", "A is invalid: 3 failed"),
    ],
)
def test_a_measurement_is_reported_in_its_direction(
    approved: Report, a: Measurement, b: Measurement, trend: str, because: str
) -> None:
    moved = _find_moved(diff(_replace_measurements(approved, a), _replace_measurements(approved, b)), RATE)
    assert (moved.trend, moved.because) == (trend, because)
    assert moved.is_sure == (trend != "unclear" and not because)


@pytest.mark.parametrize("metric", [name for name, metric in METRICS.items() if metric.stage == "load"])
def test_a_fifth_more_is_better_or_worse_by_the_metric(approved: Report, metric: str) -> None:
    def measuring(value: float) -> Report:
        row = valid(metric, value, "load/", sample_count=9, interval=Interval(lower=value, upper=value))
        (load,) = (stage for stage in approved.stages if stage.stage == "load")
        return changed(approved, stages=[changed(load, measurements=[row])])

    # A share is at most 1.
    before = 0.5 if METRICS[metric].unit == "fraction" else 10.0
    (moved,) = diff(measuring(before), measuring(1.2 * before)).measurements
    assert moved.trend == ("better" if metric in HIGHER_IS_BETTER else "worse")
    assert moved.ratio == (None if METRICS[metric].unit == "fraction" else pytest.approx(1.2))
    assert moved.difference == pytest.approx(0.2 * before)


def test_shares_differ_by_points_and_zero_has_no_ratio(approved: Report) -> None:
    moved = _find_moved(diff(approved, not_passed_report()), "exact_match (gsm8k, strict-match)")
    assert (moved.ratio, moved.trend) == (None, "worse")
    assert moved.difference == pytest.approx((940 - 1100) / 1319)
    zero, five = (_replace_measurements(approved, _make_rate(value)) for value in (0.0, 5.0))
    from_zero = _find_moved(diff(zero, five), RATE)
    assert (from_zero.ratio, from_zero.difference, from_zero.trend) == (None, 5.0, "better")


def test_losses_against_different_baselines_are_not_compared(approved: Report) -> None:
    def lost(against: str, share: float) -> Report:
        row = valid("exact_match", share, "", task="gsm8k", filter="strict-match", against=against, sample_count=9)
        return changed(approved, "judgement", comparisons=[row])

    label = "exact_match (gsm8k, strict-match) against the baseline"
    same = _find_moved(diff(lost("r1", 0.01), lost("r1", 0.03)), label)
    assert (same.trend, same.because) == ("worse", NO_NOISE_KNOWN)
    other = _find_moved(diff(lost("r1", 0.01), lost("r2", 0.03)), label)
    assert (other.trend, other.because) == ("unclear", "A is against run r1, B against run r2")


def test_verdicts_that_changed_are_reported_and_so_are_waivers(approved: Report, not_approved: Report) -> None:
    difference = {change.gate: change for change in diff(approved, not_approved).verdicts}
    assert (difference[RATE].a, difference[RATE].b) == ("pass", "invalid")
    assert "smoke_usage" not in difference
    failing = next(gate for gate in not_approved.judgement.gates if gate.verdict == "fail")
    waiver = waiver_of(failing.gate.label, "Grace", SCRIPT)
    gates = [changed(gate, waiver=waiver) if gate == failing else gate for gate in not_approved.judgement.gates]
    waived = changed(not_approved, "judgement", gates=gates)
    (change,) = diff(not_approved, waived).verdicts
    assert (change.a_counts_as, change.b_counts_as) == ("fail", "pass")
    assert f"{failing.gate.label}: fail → fail, waived" in _print_diff(diff(not_approved, waived))


def test_a_gate_that_only_one_has_is_a_difference_of_verdicts_unless_it_passed(approved: Report, not_approved: Report) -> None:
    """Who takes a gate away that failed gets a report that passed."""
    failing = next(gate for gate in not_approved.judgement.gates if gate.verdict == "fail")
    others = [gate for gate in not_approved.judgement.gates if gate != failing]
    without = changed(not_approved, "judgement", gates=others)
    (change,) = diff(not_approved, without).verdicts
    assert (change.gate, change.a, change.b, change.b_counts_as) == (failing.gate.label, "fail", None, None)
    assert change.because == f"B has no such gate; in A: {failing.because}"
    (change,) = diff(without, not_approved).verdicts
    assert (change.a, change.b, change.because) == (None, "fail", failing.because)
    shown = _print_diff(diff(not_approved, without))
    assert f"{failing.gate.label}: fail → no gate: B has no such gate" in " ".join(shown.split())
    assert "Verdicts: no difference" not in shown
    passing = approved.judgement.gates[0]
    fewer = changed(approved, "judgement", gates=approved.judgement.gates[1:])
    assert passing.verdict == "pass"
    assert diff(approved, fewer).verdicts == []


def test_a_change_is_told_on_one_line_whatever_a_waiver_says(approved: Report) -> None:
    gone, *kept = approved.plan.gates
    waiver = waiver_of(kept[0].label, "Grace", "it is\nslow")
    other = approved.plan.model_copy(update={"gates": kept, "waivers": [waiver]})
    told = [words_of_change(change) for change in changed_gates(approved.plan, other)]
    assert f"{gone.label} removed: {words_of_bound(gone)}" in told
    (added,) = (line for line in told if line.startswith("waiver of "))
    assert added.endswith("by Grace: it is slow")
    assert " added: until " in added
    assert changed_gates(approved.plan, approved.plan) == []


# --- in the terminal


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_nothing_is_cut_off_or_too_wide(approved: Report, not_approved: Report, width: int) -> None:
    difference = diff(approved, not_approved)
    shown = _print_diff(difference, width)
    assert max(map(cell_len, shown.splitlines())) <= width
    assert "…" not in shown
    together = "".join(shown.split())
    assert [moved.label for moved in difference.measurements if "".join(moved.label.split()) not in together] == []


def test_outside_text_is_no_markup_and_no_control_code(approved: Report, not_approved: Report) -> None:
    difference = diff(approved, not_approved)
    shown = _print_diff(difference, 500)
    assert [text for text in HOSTILE if text not in shown] == []
    assert not {"\x1b", "\u202e"} & set(shown)
    assert "WARN -> " in _print_diff(difference, encoding="ascii")


def test_what_is_not_sure_is_marked_and_what_only_one_measured_is_named(approved: Report) -> None:
    shown = _print_diff(diff(approved, _replace_measurements(approved, _make_rate(12650.0))))
    assert "better?" in shown
    assert f"{RATE}: {WITHIN_NOISE}" in shown
    difference = diff(approved, detailed_report())
    assert {"slo_cost_usd_mtok", "speculative_speedup"} <= set(difference.alone_b)
    assert difference.alone_a == []
    assert "Only B measured: " in _print_diff(difference)
