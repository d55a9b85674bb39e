"""The verdict table in the terminal: whole at every width, and plain where it is not a terminal."""

import io
import re
from collections import Counter
from typing import Literal

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.builders.changed import changed
from tests.report.builder import HOSTILE, MARKUP, SCRIPT, compared_report, detailed_report, image_report
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge.verdict import Judgement
from vllm_qualify.recipe.gates import Minimum
from vllm_qualify.report.model import Report
from vllm_qualify.report.terminal import show_report

PAGE = "/a/folder/with/a/rather/long/path/that/is/wider/than/eighty/columns/20260314T092653Z-5f3d19/report.html"


def _print_report(report: Report, width: int, encoding: str = "utf-8", terminal: bool = False, page: str | None = PAGE) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    colors: Literal["truecolor"] | None = "truecolor" if terminal else None
    console = Console(file=file, width=width, force_terminal=terminal, color_system=colors, legacy_windows=False)
    show_report(report, console, page)
    return raw.getvalue().decode(encoding)


def _without_spaces(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("width", [80, 120])
def test_every_gate_has_its_row(not_approved: Report, width: int) -> None:
    shown = _print_report(not_approved, width)
    table = shown[shown.index("gate  ") : shown.index("Page:")]
    for gate in not_approved.judgement.gates:
        assert gate.gate.metric in table
        assert gate.gate.filter is None or f"{gate.gate.filter})" in table
    for verdict, number in Counter(gate.verdict for gate in not_approved.judgement.gates).items():
        assert len(re.findall(rf" {verdict}\s*$", table, re.MULTILINE)) >= number


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_nothing_is_cut_off_and_nothing_but_the_page_is_wider_than_the_console(not_approved: Report, width: int) -> None:
    shown = _print_report(not_approved, width)
    assert max(cell_len(line) for line in shown.splitlines() if not line.startswith("Page:")) <= width
    assert "…" not in shown
    reasons = {gate.because for gate in not_approved.judgement.gates if gate.verdict in ("fail", "inconclusive")}
    for text in (*reasons, not_approved.plan.cell.id, not_approved.plan.cell.release.engine.digest):
        assert _without_spaces(text) in _without_spaces(shown)


@pytest.mark.parametrize("width", [40, 120])
def test_a_warning_is_shown_without_control_codes(approved: Report, width: int) -> None:
    warnings = ["top_p 0.9\x1b[31m changes what clients get"]
    shown = _print_report(changed(approved, "plan", warnings=warnings), width)
    assert re.search(r"Warning:top_p0\.9.{0,12}changeswhatclientsget", _without_spaces(shown))
    assert "\x1b" not in shown
    assert "Warning:" not in _print_report(approved, width)


def test_the_first_screen_tells_release_machine_time_and_place() -> None:
    report = image_report().model_copy(update={"judged_on": "host-7"})
    release = report.plan.cell.release
    assert release.engine.image is not None
    shown = _without_spaces(_print_report(report, 80))
    for expected in (release.engine.image.reference, release.engine.digest, release.model, release.revision, "NVIDIA H200"):
        assert _without_spaces(expected) in shown
    assert _without_spaces("2026-03-14 10:40:53 UTC on host-7 by vllm-qualify 0.1.0") in shown


def test_a_report_that_passed_has_no_reasons_and_no_more_than_there_is(approved: Report) -> None:
    shown = _print_report(approved, 120)
    assert shown.startswith("PASSED  llama-3.1-8b/fp8/h200/throughput\n")
    assert shown.count("pass") == len(approved.judgement.gates) + 1
    for absent in ("confidence", "Decided", "judged again", "Baseline", "slo_"):
        assert absent not in shown


def test_a_report_that_did_not_pass_names_the_gates_that_decided_and_tells_a_shared_reason_once(not_approved: Report) -> None:
    shown = _print_report(not_approved, 120)
    assert shown.startswith("NOT PASSED  llama-3.1-8b/fp8/h200/throughput\n")
    assert "1 fail, 3 invalid, 1 inconclusive, 4 pass. Decided by exact_match (gsm8k, strict-match)" in shown
    assert "judged again from run 20260313T201500Z-0a1b2c" in shown
    assert shown.count("1021 of 1024 requests completed") == 1
    assert "output_throughput_tok_s, ttft_p99_ms, tpot_p99_ms: invalid\n" in shown


def test_what_changed_since_the_baseline_is_reported_in_a_line_and_a_changed_default_is_no_warning() -> None:
    report = compared_report()
    assert report.plan.baseline is not None
    shown = _print_report(report, 400)
    assert f"Baseline: run {report.plan.baseline.run_id} of " in shown
    assert "Since then: changed: " in shown
    assert "Warning: VLLM_X is not known" in shown
    assert "--moe-backend is auto by default" not in shown


def test_outside_text_is_no_markup_and_no_control_code(not_approved: Report) -> None:
    shown = _print_report(not_approved, 400)
    assert [text for text in HOSTILE if text not in shown] == []
    assert not {"\x1b", "\u202e"} & set(shown)
    assert "\\x1b[2J" in shown


def test_colours_only_in_a_terminal_and_ascii_without_unicode(approved: Report, not_approved: Report) -> None:
    assert "\x1b[1;32mPASSED" in _print_report(approved, 80, terminal=True)
    assert "\x1b" not in _print_report(approved, 80)
    shown = _print_report(not_approved, 80, encoding="ascii")
    assert ">=77.5%" in shown
    assert re.search(r"ttft_p99_ms +- ", shown)


def test_the_page_is_one_unbroken_line_or_not_reported(approved: Report) -> None:
    assert f"Page: {PAGE}\n" in _print_report(approved, 80)
    assert "Page" not in _print_report(approved, 80, page=None)


def test_checks_of_the_contract_have_one_row_but_those_that_are_not_kept(approved: Report) -> None:
    """Sixteen rows of `yes` would hide what was measured."""
    gates = approved.judgement.gates
    (one, *_) = (each for each in gates if each.gate.metric == "smoke_usage")
    verdicts = {"contract_stop": "pass", "contract_seed": "fail", "contract_many": "pass"}
    about = {name: Minimum(metric=name, minimum=1.0, unit="bool") for name in verdicts}
    checks = [changed(one, gate=about[name], verdict=verdict) for name, verdict in verdicts.items()]
    shown = _print_report(changed(approved, "judgement", gates=[*gates, *checks]), 120)
    assert re.search(r"^contract \(2 checks\) .* pass\s*$", shown, re.MULTILINE)
    assert re.search(r"^contract_seed .* fail\s*$", shown, re.MULTILINE)
    assert "contract_stop" not in shown


def test_a_report_without_gates_is_reported_plainly(approved: Report) -> None:
    nothing = Judgement(verdict="invalid", gates=[], levels=Levels(), suite={}, validation={})
    shown = _print_report(changed(approved, judgement=nothing), 80)
    assert shown.startswith("NOT PASSED")
    assert "no gate was judged" in shown


def test_what_a_sweep_found_and_costs_is_reported_in_a_line_each() -> None:
    shown = _print_report(detailed_report(), 120)
    assert "slo_concurrency_req: 32.00 req\n" in shown
    assert f"slo_request_rate_req_s: none: 2 runs were invalid: {SCRIPT}{MARKUP}\n" in shown
    assert "slo_cost_usd_mtok: 0.4213 usd/Mtok\n" in shown
