"""Every deployment's entry point loads for real, and takes the parameters that it is given."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import typer
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint
from prefect.server.events.schemas.automations import EventTrigger as ServersTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.settings import PREFECT_API_URL, temporary_settings
from ruamel.yaml import YAML

from deployments import setup
from deployments.setup import GPU_POOLS, PRIORITIES
from tasks.fleet import TAG, pool_of
from vllm_qualify.recipe.loading import catalog_names, load_recipe

FILE = Path(__file__).parents[1] / "deployments" / "prefect.yaml"
DEPLOYMENTS: list[dict[str, Any]] = YAML(typ="safe").load(FILE.read_text())["deployments"]
NAMES = {deployment["name"]: deployment for deployment in DEPLOYMENTS}
# What people or other flows give.
GIVEN: dict[str, dict[str, Any]] = {
    "release": {
        "recipe": "reference",
        "gpu_types": ["h100"],
        "launch": {"launcher": "docker", "image": "vllm/vllm-openai:v0.32.0"},
    }
}


def request_of(deployment: dict[str, Any]) -> dict[str, Any]:
    given = deployment.get("parameters", {}).get("request")
    return dict(GIVEN.get(deployment["name"], {"recipe": "reference"}) if given is None else given)


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_point_loads_without_a_placeholder_and_every_setting_of_its_form_is_described(name: str) -> None:
    deployment = NAMES[name]
    flow: Flow[Any, Any] = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    assert flow.validate_parameters({"request": request_of(deployment)})
    assert deployment["description"]
    with pytest.raises(Exception, match="Extra inputs are not permitted"):
        flow.validate_parameters({"request": request_of(deployment) | {"no such setting": 1}})
    form = flow.parameters.model_dump()
    request = form["properties"]["request"]
    title = request.get("$ref", request.get("allOf", [{}])[0].get("$ref", "")).rpartition("/")[2]
    settings = form["definitions"][title]["properties"]
    assert [setting for setting, about in settings.items() if not about.get("description")] == []


def test_a_verdict_is_never_tried_again_whatever_a_host_sets_for_its_flows() -> None:
    """Since 3.9 Prefect also tries a flow again that returned a failed state."""
    told = "from flows.qualify import qualify_host, qualify_release; print(qualify_host.retries, qualify_release.retries)"
    given = os.environ | {"PREFECT_FLOWS_DEFAULT_RETRIES": "3"}
    assert subprocess.check_output([sys.executable, "-c", told], env=given, text=True) == "0 0\n"


def test_scheduled_flows_have_all_that_they_need() -> None:
    assert {name for name, deployment in NAMES.items() if deployment.get("schedules")} == {"watch", "requalify", "tend"}
    for name in ("watch", "requalify"):
        watched = set(NAMES[name]["parameters"]["request"]["recipes"])
        assert watched == {each for each in catalog_names() if not each.startswith("reference")}
        for recipe in NAMES[name]["parameters"]["request"]["recipes"]:
            assert set(load_recipe(recipe).recipe.gpu_types) & {"h100", "h200", "b200"}


def test_each_gpu_type_has_its_pool_and_its_deployment() -> None:
    cells = {deployment["work_pool"]["name"] for deployment in DEPLOYMENTS if deployment["entrypoint"].endswith("qualify_host")}
    assert cells == set(GPU_POOLS) == {pool_of(gpu_type) for gpu_type in ("h100", "h200", "b200", "cpu")}
    for pool in GPU_POOLS:
        assert NAMES[pool]["work_pool"]["name"] == pool
        assert NAMES[pool]["work_pool"]["work_queue_name"] in PRIORITIES
    assert PRIORITIES["release"] < PRIORITIES["requalification"]


def test_the_one_that_tends_is_never_kept_from_it_by_one_that_was_killed() -> None:
    assert "concurrency_limit" not in NAMES["tend"]


def test_without_a_server_nothing_is_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(typer.Exit) as raised:
        setup.main()
    assert raised.value.exit_code == 2
    assert "set PREFECT_API_URL" in capsys.readouterr().err


def event(flow: str, state: str) -> ReceivedEvent:
    """That a run of this flow came into a state, as Prefect's server tells it."""
    related = [
        {"prefect.resource.id": f"prefect.flow.{uuid4()}", "prefect.resource.role": "flow", "prefect.resource.name": flow},
        {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"},
    ]
    return ReceivedEvent.model_validate(
        {
            "event": f"prefect.flow-run.{state}",
            "resource": {"prefect.resource.id": f"prefect.flow-run.{uuid4()}"},
            "related": related,
            "occurred": datetime.now(UTC),
            "id": uuid4(),
        }
    )


@pytest.mark.parametrize(
    ("flow", "state", "expected"),
    [
        ("qualify-host", "AwaitingDecision", "waiting for a decision"),
        ("qualify-host", "NotPassed", "not passed"),
        ("qualify-host", "Inconclusive", "not passed"),
        ("qualify-host", "Crashed", "infrastructure failure"),
        ("tend-fleet", "Failed", "infrastructure failure"),
        # by the run of its host
        ("qualify-release", "AwaitingDecision", None),
        ("qualify-release", "NotPassed", None),
        ("qualify-host", "Approved", None),
    ],
)
def test_people_are_reported_once_of_a_run_that_needs_them(flow: str, state: str, expected: str | None) -> None:
    triggers = {what: setup.telling(what, states, uuid4()).trigger for what, states in setup.NOTIFICATIONS.items()}
    servers = {what: ServersTrigger.model_validate(trigger.model_dump(exclude={"id"})) for what, trigger in triggers.items()}
    assert [what for what, trigger in servers.items() if trigger.covers(event(flow, state))] == ([expected] if expected else [])
