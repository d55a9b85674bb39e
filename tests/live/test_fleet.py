"""A fleet of real services: whatever is killed in whatever stage, the qualification ends, and nothing is done twice."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from ruamel.yaml import YAML

from deployments.setup import CONTROL, make_pool
from infra.bench.passing import recipe, write_engine
from tests.approval.builder import approved, made_key
from tests.fleet import Postgres, PrefectServer, Worker
from tests.fleet.runs import Runs
from tests.fleet.stubbed import DONE_ONCE, HELD, STARTS
from tests.recipes import write
from vllm_qualify.approval.pointer import Pointer, read_pointer
from vllm_qualify.approval.published import read_run
from vllm_qualify.approval.signing import PRIVATE_KEY
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.approver.service import approve_new
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.loading import load_recipe

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
DEPLOYMENTS: dict[str, Any] = YAML(typ="safe").load((ROOT / "deployments" / "prefect.yaml").read_text())
JOB: dict[str, Any] = DEPLOYMENTS["definitions"]["job"]
# One of the four measured stages stands for all: the same task measures each, and saves it. The rest have a task of their own.
STAGES = [STARTS, "accuracy", "judge", "publish", "approve"]
# What is killed while runs are held; services one after another, each started again before the next.
VICTIMS = {"flow": ["flow"], "services": ["worker", "server", "postgres"]}
# A crash ends the process; one that goes on while something else is away starts no stage a second time.
STARTED_AGAIN = {"flow"}


@dataclass(frozen=True)
class Fleet:
    """All services, one worker for the fleet's own flows and one for cells, which takes as many at a time as there are."""

    server: PrefectServer
    postgres: Postgres
    control: Worker
    worker: Worker
    folder: Path

    @property
    def runs(self) -> Runs:
        return Runs(self.server, self.control.log, self.worker.log)

    @property
    def store(self) -> Store:
        return open_store((self.folder / "store").as_uri())

    def request(self, profile: str, **settings: object) -> dict[str, object]:
        """Of one cell of the recipe."""
        cell = {"recipe": str(self.folder / "recipe.yaml"), "choice": {"profile": profile}}
        return cell | {"store": self.store.url, **settings}

    def environment(self, host: str) -> dict[str, str]:
        """Of a flow run that is to be on a host of this name: what a host has for itself is in a folder of that name."""
        folder = self.folder / host
        folder.mkdir(exist_ok=True)
        own = {"VLLM_QUALIFY_HOST": host, "VLLM_QUALIFY_HOME": str(folder / "home"), "VLLM_QUALIFY_LOCKS": str(folder)}
        return {**JOB["env"], **own, HELD: str(folder)}

    def start(self, host: str, request: dict[str, object], **settings: str) -> UUID:
        with self.runs.client() as client:
            deployment = client.read_deployment_by_name("qualify-host/cpu").id
            return client.create_flow_run_from_deployment(
                deployment,
                parameters={"request": request},
                tags=["vllm-qualify"],
                job_variables=JOB | {"env": self.environment(host) | settings},
            ).id

    def hold(self, host: str, stage: str) -> Path:
        """Whoever comes to the stage on this host waits there until the file is gone."""
        self.environment(host)
        path = self.folder / host / f"hold-{stage}"
        path.touch()
        return path

    def noted(self, host: str) -> list[str]:
        """What began and was done on a host: `begun STAGE RUN` and `done STAGE RUN`, the first one first."""
        log = self.folder / host / "stages.log"
        return log.read_text().splitlines() if log.exists() else []

    def await_begun(self, host: str, stage: str, run: UUID) -> None:
        self.runs.wait_until(lambda: f"begun {stage} {run}" in self.noted(host), f"{stage} of {run}")

    def kill(self, victim: str) -> None:
        """With -9, and started again where it is a service."""
        if victim == "flow":
            self.worker.kill_flow_runs()
            return
        service: Any = getattr(self, victim)
        service.kill()
        service.start()


@pytest.fixture(scope="module")
def fleet(_postgres: Postgres, _fleet_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    _postgres.start()
    _fleet_server.revive()
    folder = tmp_path_factory.mktemp("fleet")
    write(recipe(len(STAGES) + 2) | {"approval": {"automatic": True}}, folder / "recipe.yaml")
    write(recipe(1), folder / "decided.yaml")
    made_key(folder / "approver.pem")
    environment = {
        "VLLM_QUALIFY_ENGINE": str(write_engine(folder / "engine")),
        f"{PRIVATE_KEY}_FILE": str(folder / "approver.pem"),
    }
    deploy(_fleet_server)
    with (
        Worker(folder, _fleet_server.url, CONTROL, CONTROL, **environment) as control,
        Worker(folder, _fleet_server.url, "cpu", **environment) as worker,
    ):
        started = Fleet(_fleet_server, _postgres, control, worker, folder)
        started.store.check()
        yield started


def deploy(server: PrefectServer) -> None:
    """The pools and deployments that these tests use; of `qualify-host` the stubbed one."""
    entrypoints = {"tend-fleet/tend": "flows.fleet.tend_fleet", "qualify-host/cpu": "tests.fleet.stubbed.qualify_host"}
    with Runs(server).client() as client:
        for pool in (CONTROL, "cpu"):
            make_pool(client, pool)
        for name, entrypoint in entrypoints.items():
            flow, _, deployment = name.partition("/")
            client.create_deployment(
                client.create_flow_from_name(flow),
                deployment,
                entrypoint=entrypoint,
                work_pool_name="cpu" if deployment == "cpu" else CONTROL,
                work_queue_name="release" if deployment == "cpu" else None,
                pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
                job_variables=JOB,
            )


def pointer_of(fleet: Fleet, profile: str) -> Pointer | None:
    return read_pointer(fleet.store, f"orchestrator/bf16/cpu/{profile}")


def manifests(fleet: Fleet, profile: str) -> int:
    """How many runs of a cell were published."""
    return sum(key.endswith("/manifest.json") for key in fleet.store.keys(f"reports/orchestrator/bf16/cpu/{profile}/"))


def test_a_report_waits_for_a_decision_and_becomes_an_approval(fleet: Fleet) -> None:
    asked = fleet.request("p1") | {"recipe": str(fleet.folder / "decided.yaml"), "store": f"{fleet.store.url}/decided"}
    ended = fleet.runs.ended(fleet.start("decided", asked))
    assert ended.name == "AwaitingDecision", ended.message
    cell, store = "orchestrator/bf16/cpu/p1", open_store(str(asked["store"]))
    assert cell in (ended.message or "")
    (manifest,) = (key for key in store.keys(f"reports/{cell}/") if key.endswith("/manifest.json"))
    run = read_run(store, cell, manifest.split("/")[-2])
    done = approved(store, run, made_key(fleet.folder / "adas.pem"), datetime.now(UTC))
    assert (done.pointer.last.run_id, done.pointer.last.by) == (run.run_id, "Ada")
    # What is approved is not qualified again where nothing has changed.
    again = fleet.runs.ended(fleet.start("decided", asked | {"renew_days": 14}))
    assert again.name == "NothingToDo", again.message


def test_what_a_recipe_approves_itself_the_approver_signs_where_hosts_have_no_key(fleet: Fleet) -> None:
    asked = fleet.request("p1", store=f"{fleet.store.url}/automatic")
    ended = fleet.runs.ended(fleet.start("keyless", asked, **{f"{PRIVATE_KEY}_FILE": ""}))
    assert ended.name == "AwaitingDecision", ended.message
    own = load_recipe(str(fleet.folder / "recipe.yaml"))
    store = open_store(str(asked["store"]))
    recipes, key = {own.recipe.name: own}, made_key(fleet.folder / "approvers.pem")
    ((cell, run_id),) = approve_new(Desk(store, key, recipes), set())
    # The packages of a host can be any: the approver is told which ones it may take.
    assert read_pointer(store, cell) is None
    engine = read_run(store, cell, run_id).report.plan.cell.release.engine.digest
    assert approve_new(Desk(store, key, recipes, engines=[engine]), set()) == {(cell, run_id)}
    pointer = read_pointer(store, cell)
    assert pointer is not None
    assert (pointer.last.run_id, pointer.last.by) == (run_id, "recipe")


@dataclass(frozen=True)
class Outcome:
    """Of a cell whose run was held in a stage while something was killed. Of done stages, how often each was done."""

    state: str
    starts: int
    done: dict[str, int]
    published: int
    approved: int
    left: Sequence[str]


@pytest.fixture(scope="module", params=VICTIMS)  # of them and the stages a table is in docs/operations.md
def outcomes(request: pytest.FixtureRequest, fleet: Fleet) -> dict[str, Outcome]:
    """By the stage in which it happened: one run is held in each stage, on a host of its own; then the victims are killed."""
    fleet.worker.revive()
    victim, profiles = request.param, {stage: f"p{number}" for number, stage in enumerate(STAGES, 1)}
    hosts = {stage: f"{victim}-{stage}" for stage in STAGES}
    before = {stage: (manifests(fleet, profile), approvals(fleet, profile)) for stage, profile in profiles.items()}
    held = [fleet.hold(hosts[stage], stage) for stage in STAGES]
    runs = {stage: fleet.start(hosts[stage], fleet.request(profiles[stage])) for stage in STAGES}
    for stage, run in runs.items():
        fleet.await_begun(hosts[stage], stage, run)
    for killed in VICTIMS[victim]:
        fleet.kill(killed)
    for path in held:
        path.unlink()
    if victim in STARTED_AGAIN:
        for run in runs.values():
            assert fleet.runs.ended(run).name == "Crashed"
        fleet.runs.tend_until(
            lambda: all(starts(fleet, run) > 1 or not fleet.runs.state(run).is_final() for run in runs.values())
        )
    states = {stage: fleet.runs.completed(run) for stage, run in runs.items()}
    fleet.runs.wait_until(lambda: fleet.worker.flow_runs() == [], "the processes of all runs to be gone")
    return {
        stage: Outcome(
            state=f"{states[stage].name}",
            starts=starts(fleet, runs[stage]),
            done=Counter(line.split()[1] for line in fleet.noted(hosts[stage]) if line.startswith("done")),
            published=manifests(fleet, profiles[stage]) - before[stage][0],
            approved=approvals(fleet, profiles[stage]) - before[stage][1],
            left=[" ".join(process.cmdline()) for process in fleet.worker.flow_runs()],
        )
        for stage in STAGES
    }


def approvals(fleet: Fleet, profile: str) -> int:
    pointer = pointer_of(fleet, profile)
    return len(pointer.entries) if pointer else 0


def starts(fleet: Fleet, run: UUID) -> int:
    with fleet.runs.client() as client:
        return client.read_flow_run(run).run_count or 0


@pytest.mark.parametrize("stage", STAGES)
def test_whatever_is_killed_the_qualification_ends_and_nothing_is_done_twice(
    stage: str, outcomes: dict[str, Outcome], request: pytest.FixtureRequest
) -> None:
    victim = request.node.callspec.params["outcomes"]
    # A verdict that was not published is made again of the kept evidence, in a second.
    judged = 2 if (victim, stage) == ("flow", "publish") else 1
    assert outcomes[stage] == Outcome(
        state="Approved",
        starts=2 if victim in STARTED_AGAIN else 1,
        done=dict.fromkeys(DONE_ONCE, 1) | {"judge": judged},
        published=1,
        approved=1,
        left=[],
    )


def test_two_cells_for_one_machine_never_overlap_though_worker_and_run_are_killed(fleet: Fleet) -> None:
    """The second cell begins when the first one's lease has ended; the first one is then started again, behind it."""
    first_cell, second_cell = f"p{len(STAGES) + 1}", f"p{len(STAGES) + 2}"
    held = fleet.hold("shared", "load")
    first = fleet.start("shared", fleet.request(first_cell))
    fleet.await_begun("shared", "load", first)
    fleet.worker.kill()
    with Worker(fleet.folder, fleet.server.url, "cpu", "other", **fleet.worker.given) as other:
        second = fleet.start("shared", fleet.request(second_cell))
        # The last that a run does before it takes the machine.
        fleet.runs.wait_until(lambda: list(fleet.store.keys(f"attempts/{second}/")), "the second run to want the machine")
        assert runs_in(fleet.noted("shared")) == [str(first)]
        fleet.worker.kill_flow_runs()
        held.unlink()
        assert fleet.runs.ended(second).name == "Approved"
        assert fleet.runs.state(first).name == "Running", "nobody saw its end"
        fleet.runs.tend_until(lambda: fleet.runs.state(first).name != "Running")
        assert fleet.runs.completed(first).name == "Approved"
        assert runs_in(fleet.noted("shared")) == [str(first), str(second), str(first)]
        fleet.runs.wait_until(lambda: other.flow_runs() == [], "its processes to be gone")


def runs_in(noted: Sequence[str]) -> list[str]:
    """Whose stages they are, one after another."""
    return [run for run, _ in groupby(line.split()[2] for line in noted)]
