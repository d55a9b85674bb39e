"""Guarded processes: whatever happens to whom, nothing is left."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import pytest

from tests.builders.processes import alive, until
from tests.ci import IN_CI
from vllm_qualify.engine import guard
from vllm_qualify.engine import process as processes
from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.engine.process import PROGRESS, RunningProcess, running_guarded, tail, wait_for
from vllm_qualify.errors import HostError

# Deaf to SIGTERM, with a child of its own: what a wedged engine core is like.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def guarded(folder: Path, code: str = STUBBORN) -> AbstractContextManager[RunningProcess]:
    return running_guarded([sys.executable, "-c", code], quiet_environment(), folder / "log", grace_s=0.5)


def pids_in(log: Path) -> list[int]:
    assert until(lambda: log.exists() and len(log.read_text().split()) == 2)
    return [int(word) for word in log.read_text().split()]


@pytest.mark.parametrize("leaving", [nullcontext(), pytest.raises(KeyboardInterrupt)], ids=["at its end", "by an exception"])
def test_leaving_the_block_ends_a_stubborn_process_and_its_child(
    tmp_path: Path, leaving: AbstractContextManager[object]
) -> None:
    with leaving, guarded(tmp_path):
        pids = pids_in(tmp_path / "log")
        assert all(alive(pid) for pid in pids)
        if not isinstance(leaving, nullcontext):
            raise KeyboardInterrupt
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_the_caller_ends_the_process(tmp_path: Path, number: signal.Signals) -> None:
    caller = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from vllm_qualify.engine.confinement import quiet_environment
        from vllm_qualify.engine.process import PROGRESS, running_guarded
        log = Path({str(tmp_path / "log")!r})
        with running_guarded([sys.executable, "-c", {STUBBORN!r}], quiet_environment(), log, grace_s=0.5):
            time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", caller]) as process:
        pids = pids_in(tmp_path / "log")
        process.send_signal(number)
        process.wait()
        assert until(lambda: not any(alive(pid) for pid in pids))


def test_the_death_of_the_guard_ends_the_process_and_counts_as_killed(tmp_path: Path) -> None:
    with guarded(tmp_path) as process:
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
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    leaver = f"import subprocess, sys; p = subprocess.Popen({sleeper}); print(p.pid, 0)"
    with guarded(tmp_path, leaver) as process:
        assert until(lambda: process.exit_code() == 0)
        orphan, _ = pids_in(tmp_path / "log")
        assert not alive(orphan)


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_exit_codes_are_reported(tmp_path: Path, code: str, expected: int) -> None:
    with guarded(tmp_path, code) as process:
        assert until(lambda: process.exit_code() is not None)
        assert process.exit_code() == expected


def test_who_knows_the_exit_code_finds_the_whole_log(tmp_path: Path) -> None:
    """The output goes through a pipe, which holds 64 KiB."""
    says = "import sys; sys.stdout.write('x' * 3_000_000 + 'end'); sys.stdout.flush(); sys.stderr.write('told'); sys.exit(4)"
    with guarded(tmp_path, says) as process:
        assert until(lambda: process.exit_code() == 4)
        log = (tmp_path / "log").read_text()
    assert (len(log), log[-7:]) == (3_000_007, "endtold")


def test_a_process_that_left_the_group_holds_no_end_up(tmp_path: Path) -> None:
    """It still has the pipe of the output."""
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    leaver = f"import subprocess, sys; p = subprocess.Popen({sleeper}, start_new_session=True); print(p.pid, 0)"
    with guarded(tmp_path, leaver) as process:
        assert until(lambda: process.exit_code() == 0)
        pid, _ = pids_in(tmp_path / "log")
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_full_disk_holds_no_command_up(tmp_path: Path) -> None:
    """Its log loses lines: /dev/full refuses each."""
    says = "print('x' * 1_000_000, flush=True)"
    command = [sys.executable, guard.__file__, str(tmp_path / "state"), "1", "null", sys.executable, "-c", says]
    with (
        Path("/dev/full").open("wb") as full,
        subprocess.Popen(command, stdout=full, stderr=full, stdin=subprocess.PIPE) as process,
    ):
        assert until(lambda: process.poll() == 0)
    assert json.loads((tmp_path / "state").read_text())["exit_code"] == 0


def test_a_command_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="could not be started"), running_guarded(["/no/such/command"], {}, tmp_path / "log"):
        pass


def test_a_tool_that_fails_brings_its_last_lines(tmp_path: Path) -> None:
    fails = "print('first'); raise SystemExit('the cause')"
    with pytest.raises(HostError, match="exit code 1") as raised, guarded(tmp_path, fails) as process:
        wait_for(process, 30, lambda: None, "accuracy")
    assert "the cause" in raised.value.log_tail


def test_a_tool_over_its_time_limit_is_ended(tmp_path: Path) -> None:
    sleeps = "import time; time.sleep(600)"
    with pytest.raises(HostError, match=r"longer than its 0\.5 s"), guarded(tmp_path, sleeps) as process:
        wait_for(process, 0.5, lambda: None, "load")


@pytest.mark.parametrize("piece", ["1", "1/", "1/1", "1/1 "])
def test_a_hostile_log_has_no_progress_and_is_read_in_seconds(piece: str) -> None:
    """Minutes, where the work grows with the square of the digits."""
    assert PROGRESS.findall(piece * (200_000 // len(piece))) == []


def test_tail_shows_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\r\n 1/3\r 2/3\r 3/3\ntwo\n\n")
    assert tail(tmp_path / "log") == ["one", " 3/3", "two"]
    assert tail(tmp_path / "log", 1) == ["two"]


def test_of_all_keys_a_download_gets_the_hubs_token_alone_and_no_other_process_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "VLLM_QUALIFY_PRIVATE_KEY", "VLLM_QUALIFY_PRIVATE_KEY_FILE", "HF_TOKEN"):
        monkeypatch.setenv(name, "what signs")
    assert "what signs" not in quiet_environment().values()
    assert [name for name, value in quiet_environment(downloads=True).items() if value == "what signs"] == ["HF_TOKEN"]


def test_a_full_disk_is_reported_though_the_command_could_not_say_so(tmp_path: Path) -> None:
    """A real one, in a mount namespace of its own: the log can be made there, and nothing be written to it."""
    starting = "import sys; from pathlib import Path; from vllm_qualify.engine.process import running_guarded\n"
    starting += "with running_guarded(['true'], {}, Path(sys.argv[1]) / 'log'): pass"
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
