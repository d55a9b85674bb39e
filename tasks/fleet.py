"""A release on the fleet: one run of `qualify_cell` for each GPU type, on the work pool of that type."""

import hashlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from prefect import get_client, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Completed

from tasks.patience import patiently
from tasks.tend import why_lost
from vllm_qualify.engine.launch import Launch
from vllm_qualify.engine.plan import Choice, commit_of
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.publish.store import open_store
from vllm_qualify.qualification import Published
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.releases import known
from vllm_qualify.releases.pinning import pinned

LOOK_EVERY_S = 5.0
# `tend-fleet` does it within some minutes, where its deployment is scheduled.
STARTED_AGAIN_WITHIN = timedelta(minutes=30)
# Of every run of this project's on the fleet.
TAG = "vllm-qualify"
# The work queues of a pool of GPUs, the first before the second.
RELEASE, REQUALIFICATION = "release", "requalification"
CPU, POOL_OF_GPUS = "cpu", "gpu-"
# What a run's state is named once all its cells are reported; the first that one of them has.
NOT_APPROVED, AWAITING, APPROVED, COVERED = "NotApproved", "AwaitingDecision", "Approved", "NothingToDo"


def pool_of(gpu_type: str) -> str:
    """The work pool of a GPU type, and its deployment's name."""
    return gpu_type if gpu_type == CPU else f"{POOL_OF_GPUS}{gpu_type}"


@task(name="claim", task_run_name="claim", cache_policy=NO_CACHE)
def claim(store: str, release_key: str | None) -> bool:
    """Whether this flow run is to handle the release that its event is about: another one may have begun. Raises StoreError."""
    if release_key is None:
        return True
    opened = open_store(store)
    is_ours = known.claim(opened, release_key, str(flow_run.id), datetime.now(UTC))
    if not is_ours:
        by = known.claimed(opened, release_key).by
        get_run_logger().info(f"flow run {by} handles this release: nothing to do")
    return is_ours


@task(name="resolve", task_run_name="resolve", cache_policy=NO_CACHE)
def resolve(launch: Launch) -> Launch:
    """With the images by digest, the same on every host. Raises CallerError, HostError."""
    return pinned(launch)


@task(name="revision", task_run_name="revision", cache_policy=NO_CACHE)
def pin_revision(recipe: str, choice: Choice) -> Choice:
    """With the model by its commit, the same on every host. Raises CallerError, HostError."""
    return choice.model_copy(update={"revision": commit_of(load_recipe(recipe), choice)})


@task(name="start", task_run_name="start on {gpu_type}", cache_policy=NO_CACHE)
def start_on_fleet(gpu_type: str, request: dict[str, Any], queue: str) -> None:
    """Start a run of `qualify_cell`, unless this flow run did before; nobody waits for it. Raises CallerError."""
    with get_client(sync_client=True) as client:
        patiently(partial(_started, client, gpu_type, request, queue))


def run_on_fleet(requests: dict[str, dict[str, Any]], queue: str) -> None:
    """Start a run of `qualify_cell` for the request of each GPU type, unless it was started before; wait until all have ended.

    Raises:
        CallerError: a GPU type has no deployment.
        HostError: a run failed; the others were waited for.
    """
    with get_client(sync_client=True) as client:
        runs = {name: patiently(partial(_started, client, name, asked, queue)) for name, asked in requests.items()}
        ended = {gpu_type: _ended(client, run) for gpu_type, run in runs.items()}
    for gpu_type, state in ended.items():
        get_run_logger().info(f"{gpu_type}: {state.name}: {state.message}")
    failed = {gpu_type: state for gpu_type, state in ended.items() if not state.is_completed()}
    if failed:
        told = "; ".join(f"{gpu_type}: {state.name}: {state.message}" for gpu_type, state in failed.items())
        raise HostError(f"{len(failed)} of {len(ended)} GPU types were not qualified: {told}", "see their flow runs", "fleet")


def _started(client: SyncPrefectClient, gpu_type: str, request: dict[str, Any], queue: str) -> UUID:
    name = f"qualify-cell/{pool_of(gpu_type)}"
    try:
        deployment = client.read_deployment_by_name(name)
    except ObjectNotFound as error:
        problem = f"the fleet has no deployment {name}"
        raise CallerError(problem, "deploy it with deployments/prefect.yaml, or leave the GPU type out", "gpu_types") from error
    created = client.create_flow_run_from_deployment(
        deployment.id,
        parameters={"request": request},
        # The same run, however often this flow run is started again.
        idempotency_key=f"{flow_run.id}:{gpu_type}:{_digest(request)}",
        work_queue_name=queue,
        tags=[TAG, gpu_type],
    )
    get_run_logger().info(f"{gpu_type}: flow run {created.name} ({created.id})")
    return created.id


def _digest(request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]


def _ended(client: SyncPrefectClient, run_id: UUID) -> State[Any]:
    while True:
        run: FlowRun = patiently(partial(client.read_flow_run, run_id))
        if run.state and run.state.is_final() and not _may_start_again(run, run.state):
            return run.state
        # It takes minutes to hours; whoever watches it looks at the run itself.
        time.sleep(LOOK_EVERY_S)


def _may_start_again(run: FlowRun, state: State[Any]) -> bool:
    """What was lost is no end as long as `tend-fleet` may still come to it."""
    return bool(why_lost(run)) and datetime.now(UTC) - state.timestamp < STARTED_AGAIN_WITHIN


def state_of(reported: list[Published]) -> State[str]:
    """What became of all cells of a run, in its final state: people and automations read it there."""
    if not reported:
        return Completed(name=COVERED, message="the approval of every cell still covers it")
    names = [_name(each) for each in reported]
    worst = next(name for name in (NOT_APPROVED, AWAITING, APPROVED) if name in names)
    return Completed(name=worst, message="\n".join(line for each in reported for line in _lines(each)), data=worst)


def _name(published: Published) -> str:
    if not published.approved or published.rejected:
        return NOT_APPROVED
    return APPROVED if published.told else AWAITING


def _lines(published: Published) -> Iterator[str]:
    """The cell, the gates that it failed, and where its report is."""
    report = published.run.report()
    yield f"{report.plan.cell.id}: {published.told or published.outcome}"
    for found in report.judgement.gates:
        if found.counts_as != "pass":
            yield f"  {found.gate.label}: {found.verdict}"
    yield f"  {published.page}"
