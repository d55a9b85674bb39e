"""Containers that a killed process left behind: found by their labels, and removed."""

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_qualify.engine.containers.host import docker_host
from vllm_qualify.engine.process import Leftover
from vllm_qualify.lazy import Lazy

if TYPE_CHECKING:
    import docker
else:
    docker = Lazy("docker")

RUN_LABEL, CELL_LABEL, ROLE_LABEL, OWNER_LABEL = (f"vllm-qualify.{name}" for name in ("run", "cell", "role", "owner"))
STAGE = "check"
# Docker Engine waits 10 s for the end of a process that it killed, and refuses the removal if the process still ends then: on
# a busy machine a server takes longer to free its memory.
REMOVED_WITHIN_S, REMOVE_EVERY_S = 120.0, 1.0


def owner_label() -> str:
    """This process's label, so that others can tell if it still runs: machine, boot, PID namespace, PID, start time."""
    return ":".join([*_machine_parts(), str(os.getpid()), _started_at(os.getpid())])


def _machine_parts() -> list[str]:
    names = ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")
    texts = [Path(name).read_text().strip() if Path(name).exists() else "" for name in names]
    return [*texts, str(Path("/proc/self/ns/pid").stat().st_ino)]


def _started_at(pid: int) -> str:
    """A process's start, in clock ticks since boot (field 22 of /proc/PID/stat); empty if it is gone or has ended (Z)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _is_orphan(label: str) -> bool:
    """Whether the owner is known to be gone. Nothing is known about an owner in another machine or namespace."""
    machine, boot, namespace, pid, started = (*label.split(":"), *[""] * 5)[:5]
    here_machine, here_boot, here_namespace = _machine_parts()
    if not re.fullmatch("[0-9]+", pid) or machine != here_machine:
        return False
    if boot != here_boot:
        return True
    return namespace == here_namespace and _started_at(int(pid)) != started


def find_leftovers() -> list[Leftover]:
    """The containers whose owner is gone. Raises HostError if Docker Engine does not answer."""
    with docker_host(STAGE) as host:
        containers = host.api.containers(all=True, filters={"label": [RUN_LABEL, OWNER_LABEL]})
    return [
        Leftover(id=about["Id"], name=about["Names"][0].lstrip("/"), run=about["Labels"][RUN_LABEL])
        for about in containers
        if _is_orphan(about["Labels"][OWNER_LABEL])
    ]


def remove_leftovers() -> list[Leftover]:
    """Remove them, and return what was removed. Raises HostError."""
    removed = find_leftovers()
    with docker_host(STAGE) as host:
        for leftover in removed:
            force_removal(host, leftover.id)
    return removed


def force_removal(host: "docker.DockerClient", container: str) -> None:
    """Remove a container that may still run; one that is gone already is no error. Raises APIError if that takes too long."""
    deadline = time.monotonic() + REMOVED_WITHIN_S
    while True:
        try:
            host.api.remove_container(container, force=True, v=True)
            return
        except docker.errors.NotFound:
            return
        except docker.errors.APIError:
            if time.monotonic() > deadline:
                raise
        time.sleep(REMOVE_EVERY_S)
