"""Servers in containers of this machine's Docker Engine."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_qualify.engine import container
from vllm_qualify.engine import image as images
from vllm_qualify.engine.container import SERVED_PORT, ContainerPlan
from vllm_qualify.engine.docker_host import platform_here
from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.gpu import NVIDIA_SMI_QUERY, Fingerprint, detect, fingerprint_of, parse_nvidia_smi
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.launchers.base import Launched, Script
from vllm_qualify.engine.running import Leftover, Running
from vllm_qualify.engine.server import (
    CONFIG_FILE,
    HF_HOME_INSIDE,
    HOST,
    LOG,
    OFFLINE,
    RESULTS_INSIDE,
    STAGE,
    Client,
    Engine,
    Labels,
    ServerPlan,
    Starting,
    container_environment,
    container_labels,
    container_name,
    container_of,
    model_binds,
    statistics_off,
)
from vllm_qualify.errors import HostError
from vllm_qualify.recipe.gpu_types import SUPERCHIPS
from vllm_qualify.recipe.serving import VLLM

# nvidia-smi's exit codes when its output can be parsed: a table, a wrong query, no device.
SMI_TELLS = (0, 2, 6)


class DockerLauncher:
    """Runs containers through Docker's SDK. A client's `runs_in` is its container's id."""

    from_image = True

    def named(self, image: str | None, gpu_type: str) -> Engine:
        return images.parse_reference(image or "", "linux/arm64" if gpu_type in SUPERCHIPS else platform_here())

    def find(self, image: str | None, option: str) -> Engine:
        return images.resolve(image or "", option)

    def pull(self, engine: Engine, progress: Callable[[str], None]) -> float | None:
        return images.pull(_image(engine), progress)

    def identity(self, engine: Engine) -> EngineIdentity:
        return _image(engine).identity()

    def tag_for_deployment(self, engine: EngineImage) -> str | None:
        return images.tag_for_deployment(engine) if self.identity(engine).kind == VLLM else None

    def machine(self, engine: Engine, gpu_type: str | None) -> Fingerprint:
        """Its GPUs by NVML here, else by `nvidia-smi` in a container of the image; without GPUs its CPU."""
        detected = detect(gpu_type)
        listed = None if gpu_type == "cpu" or detected.gpu_type != "cpu" else _nvidia_smi(_image(engine))
        machine = detected if listed is None else fingerprint_of(parse_nvidia_smi(listed), gpu_type)
        return machine.model_copy(update={"confined": True})

    def ask(self, engine: Engine, script: Script, check: Callable[[], None]) -> str:
        """The models' files are mounted where a server of this image has them."""
        image = _image(engine)
        binds = {bind for server in script.servers for bind in model_binds(server)}
        plan = ContainerPlan(
            image=image.pinned,
            platform=image.platform,
            entrypoint="python3",
            arguments=["-I", "-c", script.file.read_text(), script.question],
            environment={"HF_HOME": HF_HOME_INSIDE} | OFFLINE | statistics_off(),
            binds=sorted(binds, key=str),
        )
        return container.run_once(plan, script.place, time_limit_s=script.time_limit_s, check=check)

    @contextmanager
    def serve(self, plan: ServerPlan, folder: Path, port: int, labels: Labels) -> Iterator[Launched]:
        planned = container_of(plan, folder / CONFIG_FILE, port, labels)
        with container.running(planned, folder / LOG, STAGE) as process:
            client = Client(
                launcher=plan.engine.launcher,
                runs_in=process.container_id,
                program="vllm",
                python="python3",
                url=f"http://{HOST}:{SERVED_PORT}",
                model=plan.served_from,
                trust_remote_code=plan.trust_remote_code,
            )
            yield Launched(f"http://{HOST}:{port}", process, container.command_line(planned), client)

    @contextmanager
    def client_in(
        self, image: EngineImage, plan: ServerPlan, server: Starting, folder: Path, labels: Labels
    ) -> Iterator[Client]:
        """It runs in the server's network."""
        planned = ContainerPlan(
            name=container_name(labels, "client"),
            image=image.pinned,
            platform=image.platform,
            entrypoint="sleep",
            arguments=["infinity"],
            environment=container_environment(plan),
            binds=model_binds(plan),
            labels=container_labels(labels, "client"),
            network=f"container:{server.client.runs_in}",
        )
        with container.running(planned, folder / "client.log", "load") as process:
            yield server.client.model_copy(update={"runs_in": process.container_id})

    def shell_command(self, plan: ServerPlan, config: Path, port: int, labels: Labels) -> str:
        return container.shell_command(container_of(plan, config, port, labels))

    @contextmanager
    def letter_box(self, client: Client) -> Iterator[str]:
        """It is removed with its container."""
        yield f"{RESULTS_INSIDE}-orders-{secrets.token_hex(4)}"

    @contextmanager
    def run(self, client: Client, command: list[str], letter_box: str, log: Path, place: str) -> Iterator[Running]:
        with container.executing(client.runs_in, command, log, place) as process:
            yield process

    def put(self, client: Client, file: str, body: bytes, place: str) -> None:
        container.put(client.runs_in, file, body, place)

    def give(self, client: Client, file: Path, folder: str, place: str) -> str:
        there = f"{folder}/given/{file.name}"
        self.put(client, there, file.read_bytes(), place)
        return there

    def results_folder(self, client: Client, letter_box: str) -> str:
        return RESULTS_INSIDE

    def fetch(self, client: Client, file: str, into: Path, place: str) -> None:
        container.copy_out(client.runs_in, file, into, place)

    def shown(self, client: Client, command: list[str]) -> list[str]:
        return ["docker", "exec", client.runs_in[:12], *command]

    def leftovers(self, place: str = "check") -> list[Leftover]:
        return container.leftovers(place)

    def remove_leftovers(self, place: str = "check") -> list[Leftover]:
        return container.remove_leftovers(place)


def _image(engine: Engine) -> EngineImage:
    assert isinstance(engine, EngineImage)  # noqa: S101  (its `launcher` says so)
    return engine


def _nvidia_smi(engine: EngineImage) -> str | None:
    """The output of `nvidia-smi` in a container; None if Docker Engine has no GPU to give."""
    plan = ContainerPlan(
        image=engine.pinned, platform=engine.platform, entrypoint="nvidia-smi", arguments=NVIDIA_SMI_QUERY, gpus="all"
    )
    try:
        return container.run_once(plan, "check", SMI_TELLS)
    except HostError as error:
        if error.kind == "no-gpu-in-docker":
            return None
        raise
