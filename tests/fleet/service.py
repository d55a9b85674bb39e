"""One process that a test may kill and start again, and all that it started."""

import os
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from vllm_qualify.engine.confinement import NO_STATISTICS
from vllm_qualify.engine.process import tail

# Inherited by all that a service starts. It identifies processes after their parent was killed.
MARK = "VLLM_QUALIFY_TEST_SERVICE"
POLL_S = 0.5
START_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0


class ServiceError(AssertionError):
    """A service did not start, or does not do what it was waited for; with its log's last lines."""


class Ended(ABC):
    """What runs within a block, from its start to its end."""

    @abstractmethod
    def start(self) -> None:
        """Start, on the same data and port as before, and wait until it is of use. Raises ServiceError if it is not."""

    @abstractmethod
    def end(self) -> None:
        """Leave nothing of it running."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()


class Service(Ended):
    """A Prefect process. Its log is appended to by every start."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.name = name
        self.log = folder / f"{name}.log"
        # Killed, it leaves files there.
        self.temporary = folder / f"{name}-tmp"
        self.temporary.mkdir(exist_ok=True)
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def arguments(self) -> Sequence[str]:
        """What `prefect` is called with."""

    @abstractmethod
    def settings(self) -> Mapping[str, str]:
        """The environment, beyond what every service gets."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the process that was started last is of use; asked again until it is."""

    def start(self) -> None:
        assert not self.is_running(), f"{self.name} runs already"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "--no-prompt", *self.arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self._environment(),
                start_new_session=True,
            )
        self.wait_until(self.is_ready, "ready")

    def revive(self) -> None:
        """Start it again if it does not run, and wait until it is of use. For fixtures that outlive a test."""
        if not self.is_running():
            self.start()
        self.wait_until(self.is_ready, "ready")

    def wait_until(self, check: Callable[[], bool], what: str, limit_s: float = START_LIMIT_S) -> None:
        """Wait until `check` holds. Raises ServiceError if it does not within `limit_s`, or the process ended."""
        deadline = time.monotonic() + limit_s
        while not check():
            if not self.is_running():
                raise ServiceError(self._with_log(f"{self.name} ended before it was {what}"))
            if time.monotonic() > deadline:
                raise ServiceError(self._with_log(f"{self.name} was not {what} within {limit_s:g} s"))
            time.sleep(POLL_S)  # another process is waited for, which tells nothing by itself

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """With -9, and this process alone: what it started lives on, as after a crash."""
        assert self._process is not None, f"{self.name} was not started"
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """As an administrator does: ask, and kill what does not end in time."""
        assert self._process is not None, f"{self.name} was not started"
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def end(self) -> None:
        """Leave nothing of it running. Killed, not asked: nobody will read what they would still write."""
        while running := self.processes():
            for process in running:
                kill(process)
            time.sleep(POLL_S)  # another process is waited for, which tells nothing by itself
        if self._process is not None:
            self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """All that runs of this service and of what it started, also what was started before it was killed."""
        return [process for process in psutil.process_iter() if _has_mark(process, self._mark)]

    def _environment(self) -> dict[str, str]:
        """No setting of the caller's Prefect: a developer may have one."""
        inherited = {name: value for name, value in (os.environ | NO_STATISTICS).items() if not name.startswith("PREFECT_")}
        return inherited | {
            MARK: self._mark,
            "PREFECT_HOME": str(self.folder / f"{self.name}-home"),
            "TMPDIR": str(self.temporary),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            **self.settings(),
        }

    def _with_log(self, problem: str) -> str:
        return "\n".join([f"{problem}; the last lines of {self.log}:", *tail(self.log)])


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        # It ended, or is another user's.
        return False


def kill(process: psutil.Process) -> None:
    """With -9; one that ended meanwhile is what was wanted."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
