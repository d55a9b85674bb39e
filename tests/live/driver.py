"""Run `vllm-qualify` with the server killed at a chosen moment between two stages.

    driver.py before:accuracy run recipe.yaml
    driver.py after:load run recipe.yaml

The flow, the stages and the server are the real ones; only the step's task is wrapped.
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from vllm_qualify import cli
from vllm_qualify.engine.server import Server
from vllm_qualify.qualification import Run

STEPS = {"smoke": "smoke_test", "accuracy": "measure_accuracy", "load": "measure_load"}


def kill(server: Server) -> None:
    os.killpg(json.loads(server.process.state_file.read_text())["pid"], signal.SIGKILL)
    while server.process.exit_code() is None:
        pass


def wrap(when: str, step: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(server: Server, run: Run) -> Any:
        if when == "before":
            kill(server)
        found = step(server, run)
        if when == "after":
            kill(server)
        return found

    return wrapped


if __name__ == "__main__":
    when, _, step = sys.argv[1].partition(":")
    cli.set_up_prefect()
    flow_module = importlib.import_module("flows.qualify")
    setattr(flow_module, STEPS[step], wrap(when, getattr(flow_module, STEPS[step])))
    sys.argv = ["vllm-qualify", *sys.argv[2:]]
    cli.main()
