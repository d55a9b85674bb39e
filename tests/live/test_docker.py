"""Docker for real: images from a registry, containers that come and go, and nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.builders.changed import changed
from tests.builders.processes import until
from tests.docker_engine import Engine, push_image
from tests.qualified import COMMAND, run
from tests.report.builder import image_report
from vllm_qualify.approval.here.image import compare_image
from vllm_qualify.engine import image
from vllm_qualify.engine.containers.leftovers import OWNER_LABEL, RUN_LABEL, find_leftovers, remove_leftovers
from vllm_qualify.engine.containers.plan import Bind, ContainerPlan, command_line, create_container
from vllm_qualify.engine.containers.run import RunningContainer, copy_file_out, run_once, running_command, running_container
from vllm_qualify.engine.failure.end import End
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.provision import read_machine
from vllm_qualify.errors import CallerError, HostError, QualifyError, ReleaseError

pytestmark = pytest.mark.docker
# Makes the plan of a container that runs a shell command.
Shell = Callable[..., ContainerPlan]
NOBODYS = "sha256:" + "0" * 64
# A shell with this ends on SIGTERM. Docker waits ten seconds for one that ignores it.
WAITING = "trap 'exit 0' TERM; sleep 600 & wait"


def silent(_line: str) -> None:
    pass


def classed(error: QualifyError) -> tuple[str, type[QualifyError], bool]:
    return error.kind, type(error), error.retry


# --- images


def test_a_tag_becomes_the_digest_of_the_registry(docker_engine: Engine) -> None:
    digest = push_image(docker_engine.registry, "plain", "v1")
    resolved = image.resolve(f"{docker_engine.registry}/plain:v1")
    assert (resolved.digest, resolved.platform) == (digest, "linux/amd64")
    assert resolved.pinned == f"{docker_engine.registry}/plain@{digest}"
    assert image.resolve(f"{docker_engine.registry}/plain:v1@{digest}") == resolved
    assert image.resolve(resolved.pinned).pinned == resolved.pinned


@pytest.mark.parametrize(
    ("reference", "kind", "error", "retry"),
    [
        ("{registry}/plain:no-such-tag", "image-missing", CallerError, False),
        ("{registry}/no/such/image:v1", "image-missing", CallerError, False),
        ("{registry}/plain@" + NOBODYS, "image-missing", CallerError, False),
        ("{registry}/plain:v1@" + NOBODYS, "tag-moved", ReleaseError, False),
        ("{registry}/arm:v1", "wrong-platform", ReleaseError, False),
        ("{login}/plain:v1", "login-required", HostError, False),
        ("127.0.0.1:9/plain:v1", "registry-unreachable", HostError, True),
        ("no.such.registry.invalid/plain:v1", "registry-unreachable", HostError, True),
    ],
)
def test_an_image_that_cannot_be_had_ends_in_its_own_class(
    docker_engine: Engine, reference: str, kind: str, error: type[QualifyError], retry: bool
) -> None:
    push_image(docker_engine.registry, "plain", "v1")
    push_image(docker_engine.registry, "arm", "v1", architecture="arm64")
    with pytest.raises(error) as raised:
        image.resolve(reference.format(registry=docker_engine.registry, login=docker_engine.login_registry))
    assert classed(raised.value) == (kind, error, retry)


def test_the_credentials_of_dockers_own_configuration_open_a_registry(
    docker_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = push_image(docker_engine.registry, "plain", "v1")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    user, password = (docker_engine.settings[f"VLLM_QUALIFY_LOGIN_{name}"] for name in ("USER", "PASSWORD"))
    login = ["docker", "login", "--username", user, "--password-stdin", docker_engine.login_registry]
    subprocess.run(login, input=password, text=True, check=True, capture_output=True)
    resolved = image.resolve(f"{docker_engine.login_registry}/plain:v1")
    assert resolved.digest == digest
    image.pull(resolved, silent)


def test_a_pull_tells_each_layer_and_tags_the_image_for_deployment(docker_engine: Engine) -> None:
    push_image(docker_engine.registry, "pulled", "v1", content=str(time.time_ns()))
    resolved = image.resolve(f"{docker_engine.registry}/pulled:v1")
    lines: list[str] = []
    image.pull(resolved, lines.append)
    assert any(line.startswith("pulling: layer") and "layers done" in line for line in lines)
    assert image.tag_for_deployment(resolved) == "vllm/vllm-openai:deploy"
    client = docker_engine.client()
    tagged = client.images.get("vllm/vllm-openai:deploy")
    assert tagged.id == client.images.get(resolved.pinned).id
    lines.clear()
    image.pull(resolved, lines.append)
    assert lines == [], "what is here is not pulled again"


def test_a_tag_that_moves_after_it_was_resolved_is_reported_by_the_pull(docker_engine: Engine) -> None:
    old = push_image(docker_engine.registry, "moving", "v1", content=str(time.time_ns()))
    resolved = image.resolve(f"{docker_engine.registry}/moving:v1")
    new = push_image(docker_engine.registry, "moving", "v1", content=str(time.time_ns()))
    with pytest.raises(ReleaseError, match=f"was at {old} and is now at {new}") as raised:
        image.pull(resolved, silent)
    assert raised.value.kind == "tag-moved"
    by_digest = resolved.model_copy(update={"tag": None})
    image.pull(by_digest, silent)


def test_an_image_for_another_platform_is_refused_after_the_pull_too(docker_engine: Engine) -> None:
    digest = push_image(docker_engine.registry, "arm", "v1", architecture="arm64")
    arm = EngineImage(repository=f"{docker_engine.registry}/arm", tag=None, digest=digest, platform="linux/amd64")
    with pytest.raises(ReleaseError) as raised:
        image.pull(arm, silent)
    assert raised.value.kind == "wrong-platform"


def test_an_image_without_vllm_is_reported(docker_engine: Engine) -> None:
    push_image(docker_engine.registry, "plain", "v1")
    resolved = image.resolve(f"{docker_engine.registry}/plain:v1")
    image.pull(resolved, silent)
    with pytest.raises(ReleaseError, match="use an image with the interface of vllm/vllm-openai") as raised:
        resolved.identity()
    assert raised.value.kind == "not-vllm-openai"


def test_an_image_tells_what_is_in_it(vllm_image: EngineImage) -> None:
    identity = vllm_image.identity()
    assert (identity.launcher, identity.version, identity.digest) == ("docker", "0.32.0+cpu", vllm_image.digest)
    assert identity.packages["torch"] == "2.13.0+cpu"
    assert identity.image is not None
    assert identity.image.reference == vllm_image.reference
    assert identity.image.labels["org.opencontainers.image.version"] == "v0.32.0"


# --- containers


@pytest.fixture
def vllm_image(docker_engine: Engine, cpu_image: str) -> EngineImage:  # noqa: ARG001  (names the engine)
    resolved = image.resolve(cpu_image)
    image.pull(resolved, silent)
    return resolved


@pytest.fixture
def shell(vllm_image: EngineImage) -> Shell:
    """The plan of a container that runs a shell command."""

    def plan(command: str, **others: Any) -> ContainerPlan:
        named = {"name": "vllm-qualify-test", "labels": {RUN_LABEL: "test"}} | others
        return ContainerPlan(
            image=vllm_image.pinned, platform=vllm_image.platform, entrypoint="sh", arguments=["-c", command], **named
        )

    return plan


def ended(watched: RunningContainer, within_s: float = 30) -> End:
    deadline = time.monotonic() + within_s
    while (end := watched.end()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return end


def test_a_container_leaves_its_log_its_exit_code_and_nothing_else(docker_engine: Engine, shell: Shell, tmp_path: Path) -> None:
    with running_container(shell("echo out; echo err >&2; exit 7"), tmp_path / "it.log", "serve") as watched:
        assert ended(watched) == End(exit_code=7)
    assert sorted((tmp_path / "it.log").read_text().split()) == ["err", "out"]
    assert docker_engine.containers() == []


def test_the_log_is_there_while_the_container_runs(shell: Shell, tmp_path: Path) -> None:
    with running_container(shell(f"echo ready; {WAITING}"), tmp_path / "it.log", "serve") as watched:
        assert until(lambda: watched.log.read_text() == "ready\n", 30)
        assert watched.end() is None


def test_a_container_is_removed_when_the_block_fails(docker_engine: Engine, shell: Shell, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), running_container(shell(WAITING), tmp_path / "it.log", "serve"):
        assert docker_engine.containers() == ["vllm-qualify-test"]
        raise KeyboardInterrupt
    assert docker_engine.containers() == []


class Stopped(BaseException):
    """What the command raises on Ctrl-C and kill -TERM."""


@pytest.fixture
def stoppable() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, before)


def signalled(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A kill -TERM arrives while the engine works on this call."""
    real = getattr(docker.APIClient, call)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(docker.APIClient, call, interrupted)


@pytest.mark.usefixtures("stoppable")
@pytest.mark.parametrize("call", ["create_container", "stop", "remove_container"])
def test_a_signal_at_the_worst_moment_leaves_no_container(
    docker_engine: Engine, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    signalled(monkeypatch, call)
    with pytest.raises(Stopped), running_container(shell(WAITING), tmp_path / "it.log", "serve"):
        pass
    assert docker_engine.containers() == []


@pytest.mark.usefixtures("stoppable")
@pytest.mark.parametrize("call", ["create_container", "start", "remove_container"])
def test_a_signal_leaves_no_container_of_a_short_command(
    docker_engine: Engine, shell: Shell, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    signalled(monkeypatch, call)
    with pytest.raises(Stopped):
        run_once(shell("true"), "check")
    assert docker_engine.containers() == []


def test_a_container_that_needs_more_than_its_memory_is_reported_as_oom_killed(shell: Shell, tmp_path: Path) -> None:
    # containerd watches for it only from a moment after the start on (its issue 8180)
    greedy = shell("sleep 3; python3 -c 'bytearray(10**9)'; exit 137", memory_limit_mib=64)
    with running_container(greedy, tmp_path / "it.log", "serve") as watched:
        assert ended(watched) == End(exit_code=137, oom_killed=True)


def test_a_secret_reaches_the_container_and_no_command_line_and_no_log(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    plan = shell('echo "$HF_TOKEN"', passed=["HF_TOKEN"])
    with running_container(plan, tmp_path / "it.log", "serve") as watched:
        assert ended(watched) == End(exit_code=0)
    assert (tmp_path / "it.log").read_text() == "[redacted]\n"
    assert "hf_secret_of_mine" not in " ".join(command_line(plan)) + plan.model_dump_json()


def test_a_command_in_a_container_has_its_own_log_and_exit_code_and_its_files_are_fetched(shell: Shell, tmp_path: Path) -> None:
    work = "mkdir /results && echo found > /results/r.json && ln -s /etc/passwd /results/l; echo done; exit 3"
    with running_container(shell(WAITING), tmp_path / "it.log", "serve") as watched:
        with running_command(watched.container_id, ["sh", "-c", work], tmp_path / "work.log", "load") as executed:
            assert ended(executed) == End(exit_code=3)
        assert (tmp_path / "work.log").read_text() == "done\n"
        for name in ("r.json", "l", "nothing"):
            copy_file_out(watched.container_id, f"/results/{name}", tmp_path / name, "load")
    assert (tmp_path / "r.json").read_text() == "found\n"
    assert not (tmp_path / "l").exists()
    assert not (tmp_path / "nothing").exists()


def test_a_short_command_that_does_not_end_is_given_up(docker_engine: Engine, shell: Shell) -> None:
    with pytest.raises(HostError, match="did not end within 1 s") as raised:
        run_once(shell("sleep 600"), "check", time_limit_s=1)
    assert raised.value.kind == "command-failed"
    assert docker_engine.containers() == []


def test_a_command_ends_with_its_container(shell: Shell, tmp_path: Path) -> None:
    with (
        running_container(shell("sleep 1"), tmp_path / "it.log", "serve") as watched,
        running_command(watched.container_id, ["sleep", "600"], tmp_path / "work.log", "load") as executed,
    ):
        assert ended(executed).exit_code != 0


@pytest.mark.parametrize(
    ("others", "kind"),
    [
        ({"gpus": [0]}, "no-gpu-in-docker"),
        ({"image": "no/such/image:v1"}, "image-missing"),
        ({"binds": [Bind(source=Path("/no/such/folder"), target="/x")]}, "mount-refused"),
        ({"entrypoint": "/no/such/program"}, "not-vllm-openai"),
    ],
)
def test_a_container_that_cannot_start_ends_in_its_own_class(
    docker_engine: Engine, shell: Shell, tmp_path: Path, others: dict[str, Any], kind: str
) -> None:
    plan = shell("true").model_copy(update=others)
    with pytest.raises(QualifyError) as raised, running_container(plan, tmp_path / "it.log", "serve"):
        pass
    assert raised.value.kind == kind
    assert docker_engine.containers() == []


def test_a_port_that_another_container_has_is_reported(shell: Shell, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running_container(shell(WAITING, port=port), tmp_path / "it.log", "serve"):
        second = shell("true", port=port, name="vllm-qualify-second")
        with (
            pytest.raises(HostError, match=f"port {port} is in use") as raised,
            running_container(second, tmp_path / "2.log", "serve"),
        ):
            pass
    assert raised.value.kind == "port-in-use"


def test_the_command_line_makes_the_very_container_that_is_launched(
    docker_engine: Engine, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dry-run` shows this command; what the engine made of it and of the SDK's call is compared field by field."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    plan = shell(
        WAITING,
        environment={"VLLM_LOGGING_LEVEL": "INFO"},
        passed=["HF_TOKEN"],
        binds=[Bind(source=tmp_path, target="/model"), Bind(source=tmp_path, target="/cache", read_only=False)],
        port=18_765,
        shared_memory_gib=1,
        memory_limit_mib=512,
    )
    client = docker_engine.client()
    with running_container(plan, tmp_path / "it.log", "serve") as watched:
        launched = client.api.inspect_container(watched.container_id)
    assert comparable(made_by_command(client, plan)) == comparable(launched)
    assert launched["HostConfig"]["Privileged"] is False
    assert launched["HostConfig"]["PortBindings"] == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "18765"}]}


def made_by_command(client: docker.DockerClient, plan: ContainerPlan) -> dict[str, Any]:
    """What the engine makes of the plan's command line."""
    command = ["docker", "create", *command_line(plan)[3:]]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        about: dict[str, Any] = client.api.inspect_container(made)
    finally:
        client.api.remove_container(made)
    return about


def comparable(about: dict[str, Any]) -> dict[str, Any]:
    """All of a container's configuration but the label of its owner, and what only a terminal's client sets."""
    labels = {name: value for name, value in about["Config"]["Labels"].items() if name != OWNER_LABEL}
    config = about["Config"] | {"Labels": labels, "Env": sorted(about["Config"]["Env"])}
    of_a_terminal = ("AttachStdin", "AttachStdout", "AttachStderr", "Hostname", "ConsoleSize", "OpenStdin", "StdinOnce")
    given = config | about["HostConfig"]
    # The client writes empty lists and maps where the SDK writes nothing.
    return {name: value for name, value in given.items() if name not in of_a_terminal and value not in (None, [], {}, "", 0)}


def test_gpus_are_asked_for_by_the_same_request(docker_engine: Engine, shell: Shell) -> None:
    """No GPU is needed to make a container that asks for one, only to start it."""
    client = docker_engine.client()
    plan = shell("true", gpus=[0, 3])
    by_command = made_by_command(client, plan)["HostConfig"]["DeviceRequests"]
    made = create_container(client, plan)
    by_call = client.api.inspect_container(made)["HostConfig"]["DeviceRequests"]
    client.api.remove_container(made)
    assert by_call == by_command
    assert by_call[0]["DeviceIDs"] == ["0", "3"]


def test_a_machine_whose_engine_has_no_gpu_is_a_cpu_machine(vllm_image: EngineImage) -> None:
    assert read_machine(vllm_image, None).gpu_type == "cpu"


# --- what a killed run leaves

HOLDS = """
import sys, time
from pathlib import Path
from vllm_qualify.engine.containers.plan import ContainerPlan
from vllm_qualify.engine.containers.run import running_container
with running_container(ContainerPlan.model_validate_json(sys.argv[1]), Path(sys.argv[2]), "serve"):
    print("running", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_run_left_is_found_and_removed_and_a_living_ones_is_not(
    docker_engine: Engine, shell: Shell, tmp_path: Path, home: Path
) -> None:
    plan = shell(WAITING)
    command = [sys.executable, "-c", HOLDS, plan.model_dump_json(), str(tmp_path / "it.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "running\n"
        assert find_leftovers() == []
        assert remove_leftovers() == []
        assert docker_engine.containers() == ["vllm-qualify-test"]
        os.kill(holder.pid, signal.SIGKILL)
    assert [(leftover.name, leftover.run) for leftover in find_leftovers()] == [("vllm-qualify-test", "test")]
    shown = run(home, COMMAND, "doctor")
    assert "found    leftovers     vllm-qualify-test" in shown.stdout
    cleaned = run(home, COMMAND, "doctor", "--clean")
    assert "removed  vllm-qualify-test, of run test" in cleaned.stdout
    assert docker_engine.containers() == []


def test_an_engine_that_stops_is_not_the_containers_end(docker_engine: Engine, shell: Shell, tmp_path: Path) -> None:
    with running_container(shell(WAITING), tmp_path / "it.log", "serve") as watched:
        docker_engine.stop()
        try:
            with pytest.raises(HostError) as raised:
                ended(watched)
        finally:
            docker_engine.start()
    assert raised.value.kind == "docker-gone"
    assert docker_engine.containers() == []


def test_a_container_that_cannot_be_removed_is_named_beside_the_error_and_removed_later(
    docker_engine: Engine, shell: Shell, tmp_path: Path
) -> None:
    try:
        plan = shell(WAITING)
        with pytest.raises(ReleaseError, match="of its own") as raised, running_container(plan, tmp_path / "it.log", "serve"):
            docker_engine.stop()
            raise ReleaseError("an error of its own", "none")
    finally:
        docker_engine.start()
    assert "the container vllm-qualify-test could not be removed" in raised.value.__notes__[0]
    # its owner, this process, still lives: it is no leftover yet
    assert find_leftovers() == []
    client = docker_engine.client()
    (left,) = client.containers.list(all=True, filters={"label": RUN_LABEL})
    assert left.status == "exited"
    left.remove()


def test_a_tag_is_compared_in_its_registry_and_on_this_machine(docker_engine: Engine) -> None:
    """Each may have moved without the other: the registry's copy is not the one that `docker run` takes here."""
    registry, name = docker_engine.registry, f"{docker_engine.registry}/deployed:v1"
    digest = push_image(registry, "deployed", "v1", content=str(time.time_ns()))
    approved = image.resolve(name)
    plan = changed(image_report().plan, "server", engine=approved)

    def states() -> dict[str, str]:
        return {found.what: found.state for found in compare_image(name, plan.cell.release, plan.server)}

    assert (approved.digest, states()["digest in the registry"]) == (digest, "same")
    assert states()["digest on this machine"] == "cannot be told"
    docker_engine.client().images.pull(name)
    assert (states()["digest on this machine"], states()["platform on this machine"]) == ("same", "same")
    push_image(registry, "deployed", "v1", content=str(time.time_ns()))
    assert (states()["digest in the registry"], states()["digest on this machine"]) == ("different", "same")
    docker_engine.client().images.pull(name)
    assert states()["digest on this machine"] == "different"
    push_image(registry, "deployed", "v1", architecture="arm64")
    assert states()["digest in the registry"] == "different"
    docker_engine.client().images.pull(name, platform="linux/arm64")
    assert states()["platform on this machine"] == "different"
