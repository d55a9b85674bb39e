"""Containers: planned as data, launched through Docker's SDK, watched, and always removed.

Labels show which containers a killed process left behind: `remove_leftovers` removes them.
"""

import csv
import io
import json
import os
import re
import secrets
import shlex
import tarfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_qualify.engine import start_failure, watch
from vllm_qualify.engine.docker_host import GONE, docker_host, gone, said
from vllm_qualify.engine.failure import End
from vllm_qualify.engine.process import open_log
from vllm_qualify.engine.running import Leftover, Running
from vllm_qualify.engine.signals import signals_held
from vllm_qualify.errors import HostError, writing
from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.secrets import redact_file

if TYPE_CHECKING:
    import docker
    import requests
else:
    docker, requests = Lazy("docker"), Lazy("requests")

RUN_LABEL, CELL_LABEL, ROLE_LABEL, OWNER_LABEL = (f"vllm-qualify.{name}" for name in ("run", "cell", "role", "owner"))
COMMAND_FAILED = "command-failed"
STOP_GRACE_S = 10
# A Docker Engine that is being stopped ends its containers first, and answers until they have ended. The check is shorter for
# a container than for a command in it, so that the container's state is written before the command's.
ENGINE_ENDS_WITHIN_S, CONTAINER_ENDS_WITHIN_S = 5.0, 3.0
# Docker Engine waits 10 s for the end of a process that it killed, and refuses the removal if the process still ends then: on
# a busy machine a server takes longer to free its memory.
REMOVED_WITHIN_S, REMOVE_EVERY_S = 120.0, 1.0
JOIN_S = 20
CHECK_EVERY_S = 1.0
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
    """The `docker run` command for exactly the container that `running` makes, without the owner's label."""
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


def create(host: "docker.DockerClient", plan: ContainerPlan) -> str:
    passed = {name: os.environ[name] for name in plan.passed if name in os.environ}
    made = host.containers.create(
        plan.image,
        plan.arguments,
        name=plan.name,
        platform=plan.platform,
        entrypoint=plan.entrypoint,
        environment=plan.environment | passed,
        labels=plan.labels | {OWNER_LABEL: owner()},
        mounts=[_mount(bind) for bind in plan.binds],
        device_requests=_devices(plan.gpus),
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


def _mount(bind: Bind) -> "docker.types.Mount":
    return docker.types.Mount(bind.target, str(bind.source), type="bind", read_only=bind.read_only)


def _devices(gpus: list[int] | Literal["all"]) -> "list[docker.types.DeviceRequest] | None":
    if gpus == "all":
        return [docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])]
    return [docker.types.DeviceRequest(device_ids=[str(index) for index in gpus], capabilities=[["gpu"]])] if gpus else None


class RunningContainer(Running):
    """A container, or a command in one. If Docker Engine went away, or the log could not be written, its end is unknown."""

    container_id: str

    def end(self) -> End | None:
        if not self.state_file.exists():
            return None
        state = json.loads(self.state_file.read_text())
        if "error" in state:
            raise HostError(**state["error"])
        return End.model_validate(state)

    def processes(self) -> Collection[int]:
        return watch.first_in_container(self.container_id)


@contextmanager
def running(plan: ContainerPlan, log: Path, place: str) -> Iterator[RunningContainer]:
    """Run the container within the block, with its output in `log`. After the block the container is gone.

    Raises:
        QualifyError: it could not be made or started; `start_failure` chooses the class.
        HostError: Docker Engine does not answer, or `log` cannot be written.
    """
    state_file = log.with_suffix(".state")
    with writing(str(log)):
        state_file.unlink(missing_ok=True)
        log.touch()
    watchers: list[threading.Thread] = []
    asked = threading.Event()
    try:
        with _removed(str(plan.name), place, watchers, asked):
            with docker_host(place) as host:
                container_id = _started(host, plan, place)
            watchers.append(_thread(_follow, container_id, log, place))
            watchers.append(_thread(_await_end, container_id, state_file, place, asked))
            yield RunningContainer(container_id=container_id, state_file=state_file, log=log)
    finally:
        with signals_held():
            redact_file(log)


@contextmanager
def _removed(name: str, place: str, watchers: list[threading.Thread], asked: threading.Event) -> Iterator[None]:
    """Remove the container after the block. If that fails, the error has a note about it.

    `asked` is set as soon as this process begins to end the container.
    """
    note = f"the container {name} could not be removed; the next run does it, or: vllm-qualify doctor --clean"
    try:
        yield
    except BaseException as error:
        asked.set()
        try:
            _remove(name, place, watchers)
        except HostError:
            error.add_note(note)
        raise
    asked.set()
    try:
        _remove(name, place, watchers)
    except HostError as error:
        error.add_note(note)
        raise


def _started(host: "docker.DockerClient", plan: ContainerPlan, place: str) -> str:
    try:
        # If a signal broke off the call, the engine could still make the container after the attempt to remove it.
        with signals_held():
            container_id = create(host, plan)
        host.api.start(container_id)
    except docker.errors.APIError as error:
        raise start_failure.classify_start(said(error), plan.image, plan.port, place) from error
    return container_id


def _thread(target: Any, *arguments: object) -> threading.Thread:
    started = threading.Thread(target=target, args=arguments, daemon=True)
    started.start()
    return started


def _follow(container_id: str, log: Path, place: str) -> None:
    """Copy the container's output until it ends. If the engine goes away, the log just ends; `_await_end` reports it."""
    try:
        with docker_host(place, timeout_s=None) as host:
            _copy(host.api.logs(container_id, stream=True, follow=True), log)
    except HostError as error:
        if error.kind != GONE:
            _write_state(log.with_suffix(".state"), _unknown(error))


def _copy(stream: Iterable[bytes], log: Path) -> None:
    """Raises HostError if the log cannot be written. An error of the stream, even an OSError, is not the disk's fault."""
    with writing(str(log)):
        file = open_log(log)
    with file:
        for chunk in stream:
            with writing(str(log)):
                file.write(chunk)


def _await_end(container_id: str, state_file: Path, place: str, asked: threading.Event) -> None:
    state = _ended(container_id, place, asked)
    if not state_file.exists():
        _write_state(state_file, state)


def _ended(container_id: str, place: str, asked: threading.Event) -> dict[str, Any]:
    try:
        with docker_host(place, timeout_s=None) as host:
            exit_code = int(host.api.wait(container_id)["StatusCode"])
            _check_engine_stays(host, CONTAINER_ENDS_WITHIN_S, asked)
            return {"exit_code": exit_code, "oom_killed": _oom_killed(host, container_id)}
    except HostError as error:
        return _unknown(error)


def _check_engine_stays(host: "docker.DockerClient", within_s: float, asked: threading.Event) -> None:
    """Raises what a lost engine raises: then the container did not end on its own. Returns at once if `asked` is set."""
    deadline = time.monotonic() + within_s
    while True:
        host.ping()
        if time.monotonic() > deadline or asked.wait(0.2):
            return


def _unknown(error: HostError) -> dict[str, Any]:
    """The state of something with an unknown end, and the reason."""
    names = ("problem", "remedy", "place", "kind", "retry")
    return {"error": {name: getattr(error, name) for name in names}}


def _oom_killed(host: "docker.DockerClient", container_id: str) -> bool:
    try:
        state: dict[str, Any] = host.api.inspect_container(container_id)["State"]
    except docker.errors.NotFound:
        return False
    return bool(state.get("OOMKilled"))


def _write_state(path: Path, state: dict[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(state))
    fresh.replace(path)


def _remove(name: str, place: str, watchers: list[threading.Thread]) -> None:
    """Stop the container in order, so that its log is complete, and remove it in every case. Raises HostError."""
    with signals_held(), docker_host(place) as host:
        try:
            # The removal ends what could not be stopped.
            with suppress(docker.errors.APIError):
                host.api.stop(name, timeout=STOP_GRACE_S)
            for watcher in watchers:
                watcher.join(JOIN_S)
        finally:
            _force_removal(host, name)


def _force_removal(host: "docker.DockerClient", container: str) -> None:
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


@contextmanager
def executing(container_id: str, command: list[str], log: Path, place: str) -> Iterator[RunningContainer]:
    """Run `docker exec` within the block. A command that still runs after the block ends with its container.

    Raises:
        HostError: Docker Engine does not answer.
    """
    state_file = log.with_suffix(".state")
    with writing(str(log)):
        state_file.unlink(missing_ok=True)
        log.touch()
    with docker_host(place) as host:
        exec_id = str(host.api.exec_create(container_id, command)["Id"])
    watcher = _thread(_execute, exec_id, log, state_file, place)
    try:
        yield RunningContainer(container_id=container_id, state_file=state_file, log=log)
    finally:
        with signals_held():
            if state_file.exists():
                watcher.join(JOIN_S)
            redact_file(log)


def _execute(exec_id: str, log: Path, state_file: Path, place: str) -> None:
    try:
        with docker_host(place, timeout_s=None) as host:
            _copy(host.api.exec_start(exec_id, stream=True), log)
            exit_code = host.api.exec_inspect(exec_id)["ExitCode"]
            if exit_code != 0:
                _check_engine_stays(host, ENGINE_ENDS_WITHIN_S, threading.Event())
        # A stream that broke off looks like one that is complete, but then the command has no exit code yet.
        state = _unknown(gone(place)) if exit_code is None else {"exit_code": exit_code}
    except HostError as error:
        state = _unknown(error)
    _write_state(state_file, state)


def copy_out(container_id: str, file: str, into: Path, place: str) -> None:
    """Copy a plain file from the container to `into`, if it exists. Raises HostError."""
    with docker_host(place) as host:
        try:
            stream, _ = host.api.get_archive(container_id, file)
        except docker.errors.NotFound:
            return
        content = io.BytesIO(b"".join(stream))
    with writing(str(into)), tarfile.open(fileobj=content) as archive:
        member = archive.next()
        body = archive.extractfile(member) if member and member.isfile() else None
        if body is not None:
            into.write_bytes(body.read())


def put(container_id: str, file: str, body: bytes, place: str) -> None:
    """Write a file, and the folders above it, into a container. Raises HostError.

    It appears there whole, as a link to a finished part: a process that watches for it never sees less, and must not remove it,
    since Docker Engine then sets its owner and time. No command is run for that: one could be killed where the container has no
    memory left.
    """
    content, part = io.BytesIO(), f"{file}.part"
    with tarfile.open(fileobj=content, mode="w") as archive:
        about = tarfile.TarInfo(part.lstrip("/"))
        about.size, about.mode = len(body), 0o644
        archive.addfile(about, io.BytesIO(body))
        link = tarfile.TarInfo(file.lstrip("/"))
        link.type, link.linkname = tarfile.LNKTYPE, part.lstrip("/")
        archive.addfile(link)
    with docker_host(place) as host:
        host.api.put_archive(container_id, "/", content.getvalue())


def run_once(
    plan: ContainerPlan,
    place: str,
    accepted: Collection[int] = (0,),
    time_limit_s: float = 120,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Run a short command in a container of its own, and return its output.

    It must end with one of the `accepted` exit codes. `check` is called until then.

    Raises:
        QualifyError: it could not be started, did not end in time, or ended with another exit code.
        whatever `check` raises.
    """
    what = shlex.join([plan.entrypoint or "", *plan.arguments])[:60]
    name = f"vllm-qualify-{secrets.token_hex(6)}"
    plan = plan.model_copy(update={"name": name, "labels": {RUN_LABEL: ""}})
    with docker_host(place, timeout_s=time_limit_s) as host:
        try:
            container_id = _started(host, plan, place)
            exit_code = _waited_for(host, container_id, time_limit_s, check)
            output = bytes(host.api.logs(container_id, stdout=True, stderr=exit_code not in accepted)).decode(errors="replace")
        except requests.RequestException as error:
            # The SDK reports the end of the wait as a lost connection, with these words.
            if "timed out" not in str(error):
                raise
            problem = f"`{what}` in {plan.image} did not end within {time_limit_s:g} s"
            raise HostError(problem, "try again on a host that is less busy", place, kind=COMMAND_FAILED, retry=True) from error
        finally:
            # With its own time limit: a busy engine may need longer to remove it than the command was allowed.
            with signals_held(), docker_host(place) as remover:
                _force_removal(remover, name)
    if exit_code not in accepted:
        problem = f"`{what}` in {plan.image} ended with exit code {exit_code}"
        raise HostError(problem, "see what it said", place, output.splitlines()[-10:], kind=COMMAND_FAILED)
    return output


def _waited_for(host: "docker.DockerClient", container_id: str, time_limit_s: float, check: Callable[[], None]) -> int:
    """Wait for the exit code of a container. Raises RequestException if it takes too long, and whatever `check` raises."""
    deadline = time.monotonic() + time_limit_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return int(host.api.wait(container_id, timeout=max(0.1, min(left_s, CHECK_EVERY_S)))["StatusCode"])
        except requests.RequestException as error:
            if "timed out" not in str(error) or left_s <= CHECK_EVERY_S:
                raise
        check()


def owner() -> str:
    """This process's label, so that others can tell if it still runs: machine, boot, PID namespace, PID, start time."""
    return ":".join([*_here(), str(os.getpid()), _started_at(os.getpid())])


def _here() -> list[str]:
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
    machine, boot, namespace, pid, started = (*label.split(":"), "", "", "", "", "")[:5]
    here_machine, here_boot, here_namespace = _here()
    if not re.fullmatch("[0-9]+", pid) or machine != here_machine:
        return False
    if boot != here_boot:
        return True
    return namespace == here_namespace and _started_at(int(pid)) != started


def leftovers(place: str = "check") -> list[Leftover]:
    """The containers whose owner is gone. Raises HostError if Docker Engine does not answer."""
    with docker_host(place) as host:
        containers = host.api.containers(all=True, filters={"label": [RUN_LABEL, OWNER_LABEL]})
    return [_leftover(about) for about in containers if _is_orphan(about["Labels"][OWNER_LABEL])]


def _leftover(about: dict[str, Any]) -> Leftover:
    labels = about["Labels"]
    return Leftover(
        id=about["Id"],
        name=about["Names"][0].lstrip("/"),
        run=labels[RUN_LABEL],
        cell=labels.get(CELL_LABEL, ""),
        state=about["State"],
    )


def remove_leftovers(place: str = "check") -> list[Leftover]:
    """Remove them, and return what was removed. Raises HostError."""
    removed = leftovers(place)
    with docker_host(place) as host:
        for leftover in removed:
            _force_removal(host, leftover.id)
    return removed
