"""Restarts: a server that was started anew between two moments is told by its counts, its start and its processes."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.loads import CAPTURED, count, measure
from vllm_qualify.engine.process import running_guarded
from vllm_qualify.engine.process_tree import EngineProcess, engine_processes
from vllm_qualify.evidence.restarts import Processes, processes_path

CORE, WORKER, ANOTHER = (EngineProcess(pid=pid, began_ticks=ticks) for pid, ticks in ((7, 100), (8, 200), (9, 9000)))
Noted = list[EngineProcess] | None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "load")


def problem(folder: Path) -> str:
    reasons = {row.invalid_because for row in measure(folder).values()}
    (reason,) = reasons if len(reasons) == 1 else [None]
    return reason or ""


def note(folder: Path, *repeats: tuple[Noted, Noted]) -> None:
    for repeat, (before, after) in enumerate(repeats, start=1):
        processes_path(folder, repeat).write_text(Processes(before=before, after=after).model_dump_json())


def began(folder: Path, repeat: int, later_s: int = 0) -> None:
    for when in ("before", "after"):
        with (folder / f"metrics-{repeat}-{when}.txt").open("a") as page:
            page.write(f"process_start_time_seconds {1.79582917621e09 + later_s}\n")


def reset(folder: Path) -> None:
    """The server's counts begin anew: it has answered the warm-ups of the second repeat."""
    for when, requests in (("before", 4), ("after", 44)):
        count(folder, when, 2, request_success=requests, generation_tokens=8 * requests, prompt_tokens=16 * requests)


def test_the_captured_load_was_of_one_server(folder: Path) -> None:
    assert problem(folder) == ""
    note(folder, ([CORE], [CORE, WORKER]), ([CORE, WORKER], [CORE, WORKER, ANOTHER]))
    began(folder, 1)
    began(folder, 2)
    assert problem(folder) == ""
    # Where processes are not known nothing follows.
    note(folder, ([CORE], None), (None, [WORKER]))
    assert problem(folder) == ""


BETWEEN = "the server was started anew between the end of repeat 1 and the start of repeat 2"


@pytest.mark.parametrize("is_noted", [False, True])
def test_counts_that_begin_anew_between_two_repeats_tell_it(folder: Path, is_noted: bool) -> None:
    reset(folder)
    if is_noted:
        note(folder, (None, None), (None, None))
    assert f"{BETWEEN}: its count of vllm:generation_tokens_total and 1 more went back" in problem(folder)


def test_so_do_counts_that_are_less_than_at_the_end_of_the_repeat_before(folder: Path) -> None:
    """Though more than at the load's first page. Copies of repeats, which nobody noted, are another matter."""
    for when in ("before", "after"):
        shutil.copy(folder / f"metrics-1-{when}.txt", folder / f"metrics-2-{when}.txt")
    assert problem(folder) == ""
    note(folder, (None, None), (None, None))
    assert f"{BETWEEN}: its count of" in problem(folder)


def test_so_does_a_server_that_says_that_it_began_later(folder: Path) -> None:
    began(folder, 1)
    began(folder, 2, later_s=125)
    assert f"{BETWEEN}: it began at 01:26:16, and then at 01:28:21" in problem(folder)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (([CORE, ANOTHER], [CORE, ANOTHER]), f"{BETWEEN}: its process 8 is no more"),
        (([EngineProcess(pid=7, began_ticks=101), WORKER], [WORKER]), f"{BETWEEN}: its process 7 is no more"),
        (([CORE, WORKER], [CORE, ANOTHER]), "the start of repeat 2 and the end of repeat 2: its process 8 is no more"),
    ],
)
def test_so_do_processes_that_are_no_more(folder: Path, second: tuple[Noted, Noted], message: str) -> None:
    """Also where the counts are kept in another process, and go on."""
    note(folder, ([CORE, WORKER], [CORE, WORKER]), second)
    assert message in problem(folder)


CHILD = "import time; time.sleep(60)"
SPAWNS = f"""
import subprocess, sys, time
for words in (["from multiprocessing.spawn import spawn_main"], ["from multiprocessing.resource_tracker import main"]):
    subprocess.Popen([sys.executable, "-c", words[0] + "; {CHILD}"])
time.sleep(60)
"""


def awaited(look: Callable[[], list[EngineProcess] | None], wanted: int) -> list[EngineProcess]:
    for _ in range(100):
        if (found := look()) is not None and len(found) == wanted:
            return found
        time.sleep(0.1)
    raise AssertionError(look())


def test_an_engines_own_processes_are_known_again_and_its_helpers_are_none(tmp_path: Path) -> None:
    with running_guarded([sys.executable, "-c", SPAWNS], os.environ, tmp_path / "server.log") as process:
        first = awaited(lambda: engine_processes(process.commands()), 2)
        assert engine_processes(process.commands()) == first
        assert process.commands()[0] in {each.pid for each in first}
        (core,) = {each.pid for each in first} - set(process.commands())
        os.kill(core, 9)
        (left,) = awaited(lambda: engine_processes(process.commands()), 1)
        assert left in first
    assert engine_processes(process.commands()) is None
    assert engine_processes([]) is None


def test_a_process_that_has_just_begun_is_not_taken_for_an_engines() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD])
    try:
        assert engine_processes([child.pid]) == []
    finally:
        child.kill()
        child.wait()
