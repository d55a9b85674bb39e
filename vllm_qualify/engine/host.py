"""What every qualification needs of this machine, and the lock that keeps others away from it.

Two qualifications on one GPU would disturb each other's measurements. The lock is the kernel's, on a file. Every guard process
inherits it, so it is free only when the last server and the last tool of a run are gone, even if the run itself was killed.
"""

import fcntl
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_qualify.errors import HostError, writing

FOLDER, NAME = "VLLM_QUALIFY_LOCKS", "vllm-qualify.lock"
SYSTEMS = "/run/lock"
ASK_EVERY_S = 0.5
STAGE = "check"
LOOPBACK_LIMIT_S = 2.0
LEAST_TEMPORARY_BYTES = 2**20

_held: list[int] = []


def check_host() -> None:
    """Raises HostError if temporary files cannot be written, or a process here cannot reach another one by 127.0.0.1."""
    # Python itself would go to another folder, but not all tools that get this variable.
    folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(LEAST_TEMPORARY_BYTES))
    except OSError as error:
        problem = f"no temporary file can be written in {folder}: {error.strerror}"
        remedy = "free space there and check its permissions, or set TMPDIR to another folder"
        raise HostError(problem, remedy, STAGE) from error
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), LOOPBACK_LIMIT_S):
            pass
    except OSError as error:
        problem = f"no connection within this machine, by 127.0.0.1: {error.strerror or error}"
        raise HostError(problem, "bring the loopback interface up: ip link set lo up", STAGE) from error


def machine_name() -> str:
    """This machine's name in the fleet: VLLM_QUALIFY_HOST, else its host name."""
    return os.environ.get("VLLM_QUALIFY_HOST") or socket.gethostname()


def lock_descriptors() -> tuple[int, ...]:
    """The file descriptors that a guard inherits."""
    return tuple(_held)


def lock_file() -> Path:
    """In the folder VLLM_QUALIFY_LOCKS, else in the system's folder for locks, which all users and homes of a machine share."""
    usual = SYSTEMS if os.access(SYSTEMS, os.W_OK) else tempfile.gettempdir()
    return Path(os.environ.get(FOLDER) or usual) / NAME


@contextmanager
def holding_machine(who: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the machine during the block. If it is not free, report once who has it, and wait.

    Raises HostError if the lock's file cannot be written, or is another user's.
    """
    path = lock_file()
    with writing(STAGE):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o660)
    try:
        _close_to_others(descriptor, path)
        _await_lock(descriptor, tell)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, who.encode(), 0)
        _held.append(descriptor)
        try:
            yield
        finally:
            _held.remove(descriptor)
    finally:
        # Closed, but not unlocked: a guard that still has something to stop keeps the lock.
        os.close(descriptor)


def _close_to_others(descriptor: int, path: Path) -> None:
    """Close the lock's file to other users: whoever may read a file may lock it, for ever. Raises HostError if it is theirs."""
    status = os.fstat(descriptor)
    is_shared = bool(status.st_mode & stat.S_IWGRP) and status.st_gid in (os.getegid(), *os.getgroups())
    if status.st_uid not in (0, os.geteuid()) and not is_shared:
        remedy = f"find out who made it and delete it, or set {FOLDER} to a folder of your own"
        raise HostError("the lock of this machine belongs to another user", remedy, str(path))
    if status.st_uid == os.geteuid() and status.st_mode & stat.S_IRWXO:
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~stat.S_IRWXO)


def _await_lock(descriptor: int, tell: Callable[[str], None]) -> None:
    is_announced = False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not is_announced:
            is_announced = True
            who = os.pread(descriptor, 200, 0).decode(errors="replace") or "another run"
            tell(f"waiting for this machine, which {who} has")
        # a blocking flock could not be interrupted by Prefect's own signals
        time.sleep(ASK_EVERY_S)
