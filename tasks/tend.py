"""Find runs whose process, worker or host was lost. Prefect's server would show them as running for ever."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect import get_client, get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.states import AwaitingRetry, Crashed

from tasks.outcome import NOT_TO_DEPLOY
from tasks.step import LIMIT_S, step
from vllm_qualify.recipe.values import Frozen

FLOWS = ("qualify-release", "qualify-host", "watch-releases", "requalify", "decide", "tend-fleet")
HEARTBEAT = "prefect.flow-run.heartbeat"
UNDER_WAY = [StateType.RUNNING, StateType.PENDING]
GIVEN_UP = "given up"
# How far back to look for runs that ended, and how many runs to read in one request.
LOOK_BACK, PAGE = timedelta(hours=6), 200
# The errors of a flow whose Prefect server was away for longer than its client retries. Nothing is wrong with the flow.
SERVER_WAS_AWAY = ("ConnectError", "ConnectTimeout", "ReadError", "ReadTimeout", "RemoteProtocolError")


class Lost(Frozen):
    """A lost run, the state that it has, and the reason. It `can_start` if it has a deployment and no schedule."""

    run_id: UUID
    name: str
    state_id: UUID | None
    starts: int
    can_start: bool
    because: str


@step("lost runs", limit_s=lambda given: given["confirm_s"] + LIMIT_S)
def lost_runs(silent_s: float, confirm_s: float, settled_s: float) -> list[Lost]:
    """The runs that crashed, that could not reach the server at their end, or that were silent at two looks."""
    with get_client(sync_client=True) as client:
        ended = [_describe_loss(run, why) for run in _recently_ended(client, settled_s) if (why := why_lost(run))]
        silent = _silent_runs(client, _read_runs(client, UNDER_WAY), silent_s)
        if silent:
            get_run_logger().info(f"{len(silent)} runs are silent; listening for another {confirm_s:.0f} s")
            # The server may have been away, and so have missed heartbeats.
            time.sleep(confirm_s)
            silent = _silent_runs(client, [client.read_flow_run(run.id) for run in silent], silent_s)
    return [*ended, *(_describe_loss(run, f"no sign of life for {silent_s:.0f} s") for run in silent)]


def _describe_loss(run: FlowRun, because: str) -> Lost:
    return Lost(
        run_id=run.id,
        name=run.name,
        state_id=run.state_id,
        starts=run.run_count or 0,
        can_start=run.deployment_id is not None and not run.auto_scheduled,
        because=because,
    )


@step("start again", "start {lost.name} again")
def restart_lost(lost: Lost, most_starts: int) -> None:
    """Start a lost run again: the next free worker takes it, and it takes over its finished stages.

    Runs of a schedule, and runs without a deployment, are only marked as crashed: the schedule starts new runs, and the outer
    flow starts its inner runs again.
    """
    message = f"infrastructure: {lost.because}"
    if not lost.can_start:
        state: State[Any] = Crashed(message=message)
    elif lost.starts >= most_starts:
        state = Crashed(message=f"{message}; {GIVEN_UP} after {lost.starts} starts")
    else:
        state = AwaitingRetry(message=f"{message}; started again")
    with get_client(sync_client=True) as client:
        # If the state differs, the run has gone on meanwhile.
        if client.read_flow_run(lost.run_id).state_id == lost.state_id:
            client.set_flow_run_state(lost.run_id, state, force=lost.starts >= most_starts)
            get_run_logger().warning(f"{lost.name} ({lost.run_id}): {state.name}: {state.message}")


def _recently_ended(client: SyncPrefectClient, settled_s: float) -> list[FlowRun]:
    """The runs that ended recently, without those that sent a heartbeat since.

    Such a run goes on: a worker reported late that an earlier start of it crashed.
    """
    now = datetime.now(UTC)
    ended = _read_runs(client, [StateType.CRASHED, StateType.FAILED], ended_after=now - LOOK_BACK)
    settled = [run for run in ended if run.state and now - run.state.timestamp > timedelta(seconds=settled_s)]
    return [run for run in settled if run.state and not _was_heard(client, run, run.state.timestamp)]


def why_lost(run: FlowRun) -> str:
    """Why a run that ended should be started again; empty if it should not."""
    message = (run.state.message if run.state else None) or ""
    is_verdict = run.state is not None and run.state.name in NOT_TO_DEPLOY
    if run.deployment_id is None or run.auto_scheduled or GIVEN_UP in message or is_verdict:
        return ""
    if run.state_type == StateType.CRASHED:
        return message.splitlines()[0] if message else "it crashed"
    return "Prefect's server was away" if any(name in message for name in SERVER_WAS_AWAY) else ""


def _read_runs(client: SyncPrefectClient, types: list[StateType], ended_after: datetime | None = None) -> list[FlowRun]:
    """The runs of this project's flows in these states."""
    of = filters.FlowRunFilter(
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=types)),
        end_time=filters.FlowRunFilterEndTime(after_=ended_after) if ended_after else None,
    )
    flows, runs = filters.FlowFilter(name=filters.FlowFilterName(any_=list(FLOWS))), list[FlowRun]()
    while page := client.read_flow_runs(flow_filter=flows, flow_run_filter=of, limit=PAGE, offset=len(runs)):
        runs += page
    return runs


def _silent_runs(client: SyncPrefectClient, runs: Iterable[FlowRun], silent_s: float) -> list[FlowRun]:
    since = datetime.now(UTC) - timedelta(seconds=silent_s)
    return [run for run in runs if _may_be_silent(run, since) and not _was_heard(client, run, since)]


def _may_be_silent(run: FlowRun, since: datetime) -> bool:
    return run.state_type in UNDER_WAY and run.state is not None and run.state.timestamp < since


def _was_heard(client: SyncPrefectClient, run: FlowRun, since: datetime) -> bool:
    heartbeats = EventFilter(
        event=EventNameFilter(name=[HEARTBEAT]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        occurred=EventOccurredFilter(since=since),
    )
    return bool(client.read_events(heartbeats, limit=1).events)
