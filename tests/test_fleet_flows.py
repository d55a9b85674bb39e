"""The fleet's flows on a real Prefect server, without hosts: what they ask of these, and that they ask once."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.flow_engine import run_flow_sync
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Completed, Pending

from deployments.setup import GPU_POOLS, PRIORITIES, make_automation, make_pool, qualifying
from flows.fleet import Requalify, WatchReleases, requalify, watch_releases
from flows.qualify import on_host, qualify_release, run_qualification
from infra.bench.passing import passing, write_bench_recipe, write_engine
from tasks import releases
from tasks.fleet import TAG, run_on_fleet, start_on_fleet
from tasks.outcome import HostOutcome, outcome_state, state_of_fleet
from tests.approval.builder import approved, made_key, publish_report, with_gate
from tests.faults.proxy import NetworkFault, network
from tests.recipes import reference, write
from tests.report.builder import not_passed_report, passed_report
from vllm_qualify.errors import CallerError, HostError, StoreError
from vllm_qualify.judge.chance import refusals
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.releases import known
from vllm_qualify.releases.known import Sighting
from vllm_qualify.releases.source import Available, ImageSource, Source
from vllm_qualify.report.model import Report
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.publishing import Published
from vllm_qualify.runs.request import RELEASE, REQUALIFICATION, QualifyHost, QualifyRelease

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("on_own_prefect")]

DIGEST = "sha256:" + "a" * 64
MOVED = "sha256:" + "b" * 64


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as opened:
        yield opened


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = open_store((tmp_path / "store").as_uri())
    opened.check()
    return opened


@pytest.fixture
def pools(client: SyncPrefectClient) -> None:
    """As `python -m deployments.setup` makes them, with the deployments of `qualify_host`."""
    for pool in GPU_POOLS:
        make_pool(client, pool)
        client.create_deployment(
            client.create_flow_from_name("qualify-host"), pool, work_pool_name=pool, work_queue_name=RELEASE
        )


def request_of(run: FlowRun) -> QualifyHost:
    return QualifyHost.model_validate(run.parameters["request"])


def started(client: SyncPrefectClient, store: str) -> list[FlowRun]:
    """The runs on hosts that publish in this store."""
    of_fleet = FlowRunFilter(tags=FlowRunFilterTags(all_=[TAG]))
    return [run for run in client.read_flow_runs(flow_run_filter=of_fleet) if request_of(run).store == store]


@pytest.mark.usefixtures("pools")
def test_pools_and_queues_are_brought_to_what_they_should_be(client: SyncPrefectClient) -> None:
    client.update_work_queue(client.read_work_queue_by_name(RELEASE, "cpu").id, priority=7)
    make_pool(client, "cpu")
    for name, priority in PRIORITIES.items():
        assert client.read_work_queue_by_name(name, "cpu").priority == priority


def test_an_automation_is_made_once(client: SyncPrefectClient) -> None:
    deployment = client.create_deployment(client.create_flow_from_name("qualify-release"), "release")
    wanted = qualifying(deployment)
    for _ in range(2):
        make_automation(client, wanted)
    (automation,) = client.read_automations_by_name(wanted.name)
    assert automation.trigger == wanted.trigger


def test_a_host_is_asked_for_the_same_release_as_all_others() -> None:
    request = QualifyRelease(recipe="reference", allow_code=True, gpu_types=["cpu"], store="file:///somewhere", renew_days=3)

    @flow
    def asked() -> dict[str, object]:
        return on_host(request, "cpu")

    choice = request.choice.model_copy(update={"gpu_type": "cpu"})
    wanted = QualifyHost(recipe="reference", allow_code=True, choice=choice, store=request.store, renew_days=3)
    assert QualifyHost.model_validate(asked()) == wanted


@pytest.mark.usefixtures("pools")
def test_a_run_is_started_once_however_often_it_is_asked_for(client: SyncPrefectClient) -> None:
    @flow
    def asking(times: int) -> None:
        for _ in range(times):
            start_on_fleet("cpu", {"recipe": "reference", "store": "file:///once"}, REQUALIFICATION)

    asking(3)
    (run,) = started(client, "file:///once")
    assert (run.work_queue_name, run.work_pool_name) == (REQUALIFICATION, "cpu")
    asking(1)
    assert len(started(client, "file:///once")) == 2, "by another flow run"


@pytest.mark.usefixtures("pools")
def test_a_run_on_a_host_is_nested_in_the_one_that_started_it_also_after_a_restart(client: SyncPrefectClient) -> None:
    """The first start is killed while it waits: it ends between two tasks, and the server knows nothing of its end."""
    request = {"recipe": "reference", "store": "file:///nested"}

    @flow(name="qualify-release")
    def releasing(is_killed: bool) -> None:
        run = start_on_fleet("cpu", request, RELEASE)
        if is_killed:
            raise KilledError
        client.set_flow_run_state(run, Completed(name="Approved"), force=True)
        run_on_fleet({"cpu": request}, RELEASE, request["store"])

    parent = client.create_flow_run(releasing, parameters={"is_killed": True}, state=Pending())
    with pytest.raises(KilledError):
        run_flow_sync(releasing, flow_run=parent, parameters={"is_killed": True})
    client.set_flow_run_state(parent.id, AwaitingRetry(), force=True)
    again = client.read_flow_run(parent.id)
    run_flow_sync(releasing, flow_run=again, parameters={"is_killed": False})
    (host,) = started(client, "file:///nested")
    assert host.parent_task_run_id is not None
    shown = client.read_task_run(host.parent_task_run_id)
    assert (shown.flow_run_id, shown.state_name) == (parent.id, "Approved")


class KilledError(BaseException):
    """As by `kill -9`: nobody handles it."""


def test_a_gpu_type_without_a_deployment_is_the_callers_mistake() -> None:
    @flow
    def asking() -> None:
        start_on_fleet("h999", {"recipe": "reference"}, RELEASE)

    with pytest.raises(CallerError, match="no deployment qualify-host/gpu-h999"):
        asking()


def published(folder: Path, report: Report) -> Published:
    run = Run(folder=folder / str(uuid4()))
    run.folder.mkdir(parents=True)
    (run.folder / "report.json").write_text(report.model_dump_json())
    return Published(outcome=report.outcome, passed=report.passed, run=run, page="s3://b/report.html", manifest="m")


def test_a_runs_state_says_what_people_have_to_know(tmp_path: Path) -> None:
    passed, failed = (published(tmp_path, report) for report in (passed_report(), not_passed_report()))
    done = passed.model_copy(update={"decision": "approved by Ada on 2026-03-14, until 2026-06-12"})
    rejected = passed.model_copy(update={"decision": "rejected", "rejected": True})
    assert colour_and_name([]) == ("COMPLETED", "NothingToDo")
    assert colour_and_name([done]) == ("COMPLETED", "Approved")
    assert colour_and_name([done, passed]) == ("COMPLETED", "AwaitingDecision")
    assert colour_and_name([passed, rejected]) == ("FAILED", "Rejected")
    assert colour_and_name([done, failed, rejected]) == ("FAILED", "NotPassed")
    state = outcome_state([done, failed, passed])
    message = str(state.message)
    report = failed.run.report()
    assert report.plan.cell.id in message
    assert failed.page in message
    for gate in report.judgement.gates:
        assert (f"{gate.gate.label}: {gate.verdict}" in message) is (gate.counts_as != "pass")


def colour_and_name(reported: list[Published]) -> tuple[str, str | None]:
    state = outcome_state(reported)
    return state.type.value, state.name


@pytest.mark.parametrize(("verdict", "name"), [("fail", "NotPassed"), ("invalid", "Invalid"), ("inconclusive", "Inconclusive")])
def test_each_verdict_that_does_not_pass_has_its_state(verdict: Verdict, name: str, tmp_path: Path) -> None:
    assert colour_and_name([published(tmp_path, with_gate(verdict)(passed_report()))]) == ("FAILED", name)


def test_a_release_has_the_worst_state_of_its_hosts() -> None:
    hosts = {"h100": "Approved", "h200": "Inconclusive", "b200": "NotPassed"}
    ended = {gpu_type: HostOutcome(name=name, message=f"of {gpu_type}", is_qualified=True) for gpu_type, name in hosts.items()}
    state = state_of_fleet(ended, refusals([]))
    assert (state.type.value, state.name) == ("FAILED", "NotPassed")
    assert all(f"{gpu_type}: {name}: of {gpu_type}" in str(state.message) for gpu_type, name in hosts.items())


def test_a_flow_in_such_a_state_still_gives_its_reports(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """And raises what stopped it, where something did."""
    failed = published(tmp_path, not_passed_report())
    request = QualifyRelease(recipe="reference", store=store.url)
    monkeypatch.setattr("flows.qualify.qualify_here", lambda _: [failed])
    assert run_qualification(request) == [failed]
    monkeypatch.setattr("flows.qualify.qualify_here", lambda _: no_such_recipe())
    with pytest.raises(CallerError, match="no such recipe"):
        run_qualification(request)


@contextmanager
def answers_lost() -> Iterator[None]:
    """The answers to a flow run's states Running and its final one are lost."""
    lost: tuple[NetworkFault, ...] = ("none", "reset")
    with network(PREFECT_API_URL.value(), lost, part="/set_state") as between:
        with temporary_settings({PREFECT_API_URL: f"{between.url}/api"}):
            yield
        assert not between.is_faulty


@pytest.mark.parametrize("report", [passed_report(), not_passed_report()], ids=["passed", "not-passed"])
def test_an_outcome_whose_answer_is_lost_still_gives_its_reports(
    report: Report, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's client asks again, and gets the state as the server has it: without its reports."""
    ended = published(tmp_path, report)
    monkeypatch.setattr("flows.qualify.qualify_here", lambda _: [ended])
    request = QualifyRelease(recipe="reference", store=store.url)
    with answers_lost():
        assert run_qualification(request) == [ended]


def test_an_error_whose_answer_is_lost_is_still_raised(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.qualify.qualify_here", lambda _: no_such_recipe())
    with answers_lost(), pytest.raises(CallerError, match="no such recipe"):
        run_qualification(QualifyRelease(recipe="reference", store=store.url))


def test_a_recipe_that_runs_code_stops_before_anything_is_looked_for(store: Store, tmp_path: Path) -> None:
    """The engine's environment is not even there, and no host is asked."""
    document = reference()
    document["variants"]["bf16"]["server"] = {"trust-remote-code": True}
    recipe = str(write(document, tmp_path / "recipe.yaml"))
    for gpu_types in ([], ["cpu"]):
        request = QualifyRelease(recipe=recipe, gpu_types=gpu_types, store=store.url, release_key="r")
        with pytest.raises(CallerError, match=r"the recipe runs code: variants\.bf16\.server\.trust-remote-code"):
            run_qualification(request)
    assert not list(store.keys("")), "the release is not claimed"


def no_such_recipe() -> None:
    raise CallerError("no such recipe", "name another")


def test_what_takes_long_is_a_task_and_each_cell_has_artifacts_of_its_own(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cells without a server: the flow, the tasks, the verdicts and the store are the real ones."""
    write_bench_recipe(2, tmp_path / "recipe.yaml")
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(write_engine(tmp_path / "engine")))
    for name in ("HOME", "LOCKS"):
        monkeypatch.setenv(f"VLLM_QUALIFY_{name}", str(tmp_path / name.lower()))
    request = QualifyRelease(recipe=str(tmp_path / "recipe.yaml"), store=(tmp_path / "store").as_uri())
    with passing():
        reports = run_qualification(request)
    assert [each.passed for each in reports] == [True, True]
    (run,) = [run for run in client.read_flow_runs() if run.parameters.get("request", {}).get("recipe") == request.recipe]
    assert run.state is not None
    assert (run.state_name, run.state_type) == ("AwaitingDecision", StateType.COMPLETED)
    tasks = Counter(task.name for task in tasks_of(client, run, len(reports)))
    assert (tasks["wait for the machine"], tasks["start server"]) == (2, 2)
    for number in (1, 2):
        cell = f"orchestrator/bf16/cpu/p{number}"
        assert tasks[f"load {cell}"] == tasks[f"keep load of {cell}"] == 1
    keys = {str(artifact.key).partition("-")[::2] for artifact in client.read_latest_artifacts()}
    assert len([of for what, of in keys if what == "verdicts"]) == 2
    assert {of for what, of in keys if what == "verdicts"} == {of for what, of in keys if what == "report"}


def tasks_of(client: SyncPrefectClient, run: FlowRun, cells: int) -> list[TaskRun]:
    """All of a run that has ended; the server hears of them as events, somewhat later."""
    deadline = time.monotonic() + 60
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
    while True:
        task_runs = client.read_task_runs(flow_run_filter=of_run)
        if len([task for task in task_runs if task.name.startswith("publish ")]) == cells:
            return task_runs
        assert time.monotonic() < deadline, "the server has not heard of all tasks"
        time.sleep(0.5)  # until the server has written them


def watching(store: Store) -> WatchReleases:
    return WatchReleases(recipes=["reference"], gpu_types=["cpu", "h100"], repository="127.0.0.1:5000/vllm", store=store.url)


def test_a_new_image_is_reported_once_with_the_whole_request_and_a_moved_tag_is_a_new_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real registry is asked in tests/releases."""
    requests: list[QualifyRelease] = []

    def emit_event(source: Source, sighting: Sighting, request: dict[str, Any], store: str) -> None:
        requests.append(QualifyRelease(**request))
        releases.emit_event(source, sighting, request, store)

    def watch(*available: Available) -> None:
        monkeypatch.setattr(releases, "available_at", lambda _: list(available))
        watch_releases(watching(store))

    monkeypatch.setattr("flows.fleet.emit_event", emit_event)
    old, new = Available(identity="sha256:" + "0" * 64, tags=["v0.31.0"]), Available(identity=DIGEST, tags=["v0.32.0"])
    watch(old)
    assert requests == [], "what was there before is only noted"
    for _ in range(2):
        watch(new, old)
    (request,) = requests
    assert request.launch.image == f"127.0.0.1:5000/vllm:v0.32.0@{DIGEST}"
    assert (request.gpu_types, request.renew_days) == (["cpu"], 0)
    assert request.release_key == known.release_key(ImageSource(name="127.0.0.1:5000/vllm", recipe="reference"), DIGEST)
    watch(Available(identity=MOVED, tags=["v0.32.0"]), old)
    assert len(requests) == 2


def test_a_silent_source_keeps_no_other_from_being_looked_at(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look(_source: Source, recipe: str, _request: WatchReleases) -> None:
        looked.append(recipe)
        if len(looked) == 1:
            raise HostError("it drips", "look why", "watch")

    monkeypatch.setattr("flows.fleet._look_at", look)
    with pytest.raises(HostError, match="it drips"):
        watch_releases(watching(store).model_copy(update={"recipes": ["reference", "reference"]}))
    assert looked == ["reference", "reference"]


def test_a_release_that_somebody_handles_is_left_to_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def run_on_fleet(requests: object, queue: str, store: str) -> State[list[Published]]:
        asked.append((requests, queue, store))
        return Completed(name="Approved")

    monkeypatch.setattr("flows.qualify.run_on_fleet", run_on_fleet)
    key = known.release_key(ImageSource(name="vllm/vllm-openai", recipe="reference"), DIGEST)
    request = QualifyRelease(recipe="reference", gpu_types=["cpu"], store=store.url, release_key=key)
    qualify_release(request)
    qualify_release(request)
    assert len(asked) == 1
    assert UUID(known.read_claim(store, key).by)


@pytest.mark.parametrize("by", ["nobody", "00000000-0000-4000-8000-000000000000"])
def test_a_release_that_no_flow_run_claimed_is_told_by_whoever_looks_and_by_whoever_would_handle_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A claim in the store is a file like any other: it was taken for a run that handles the release."""
    monkeypatch.setattr(releases, "available_at", lambda _: [])
    watch_releases(watching(store))
    key = known.release_key(ImageSource(name="127.0.0.1:5000/vllm", recipe="reference"), DIGEST)
    known.claim(store, key, by, datetime.now(UTC))
    monkeypatch.setattr(releases, "available_at", lambda _: [Available(identity=DIGEST, tags=["v0.32.0"])])
    with pytest.raises(StoreError, match=f"claimed by '{by}', which is no flow run of this server") as refused:
        watch_releases(watching(store))
    assert key in str(refused.value)
    with pytest.raises(StoreError, match="which is no flow run of this server"):
        qualify_release(QualifyRelease(recipe="reference", gpu_types=["cpu"], store=store.url, release_key=key))


@pytest.mark.usefixtures("pools")
def test_what_is_approved_is_looked_at_again_on_its_own_host(
    client: SyncPrefectClient, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = publish_report(store, tmp_path / "runs")
    approved(store, stored, made_key(tmp_path / "adas.pem"), datetime.now(UTC))
    cell = stored.report.plan.cell
    named = SimpleNamespace(recipe=SimpleNamespace(name=cell.recipe))
    monkeypatch.setattr(releases, "load_recipe", lambda _: named)
    requalify(Requalify(recipes=[cell.recipe], allow_code=True, store=store.url))
    (run,) = started(client, store.url)
    request = request_of(run)
    assert (run.work_pool_name, run.work_queue_name) == (f"gpu-{cell.gpu_type}", REQUALIFICATION)
    asked = request.choice
    assert (asked.variant, asked.gpu_type, asked.profile) == (cell.variant, cell.gpu_type, cell.profile)
    assert (request.reuse.of, request.renew_days, request.allow_code) == ("all", 14, True)
