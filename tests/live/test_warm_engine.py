"""Forks of the warm engine are what their starter would have had of the engine itself."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm.engine import OFFLINE
from vllm_qualify.engine.confinement import confined, folders_of
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.process import guarded, wait_for

pytestmark = pytest.mark.engine


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    with confined(OFFLINE) as confinement:
        yield confinement.environment


def program(engine: EngineEnvironment, source: str) -> list[str]:
    return [str(engine.python), "-u", "-c", source, "one", "two"]


def started(engine: EngineEnvironment, source: str, environment: dict[str, str]) -> tuple["subprocess.Popen[str]", int]:
    """With the process id that it prints."""
    process = subprocess.Popen(program(engine, source), env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def test_it_is_the_engine(engine: EngineEnvironment, warm_engine: EngineEnvironment) -> None:
    assert warm_engine.identity() == engine.identity()
    assert folders_of(warm_engine.python)[1:] == folders_of(engine.python)[1:]


def test_a_program_has_its_arguments_environment_folder_and_exit_code(
    warm_engine: EngineEnvironment, tmp_path: Path, environment: dict[str, str]
) -> None:
    source = "import os, sys; print(sys.argv, os.environ['TMPDIR'], os.getcwd(), 'vllm' in sys.modules); sys.exit(3)"
    done = subprocess.run(
        program(warm_engine, source),
        env=environment | {"TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, f"['-c', 'one', 'two'] {tmp_path} {tmp_path} True\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_fork(warm_engine: EngineEnvironment, number: signal.Signals, environment: dict[str, str]) -> None:
    process, fork = started(warm_engine, WAITS, environment)
    process.send_signal(number)
    assert process.wait(30) == -number
    deadline = time.monotonic() + 10
    while Path(f"/proc/{fork}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_fork_ends_as_killed(warm_engine: EngineEnvironment, environment: dict[str, str]) -> None:
    process, fork = started(warm_engine, WAITS, environment)
    os.kill(fork, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_a_fork_is_confined_by_its_guard_and_so_are_the_processes_that_it_starts(
    warm_engine: EngineEnvironment, tmp_path: Path
) -> None:
    opened, closed, log = tmp_path / "opened", tmp_path / "closed", tmp_path / "said.log"
    for file in (opened, closed):
        file.write_text("text")
    source = f"""
import multiprocessing, os
def read(file):
    try:
        return open(file).read()
    except PermissionError:
        return "refused"
for file in ({str(opened)!r}, {str(closed)!r}):
    print(read(file))
process = multiprocessing.get_context("spawn").Process(target=os.listdir, args=({str(closed.parent)!r},))
process.start()
process.join()
print(process.exitcode)
"""
    with (
        confined(OFFLINE, readable=[*folders_of(warm_engine.python), opened]) as confinement,
        guarded(program(warm_engine, source), confinement.environment, log, rules=confinement.rules) as process,
    ):
        wait_for(process, 120, lambda: None, "it")
    assert log.read_text().splitlines()[:2] == ["text", "refused"]
    assert log.read_text().splitlines()[-1] == "1"
