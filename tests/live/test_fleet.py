"""A fleet of real services: whatever is killed in whatever stage, the qualification ends, and nothing is done twice."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

from deployments.setup import make_pool
from infra.bench.passing import write_engine, write_recipe
from tests.approval.builder import made_key
from tests.fleet import Postgres, PrefectServer, Worker
from tests.fleet.stubbed import HELD
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.signing import PRIVATE_KEY
from vllm_qualify.publish.store import Store, open_store

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
CELL = "orchestrator/bf16/cpu/p1"
LIMIT_S = 240.0
JOB = {"stream_output": False, "env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", "PREFECT_CLIENT_MAX_RETRIES": "8"}}
STAGES = ["smoke", "accuracy", "load", "judge", "publish"]


@dataclass(frozen=True)
class Fleet:
    server: PrefectServer
    postgres: Postgres
    worker: Worker
    folder: Path

    @property
    def store(self) -> Store:
        return open_store((self.folder / "store").as_uri())

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(self.server.url)

    def run_flow(self, name: str, given: Mapping[str, object]) -> subprocess.CompletedProcess[str]:
        """One of the control pool's flows, in a process of its own."""
        code = f"from flows.fleet import *; {name}(request={dict(given)!r})"
        key = {f"{PRIVATE_KEY}_FILE": str(self.folder / "approver.pem")}
        environment = os.environ | key | {"PREFECT_API_URL": self.server.url, "PREFECT_HOME": str(self.folder / "control")}
        return subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def _worker(_postgres: Postgres, _fleet_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    _postgres.start()
    _fleet_server.revive()
    folder = tmp_path_factory.mktemp("fleet")
    write_recipe(1, folder / "recipe.yaml")
    made_key(folder / "approver.pem")
    with SyncPrefectClient(_fleet_server.url) as client:
        make_pool(client, "cpu")
        client.create_deployment(
            client.create_flow_from_name("qualify-cell"),
            "cpu",
            entrypoint="tests.fleet.stubbed.qualify_cell",
            work_pool_name="cpu",
            work_queue_name="release",
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
            job_variables=JOB,
        )
    environment = {
        "VLLM_QUALIFY_HOME": str(folder / "home"),
        "VLLM_QUALIFY_LOCKS": str(folder),
        "VLLM_QUALIFY_ENGINE": str(write_engine(folder / "engine")),
        HELD: str(folder),
    }
    with Worker(folder, _fleet_server.url, "cpu", **environment) as worker:
        yield worker


@pytest.fixture
def fleet(_worker: Worker, postgres: Postgres, fleet_server: PrefectServer) -> Fleet:
    _worker.revive()
    for held in [*_worker.folder.glob("hold-*"), _worker.folder / "stages.log"]:
        held.unlink(missing_ok=True)
    found = Fleet(fleet_server, postgres, _worker, _worker.folder)
    found.store.check()
    return found


def started(fleet: Fleet, **settings: object) -> UUID:
    request = {"recipe": str(fleet.folder / "recipe.yaml"), "store": fleet.store.url, **settings}
    with fleet.client() as client:
        deployment = client.read_deployment_by_name("qualify-cell/cpu").id
        return client.create_flow_run_from_deployment(deployment, parameters={"request": request}, tags=["vllm-qualify"]).id


def ended(fleet: Fleet, run: UUID) -> FlowRun:
    found: list[FlowRun] = []

    def is_over() -> bool:
        with fleet.client() as client:
            found[:] = [client.read_flow_run(run)]
        return bool(found[0].state and found[0].state.is_final())

    wait_until(is_over, f"the end of {run}", fleet)
    return found[0]


def wait_until(check: Callable[[], bool], what: str, fleet: Fleet) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not check():
        assert time.monotonic() < deadline, f"waited for {what}\n{fleet.worker.log.read_text()[-3000:]}"
        time.sleep(0.2)  # a process is waited for, which tells nothing by itself


def noted(fleet: Fleet) -> list[str]:
    log = fleet.folder / "stages.log"
    return log.read_text().splitlines() if log.exists() else []


def manifests(fleet: Fleet) -> list[str]:
    return [key for key in fleet.store.keys(f"reports/{CELL}/") if key.endswith("/manifest.json")]


def test_a_report_waits_for_a_decision_and_becomes_an_approval(fleet: Fleet) -> None:
    run = ended(fleet, started(fleet))
    assert run.state is not None
    assert run.state.name == "AwaitingDecision", run.state.message
    assert CELL in (run.state.message or "")
    run_id = manifests(fleet)[-1].split("/")[-2]
    given = {"run": run_id, "decision": "approve", "name": "Ada", "reason": "it is fine", "store": fleet.store.url}
    done = fleet.run_flow("decide", given)
    assert done.returncode == 0, done.stderr
    pointer = read_pointer(fleet.store, CELL)
    assert pointer is not None
    assert (pointer.last.run_id, pointer.last.by) == (run_id, "Ada")
    # What is approved is not qualified again where nothing has changed.
    again = ended(fleet, started(fleet, renew_days=14))
    assert again.state is not None
    assert again.state.name == "NothingToDo", again.state.message


@pytest.mark.parametrize("stage", ["load"])
@pytest.mark.parametrize("victim", ["flow", "worker", "server", "postgres"])
def test_whatever_is_killed_the_qualification_ends_and_nothing_is_done_twice(victim: str, stage: str, fleet: Fleet) -> None:
    before = manifests(fleet)
    (fleet.folder / f"hold-{stage}").touch()
    run = started(fleet, reuse={"of": "unfinished"})
    wait_until(lambda: f"begun {stage}" in noted(fleet), f"{stage} to begin", fleet)
    kill(fleet, victim)
    (fleet.folder / f"hold-{stage}").unlink()
    state = ended(fleet, run).state
    if victim == "flow":
        assert state is not None
        assert state.name == "Crashed"
        done = fleet.run_flow("tend_fleet", {"silent_s": 10, "confirm_s": 1, "settled_s": 20})
        while "started again" not in done.stderr:
            done = fleet.run_flow("tend_fleet", {"silent_s": 10, "confirm_s": 1, "settled_s": 20})
        wait_until(lambda: f"done {STAGES[-1]}" in noted(fleet), "the second start", fleet)
        state = ended(fleet, run).state
    assert state is not None
    assert state.name == "AwaitingDecision", f"{state}\n{fleet.worker.log.read_text()[-3000:]}"
    assert [line for line in noted(fleet) if line.startswith("done")] == [f"done {each}" for each in STAGES]
    assert len(manifests(fleet)) == len(before) + 1
    wait_until(lambda: fleet.worker.flow_runs() == [], "its processes to be gone", fleet)


def kill(fleet: Fleet, victim: str) -> None:
    if victim == "flow":
        fleet.worker.kill_flow_runs()
    elif victim == "worker":
        fleet.worker.kill()
        fleet.worker.start()
    elif victim == "server":
        fleet.server.kill()
        fleet.server.start()
    else:
        fleet.postgres.kill()
        fleet.postgres.start()
