"""The page about an error: from real logs, with hostile lines, and never in the error's way."""

import json
import os
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.builders.changed import changed
from tests.builders.failures import CASES, Case
from tests.html import Reader
from tests.report.builder import CONTROL, HOSTILE, IMAGE, MARKUP, SCRIPT, image_report, passed_report
from vllm_qualify.engine.failure.classify import classify_log
from vllm_qualify.errors import HostError, HubError, QualifyError, RecipeError, ReleaseError, StoreError, UnclearError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.report.failure import LONGEST_LINE, MOST_FILES, MOST_LINES, RunFailure, render_failure, run_failure
from vllm_qualify.runs.failed import keeping_evidence
from vllm_qualify.runs.folder import Run

ERRORS: dict[str, type[QualifyError]] = {
    "recipe": RecipeError,
    "host": HostError,
    "release": ReleaseError,
    "hub": HubError,
    "unclear": UnclearError,
}


def _error(case: Case) -> QualifyError:
    """As the server's start raises it."""
    failure = classify_log(case.text, case.end)
    return ERRORS[failure.whose_turn](failure.problem, failure.remedy, "serve", failure.lines, failure.kind, failure.retry)


@pytest.fixture
def plan() -> CellPlan:
    return image_report().plan


@pytest.fixture
def run(tmp_path: Path, plan: CellPlan) -> Run:
    """A run that has its plan and its server's log."""
    run_there = Run(folder=tmp_path / "runs" / plan.run_id)
    (run_there.evidence / "serve").mkdir(parents=True)
    (run_there.folder / "plan.json").write_text(plan.model_dump_json())
    (run_there.evidence / "serve" / "server.log").write_text("INFO: starting\n")
    return run_there


def _fail_run(run: Run, error: QualifyError, *others: Run) -> tuple[RunFailure, str]:
    with pytest.raises(type(error)) as raised, keeping_evidence([run, *others]):
        raise error
    assert raised.value is error
    page = run.folder / "failure.html"
    assert f"page about it: {page}" in error.__notes__
    return RunFailure.model_validate_json((run.folder / "failure.json").read_bytes()), page.read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.log)
def test_a_real_log_is_reported_with_class_turn_remedy_and_lines(case: Case, run: Run) -> None:
    failure, page = _fail_run(run, _error(case))
    text = Reader(page).text
    assert (failure.stage, failure.kind, failure.retry) == ("serve", case.kind, case.retry)
    assert failure.whose_turn == ERRORS[case.turn].who_acts
    assert failure.lines
    for expected in (*failure.lines, failure.problem, failure.remedy, str(failure.kind), failure.whose_turn):
        assert "\t" in expected or expected in text
    assert ("may well succeed" in text) == case.retry
    assert "<script" not in page


def test_the_page_tells_release_machine_run_and_command(run: Run, plan: CellPlan) -> None:
    failure, page = _fail_run(run, ReleaseError("it died", "see the log", "accuracy.gsm8k", ["bang"]))
    read = Reader(page)
    text = read.text
    release = plan.cell.release
    engine = str(getattr(plan.server.engine, "pinned", ""))
    expected = [plan.cell.id, plan.run_id, release.model, release.revision, release.engine.digest, "NVIDIA H200", engine]
    choice = "--gpu-type h200 --variant fp8 --profile throughput --launcher docker"
    expected += [f"vllm-qualify run llama-3.1-8b {choice} --image {engine}", "accuracy.gsm8k"]
    assert [missing for missing in expected if missing not in text] == []
    assert "--reuse" not in text
    assert failure.stage == "accuracy"
    # It needs no network, runs no script and has the report page's style.
    assert "default-src 'none'" in page
    assert "script-src" not in page
    assert "--paper:" in page
    assert read.having("src") == []


def test_raw_files_are_linked_below_the_run(run: Run) -> None:
    name = f'{SCRIPT.replace("/", "")} %41"#?.log'
    (run.evidence / "serve" / name).write_text("x")
    _, page = _fail_run(run, ReleaseError("it died", "see the log", "serve"))
    links = [link for link in Reader(page).having("href") if not link.startswith(("#", "data:"))]
    assert {(run.folder / unquote(link)).is_file() for link in links} == {True}
    assert {"plan.json", "evidence/serve/server.log", f"evidence/serve/{name}"} <= {unquote(link) for link in links}


def test_hostile_lines_stay_text(run: Run) -> None:
    hostile = f"{SCRIPT}{MARKUP}{IMAGE}{CONTROL}</code></pre>{{{{ 7 * 7 }}}}"
    lines = [hostile, f"{hostile}\n{hostile}"]
    error = HostError(f"it died: {hostile}", f"ask {hostile}", f"serve/{hostile}", lines, kind=hostile)
    failure, page = _fail_run(run, error)
    read = Reader(page)
    assert not {"script", "img", "red", "iframe"} & {tag for tag, _ in read.elements}
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    assert [text for text in (*HOSTILE, "{{ 7 * 7 }}") if text not in read.text] == []
    assert not {"\x1b", "\u202e"} & set(page)
    assert len(failure.lines) == 3


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_lines_and_files_are_bounded_and_the_rest_is_counted(run: Run, ending: str) -> None:
    lines = ending.join("x" * (LONGEST_LINE + 10) for _ in range(MOST_LINES + 3))
    for number in range(MOST_FILES):
        (run.evidence / f"{number}.log").write_text("")
    failure, page = _fail_run(run, HostError("it died", "see the log", "load", [lines]))
    assert (len(failure.lines), failure.lines_left_out) == (MOST_LINES, 3)
    assert {len(line) for line in failure.lines} == {LONGEST_LINE + 2}
    assert (len(failure.files), failure.files_left_out) == (MOST_FILES, 2)
    assert "3 more lines are in the log itself" in page
    assert "2 more files lie there" in page


def test_what_the_error_does_not_tell_is_said_to_be_missing(run: Run) -> None:
    failure, page = _fail_run(run, StoreError("no right", "ask for it", "s3://bucket/evidence/x"))
    assert (failure.stage, failure.kind, failure.retry, failure.lines) == (None, None, None, [])
    text = Reader(page).text
    expected = [
        "the error does not name it",
        "none that is known",
        "not known without a class",
        "no lines of a log",
        "no stage",
    ]
    assert [missing for missing in expected if missing not in text] == []
    assert json.loads((run.folder / "failure.json").read_text())["retry"] is None


def test_secrets_reach_no_page(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a page and JSON write in another way."""
    secret = 'hf_<zyxwv>&"secret"'
    monkeypatch.setenv("HF_TOKEN", secret)
    failure, page = _fail_run(run, HostError(f"said {secret}", f"unset {secret}", "serve", [f"HF_TOKEN={secret}"]))
    assert failure.lines == ["HF_TOKEN=[redacted]"]
    written = page + (run.folder / "failure.json").read_text()
    assert "zyxwv" not in written


def test_runs_of_one_server_end_together_and_a_finished_one_has_no_page(run: Run, tmp_path: Path, plan: CellPlan) -> None:
    def another(name: str) -> Run:
        run_there = Run(folder=tmp_path / "runs" / name)
        run_there.folder.mkdir()
        (run_there.folder / "plan.json").write_text(changed(plan, run_id=name).model_dump_json())
        return run_there

    second, finished = another("second"), another("finished")
    (finished.folder / "report.json").write_text("{}")
    failure, page = _fail_run(run, ReleaseError("it died", "see the log", "load"), second, finished)
    assert failure.ended_with == ["second"]
    assert "second" in Reader(page).text
    assert (second.folder / "failure.html").is_file()
    assert not (finished.folder / "failure.html").exists()


@pytest.mark.parametrize("breaks", ["plan", "folder"])
def test_a_page_that_cannot_be_written_hides_nothing(run: Run, breaks: str) -> None:
    if breaks == "plan":
        (run.folder / "plan.json").write_text("{")
    else:
        (run.folder / ".failure.json.new").mkdir()
    error = ReleaseError("it died", "see the log", "serve")
    with pytest.raises(ReleaseError, match="it died") as raised, keeping_evidence([run]):
        raise error
    notes = raised.value.__notes__
    assert notes[0].startswith("no page about it could be written: ")
    assert notes[1] == f"evidence so far: {run.evidence}"


def test_a_failure_is_read_back_as_it_was(tmp_path: Path) -> None:
    failure = run_failure(HubError("429", "wait", "serve", kind="hub-rate-limit", retry=True), passed_report().plan, tmp_path)
    assert RunFailure.model_validate_json(failure.model_dump_json()) == failure
    assert "The run left no files" in render_failure(failure)
    assert os.fspath(tmp_path) not in failure.model_dump_json()
