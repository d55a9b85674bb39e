"""Which processes a server consists of: one that ends and is started again, by itself or by a supervisor, is another one."""

import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from vllm_qualify.recipe.values import CountOrZero, Frozen

# vLLM's own titles, and Python's ways to start a process. A fork has its parent's words. All else in a server's tree comes and
# goes as it likes: compilers with their workers, shells.
OF_ENGINE = ("VLLM::", "multiprocessing.spawn import spawn_main", "multiprocessing.forkserver import main")
# A younger process may be a fork that is about to run something else.
LEAST_AGE_S = 1.0


class EngineProcess(Frozen):
    """A process of a server: its id as its own log has it, and when it began, in clock ticks since the machine's start."""

    pid: CountOrZero
    began_ticks: CountOrZero


def engine_processes(roots: Collection[int]) -> list[EngineProcess] | None:
    """The processes in the trees of `roots` that are the engine's own; None if there is no root, or one has ended."""
    try:
        trees = [[psutil.Process(root), *psutil.Process(root).children(recursive=True)] for root in roots]
    except psutil.Error:
        return None
    found = set[EngineProcess]()
    for tree in trees:
        first, *_ = (_command_words(process.pid) for process in tree)
        for process in tree:
            # It may end meanwhile.
            with suppress(OSError, ValueError, IndexError):
                words = _command_words(process.pid)
                if words == first or any(word in words for word in OF_ENGINE):
                    found |= _old_enough(process.pid)
    return sorted(found, key=lambda each: each.pid) if trees else None


def _command_words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _old_enough(pid: int) -> set[EngineProcess]:
    """The process, unless it is too young to tell what it is. Raises OSError, ValueError, IndexError if it has ended."""
    began = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    if time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK") < LEAST_AGE_S:
        return set()
    status = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    # The last id is that of the innermost namespace, a container's.
    own = next((line.split()[-1] for line in status if line.startswith("NSpid:")), str(pid))
    return {EngineProcess(pid=int(own), began_ticks=began)}
