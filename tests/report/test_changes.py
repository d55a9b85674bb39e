"""What stands beside a baseline: its report as it was brought, what differs, the repeats as points, and the cost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.builders.changed import changed
from tests.builders.loads import CAPTURED as CAPTURED_LOAD
from tests.report.builder import (
    THEIR_RUN,
    baseline_of,
    compared_report,
    detailed_report,
    image_report,
    page_link,
    passed_report,
)
from vllm_qualify.cli.commands import app
from vllm_qualify.engine.image import parse_reference
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.load.result import BESIDE
from vllm_qualify.evidence.measurement import invalid
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import within_budget
from vllm_qualify.recipe.load import Load
from vllm_qualify.report import points
from vllm_qualify.report.before import find_drift, read_before
from vllm_qualify.report.changes import Changes, ConfigRow, changes_of
from vllm_qualify.report.details import details_of
from vllm_qualify.report.head import facts
from vllm_qualify.report.model import Report
from vllm_qualify.report.page import render_page
from vllm_qualify.report.points import cost, effort, latency_rows, strips
from vllm_qualify.report.rerun import rerun
from vllm_qualify.report.words import DASH, NO_BREAK

THEN = detailed_report().model_copy(update={"run_id": THEIR_RUN})


def compare_with(report: Report, **changes: Any) -> CellPlan:
    """The approved report's plan with this one as its baseline."""
    return changed(passed_report().plan, baseline=baseline_of(report.plan, report.run_id), **changes)


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    folder = tmp_path / "evidence" / "baseline"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(THEN.model_dump_json(indent=2))
    return folder.parent


def spaced(text: str) -> str:
    return text.replace(NO_BREAK, " ")


# --- what is read of the baseline


def test_the_baselines_report_is_read(evidence: Path) -> None:
    before = read_before(compare_with(THEN), evidence)
    assert before is not None
    assert (before.run_id, before.judged_at, before.server) == (THEN.run_id, THEN.created_at, THEN.plan.server)
    assert THEN.details.sweep is not None
    assert before.curve == THEN.details.sweep.curve
    measured = [row for stage in THEN.stages for row in stage.measurements]
    assert before.measurements == [row.model_copy(update={"traced_to": []}) for row in measured]
    assert before.load_measured == "then"


def test_a_load_in_turns_is_the_one_that_was_measured_beside(evidence: Path) -> None:
    shape = {"input_len": 16, "output_len": 8, "max_concurrency": 4, "num_prompts": 40, "num_warmups": 4}
    settings = Load.model_validate({**shape, "repeats": 2, "most_repeats": 2, "min_duration_s": 0.5})
    shutil.copytree(CAPTURED_LOAD, evidence / "load" / BESIDE)
    plan = compare_with(THEN, load=settings, beside=THEN.plan.server)
    before = read_before(plan, evidence)
    assert before is not None
    assert before.load_measured == "in turns"
    (load,) = (row for row in before.measurements if row.metric == "output_throughput_tok_s")
    assert load.source.startswith("load/beside/")
    assert [row.metric for row in before.measurements].count("startup_s") == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "20260101T000000Z-000000"}, "the report is of run 20260101T000000Z-000000"),
        ({"plan": {}}, "validation error"),
        (None, "No such file or directory: report.json"),
    ],
)
def test_a_report_that_cannot_be_used_is_reported(evidence: Path, changes: dict[str, Any] | None, reason: str) -> None:
    path = evidence / "baseline" / "report.json"
    if changes is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    details = details_of(compare_with(THEN), evidence)
    assert details.before is None
    (note,) = details.notes
    assert note.startswith("baseline: no usable evidence: ")
    assert reason in note


# --- drift


def test_drift_is_reported_by_the_catalogs_table_of_vllm() -> None:
    plan = passed_report().plan
    drift = find_drift(changed(plan, "server", arguments=plan.server.arguments | {"no-such-option": 1}))
    assert drift is not None
    assert (drift.version, drift.since) == ("0.32.0", None)
    assert [(each.kind, each.name) for each in drift.findings] == [("unknown-option", "no-such-option")]
    assert find_drift(changed(plan, "server", kind="tensorrt-llm")) is None


def test_defaults_that_changed_since_the_baselines_version_and_a_missing_table_are_reported(tmp_path: Path) -> None:
    drift = find_drift(compare_with(changed(THEN, "plan.cell.release.engine", version="0.12.0")))
    assert drift is not None
    assert drift.since == "0.12.0"
    defaults = {each.name: each for each in drift.findings if each.kind == "changed-default"}
    assert "false by default in 0.12.0 and true in 0.32.0" in defaults["async-scheduling"].told
    # The recipe gives it, so that its default does not matter.
    assert "gpu-memory-utilization" not in defaults
    details = details_of(changed(passed_report().plan, "cell.release.engine", version="0.1.0"), tmp_path)
    assert (details.drift, details.notes) == (None, ["drift: the catalog has no table of vLLM 0.1.0"])


# --- what changed


def changes_in(report: Report) -> Changes:
    changes = changes_of(report)
    assert changes is not None
    return changes


def test_settings_are_distinguished_by_what_became_of_them() -> None:
    changes = changes_in(compared_report())
    assert changes.config is not None
    assert {(row.change, row.name) for row in changes.config if row.where == "option"} == {
        ("changed", "compilation-config.pass_config.fuse_allreduce_rms"),
        ("added", "speculative-config.method"),
        ("added", "speculative-config.num_speculative_tokens"),
        ("removed", "swap-space"),
    }
    assert ConfigRow("added", "environment", "NCCL_DEBUG", DASH, '"WARN"') in changes.config


def test_only_settings_that_differ_have_a_row_and_a_text_differs_from_a_number() -> None:
    report = compared_report()
    same = changes_in(changed(report, "details.before", server=report.plan.server))
    assert same.config == []
    assert same.brief == "changed: engine, digest, hardware, load client, torch; settings: the same"
    text = changed(report.plan.server, arguments=report.plan.server.arguments | {"max-num-seqs": "256"})
    changes = changes_in(changed(report, "details.before", server=text))
    assert changes.config == [ConfigRow("changed", "option", "max-num-seqs", '"256"', "256")]


def test_each_gate_has_both_values_and_how_much_worse_it_is() -> None:
    changes = changes_in(compared_report())
    rows = {row.gate: row for row in changes.metrics}
    assert [row.verdict for row in changes.metrics] == ["fail", "invalid", "inconclusive"]
    output = rows["output_throughput_tok_s"]
    assert (output.then, output.now) == ("12,356 tok/s", "12,608 tok/s")
    assert spaced(output.worse) == "6.10 %"
    ttft = rows["ttft_p99_ms"]
    assert (ttft.worse, ttft.interval) == (DASH, DASH)
    assert "repeat 2" in ttft.because


def test_a_cell_without_a_baseline_has_no_changes(tmp_path: Path) -> None:
    assert changes_of(passed_report()) is None
    assert read_before(passed_report().plan, tmp_path) is None


# --- the load


def test_repeats_are_points_within_their_drawing() -> None:
    drawn = {strip.metric: strip for strip in strips(compared_report())}
    assert list(drawn) == ["request_throughput_req_s", "output_throughput_tok_s", "ttft_p99_ms", "tpot_p99_ms"]
    for strip in drawn.values():
        assert strip.interval is not None
        xs = [mark.x for mark in (*strip.ours, *strip.theirs, *strip.bounds)] + list(strip.interval)
        assert points.LEFT <= min(xs) <= max(xs) <= points.WIDTH - points.RIGHT
        assert len(strip.ours) == len(strip.theirs) == 3
        assert strip.interval[0] < strip.ours[0].x < strip.ours[-1].x < strip.interval[1]
    output = drawn["output_throughput_tok_s"]
    assert output.bounds[0].x < output.theirs[0].x < output.ours[0].x
    assert spaced(output.text) == (
        "repeats 12,558 · 12,608 · 12,659 tok/s; interval 12,524 to 12,693 tok/s; bound ≥ 12,000 tok/s; "
        "baseline 12,307 · 12,356 · 12,406 tok/s"
    )


def test_an_invalid_load_has_no_points_no_percentiles_and_no_cost() -> None:
    report = passed_report()
    (load,) = (stage for stage in report.stages if stage.stage == "load")
    spoiled = changed(load, measurements=[invalid(row.metric, "3 failed", "load/") for row in load.measurements])
    report = changed(report, stages=[spoiled if stage == load else stage for stage in report.stages])
    assert strips(report) == []
    assert {text for row in latency_rows(report) for pair in row.percentiles for text in pair} == {DASH}
    assert latency_rows(changed(report, stages=[])) == []
    priced = [changed(each, "plan", price_usd_gpu_hour=3.6) for each in (report, passed_report())]
    assert cost(priced[0]) == (DASH, "there is no valid output_throughput_tok_s")
    shown, why = cost(priced[1])
    assert shown == "0.07931 usd/Mtok"
    assert spaced(why) == "1 times 3.6 usd an hour for 12,608 tok/s; interval 0.07878 to 0.07985 usd/Mtok"


def test_repeats_that_are_all_alike_are_still_drawn() -> None:
    report = passed_report()
    stages = []
    for stage in report.stages:
        zero = {"repeats": [0.0, 0.0], "value": 0.0, "interval": None}
        rows = [changed(row, **zero) if row.repeats else row for row in stage.measurements]
        stages.append(changed(stage, measurements=rows))
    drawn = strips(changed(changed(report, "judgement", gates=[]), stages=stages))
    assert {mark.x for strip in drawn for mark in strip.ours} == {(points.LEFT + points.WIDTH - points.RIGHT) / 2}


def test_percentiles_stand_beside_the_baselines() -> None:
    rows = latency_rows(compared_report())
    assert [row.name for row in rows] == ["TTFT", "TPOT", "ITL", "E2EL"]
    assert rows[0].percentiles == [("171.5 ms", "168.0 ms"), ("220.7 ms", "216.3 ms"), ("333.8 ms", "327.1 ms")]
    assert rows[0].meaning == "time to first token"
    alone = latency_rows(passed_report())
    assert [theirs for _, theirs in alone[0].percentiles] == [DASH] * 3


def loaded(report: Report, repeats: int, beside: ServerPlan | None = None, **load: object) -> Report:
    """At a price, with so many repeats; and of the baseline beside it."""
    commands = [["vllm", "bench", "serve"]] * repeats * (2 if beside else 1)
    stages = [changed(stage, commands=commands) if stage.stage == "load" else stage for stage in report.stages]
    plan = changed(changed(report.plan, "load", **load), "server", gpus=[0, 1])
    return changed(report, stages=stages, plan=changed(plan, price_usd_gpu_hour=3.6, beside=beside))


def test_the_load_took_what_its_stage_took_on_all_gpus_that_it_held() -> None:
    report = passed_report()
    assert effort(loaded(report, 1)) == "1 repeat, 42 min, 84 GPU-min, $5.02"
    other = changed(report.plan.server, gpus=[2, 3])
    assert effort(loaded(report, 3, other)) == "3 repeats, 42 min, 167 GPU-min, $10.04"
    others = [stage for stage in report.stages if stage.stage != "load"]
    assert effort(changed(report, stages=others)) == ""
    thrice = loaded(report, 3)
    taken_over = [changed(stage, taken_from="20260101T000000Z-abcdef") for stage in thrice.stages]
    assert effort(changed(thrice, stages=taken_over)).endswith("$5.02, in run 20260101T000000Z-abcdef")


def test_figures_of_whole_runs_say_so_wherever_the_load_is_shown() -> None:
    steady, whole = (loaded(passed_report(), 3, window=window) for window in ("steady", "whole"))
    note = "ramp-up and tail are in them"
    assert note in dict(facts(whole))["Load"]
    assert note in render_page(whole, page_link)
    assert dict(facts(steady))["Load"] == "3 repeats, 42 min, 84 GPU-min, $5.02"
    page = render_page(steady, page_link)
    assert "It took 3 repeats, 42 min, 84 GPU-min, $5.02." in page
    assert note not in page


# --- the command


def test_every_option_of_the_command_is_one_of_the_command_line() -> None:
    run = get_command(app).commands["run"]  # type: ignore[attr-defined]
    known = {name for parameter in run.params for name in parameter.opts}
    for report in (passed_report(), image_report(), compared_report()):
        plan = within_budget(changed(report.plan, price_usd_gpu_hour=2.5), 900.0)
        given = [part for part in rerun(plan) if part.startswith("--")]
        assert set(given) <= known
        assert len(given) == len(set(given))


def test_an_image_is_named_by_its_digest_and_a_baseline_is_made_one_again() -> None:
    command = rerun(image_report().plan)
    for option in ("--image", "--client-image"):
        named = parse_reference(command[command.index(option) + 1], "linux/arm64")
        assert named.digest
        assert named.tag is None
    command = rerun(changed(passed_report().plan, establishes=True))
    assert command[-1] == "--establish-baseline"
    assert "--baseline" not in command


@pytest.mark.parametrize(("recipe", "allowed"), [("mine", True), ("reference", False)])
def test_code_that_ran_is_shown_and_allowed_again(recipe: str, allowed: bool) -> None:
    report = passed_report()
    assert "Trusts code" not in dict(facts(report))
    assert "--allow-code" not in rerun(report.plan)
    line = "server.middleware: the server imports what it names"
    trusting = changed(changed(report, "plan.cell", recipe=recipe), "plan", code=[line])
    assert dict(facts(trusting))["Trusts code"] == line
    assert ("--allow-code" in rerun(trusting.plan)) is allowed
