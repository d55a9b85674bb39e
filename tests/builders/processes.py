"""Whether a process lives, and what comes true in time."""

import time
from contextlib import suppress
from pathlib import Path

import psutil


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_that_run(command: list[str], parent: int | None = None) -> list[int]:
    """The ids of the descendants of `parent` (else of this process) with that command line.

    One that ends while it is looked at runs no more.
    """
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):
            found += [child.pid] if child.cmdline() == command else []
    return found


def until(condition: object, limit_s: float = 15) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
