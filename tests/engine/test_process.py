"""Guarded processes: whatever happens to whom, nothing is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.ci import IN_CI
from vllm_qualify.engine import process as processes
from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.engine.process import PROGRESS, RunningProcess, guarded, tail, wait_for
from vllm_qualify.errors import HostError

# Deaf to SIGTERM, with a child of its own: what a wedged engine core is like.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: object, limit_s: float = 15) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def pids_in(log: Path) -> list[int]:
    assert until(lambda: log.exists() and len(log.read_text().split()) == 2)
    return [int(word) for word in log.read_text().split()]


def test_leaving_the_block_ends_a_stubborn_process_and_its_child(tmp_path: Path) -> None:
    with guarded([sys.executable, "-c", STUBBORN], quiet_environment(), tmp_path / "log", grace_s=0.5):
        pids = pids_in(tmp_path / "log")
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


def test_an_exception_in_the_block_ends_the_process_too(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        guarded([sys.executable, "-c", STUBBORN], quiet_environment(), tmp_path / "log", grace_s=0.5),
    ):
        pids = pids_in(tmp_path / "log")
        raise KeyboardInterrupt
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_the_caller_ends_the_process(tmp_path: Path, number: signal.Signals) -> None:
    caller = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from vllm_qualify.engine.confinement import quiet_environment
        from vllm_qualify.engine.process import PROGRESS, guarded
        with guarded([sys.executable, "-c", {STUBBORN!r}], quiet_environment(), Path({str(tmp_path / "log")!r}), grace_s=0.5):
            time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", caller]) as process:
        pids = pids_in(tmp_path / "log")
        process.send_signal(number)
        process.wait()
        assert until(lambda: not any(alive(pid) for pid in pids))


def test_the_death_of_the_guard_ends_the_process_and_counts_as_killed(tmp_path: Path) -> None:
    with guarded([sys.executable, "-c", STUBBORN], quiet_environment(), tmp_path / "log", grace_s=0.5) as process:
        pids = pids_in(tmp_path / "log")
        os.kill(process.guard_pid, signal.SIGKILL)
        assert until(lambda: process.exit_code() == -signal.SIGKILL)
    assert until(lambda: not any(alive(pid) for pid in pids))


def test_a_guard_that_ends_while_it_is_looked_at_is_not_taken_for_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = RunningProcess(guard_pid=0, state_file=tmp_path / "state", log=tmp_path / "log")
    looked_at.state_file.write_text('{"pid": 1}')

    def ending(_: int) -> bool:
        looked_at.state_file.write_text('{"pid": 1, "exit_code": 0}')
        return False

    monkeypatch.setattr(processes, "_is_running", ending)
    assert looked_at.exit_code() == 0


def test_children_of_a_process_that_ended_are_ended(tmp_path: Path) -> None:
    leaver = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(p.pid, 0)"
    )
    with guarded([sys.executable, "-c", leaver], quiet_environment(), tmp_path / "log") as process:
        assert until(lambda: process.exit_code() == 0)
        orphan, _ = pids_in(tmp_path / "log")
        assert not alive(orphan)


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_exit_codes_are_reported(tmp_path: Path, code: str, expected: int) -> None:
    with guarded([sys.executable, "-c", code], quiet_environment(), tmp_path / "log") as process:
        assert until(lambda: process.exit_code() is not None)
        assert process.exit_code() == expected


def test_a_command_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="could not be started"), guarded(["/no/such/command"], {}, tmp_path / "log"):
        pass


def test_a_tool_that_fails_brings_its_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('first'); raise SystemExit('the cause')"]
    with (
        pytest.raises(HostError, match="exit code 1") as raised,
        guarded(command, quiet_environment(), tmp_path / "log") as process,
    ):
        wait_for(process, 30, lambda: None, "accuracy")
    assert "the cause" in raised.value.log_tail


def test_a_tool_over_its_time_limit_is_ended(tmp_path: Path) -> None:
    with (
        pytest.raises(HostError, match=r"longer than its 0\.5 s"),
        guarded([sys.executable, "-c", "import time; time.sleep(600)"], quiet_environment(), tmp_path / "log") as process,
    ):
        wait_for(process, 0.5, lambda: None, "load")


@pytest.mark.parametrize("piece", ["1", "1/", "1/1", "1/1 "])
def test_a_hostile_log_has_no_progress_and_is_read_in_seconds(piece: str) -> None:
    """Minutes, where the work grows with the square of the digits."""
    assert PROGRESS.findall(piece * (200_000 // len(piece))) == []


def test_tail_shows_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\r\n 1/3\r 2/3\r 3/3\ntwo\n\n")
    assert tail(tmp_path / "log") == ["one", " 3/3", "two"]
    assert tail(tmp_path / "log", 1) == ["two"]


def test_keys_of_the_store_do_not_reach_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "shhhhhhhh")
    monkeypatch.setenv("HF_TOKEN", "hf_needed_to_download")
    environment = quiet_environment()
    assert not {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN"} & environment.keys()
    assert quiet_environment(downloads=True)["HF_TOKEN"] == "hf_needed_to_download"
    assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == "1"


def test_a_child_gets_no_key_to_store_or_approvals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "VLLM_QUALIFY_PRIVATE_KEY", "VLLM_QUALIFY_PRIVATE_KEY_FILE"):
        monkeypatch.setenv(name, "what signs")
    monkeypatch.setenv("HF_HOME", "/models")
    variables = quiet_environment()
    assert "what signs" not in variables.values()
    assert variables["HF_HOME"] == "/models"


def test_a_full_disk_is_reported_though_the_command_could_not_say_so(tmp_path: Path) -> None:
    """A real one, in a mount namespace of its own: the log can be made there, and nothing be written to it."""
    starting = "import sys; from pathlib import Path; from vllm_qualify.engine.process import guarded\n"
    starting += "with guarded(['true'], {}, Path(sys.argv[1]) / 'log'): pass"
    full = f"mount -t tmpfs -o size=4k tmpfs {tmp_path} && head -c 4096 /dev/zero > {tmp_path}/full"
    shell = f'{full} && exec "$0" -c "$1" {tmp_path}'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell, sys.executable, starting], capture_output=True, text=True, check=False
    )
    if done.stderr.startswith(("unshare:", "mount:")):
        # on a desk this user may lack the right; in CI the test has to run
        (pytest.fail if IN_CI else pytest.skip)("this user may not mount a file system of its own")
    assert "HostError" in done.stderr
    assert "log: No space left on device" in done.stderr
