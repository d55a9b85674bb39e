"""Run `vllm-qualify` with a fault at a chosen moment between two stages.

    driver.py before:accuracy run recipe.yaml     the server is killed before the accuracy stage
    driver.py after:load run recipe.yaml          … after the load stage
    driver.py before:provide run recipe.yaml …    the image's tag is moved after it was resolved
    driver.py in-turn:plan run recipe.yaml        the machine has no room for two servers

The flow, the stages and the server are the real ones; only the step's task is wrapped.
"""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.docker_engine import push_image
from vllm_qualify import cli
from vllm_qualify.cli.flow import set_up_prefect
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.provision import Engines
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.serving import Served
from vllm_qualify.plan.cell import CellPlan


def kill(server: Server) -> None:
    os.killpg(json.loads(server.process.state_file.read_text())["pid"], signal.SIGKILL)
    while server.process.end() is None:
        pass


def move_the_tag(engines: Engines) -> None:
    """Another image is pushed to the tag."""
    image = engines.engine
    assert isinstance(image, EngineImage)
    registry, _, name = image.repository.partition("/")
    push_image(registry, name, str(image.tag), content=str(time.time_ns()))


def wrap_provide(step: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(engines: Engines) -> Any:
        move_the_tag(engines)
        return step(engines)

    return wrapped


def wrap_plan(step: Callable[..., list[CellPlan]]) -> Callable[..., list[CellPlan]]:
    def wrapped(*given: Any) -> list[CellPlan]:
        return [plan.model_copy(update={"undrafted_in_turn": True}) for plan in step(*given)]

    return wrapped


def wrap_stage(when: str, stage: str, measure: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(name: str, served: Served, *others: Any) -> Any:
        if (when, stage) == ("before", name):
            kill(served.server)
        result = measure(name, served, *others)
        if (when, stage) == ("after", name):
            kill(served.server)
        return result

    return wrapped


if __name__ == "__main__":
    when, _, step = sys.argv[1].partition(":")
    set_up_prefect()
    flow_module: Any = importlib.import_module("flows.qualify")
    if step == "provide":
        flow_module.provide_engines = wrap_provide(flow_module.provide_engines)
    elif step == "plan":
        flow_module.plan = wrap_plan(flow_module.plan)
    else:
        flow_module.measure_stage = wrap_stage(when, step, flow_module.measure_stage)
    sys.argv = ["vllm-qualify", *sys.argv[2:]]
    cli.main()
