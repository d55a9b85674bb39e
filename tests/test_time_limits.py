"""A stage that hangs for ever: its time limit ends it, with the server, and leaves what was measured before."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import tasks.measure
from flows.qualify import run_qualification
from infra.bench.passing import passing
from tests.builders.flows import request_
from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.engine.process import running_guarded
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.load import client
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.home import runs_folder
from vllm_qualify.runs.request import QualifyRelease

__all__ = ["request_"]

# pytest-timeout's other method takes SIGALRM, which Prefect needs for a task's time.
pytestmark = [pytest.mark.prefect, pytest.mark.timeout(600, method="thread"), pytest.mark.usefixtures("on_prefect")]


class Programs:
    """Programs that run for ever: one for the server, and one for the tool that a stage waits for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pids = folder, list[int]()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        with running_guarded(["sleep", "3600"], quiet_environment(), self.folder / f"{name}.log") as process:
            self.pids.append(process.guard_pid)
            yield

    def serving(self, serve: Callable[..., AbstractContextManager[Any]]) -> Callable[..., AbstractContextManager[Any]]:
        @contextmanager
        def serving(*arguments: Any, **named: Any) -> Iterator[Any]:
            with self.running("server"), serve(*arguments, **named) as served:
                yield served

        return serving

    def hang(self, *_: object) -> None:
        with self.running("tool"):
            time.sleep(3600)  # as a wait that forgot its limit

    @property
    def left(self) -> list[int]:
        return [pid for pid in self.pids if psutil.pid_exists(pid)]


def short(monkeypatch: pytest.MonkeyPatch, stage: str, limit_s: float) -> None:
    """One stage has this limit, and the others have their own."""
    usual = tasks.measure.task_of.__wrapped__

    def task_of(name: StageName) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            if name == stage:
                patched.setattr(tasks.measure, "MEASURING_LIMIT_S", limit_s)
            return usual(name)

    monkeypatch.setattr(tasks.measure, "task_of", task_of)


def test_a_stage_that_hangs_ends_with_its_server_and_leaves_the_evidence_so_far(
    request_: QualifyRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next run takes that over. It stays in its limits, and has no warning about them."""
    programs = Programs(tmp_path)
    with passing(), monkeypatch.context() as patched:
        patched.setattr(tasks.measure, "serve", programs.serving(vars(tasks.measure)["serve"]))
        patched.setattr(client, "measure_load", programs.hang)
        short(patched, "load", 2.0)
        with pytest.raises(HostError, match="'load' did not end within 2 s") as raised:
            run_qualification(request_)
    assert (len(programs.pids), programs.left) == (2, [])
    assert raised.value.place == "load"
    (folder,) = runs_folder().iterdir()
    run = Run(folder=folder)
    assert [stage.stage for stage in run.stages()] == ["smoke", "contract", "accuracy"]
    assert any(f"evidence so far: {run.evidence}" in note for note in raised.value.__notes__)
    assert "'load' did not end within 2 s" in (folder / "failure.html").read_text().replace("&#39;", "'")

    caplog.clear()
    with passing():
        (published,) = run_qualification(request_)
    assert published.passed
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line for line in warnings if "timeout" in line.lower() or "alarm" in line.lower()] == []
    taken = {stage.stage: stage.taken_from for stage in published.run.stages()}
    assert (taken["smoke"], taken["accuracy"], taken["load"]) == (run.id, run.id, None)


def test_keeping_a_stage_that_hangs_ends_too(request_: QualifyRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping it is a task within that of the stage. It was saved before, so nothing is lost."""
    programs = Programs(tmp_path)
    with passing(), monkeypatch.context() as patched:
        patched.setattr(tasks.measure, "keep", programs.hang)
        short(patched, "smoke", 2.0)
        with pytest.raises(HostError, match="'smoke' did not end within 2 s"):
            run_qualification(request_)
    assert (len(programs.pids), programs.left) == (1, [])
    (folder,) = runs_folder().iterdir()
    assert [stage.stage for stage in Run(folder=folder).stages()] == ["smoke"]
