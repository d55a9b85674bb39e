"""A release on the fleet: one run of `qualify-host` for each GPU type, on the work pool of that type."""

import hashlib
import json
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from prefect import get_client, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from tasks.outcome import HostOutcome, state_of_fleet, was_qualified
from tasks.releases import is_flow_run
from tasks.step import patiently, step
from tasks.tend import why_lost
from vllm_qualify.engine.provision import Launch
from vllm_qualify.errors import CallerError, HostError, StoreError
from vllm_qualify.judge.chance import Refusals, refusals
from vllm_qualify.plan.choice import Choice, commit_of
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.releases import known
from vllm_qualify.releases.registry import pin_images
from vllm_qualify.report.markdown import escape_text
from vllm_qualify.report.refusals import refusal_lines
from vllm_qualify.runs.publishing import Published, chances

LOOK_EVERY_S = 5.0
# A host's run waits in its queue, then for the machine, and then takes up to some days.
WAIT_LIMIT_S = 30 * 86400.0
# `tend-fleet` starts a lost run again within some minutes, if its deployment has a schedule.
STARTED_AGAIN_WITHIN = timedelta(minutes=30)
# The tag of all this project's runs on the fleet.
TAG = "vllm-qualify"


def pool_of(gpu_type: str) -> str:
    """The work pool of a GPU type, and its deployment's name."""
    return gpu_type if gpu_type == "cpu" else f"gpu-{gpu_type}"


@step("claim")
def claim(store: str, release_key: str | None) -> bool:
    """Whether this flow run handles the release; False if another flow run has already claimed it.

    Raises StoreError, also if the claim is by no flow run of this server.
    """
    if release_key is None:
        return True
    opened = open_store(store)
    is_ours = known.claim(opened, release_key, str(flow_run.id), datetime.now(UTC))
    if not is_ours:
        held = known.read_claim(opened, release_key)
        if not is_flow_run(held.by):
            raise known.not_a_run(opened, release_key, held)
        get_run_logger().info(f"flow run {held.by} handles this release: nothing to do")
    return is_ours


@step("resolve")
def resolve(launch: Launch) -> Launch:
    """The launch with its images by digest, so that all hosts use the same. Raises CallerError, HostError."""
    return pin_images(launch)


@step("revision")
def pin_revision(recipe: str, choice: Choice) -> Choice:
    """The choice with the model's commit, so that all hosts use the same. Raises CallerError, HostError."""
    return choice.model_copy(update={"revision": commit_of(load_recipe(recipe), choice)})


@step("start", "start on {gpu_type}")
def start_on_fleet(gpu_type: str, request: dict[str, Any], queue: str) -> UUID:
    """Start `qualify-host` on a GPU type, or find the run that an earlier start of this flow run made; nested in it in the UI.

    Raises CallerError if the GPU type has no deployment.
    """
    name = f"qualify-host/{pool_of(gpu_type)}"
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
    try:
        started: Any = run_deployment(
            name,
            parameters={"request": request},
            # A restart of this flow run gets the same run.
            idempotency_key=f"{flow_run.id}:{gpu_type}:{digest}",
            work_queue_name=queue,
            tags=[TAG, gpu_type],
            as_subflow=True,
            # No wait here: Prefect's would end with a crash, though `tend-fleet` starts the run again, and with the server.
            timeout=0,
        )
    except ObjectNotFound as error:
        problem = f"the fleet has no deployment {name}"
        raise CallerError(problem, "deploy it with deployments/prefect.yaml, or leave the GPU type out", "gpu_types") from error
    get_run_logger().info(f"{gpu_type}: flow run {started.name} ({started.id})")
    return UUID(str(started.id))


@step("wait", "wait for {gpu_type}", once=True, limit_s=WAIT_LIMIT_S)
def wait_for_host(gpu_type: str, run: UUID) -> HostOutcome:
    """Wait until a host's run ended; how it ended. It waits on after a loss while `tend-fleet` may start the run again."""
    with get_client(sync_client=True) as client:
        state = _final_state(client, run)
    get_run_logger().info(f"{gpu_type}: {state.name}: {state.message}")
    return HostOutcome(name=str(state.name), message=str(state.message), is_qualified=was_qualified(state))


@step("refusals", "what stands out of the refusals")
def refusals_of(store: str, runs: list[UUID]) -> Refusals:
    """Which refused cells of these hosts' runs stand out; Prefect's UI shows it if there are any.

    It changes no outcome: where the store does not answer, nothing stands out, and the log says so.
    """
    try:
        refused = refusals(chances(open_store(store), map(str, runs)))
    except StoreError as error:
        get_run_logger().warning(f"it is not known which refusals stand out: {error}")
        return refusals([])
    if texts := refusal_lines(refused):
        create_markdown_artifact(key="refusals", markdown="\n".join(f"- {escape_text(line)}" for line in texts))
    return refused


def run_on_fleet(requests: dict[str, dict[str, Any]], queue: str, store: str) -> State[list[Published]]:
    """Qualify on a host of each GPU type; the state gives the outcome of every host, and which refusals stand out.

    Raises CallerError if a GPU type has no deployment, and HostError, when all runs have ended, if one is without a verdict.
    """
    runs = {gpu_type: start_on_fleet(gpu_type, request, queue) for gpu_type, request in requests.items()}
    ended = {gpu_type: wait_for_host(gpu_type, run) for gpu_type, run in runs.items()}
    failed = {gpu_type: each for gpu_type, each in ended.items() if not each.is_qualified}
    if failed:
        problems = "; ".join(f"{gpu_type}: {each.name}: {each.message}" for gpu_type, each in failed.items())
        problem = f"{len(failed)} of {len(ended)} GPU types were not qualified: {problems}"
        raise HostError(problem, "see their flow runs", "fleet")
    return state_of_fleet(ended, refusals_of(store, list(runs.values())))


def _final_state(client: SyncPrefectClient, run_id: UUID) -> State[Any]:
    while True:
        run: FlowRun = patiently(partial(client.read_flow_run, run_id))
        if (state := run.state) and state.is_final():
            is_recent = datetime.now(UTC) - state.timestamp < STARTED_AGAIN_WITHIN
            if not (is_recent and why_lost(run)):
                return state
        # A run takes minutes to hours, so a slow poll does no harm.
        time.sleep(LOOK_EVERY_S)
