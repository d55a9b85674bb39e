"""What confined code could do without reading a file: to terminals, other processes, shared memory, modes, the kernel."""

import ctypes
import json
import os
import platform
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders.hostile_models import check_unchanged, others, run_confined
from tests.ci import IN_CI
from vllm_qualify.engine.confinement import isolation_problem
from vllm_qualify.engine.landlock import can_confine

__all__ = ["others"]

LIBC = ctypes.CDLL(None, use_errno=True)
# The number of each system call on x86_64 and on aarch64.
CALLS = {"keyctl": (250, 219), "perf_event_open": (298, 241), "clone": (56, 220), "clone3": (435, 435), "prlimit64": (302, 261)}
NUMBERS = {name: both[platform.machine() == "aarch64"] for name, both in CALLS.items()}

ATTEMPTS = """
import ctypes, json, os, resource, signal, struct, sys
given, numbers = json.loads({given!r}), json.loads({numbers!r})
LIBC = ctypes.CDLL(None, use_errno=True)
victim, file, NEW_USER = given["pid"], given["file"], 0x10000000

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def opened(path, flags=os.O_RDWR | os.O_NOCTTY):
    os.close(os.open(path, flags))

def cloned():
    pid = checked(LIBC.syscall(numbers["clone"], NEW_USER | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def limited():
    checked(LIBC.syscall(numbers["prlimit64"], victim, resource.RLIMIT_CORE, struct.pack("QQ", 0, 0), None))

# A counter of this process's own clock: allowed to everybody, before the call is refused.
COUNTER = struct.pack("=IIQQQQQ", 1, 112, 0, 0, 0, 0, 1 << 5 | 1 << 6) + bytes(72)
attempts = dict(
    terminal=lambda: opened(given["terminal"]),
    new_terminal=lambda: opened("/dev/ptmx"),
    signal=lambda: os.kill(victim, 0),
    priority=lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
    cores=lambda: os.sched_setaffinity(victim, given["cores"]),
    scheduler=lambda: os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0)),
    limit=limited,
    memory=lambda: opened(given["memory"], os.O_RDONLY),
    segment=lambda: checked(LIBC.shmget(given["segment"], 0, 0)),
    mode=lambda: os.chmod(file, 0o666),
    times=lambda: os.utime(file, (1, 1)),
    owner=lambda: os.chown(file, os.getuid(), os.getgid()),
    attribute=lambda: os.setxattr(file, "user.marker", b"1"),
    keyring=lambda: checked(LIBC.syscall(numbers["keyctl"], 0, -4, 1)),
    counter=lambda: checked(LIBC.syscall(numbers["perf_event_open"], COUNTER, 0, -1, -1, 0)),
    clone=cloned,
    namespace=lambda: checked(LIBC.unshare(NEW_USER)),
)
for name, attempt in attempts.items():
    try:
        attempt()
        print(name, "reached", flush=True)
    except OSError as error:
        print(name, error.errno, flush=True)
"""
# What needs namespaces. Without them it is as `doctor` says.
BY_NAMESPACES = ("priority", "cores", "scheduler", "memory", "segment", "mode", "times", "owner", "attribute")
ALWAYS = ("terminal", "new_terminal", "signal", "limit", "keyring", "counter", "clone", "namespace")


@pytest.fixture(autouse=True, scope="module")
def _needs_landlock() -> None:
    if not can_confine():
        (pytest.fail if IN_CI else pytest.skip)("this kernel has no Landlock of version 2")


@pytest.fixture(scope="module")
def segment() -> Iterator[int]:
    """The key of memory that System V's processes share by numbers."""
    key = os.getpid()
    made = LIBC.shmget(key, 4096, 0o1600)
    assert made >= 0
    yield key
    LIBC.shmctl(made, 0, None)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, others: dict[str, Any], segment: int) -> dict[str, str]:
    given = others | {"segment": segment, "cores": [min(os.sched_getaffinity(0))]}
    script = ATTEMPTS.format(given=json.dumps(given), numbers=json.dumps(NUMBERS))
    printed = run_confined(tmp_path_factory.mktemp("confined"), script)
    outcomes = dict(line.split() for line in printed.splitlines())
    assert outcomes.keys() == {*BY_NAMESPACES, *ALWAYS}, printed
    return outcomes


@pytest.mark.parametrize("name", ALWAYS)
def test_confined_code_reaches_no_terminal_no_keyring_and_no_namespace(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] != "reached"


@pytest.mark.parametrize("name", BY_NAMESPACES)
def test_isolated_code_changes_no_process_no_memory_and_no_mode_of_others(name: str, outcomes: dict[str, str]) -> None:
    if problem := isolation_problem():
        pytest.skip(problem)
    assert outcomes[name] != "reached"


def test_nothing_of_others_has_changed(outcomes: dict[str, str], others: dict[str, Any]) -> None:
    if problem := isolation_problem():
        pytest.skip(problem)
    assert outcomes
    check_unchanged(others)
