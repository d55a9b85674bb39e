"""`qualify_cell` as a worker runs it, around stages that pass at once, and that wait where a test wants to kill something.

In the folder HELD a file `hold-<stage>` makes that stage wait; `stages.log` tells which began and which were done.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from prefect import flow
from prefect.client.schemas.objects import State

import tasks.decide
from flows.qualify import QualifyCell
from flows.qualify import qualify_cell as real
from infra.bench.passing import passing
from vllm_qualify.evidence import stages

HELD = "VLLM_QUALIFY_TEST_HELD"
POLL_S = 0.1


@flow(name="qualify-cell", validate_parameters=True)
def qualify_cell(request: QualifyCell) -> State[str]:
    with passing(), _watched():
        state: State[str] = real.fn(request)
        return state


@contextmanager
def _watched() -> Iterator[None]:
    with ExitStack() as patched:
        run: Callable[..., Any] = stages._run
        patched.enter_context(patch.object(stages, "_run", lambda stage, *others: _told(stage, run, stage, *others)))
        for stage, name in (("judge", "judge_run"), ("publish", "publish_run")):
            work = getattr(tasks.decide, name)
            patched.enter_context(patch.object(tasks.decide, name, lambda *a, s=stage, w=work: _told(s, w, *a)))
        yield


def _told(stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
    folder = Path(os.environ[HELD])
    _note(folder, f"begun {stage}")
    while (folder / f"hold-{stage}").exists():
        time.sleep(POLL_S)  # until the test has done its worst
    found = work(*arguments)
    _note(folder, f"done {stage}")
    return found


def _note(folder: Path, line: str) -> None:
    with (folder / "stages.log").open("a") as log:
        log.write(f"{line}\n")
