"""A real server's states show which runs are lost. Those are started again; living ones are left alone."""

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events import Event, Resource
from prefect.exceptions import ObjectAlreadyExists
from prefect.states import Completed, Crashed, Failed, Pending, Running, Scheduled

from tasks import tend
from tasks.tend import HEARTBEAT, lost_runs, restart_lost

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("on_own_prefect")]

SILENT_S = 1.0
MOST_STARTS = 3


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as opened:
        yield opened


@pytest.fixture
def deployment(client: SyncPrefectClient) -> UUID:
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name="tended", type="process"))
    return client.create_deployment(client.create_flow_from_name("qualify-host"), "tended", work_pool_name="tended")


def begun(client: SyncPrefectClient, deployment: UUID, *states: State[object]) -> UUID:
    """A run that had these states, the last one for longer than SILENT_S once the test asks."""
    run = client.create_flow_run_from_deployment(deployment, state=Scheduled()).id
    for state in states:
        client.set_flow_run_state(run, state, force=True)
    return run


@flow
def tended() -> None:
    for lost in lost_runs(SILENT_S, confirm_s=1, settled_s=0):
        restart_lost(lost, MOST_STARTS)


def tend_once() -> None:
    time.sleep(SILENT_S + 0.5)  # until what says nothing is silent
    tended()


def state_of(client: SyncPrefectClient, run: UUID) -> tuple[StateType | None, str | None, str]:
    flow_run: FlowRun = client.read_flow_run(run)
    assert flow_run.state is not None
    return flow_run.state.type, flow_run.state.name, flow_run.state.message or ""


def test_a_run_that_gives_no_sign_of_life_is_started_again(client: SyncPrefectClient, deployment: UUID) -> None:
    running, pending = begun(client, deployment, Pending(), Running()), begun(client, deployment, Pending())
    tend_once()
    for run in (running, pending):
        kind, name, message = state_of(client, run)
        assert (kind, name) == (StateType.SCHEDULED, "AwaitingRetry")
        assert message.startswith("infrastructure: no sign of life for 1 s; started again")


def test_a_living_run_is_left_alone(client: SyncPrefectClient, deployment: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    run, called_crashed = begun(client, deployment, Pending(), Running()), begun(client, deployment, Crashed(message="killed"))
    silent = begun(client, deployment, Pending(), Running())
    monkeypatch.setattr("tests.test_tend.SILENT_S", 20.0)
    monkeypatch.setattr(tend, "_may_be_silent", lambda *_: True)
    for heard in (run, called_crashed):
        resource = Resource({"prefect.resource.id": f"prefect.flow-run.{heard}"})
        event = Event(occurred=datetime.now(UTC), event=HEARTBEAT, resource=resource)
        client.request("POST", "/events", json=[event.model_dump(mode="json")])
    time.sleep(8)  # the server writes events every five seconds
    tended()
    assert state_of(client, run)[:2] == (StateType.RUNNING, "Running")
    assert state_of(client, called_crashed)[0] == StateType.CRASHED
    assert state_of(client, silent)[0] == StateType.SCHEDULED


@pytest.mark.parametrize(
    ("state", "is_started"),
    [
        (Crashed(message="Process exited with status code: -9."), True),
        (Failed(message="Flow run encountered an exception: ConnectError: [Errno 111] Connection refused"), True),
        (Failed(message="Flow run encountered an exception: ReleaseError: serve: it did not start"), False),
        (Completed(name="Approved"), False),
        (Failed(name="NotPassed", message="accuracy: fail; its log has a ReadTimeout"), False),
    ],
    ids=["crashed", "server away", "release failed", "approved", "not passed"],
)
def test_what_ended_is_started_again_only_where_the_infrastructure_failed(
    state: State[object], is_started: bool, client: SyncPrefectClient, deployment: UUID
) -> None:
    run = begun(client, deployment, Pending(), Running(), state)
    tend_once()
    assert (state_of(client, run)[0] == StateType.SCHEDULED) is is_started


def test_a_run_is_given_up_after_so_many_starts_and_then_left_alone(client: SyncPrefectClient, deployment: UUID) -> None:
    run = begun(client, deployment, *[Pending(), Running(), Crashed(message="killed")] * MOST_STARTS)
    # The client sends a request again if no answer comes in time. Then the server counts the start twice.
    count = client.read_flow_run(run).run_count
    assert count >= MOST_STARTS
    tend_once()
    kind, _, message = state_of(client, run)
    assert kind == StateType.CRASHED
    assert message == f"infrastructure: killed; given up after {count} starts"
    tend_once()
    assert state_of(client, run) == (kind, "Crashed", message)


def test_a_run_within_another_one_is_only_reported_as_lost(client: SyncPrefectClient) -> None:
    @flow(name="qualify-host")
    def inner() -> None:
        """As a run that no deployment made."""

    run = client.create_flow_run(inner, state=Running()).id
    tend_once()
    assert state_of(client, run)[0] == StateType.CRASHED
