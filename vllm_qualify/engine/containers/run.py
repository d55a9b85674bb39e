"""Containers and commands in them: run through Docker's SDK, watched, and always removed."""

import io
import json
import secrets
import shlex
import tarfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_qualify.engine.containers.host import GONE, docker_host, engine_message, gone_error
from vllm_qualify.engine.containers.leftovers import RUN_LABEL, force_removal
from vllm_qualify.engine.containers.plan import ContainerPlan, create_container
from vllm_qualify.engine.failure.docker import classify_start
from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.guard import write_state
from vllm_qualify.engine.process import Running, open_log, signals_held
from vllm_qualify.engine.watch import first_in_container
from vllm_qualify.errors import HostError, writing
from vllm_qualify.lazy import Lazy
from vllm_qualify.secrets import redact_file

if TYPE_CHECKING:
    import docker
    import requests
else:
    docker, requests = Lazy("docker"), Lazy("requests")

COMMAND_FAILED = "command-failed"
STOP_GRACE_S = 10
# A Docker Engine that is being stopped ends its containers first, and answers until they have ended. The check is shorter for
# a container than for a command in it, so that the container's state is written before the command's.
ENGINE_ENDS_WITHIN_S, CONTAINER_ENDS_WITHIN_S = 5.0, 3.0
JOIN_S = 20
CHECK_EVERY_S = 1.0


class RunningContainer(Running):
    """A container, or a command in one. If Docker Engine went away, or the log could not be written, its end is unknown."""

    in_image: ClassVar[bool] = True

    container_id: str

    def end(self) -> End | None:
        if not self.state_file.exists():
            return None
        state = json.loads(self.state_file.read_text())
        if "error" in state:
            raise HostError(**state["error"])
        return End.model_validate(state)

    def processes(self) -> Collection[int]:
        return first_in_container(self.container_id)


@contextmanager
def running_container(plan: ContainerPlan, log: Path, place: str) -> Iterator[RunningContainer]:
    """Run the container within the block, with its output in `log`. After the block the container is gone.

    Raises what `classify_start` chooses if it could not be made or started, and HostError if Docker Engine does not answer, or
    `log` cannot be written.
    """
    state_file = _fresh_state_file(log)
    watchers: list[threading.Thread] = []
    asked = threading.Event()
    try:
        with _removing_after(str(plan.name), place, watchers, asked):
            with docker_host(place) as host:
                container_id = _start_container(host, plan, place)
            watchers.append(_start_thread(_copy_log, container_id, log, place))
            watchers.append(_start_thread(_await_end, container_id, state_file, place, asked))
            yield RunningContainer(container_id=container_id, state_file=state_file, log=log)
    finally:
        with signals_held():
            redact_file(log)


def _fresh_state_file(log: Path) -> Path:
    """The place for the state of what writes to `log`, which exists from now on. Raises HostError."""
    with writing(str(log)):
        log.with_suffix(".state").unlink(missing_ok=True)
        log.touch()
    return log.with_suffix(".state")


@contextmanager
def _removing_after(name: str, place: str, watchers: list[threading.Thread], asked: threading.Event) -> Iterator[None]:
    """Remove the container after the block. If that fails, the error has a note about it; the block's own error comes first.

    `asked` is set as soon as this process begins to end the container.
    """
    of_block: BaseException | None = None
    try:
        yield
    except BaseException as error:
        of_block = error
        raise
    finally:
        asked.set()
        try:
            _stop_and_remove(name, place, watchers)
        except HostError as error:
            told = of_block or error
            told.add_note(f"the container {name} could not be removed; the next run does it, or: vllm-qualify doctor --clean")
            if of_block is None:
                raise


def _start_container(host: "docker.DockerClient", plan: ContainerPlan, place: str) -> str:
    try:
        # If a signal broke off the call, the engine could still make the container after the attempt to remove it.
        with signals_held():
            container_id = create_container(host, plan)
        host.api.start(container_id)
    except docker.errors.APIError as error:
        raise classify_start(engine_message(error), plan.image, plan.port, place) from error
    return container_id


def _start_thread(target: Any, *arguments: object) -> threading.Thread:
    started = threading.Thread(target=target, args=arguments, daemon=True)
    started.start()
    return started


def _copy_log(container_id: str, log: Path, place: str) -> None:
    """Copy the container's output until it ends. If the engine goes away, the log just ends; `_await_end` reports it."""
    try:
        with docker_host(place, timeout_s=None) as host:
            _copy_stream(host.api.logs(container_id, stream=True, follow=True), log)
    except HostError as error:
        if error.kind != GONE:
            write_state(log.with_suffix(".state"), **_unknown_state(error))


def _copy_stream(stream: Iterable[bytes], log: Path) -> None:
    """Raises HostError if the log cannot be written. An error of the stream, even an OSError, is not the disk's fault."""
    with writing(str(log)):
        file = open_log(log)
    with file:
        for chunk in stream:
            with writing(str(log)):
                file.write(chunk)


def _await_end(container_id: str, state_file: Path, place: str, asked: threading.Event) -> None:
    try:
        with docker_host(place, timeout_s=None) as host:
            exit_code = int(host.api.wait(container_id)["StatusCode"])
            _check_engine_stays(host, CONTAINER_ENDS_WITHIN_S, asked)
            state = {"exit_code": exit_code, "oom_killed": False}
            with suppress(docker.errors.NotFound):
                state["oom_killed"] = bool(host.api.inspect_container(container_id)["State"].get("OOMKilled"))
    except HostError as error:
        state = _unknown_state(error)
    if not state_file.exists():
        write_state(state_file, **state)


def _check_engine_stays(host: "docker.DockerClient", within_s: float, asked: threading.Event) -> None:
    """Raises what a lost engine raises: then the container did not end on its own. Returns at once if `asked` is set."""
    deadline = time.monotonic() + within_s
    while True:
        host.ping()
        if time.monotonic() > deadline or asked.wait(0.2):
            return


def _unknown_state(error: HostError) -> dict[str, Any]:
    """The state of something with an unknown end, and the reason."""
    names = ("problem", "remedy", "place", "kind", "retry")
    return {"error": {name: getattr(error, name) for name in names}}


def _stop_and_remove(name: str, place: str, watchers: list[threading.Thread]) -> None:
    """Stop the container in order, so that its log is complete, and remove it in every case. Raises HostError."""
    with signals_held(), docker_host(place) as host:
        try:
            # The removal ends what could not be stopped.
            with suppress(docker.errors.APIError):
                host.api.stop(name, timeout=STOP_GRACE_S)
            for watcher in watchers:
                watcher.join(JOIN_S)
        finally:
            force_removal(host, name)


@contextmanager
def running_command(container_id: str, command: list[str], log: Path, place: str) -> Iterator[RunningContainer]:
    """Run `docker exec` within the block. A command that still runs after the block ends with its container.

    Raises HostError if Docker Engine does not answer.
    """
    state_file = _fresh_state_file(log)
    with docker_host(place) as host:
        exec_id = str(host.api.exec_create(container_id, command)["Id"])
    watcher = _start_thread(_run_exec, exec_id, log, state_file, place)
    try:
        yield RunningContainer(container_id=container_id, state_file=state_file, log=log)
    finally:
        with signals_held():
            if state_file.exists():
                watcher.join(JOIN_S)
            redact_file(log)


def _run_exec(exec_id: str, log: Path, state_file: Path, place: str) -> None:
    try:
        with docker_host(place, timeout_s=None) as host:
            _copy_stream(host.api.exec_start(exec_id, stream=True), log)
            exit_code = host.api.exec_inspect(exec_id)["ExitCode"]
            if exit_code != 0:
                _check_engine_stays(host, ENGINE_ENDS_WITHIN_S, threading.Event())
        # A stream that broke off looks like one that is complete, but then the command has no exit code yet.
        state = _unknown_state(gone_error(place)) if exit_code is None else {"exit_code": exit_code}
    except HostError as error:
        state = _unknown_state(error)
    write_state(state_file, **state)


def copy_file_out(container_id: str, file: str, into: Path, place: str) -> None:
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


def put_file(container_id: str, file: str, body: bytes, place: str) -> None:
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

    It must end with one of the `accepted` exit codes. `check` is called until then, and may raise. Raises QualifyError if it
    could not be started, did not end in time, or ended with another exit code.
    """
    what = shlex.join([plan.entrypoint or "", *plan.arguments])[:60]
    name = f"vllm-qualify-{secrets.token_hex(6)}"
    plan = plan.model_copy(update={"name": name, "labels": {RUN_LABEL: ""}})
    with docker_host(place, timeout_s=time_limit_s) as host:
        try:
            container_id = _start_container(host, plan, place)
            exit_code = _await_exit_code(host, container_id, time_limit_s, check)
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
                force_removal(remover, name)
    if exit_code not in accepted:
        problem = f"`{what}` in {plan.image} ended with exit code {exit_code}"
        raise HostError(problem, "see what it said", place, output.splitlines()[-10:], kind=COMMAND_FAILED)
    return output


def _await_exit_code(host: "docker.DockerClient", container_id: str, time_limit_s: float, check: Callable[[], None]) -> int:
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
