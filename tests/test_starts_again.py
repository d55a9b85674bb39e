"""The server is started again: once for all cells that share it, as often as each needs. Each start is saved when it ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tasks.starts
from tests.builders.captured_runs import captured_plan, store_in
from tests.builders.flows import in_flow
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES
from vllm_qualify.errors import ReleaseError
from vllm_qualify.evidence.measurement import valid
from vllm_qualify.evidence.stages.smoke import SMOKE
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import new_run_id
from vllm_qualify.plan.request import Reuse
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.runs.folder import Run, start_run
from vllm_qualify.runs.stored import reuse_stage

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("on_prefect")]
COMMAND = ["vllm", "serve"]


@pytest.fixture
def plan(tmp_path: Path) -> CellPlan:
    """A run that becomes a baseline: it is started as often as planned, whatever it measures."""
    gate = gate_of(metric="exact_match", task="gsm8k", filter="strict-match", max_loss=0.01, unit="fraction")
    plan = captured_plan(tmp_path)
    return plan.model_copy(update={"gates": [*plan.gates, gate], "establishes": True, "starts": 2})


class Servers:
    """In place of real servers: what was started, what each cell measured there, and whether the server ran meanwhile."""

    def __init__(self) -> None:
        self.started: list[Path] = []
        self.measured: list[tuple[str, int, bool]] = []
        self.running = False
        self.fails_at = 0

    @contextmanager
    def serve(self, _plan: CellPlan, folder: Path, *_: object, **__: object) -> Iterator[Any]:
        self.started.append(folder)
        if len(self.started) == self.fails_at:
            raise ReleaseError("it ended at once", "see its log", "serve")
        for name in (SCRAPES, HOST_SAMPLES, "server.log"):
            (folder / name).write_text(f"{name} of {folder.parent.name}\n")
        self.running = True
        yield SimpleNamespace(server=SimpleNamespace(url="http://here", startup_s=1.5, command=COMMAND))
        self.running = False

    def measure(self, _: Any, plan: CellPlan, evidence: Path, number: int, *__: object) -> list[list[str]]:
        self.measured.append((plan.run_id, number, self.running))
        folder = evidence / "starts" / str(number) / "accuracy"
        folder.mkdir()
        (folder / "asked.txt").write_text(f"{plan.run_id} {number}\n")
        return [["lm-eval"]]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(tasks.starts, "serve", servers.serve)
    monkeypatch.setattr("vllm_qualify.evidence.stages.starts.measure_start", servers.measure)
    return servers


def cell(plan: CellPlan, **changes: object) -> Run:
    return start_run(plan.model_copy(update={"run_id": new_run_id()} | changes))


def start_again(store: Path, *runs: Run) -> None:
    in_flow(lambda: tasks.starts.measure_starts(list(runs), store_in(store).url))


def test_cells_share_each_start_and_each_gets_its_own_evidence(plan: CellPlan, servers: Servers, tmp_path: Path) -> None:
    first, second, alone = cell(plan), cell(plan, starts=3), cell(plan, starts=1)
    start_again(tmp_path / "store", first, second, alone)
    assert len(servers.started) == 2
    assert servers.measured == [(first.id, 2, True), (second.id, 2, True), (second.id, 3, True)]
    assert alone.stage("starts") is None
    for run, numbers in ((first, (2,)), (second, (2, 3))):
        stage = run.stage("starts")
        assert stage is not None
        assert stage.commands == [COMMAND, ["lm-eval"]] * len(numbers)
        paths = {file.path for file in stage.files}
        for number in numbers:
            assert {f"starts/{number}/serve/server.log", f"starts/{number}/serve/startup_s"} <= paths
            assert (run.evidence / f"starts/{number}/accuracy/asked.txt").read_text() == f"{run.id} {number}\n"
    logs = [run.evidence / "starts/2/serve/server.log" for run in (first, second)]
    assert logs[0].read_text() == logs[1].read_text()
    assert not logs[0].samefile(logs[1])


def test_what_is_finished_is_not_measured_again(plan: CellPlan, servers: Servers, tmp_path: Path) -> None:
    run = cell(plan, starts=3)
    servers.fails_at = 2
    with pytest.raises(ReleaseError):
        start_again(tmp_path / "store", run)
    assert [number for _, number, _ in servers.measured] == [2]
    fresh = cell(plan, starts=3)
    assert reuse_stage(fresh, "starts", store_in(tmp_path / "store"), Reuse()) is not None
    start_again(tmp_path / "store", fresh)
    assert [number for _, number, _ in servers.measured] == [2, 3]
    assert (fresh.evidence / "starts/2/accuracy/asked.txt").read_text() == f"{run.id} 2\n"


def test_a_run_that_needs_no_other_start_says_so(plan: CellPlan, servers: Servers, tmp_path: Path) -> None:
    """Its stage is there, so that it cannot be left out; here an absolute gate surely fails."""
    run = cell(plan)
    smoke = SMOKE.record(run.plan, run.evidence, lambda _: [])
    failing = next(gate for gate in run.plan.gates if gate.metric.startswith("smoke"))
    missed = valid(failing.metric, 0.0, "smoke/replies.json", sample_count=2)
    run.save_stage(smoke.model_copy(update={"measurements": [missed]}))
    start_again(tmp_path / "store", run)
    assert servers.started == []
    stage = run.stage("starts")
    assert stage is not None
    assert [file.path for file in stage.files] == ["starts/machine.json"]
    assert stage.measurements == []
