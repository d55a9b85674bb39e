"""Every deployment's entry point loads for real, and takes the parameters that it is given."""

from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint
from ruamel.yaml import YAML

FILE = Path(__file__).parents[1] / "deployments" / "prefect.yaml"
DEPLOYMENTS: list[dict[str, Any]] = YAML(typ="safe").load(FILE.read_text())["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_an_entry_point_loads_without_a_placeholder(deployment: dict[str, Any]) -> None:
    flow: Flow[Any, Any] = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    parameters = deployment.get("parameters") or {"request": {"recipe": "reference"}}
    assert flow.validate_parameters(parameters)
    assert deployment["description"]
