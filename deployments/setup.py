"""Prepare a Prefect server for the fleet: work pools with their queues, the deployments of prefect.yaml, and the automations.

    python -m deployments.setup [--notify BLOCK_TYPE/NAME]

What exists already is updated; run it again after every upgrade. With `--notify`, a notification block such as
slack-webhook/releases, people are notified of runs that need them.
"""

import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.actions import RunDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import get_current_settings

from tasks.fleet import TAG
from tasks.outcome import AWAITING, NOT_TO_DEPLOY
from tasks.releases import NEW_RELEASE
from vllm_qualify.recipe.gpu_types import POOL_PRODUCTS
from vllm_qualify.runs.request import RELEASE, REQUALIFICATION

FILE = Path(__file__).with_name("prefect.yaml")
CONTROL, GPU_POOLS = "control", (*POOL_PRODUCTS, "cpu")
# A lower number has priority.
PRIORITIES = {RELEASE: 1, REQUALIFICATION: 2}
QUALIFIES = "qualify-release/release"
# A template: Prefect fills in the event's request, a whole JSON document.
REQUEST_OF_EVENT = {
    "__prefect_kind": "json",
    "value": {"__prefect_kind": "jinja", "template": "{{ event.payload.request | tojson }}"},
}
RUN = "{{ flow_run.name }}: {{ flow_run.state.name }}\n{{ flow_run.state.message }}\n{{ flow_run | ui_url }}"
# The subject of a notification, and the states of a run that it is for.
NOTIFICATIONS: dict[str, Sequence[str]] = {
    "not passed": NOT_TO_DEPLOY,
    "waiting for a decision": [AWAITING],
    "infrastructure failure": ["Failed", "Crashed", "TimedOut"],
}
# The run of a release has the states of its hosts' runs too: people are notified once, for the host's.
QUALIFIES_CELLS = "qualify-host"


def main(notify: Annotated[str | None, typer.Option(metavar="BLOCK_TYPE/NAME", help="A notification block.")] = None) -> None:
    if get_current_settings().api.url is None:
        # Without this check Prefect would start a server that ends with this command.
        typer.echo("error: no Prefect server is named; remedy: set PREFECT_API_URL, like https://HOST/api", err=True)
        raise typer.Exit(2)
    with get_client(sync_client=True) as client:
        for pool in (CONTROL, *GPU_POOLS):
            make_pool(client, pool)
        deploy()
        make_automation(client, qualifying(client.read_deployment_by_name(QUALIFIES).id))
        if notify:
            for what, states in NOTIFICATIONS.items():
                make_automation(client, telling(what, states, block_id(client, notify)))
    typer.echo(
        f"ready: {', '.join((CONTROL, *GPU_POOLS))}; start a worker on each host: prefect worker start --pool POOL --limit 1"
    )


def make_pool(client: SyncPrefectClient, name: str) -> None:
    """Make a pool of type process, with a GPU type's two queues. A pool that exists is kept, even if its type differs."""
    try:
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    except ObjectAlreadyExists:
        typer.echo(f"the pool {name} is there", err=True)
    if name == CONTROL:
        return
    for queue, priority in PRIORITIES.items():
        try:
            client.create_work_queue(name=queue, work_pool_name=name, priority=priority)
        except ObjectAlreadyExists:
            client.update_work_queue(client.read_work_queue_by_name(queue, name).id, priority=priority)


def deploy() -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--prefect-file", str(FILE), "--all"]
    subprocess.run(command, check=True, cwd=FILE.parents[1])


def qualifying(deployment: UUID) -> AutomationCore:
    """The automation that qualifies each new release."""
    return AutomationCore(
        name="vllm-qualify: qualify new releases",
        description="Starts qualify-release for each event of watch-releases; one that comes twice is handled once.",
        trigger=EventTrigger(expect={NEW_RELEASE}, posture=Posture.Reactive, threshold=1, within=timedelta(0)),
        actions=[RunDeployment(source="selected", deployment_id=deployment, parameters={"request": REQUEST_OF_EVENT})],
    )


def telling(what: str, states: Sequence[str], block: UUID) -> AutomationCore:
    """The automation that notifies people of runs in these states. The state's message has cells, failed gates and reports."""
    tagged = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
    of_a_host = {"prefect.resource.role": "flow", "prefect.resource.name": QUALIFIES_CELLS}
    return AutomationCore(
        name=f"vllm-qualify: {what}",
        description="Notifies people of runs that need them.",
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{state}" for state in states},
            match_related=[tagged, of_a_host] if set(states) & {*NOT_TO_DEPLOY, AWAITING} else tagged,
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[SendNotification(block_document_id=block, subject=f"vllm-qualify: {what}", body=RUN)],
    )


def make_automation(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    known = client.read_automations_by_name(wanted.name)
    if known:
        client.update_automation(known[0].id, wanted)
        for twin in known[1:]:
            client.delete_automation(twin.id)
    else:
        client.create_automation(wanted)


def block_id(client: SyncPrefectClient, name: str) -> UUID:
    block_type, _, document = name.partition("/")
    try:
        stored: Any = client.read_block_document_by_name(document, block_type)
    except ObjectNotFound:
        raise typer.BadParameter(f"there is no block {name}: make it first, in Prefect's UI or by `prefect block`") from None
    return UUID(str(stored.id))


if __name__ == "__main__":
    typer.run(main)
