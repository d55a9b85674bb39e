"""What runs, as data; and processes that never outlive this one: the server and the measuring tools, each under a guard."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol, TypeVar

from vllm_qualify.engine import guard
from vllm_qualify.engine.confinement import Confinement
from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.host import lock_descriptors
from vllm_qualify.errors import HostError, writing
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.secrets import redact, redact_file

POLL_S = 0.1
LOG_TAIL_LINES = 25
TAIL_BYTES, WHOLE_LOG_BYTES = 65_536, 8 * 2**20
PROGRESS = re.compile(r"(?<!\d)(\d{1,12})/(\d{1,12}) \[")

# SIGALRM: Prefect ends a task with it when the task's time is over.
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

T = TypeVar("T")
Tell = Callable[[str], None]


class Progress(Protocol):
    """Gets how much is done, the total, and the part's name, which is empty where there is only one part."""

    def __call__(self, done: int, total: int, part: str = "", /) -> None: ...


class Running(Frozen, ABC):
    """Something that runs, writes a log, and ends. Each launcher has its own kind: a guarded process, a container.

    With `in_image` its programs and libraries are an image's, which nobody on its host can change.
    """

    in_image: ClassVar[bool] = False

    state_file: Path
    log: Path

    @abstractmethod
    def end(self) -> End | None:
        """How it ended; None while it runs. Raises HostError if its end cannot be known."""

    @abstractmethod
    def processes(self) -> Collection[int]:
        """The ids of its first processes on this machine, to sample them with their children. Empty if they are unknown."""

    def commands(self) -> Collection[int]:
        """The ids of the processes that run its command, without what guards them. Empty if they are unknown."""
        return self.processes()


class Leftover(Frozen):
    """What a killed run left running. `id` is the launcher's own id: a container's or a pod's."""

    id: str
    name: str
    run: str


class RunningProcess(Running):
    """A guarded process."""

    guard_pid: int

    def exit_code(self) -> int | None:
        """None while it runs; below zero for a signal. A process whose guard is gone counts as killed."""
        # Looked at first: the guard may write the code and end between the two.
        has_guard = _is_running(self.guard_pid)
        state = json.loads(self.state_file.read_text()) if self.state_file.exists() else {}
        if "exit_code" in state:
            return int(state["exit_code"])
        return None if has_guard else -signal.SIGKILL

    def end(self) -> End | None:
        exit_code = self.exit_code()
        return None if exit_code is None else End(exit_code=exit_code)

    def processes(self) -> tuple[int]:
        return (self.guard_pid,)

    def commands(self) -> tuple[int, ...]:
        with suppress(OSError, ValueError, KeyError):
            return (int(json.loads(self.state_file.read_text())["pid"]),)
        return ()


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def running_guarded(
    command: Sequence[str], environment: Mapping[str, str], log: Path, grace_s: float = 10.0, rules: Confinement | None = None
) -> Iterator[RunningProcess]:
    """Run `command` in its own process group within the block, output to `log`. Afterwards nothing of the group is left.

    With `rules` it is confined by them, if the kernel can, and begins in its own temporary folder: this process's folder may be
    the checkout of this project. Raises HostError if the command cannot be started.
    """
    state_file = log.absolute().with_suffix(".state")
    state_file.unlink(missing_ok=True)
    written = rules.model_dump_json() if rules else "null"
    runner = [sys.executable, "-I", "-S", guard.__file__, str(state_file), str(grace_s), written, *command]
    with writing(str(log)), open_log(log) as output:
        process = subprocess.Popen(
            runner,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=environment.get("TMPDIR") if rules else None,
            start_new_session=True,
            pass_fds=lock_descriptors(),
        )
    try:
        _await_start(process, state_file, log)
        yield RunningProcess(guard_pid=process.pid, state_file=state_file, log=log)
    finally:
        with signals_held():
            _stop_guard(process, state_file, grace_s)
            redact_file(log)


def open_log(path: Path) -> BinaryIO:
    """A log to append to, which only this user may read: until its end it can have secrets. A link is not followed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    return os.fdopen(descriptor, "ab", buffering=0)


def _await_start(process: subprocess.Popen[bytes], state_file: Path, log: Path) -> None:
    while not state_file.exists():
        if process.poll() is not None:
            # A full disk ends the guard before it can say so.
            with writing(str(log)), tempfile.TemporaryFile(dir=log.parent, buffering=0) as file:
                file.write(b"room")
            raise HostError("a command could not be started", "see the log's last lines", str(log), tail(log))
        time.sleep(0.01)


def _stop_guard(process: subprocess.Popen[bytes], state_file: Path, grace_s: float) -> None:
    """Closing the pipe tells the guard to stop its group; a guard that does not end in time is killed with its group."""
    assert process.stdin is not None  # noqa: S101  (a pipe was asked for)
    process.stdin.close()
    try:
        process.wait(grace_s + 10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # Without its exit code the guard was itself killed. In every other case the group is empty.
    if state_file.exists() and "exit_code" not in (state := json.loads(state_file.read_text())):
        guard.signal_group(int(state["pid"]), signal.SIGKILL)


def text_of(log: Path, most_bytes: int = WHOLE_LOG_BYTES) -> str:
    """The end of a log, without secrets; empty if there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - most_bytes))
        return redact(file.read().decode(errors="replace"))


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """The last lines of a log without secrets, progress bars reduced to their last state."""
    text = text_of(log, TAIL_BYTES)
    states = [[state for state in line.split("\r") if state.strip()] for line in text.split("\n")]
    return [line[-1].rstrip() for line in states if line][-lines:]


def wait_for(process: Running, time_limit_s: float, check: Callable[[], None], what: str) -> None:
    """Wait until the process ends. Until then call `check`, which may raise.

    Raises HostError if it took longer than `time_limit_s`, or ended with another exit code than 0.
    """

    def poll_end() -> End | None:
        end = process.end()
        if end is None or end.exit_code != 0:
            check()
        return end

    end = await_result(poll_end, time_limit_s, what, what, process.log)
    if end.exit_code != 0:
        problem = f"{what} ended with exit code {end.exit_code}"
        raise HostError(problem, "see the last lines of its log", what, tail(process.log))


def await_result(look: Callable[[], T | None], time_limit_s: float, what: str, stage: str, log: Path) -> T:
    """The first result of `look` that is not None. It looks again and again, and raises if there can be none any more.

    Raises HostError if `what` took longer than `time_limit_s`; the error has the last lines of `log`.
    """
    deadline = time.monotonic() + time_limit_s
    while (result := look()) is None:
        if time.monotonic() > deadline:
            remedy = "raise time_limit_s in the recipe, or find what slows it"
            raise HostError(f"{what} took longer than its {time_limit_s:g} s", remedy, stage, tail(log))
        # No single event ends the wait: `look` may check a file, a log, the server and the tool.
        time.sleep(POLL_S)
    return result


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals that would end the program or a task until after the block, for steps that must not be left half done.

    These are Ctrl-C, kill -TERM and the end of a task's time. Python runs signal handlers only in the main thread: in other
    threads nothing needs to be held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in HELD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in came:
            signal.raise_signal(held)
