"""The machine's lock: one at a time, also after a kill, and not before the last server of a run is gone."""

import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_qualify.engine.host import FOLDER, holding_machine, lock_file
from vllm_qualify.errors import HostError

# Holds the machine, and a command under a guard with it, until it is killed. A command that is not ready yet would be ended by
# SIGTERM like any other.
HOLDER = """
import sys, time
from pathlib import Path
from vllm_qualify.engine.host import holding_machine
from vllm_qualify.engine.process import running_guarded
with holding_machine("run A", print):
    log = Path(sys.argv[1])
    with running_guarded([sys.executable, "-c", sys.argv[2]], {}, log, grace_s=3.0):
        while b"ready" not in log.read_bytes():
            time.sleep(0.01)  # another process writes it
        print("held", flush=True)
        time.sleep(600)  # until it is killed
"""
ENDS_AT_ONCE = "import time; print('ready', flush=True); time.sleep(600)  # until its guard ends it"
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
ENDS_LATE = f"import signal, time; {IGNORES}; print('ready', flush=True); time.sleep(600)  # until it is killed"
LIMIT_S = 60


@pytest.fixture(autouse=True)
def _locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "locks"))


def holder(tmp_path: Path, command: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path / "server.log"), command]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def is_free() -> bool:
    """Whether another run could take the machine now. A lock is of an open file, not of a process."""
    with lock_file().open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_it_is_held_for_the_block_and_free_after_it() -> None:
    with holding_machine("run A", print):
        assert not is_free()
        assert lock_file().read_text() == "run A"
    assert is_free()


def test_who_waits_is_reported_for_whom_and_goes_on_when_it_is_free(tmp_path: Path) -> None:
    first = holder(tmp_path, ENDS_AT_ONCE)
    announced: list[str] = []

    def tell(line: str) -> None:
        announced.append(line)
        first.kill()

    with holding_machine("run B", tell):
        assert lock_file().read_text() == "run B"
    first.wait()
    assert announced == ["waiting for this machine, which run A has"]


def test_a_killed_run_has_the_machine_until_its_server_is_gone(tmp_path: Path) -> None:
    first = holder(tmp_path, ENDS_LATE)
    first.send_signal(signal.SIGKILL)
    first.wait()
    # its guard gives the server three seconds
    assert not is_free()
    deadline = time.monotonic() + LIMIT_S
    while not is_free():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # until the guard has killed it
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert ENDS_LATE not in commands


def test_a_folder_that_cannot_be_written_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "/proc/locks")
    with pytest.raises(HostError, match="/proc/locks"), holding_machine("run A", print):
        pass
