"""The services that the fleet's tests stand on are real, and come back after kill -9 with all that they knew.

That runs go on when a worker, a server or a database is killed, and that a worker sees the end of a killed run, is in
tests/live/test_fleet.py.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import IntervalSchedule

from tests.fleet import Postgres, PrefectServer, Worker

pytestmark = pytest.mark.fleet

POOL = "bench"
# The server gives none below 60 s. A start of the server must fit in.
LEASE_S = 60
LIMIT_S = 240.0

FLOW = """
from pathlib import Path
import time
from prefect import flow

@flow
def touch(path: str) -> None:
    Path(path).touch()

@flow
def wait_for(path: str) -> None:
    Path(path).with_suffix(".begun").touch()
    while not Path(path).exists():
        time.sleep(0.1)  # until the test lets it go on
"""

HOLD = """
import sys, time
from prefect.concurrency.sync import concurrency

with concurrency(sys.argv[1], lease_duration=float(sys.argv[2]), strict=True):
    print("held", flush=True)
    time.sleep(3600)  # until it is killed
"""


@dataclass(frozen=True)
class Fleet:
    server: PrefectServer
    worker: Worker
    touch: UUID
    wait_for: UUID

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(self.server.url)

    def submit(self, deployment: UUID, path: Path) -> UUID:
        with self.client() as client:
            return client.create_flow_run_from_deployment(deployment, parameters={"path": str(path)}).id

    def state(self, flow_run: UUID) -> StateType:
        with self.client() as client:
            state = client.read_flow_run(flow_run).state
            assert state is not None
            return state.type

    def await_state(self, flow_run: UUID, wanted: StateType) -> None:
        self.worker.wait_until(lambda: self.state(flow_run) == wanted, f"done: {flow_run} {wanted}", LIMIT_S)

    def await_file(self, path: Path) -> None:
        self.worker.wait_until(path.exists, f"writing {path.name}", LIMIT_S)


@pytest.fixture(scope="module")
def _fleet(_postgres: Postgres, _fleet_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    _postgres.start()
    _fleet_server.revive()
    folder = tmp_path_factory.mktemp("bench")
    (folder / "fleet_probe.py").write_text(FLOW)
    with SyncPrefectClient(_fleet_server.url) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        touch, wait_for = (deploy(client, name, folder) for name in ("touch", "wait_for"))
    with Worker(folder, _fleet_server.url, POOL) as worker:
        yield Fleet(_fleet_server, worker, touch, wait_for)


def deploy(client: SyncPrefectClient, name: str, folder: Path) -> UUID:
    return client.create_deployment(
        client.create_flow_from_name(name),
        name,
        entrypoint=f"fleet_probe.{name}",
        work_pool_name=POOL,
        # Without one a worker copies all of its own working directory for each flow run.
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}],
        # Otherwise its output is a pipe to the worker: when that is gone, the next line logged ends the flow run.
        job_variables={"stream_output": False},
    )


@pytest.fixture
def fleet(_fleet: Fleet, fleet_server: PrefectServer) -> Fleet:
    assert fleet_server is _fleet.server
    _fleet.worker.revive()
    return _fleet


def test_killed_services_come_back_with_all_they_knew(fleet: Fleet, postgres: Postgres, tmp_path: Path) -> None:
    """Deployments, runs and limits; and a lease, which ends after its time though its holder was killed too."""
    address = postgres.database_url
    with fleet.client() as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="gpu", limit=1))
    run = fleet.submit(fleet.wait_for, tmp_path / "go")
    fleet.await_file(tmp_path / "go.begun")
    kill_holder(fleet.server)
    (lease,) = leases(fleet.server)
    fleet.server.kill()
    postgres.kill()
    assert not fleet.server.is_ready()
    postgres.start()
    assert postgres.database_url == address
    fleet.server.start()
    assert leases(fleet.server) == [lease]
    assert slots_in_use(fleet, "gpu") == 1
    assert fleet.state(run) == StateType.RUNNING
    with fleet.client() as client:
        assert {deployment.id for deployment in client.read_deployments()} >= {fleet.touch, fleet.wait_for}
    (tmp_path / "go").touch()
    fleet.await_state(run, StateType.COMPLETED)
    assert await_true(lambda: slots_in_use(fleet, "gpu") == 0)
    assert leases(fleet.server) == []


def test_a_schedule_makes_runs(fleet: Fleet) -> None:
    """Under SQLAlchemy 2.1 this Prefect's scheduler makes none."""
    with fleet.client() as client:
        every_minute = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(minutes=1)), active=True)
        flow = client.create_flow_from_name("touch")
        client.create_deployment(flow, "scheduled", work_pool_name=POOL, schedules=[every_minute])

        def is_made() -> bool:
            return any(run.auto_scheduled for run in client.read_flow_runs(limit=200))

        assert await_true(is_made)


def test_nothing_is_left_of_a_worker(fleet: Fleet, tmp_path: Path) -> None:
    """Not even a flow run whose worker was killed, in a test that failed."""
    fleet.worker.stop()
    seen: list[psutil.Process] = []
    with pytest.raises(ZeroDivisionError), Worker(tmp_path, fleet.server.url, POOL, "second") as worker:
        fleet.submit(fleet.wait_for, tmp_path / "go")
        worker.wait_until((tmp_path / "go.begun").exists, "running its flow", LIMIT_S)
        worker.kill()
        seen += worker.flow_runs()
        _ = 1 / 0
    assert seen
    assert await_true(lambda: not any(process.is_running() for process in seen))


def kill_holder(server: PrefectServer) -> None:
    environment = {"PREFECT_API_URL": server.url, "PREFECT_HOME": str(server.folder / "holder-home")}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, "gpu", str(LEASE_S)], stdout=subprocess.PIPE, text=True, env=environment
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
        finally:
            holder.kill()


def leases(server: PrefectServer) -> list[Path]:
    return [path for path in server.leases.glob("*.json") if path.name != "expirations.json"]


def slots_in_use(fleet: Fleet, limit: str) -> int:
    with fleet.client() as client:
        return client.read_global_concurrency_limit_by_name(limit).active_slots


def await_true(check: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not check():
        if time.monotonic() > deadline:
            return False
        # polled: neither the server nor a process of another parent tells
        time.sleep(0.5)  # the server frees it by itself
    return True
