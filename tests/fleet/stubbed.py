"""`qualify_host` as a worker runs it, around stages that pass at once, and that wait where a test wants to kill something.

In the folder HELD a file `hold-<stage>` makes that stage wait. `stages.log` tells which began, which were done, and in which
flow run.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from prefect import flow
from prefect.client.schemas.objects import State

import tasks.approve
import tasks.decide
import tasks.measure
from flows.qualify import qualify_host as real
from infra.bench.passing import passing
from vllm_qualify.evidence.stages.stage import Stage
from vllm_qualify.runs.publishing import Published
from vllm_qualify.runs.request import QualifyHost

HELD = "VLLM_QUALIFY_TEST_HELD"
# As a worker tells the process of a flow run.
RUN = "PREFECT__FLOW_RUN_ID"
POLL_S = 0.1
# Where a run can be held. A server is started again wherever something is missing; all others are done once.
STARTS, DONE_ONCE = "serve", ["smoke", "contract", "accuracy", "load", "judge", "publish", "approve"]


@flow(name="qualify-host", validate_parameters=True)
def qualify_host(request: QualifyHost) -> State[list[Published]]:
    with passing(), _watched():
        state: State[list[Published]] = real.fn(request)
        return state


@contextmanager
def _watched() -> Iterator[None]:
    record, serve = Stage.record, vars(tasks.measure)["serve"]
    wrapped: dict[tuple[Any, str], Callable[..., Any]] = {
        (Stage, "record"): lambda stage, *others: _signalled(stage.name, record, stage, *others),
        (tasks.measure, "serve"): partial(_served, serve),
    }
    for stage, module, name in (
        ("judge", tasks.decide, "judge_run"),
        ("publish", tasks.decide, "publish_run"),
        ("approve", tasks.approve, "approve"),
    ):
        wrapped[module, name] = partial(_signalled, stage, getattr(module, name))
    with ExitStack() as patched:
        for (module, name), work in wrapped.items():
            patched.enter_context(patch.object(module, name, work))
        yield


@contextmanager
def _served(serve: Callable[..., AbstractContextManager[Any]], *arguments: Any, **named: Any) -> Iterator[Any]:
    _begun(STARTS)
    with serve(*arguments, **named) as served:
        yield served


def _signalled(stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
    _begun(stage)
    outcome = work(*arguments)
    _note(f"done {stage}")
    return outcome


def _begun(stage: str) -> None:
    _note(f"begun {stage}")
    while (Path(os.environ[HELD]) / f"hold-{stage}").exists():
        time.sleep(POLL_S)  # until the test has done its worst


def _note(line: str) -> None:
    with (Path(os.environ[HELD]) / "stages.log").open("a") as log:
        log.write(f"{line} {os.environ[RUN]}\n")
