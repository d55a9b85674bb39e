"""Servers in containers of this machine's Docker Engine."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from vllm_qualify.engine import image as images
from vllm_qualify.engine import server as served
from vllm_qualify.engine.confinement import STATISTICS_OFF
from vllm_qualify.engine.containers.host import platform_here
from vllm_qualify.engine.containers.leftovers import find_leftovers, remove_leftovers
from vllm_qualify.engine.containers.plan import SERVED_PORT, ContainerPlan, command_line, shell_command
from vllm_qualify.engine.containers.run import copy_file_out, put_file, run_once, running_command, running_container
from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.gpu import Fingerprint, detect, fingerprint_of
from vllm_qualify.engine.gpu_reading import NVIDIA_SMI_QUERY, parse_nvidia_smi
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.launchers.base import Script
from vllm_qualify.engine.process import Leftover, Running
from vllm_qualify.engine.server import HOST, STAGE, Client, Engine, Labels, ServerPlan, Starting
from vllm_qualify.errors import HostError
from vllm_qualify.recipe.gpu_types import SUPERCHIPS
from vllm_qualify.recipe.serving import VLLM

# nvidia-smi's exit codes when its output can be parsed: a table, a wrong query, no device.
SMI_TELLS = (0, 2, 6)


class DockerLauncher:
    """Runs containers through Docker's SDK. A client's `runs_in` is its container's id."""

    from_image = True

    def name_engine(self, image: str | None, gpu_type: str) -> Engine:
        return images.parse_reference(image or "", "linux/arm64" if gpu_type in SUPERCHIPS else platform_here())

    def find(self, image: str | None, option: str) -> Engine:
        return images.resolve(image or "", option)

    def pull(self, engine: Engine, progress: Callable[[str], None]) -> float | None:
        return images.pull(_as_image(engine), progress)

    def identity(self, engine: Engine) -> EngineIdentity:
        return _as_image(engine).identity()

    def tag_for_deployment(self, engine: EngineImage) -> str | None:
        return images.tag_for_deployment(engine) if self.identity(engine).kind == VLLM else None

    def machine(self, engine: Engine, gpu_type: str | None) -> Fingerprint:
        """Its GPUs by NVML here, else by `nvidia-smi` in a container of the image; without GPUs its CPU."""
        detected = detect(gpu_type)
        listed = None if gpu_type == "cpu" or detected.gpu_type != "cpu" else _run_nvidia_smi(_as_image(engine))
        machine = detected if listed is None else fingerprint_of(parse_nvidia_smi(listed), gpu_type)
        return machine.model_copy(update={"confined": True, "isolated": True})

    def ask(self, engine: Engine, script: Script, check: Callable[[], None]) -> str:
        """The models' files are mounted where a server of this image has them."""
        image = _as_image(engine)
        binds = {bind for server in script.servers for bind in served.model_binds(server)}
        plan = ContainerPlan(
            image=image.pinned,
            platform=image.platform,
            entrypoint="python3",
            arguments=["-I", "-c", script.file.read_text(), script.question],
            environment={"HF_HOME": served.HF_HOME_INSIDE} | served.OFFLINE | STATISTICS_OFF,
            binds=sorted(binds, key=str),
        )
        return run_once(plan, script.place, time_limit_s=script.time_limit_s, check=check)

    @contextmanager
    def serve(self, plan: ServerPlan, folder: Path, port: int, labels: Labels) -> Iterator[Starting]:
        planned, launched_at = served.container_of(plan, folder / served.CONFIG_FILE, port, labels), time.monotonic()
        with running_container(planned, folder / served.LOG, STAGE) as process:
            client = Client(
                launcher=plan.engine.launcher,
                runs_in=process.container_id,
                program="vllm",
                python="python3",
                url=f"http://{HOST}:{SERVED_PORT}",
                model=plan.served_from,
                trust_remote_code=plan.trust_remote_code,
            )
            url, command = f"http://{HOST}:{port}", command_line(planned)
            yield Starting(url=url, process=process, command=command, client=client, launched_at=launched_at)

    @contextmanager
    def client_in(
        self, image: EngineImage, plan: ServerPlan, server: Starting, folder: Path, labels: Labels
    ) -> Iterator[Client]:
        """It runs in the server's network."""
        planned = ContainerPlan(
            name=served.container_name(labels, "client"),
            image=image.pinned,
            platform=image.platform,
            entrypoint="sleep",
            arguments=["infinity"],
            environment=served.container_environment(plan),
            binds=served.model_binds(plan),
            labels=served.container_labels(labels, "client"),
            network=f"container:{server.client.runs_in}",
        )
        with running_container(planned, folder / "client.log", "load") as process:
            yield server.client.model_copy(update={"runs_in": process.container_id})

    def shell_command(self, plan: ServerPlan, config: Path, port: int, labels: Labels) -> str:
        return shell_command(served.container_of(plan, config, port, labels))

    def letter_box(self, client: Client) -> AbstractContextManager[str]:
        """It is removed with its container."""
        return nullcontext(f"{served.RESULTS_INSIDE}-orders-{secrets.token_hex(4)}")

    def run(
        self, client: Client, command: list[str], letter_box: str, log: Path, place: str
    ) -> AbstractContextManager[Running]:
        return running_command(client.runs_in, command, log, place)

    def put(self, client: Client, file: str, body: bytes, place: str) -> None:
        put_file(client.runs_in, file, body, place)

    def give(self, client: Client, file: Path, folder: str, place: str) -> str:
        there = f"{folder}/given/{file.name}"
        self.put(client, there, file.read_bytes(), place)
        return there

    def results_folder(self, client: Client, letter_box: str) -> str:
        return served.RESULTS_INSIDE

    def fetch(self, client: Client, file: str, into: Path, place: str) -> None:
        copy_file_out(client.runs_in, file, into, place)

    def typed_command(self, client: Client, command: list[str]) -> list[str]:
        return ["docker", "exec", client.runs_in[:12], *command]

    def leftovers(self) -> list[Leftover]:
        return find_leftovers()

    def remove_leftovers(self) -> list[Leftover]:
        return remove_leftovers()


def _as_image(engine: Engine) -> EngineImage:
    assert isinstance(engine, EngineImage)  # noqa: S101  (its `launcher` says so)
    return engine


def _run_nvidia_smi(engine: EngineImage) -> str | None:
    """The output of `nvidia-smi` in a container; None if Docker Engine has no GPU to give."""
    plan = ContainerPlan(
        image=engine.pinned, platform=engine.platform, entrypoint="nvidia-smi", arguments=NVIDIA_SMI_QUERY, gpus="all"
    )
    try:
        return run_once(plan, "check", SMI_TELLS)
    except HostError as error:
        if error.kind == "no-gpu-in-docker":
            return None
        raise
