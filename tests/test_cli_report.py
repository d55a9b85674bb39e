"""The commands that look at reports: what they show, what they compare, and nothing else on their output."""

import json
from pathlib import Path

import pytest

from tests.approval.builder import RUN, publish_report
from tests.builders.approval_commands import Command, command
from tests.builders.changed import changed
from tests.report.builder import not_passed_report, passed_report
from vllm_qualify.errors import ReleaseError
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.diff import ReportDiff
from vllm_qualify.report.model import Report
from vllm_qualify.runs.failed import keeping_evidence
from vllm_qualify.runs.folder import Run

__all__ = ["command"]

OLDER, NEWER, FAILED = "20260314T000000Z-000001", "20260315T000000Z-000002", "20260316T000000Z-000003"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def _run(home: Path, run_id: str, report: Report) -> Run:
    run = Run(folder=home / "runs" / run_id)
    run.folder.mkdir(parents=True)
    (run.folder / "plan.json").write_text(changed(report.plan, run_id=run_id).model_dump_json())
    return run


def _reported(home: Path, run_id: str, report: Report) -> Path:
    run = _run(home, run_id, report)
    run.save_report(changed(report, run_id=run_id))
    return run.folder


@pytest.fixture
def older(home: Path) -> Path:
    return _reported(home, OLDER, passed_report())


@pytest.fixture
def newer(home: Path) -> Path:
    return _reported(home, NEWER, not_passed_report())


@pytest.mark.usefixtures("older")
def test_the_latest_report_is_shown_with_its_first_screen(command: Command, newer: Path) -> None:
    code, out, err = command("report", "show")
    assert (code, err) == (0, "")
    assert out.startswith("NOT PASSED  llama-3.1-8b/fp8/h200/throughput\n")
    shown = ("Engine: vLLM 0.32.0", "Hardware: h200: NVIDIA H200", "Judged: ", f"Run: {NEWER}", f"Page: {newer}/report.html")
    assert [expected for expected in shown if expected not in out] == []


@pytest.mark.parametrize("named", ["id", "folder", "file", "elsewhere"])
def test_the_json_is_the_reports_own_and_nothing_else(command: Command, older: Path, tmp_path: Path, named: str) -> None:
    body = (older / "report.json").read_text()
    elsewhere = tmp_path / "copied"
    elsewhere.mkdir()
    (elsewhere / "report.json").write_text(body)
    name = {"id": OLDER, "folder": str(older), "file": str(older / "report.json"), "elsewhere": str(elsewhere)}[named]
    code, out, err = command("report", "show", name, "--json")
    assert (code, out, err) == (0, f"{body}\n", "")
    assert Report.model_validate_json(out).run_id == OLDER


@pytest.mark.usefixtures("newer")
def test_two_reports_are_compared(command: Command, older: Path) -> None:
    code, out, err = command("report", "diff", str(older), NEWER)
    assert (code, err) == (0, "")
    assert out.startswith("A: PASSED  llama-3.1-8b/fp8/h200/throughput")
    assert "exact_match (gsm8k, strict-match): pass → fail" in out
    code, out, err = command("report", "diff", OLDER, NEWER, "--json")
    assert (code, err) == (0, "")
    compared = ReportDiff.model_validate_json(out)
    assert (compared.a.run_id, compared.b.run_id) == (OLDER, NEWER)
    assert json.loads(out)["diff_version"] == 1


@pytest.mark.usefixtures("older")
def test_a_report_is_found_in_a_store(command: Command, tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    published = publish_report(store, tmp_path / "runs")
    assert command("report", "diff", OLDER, RUN)[0] == 2
    code, out, _ = command("report", "diff", OLDER, RUN, "--store", store.url)
    assert (code, f"run {RUN}" in out) == (0, True)
    code, out, _ = command("report", "show", RUN, "--store", store.url)
    text = out.replace("\n", "")
    assert (code, store.locate(f"reports/{published.cell}/{RUN}/report.html") in text) == (0, True)
    code, out, _ = command("report", "show", RUN, "--store", store.url, "--json")
    assert (code, json.loads(out)["run_id"]) == (0, RUN)
    code, _, err = command("report", "diff", OLDER, "no-such-run", "--store", store.url)
    assert (code, f"neither this machine nor {store.url} has a report 'no-such-run'" in err) == (2, True)
    Path(store.locate(published.report_object.key)).write_text("{}")
    code, _, err = command("report", "diff", OLDER, RUN, "--store", store.url)
    assert (code, "do not trust this run" in err) == (3, True)


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("arguments", [(), (OLDER,), (OLDER, "no-such-run"), ("missing.json", OLDER)])
def test_a_callers_mistake_ends_with_2(command: Command, arguments: tuple[str, ...]) -> None:
    code, out, err = command("report", "diff", *arguments)
    assert (code, out, bool(err)) == (2, "", True)


def test_the_commands_error_names_the_page(command: Command, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(home, FAILED, passed_report())

    def end(*_: object) -> None:
        with keeping_evidence([run]):
            raise ReleaseError("it died", "see the log", "serve", ["bang"], kind="crashed")

    with monkeypatch.context() as patch:
        patch.setattr("vllm_qualify.cli.commands.app", end)
        code, _, err = command("run", "reference")
    assert code == 3
    assert "error (the release's owner must act): serve: it died remedy: see the log class: crashed" in err
    assert f"page about it: {run.folder}/failure.html" in err
    code, out, err = command("report", "show", FAILED)
    assert (code, out) == (2, "")
    assert f"run {FAILED} ended by an error and has no report" in err
    assert f"{run.folder}/failure.html" in err
