"""A container as data, the command line for people that makes it, and the SDK's call that does."""

import csv
import io
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_qualify.engine.containers.leftovers import OWNER_LABEL, owner_label
from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.values import Frozen

if TYPE_CHECKING:
    import docker
else:
    docker = Lazy("docker")

SERVED_PORT = 8000
NO_NEW_PRIVILEGES = "no-new-privileges"
# An image's root reads weights, and fills a cache, that belong to another user of this machine.
CAPABILITIES = ["DAC_OVERRIDE"]


class Bind(Frozen):
    """A file or folder of this machine that is mounted in the container."""

    source: Path
    target: str
    read_only: bool = True


class ContainerPlan(Frozen):
    """One container, as data. The SDK's call and the command line for people are both made from it.

    `passed` names variables that are taken from this process's environment: their values are on no command line and in no
    file. `gpus` are NVML's indices. A long-running container has a name, and labels to find it by.
    """

    image: str
    platform: str
    arguments: list[str]
    name: str | None = None
    entrypoint: str | None = None
    environment: dict[str, str] = {}
    passed: list[str] = []
    binds: list[Bind] = []
    labels: dict[str, str] = {}
    gpus: list[int] | Literal["all"] = []
    port: int | None = None
    network: str | None = None
    shared_memory_gib: int | None = None
    memory_limit_mib: int | None = None


def command_line(plan: ContainerPlan) -> list[str]:
    """The `docker run` command for exactly the container that `running_container` makes, without the owner's label."""
    entry = plan.entrypoint
    device = "all" if plan.gpus == "all" else f'"device={",".join(map(str, plan.gpus))}"'
    return [
        *("docker", "run", "--detach", "--platform", plan.platform),
        *("--cap-drop", "ALL", *(part for name in CAPABILITIES for part in ("--cap-add", name))),
        *("--security-opt", NO_NEW_PRIVILEGES),
        *(("--name", plan.name) if plan.name else ()),
        *(("--shm-size", f"{plan.shared_memory_gib}g") if plan.shared_memory_gib else ()),
        *(("--gpus", device) if plan.gpus else ()),
        *(("--network", plan.network) if plan.network else ()),
        *(("--publish", f"127.0.0.1:{plan.port}:{SERVED_PORT}") if plan.port else ()),
        *(("--memory", f"{plan.memory_limit_mib}m") if plan.memory_limit_mib else ()),
        *(part for bind in plan.binds for part in ("--mount", _mount_option(bind))),
        *(part for name, value in plan.environment.items() for part in ("--env", f"{name}={value}")),
        *(part for name in plan.passed for part in ("--env", name)),
        *(part for name, value in plan.labels.items() for part in ("--label", f"{name}={value}")),
        *(("--entrypoint", entry) if entry else ()),
        plan.image,
        *plan.arguments,
    ]


def shell_command(plan: ContainerPlan) -> str:
    """`command_line` for a shell; each option, and the image, begins a line."""
    lines: list[list[str]] = [[]]
    for part in command_line(plan):
        if part.startswith("--") or part == plan.image:
            lines.append([])
        lines[-1].append(part)
    return " \\\n  ".join(map(shlex.join, lines))


def _mount_option(bind: Bind) -> str:
    fields = ["type=bind", f"source={bind.source}", f"target={bind.target}", *(["readonly"] if bind.read_only else [])]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def create_container(host: "docker.DockerClient", plan: ContainerPlan) -> str:
    passed = {name: os.environ[name] for name in plan.passed if name in os.environ}
    mount = docker.types.Mount
    devices: dict[str, Any] = {"count": -1} if plan.gpus == "all" else {"device_ids": list(map(str, plan.gpus))}
    made = host.containers.create(
        plan.image,
        plan.arguments,
        name=plan.name,
        platform=plan.platform,
        entrypoint=plan.entrypoint,
        environment=plan.environment | passed,
        labels=plan.labels | {OWNER_LABEL: owner_label()},
        mounts=[mount(bind.target, str(bind.source), type="bind", read_only=bind.read_only) for bind in plan.binds],
        device_requests=[docker.types.DeviceRequest(**devices, capabilities=[["gpu"]])] if plan.gpus else None,
        ports={f"{SERVED_PORT}/tcp": ("127.0.0.1", plan.port)} if plan.port else None,
        cap_drop=["ALL"],
        # As the command writes them to the engine.
        cap_add=[f"CAP_{name}" for name in CAPABILITIES],
        security_opt=[NO_NEW_PRIVILEGES],
        shm_size=f"{plan.shared_memory_gib}g" if plan.shared_memory_gib else None,
        network_mode=plan.network,
        mem_limit=f"{plan.memory_limit_mib}m" if plan.memory_limit_mib else None,
        restart_policy={"Name": "no"},
        detach=True,
    )
    return str(made.id)
