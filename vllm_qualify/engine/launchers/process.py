"""Servers as processes of this machine, from an engine environment, each under a guard."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity, find_engine
from vllm_qualify.engine.gpu import VISIBLE, Fingerprint, detect
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.launchers.base import Launched, Script
from vllm_qualify.engine.process import guarded, quiet_environment, text_of, wait_for
from vllm_qualify.engine.running import Leftover, Running
from vllm_qualify.engine.server import CONFIG_FILE, HOST, LOG, OFFLINE, Client, Engine, Labels, ServerPlan, Starting
from vllm_qualify.errors import CallerError, writing


class ProcessLauncher:
    """Runs processes without Docker. Killed runs leave nothing running: the guards end it."""

    from_image = False

    def named(self, image: str | None, gpu_type: str) -> Engine:
        return find_engine()

    def find(self, image: str | None, option: str) -> Engine:
        return find_engine()

    def pull(self, engine: Engine, progress: Callable[[str], None]) -> None:
        """Nothing to pull: the environment is here."""

    def identity(self, engine: Engine) -> EngineIdentity:
        return _environment(engine).identity()

    def tag_for_deployment(self, engine: EngineImage) -> None:
        """There is no image to tag."""

    def machine(self, engine: Engine, gpu_type: str | None) -> Fingerprint:
        return detect(gpu_type)

    def ask(self, engine: Engine, script: Script, check: Callable[[], None]) -> str:
        with TemporaryDirectory(prefix="vllm-qualify-probe-") as folder:
            answer = Path(folder, "answer.json")
            command = [str(_environment(engine).python), "-I", str(script.file), script.question, str(answer)]
            with guarded(command, quiet_environment(OFFLINE), Path(folder, "probe.log")) as process:
                wait_for(process, script.time_limit_s, check, script.what)
                return answer.read_text() if answer.exists() else text_of(process.log)

    @contextmanager
    def serve(self, plan: ServerPlan, folder: Path, port: int, labels: Labels) -> Iterator[Launched]:
        engine = _environment(plan.engine)
        command = process_command(engine, folder / CONFIG_FILE)
        url = f"http://{HOST}:{port}"
        with guarded(command, quiet_environment(process_environment(plan)), folder / LOG) as process:
            client = Client(
                program=str(engine.vllm),
                python=str(engine.python),
                url=url,
                model=plan.model,
                trust_remote_code=plan.trust_remote_code,
            )
            yield Launched(url, process, command, client)

    def client_in(
        self, image: EngineImage, plan: ServerPlan, server: Starting, folder: Path, labels: Labels
    ) -> AbstractContextManager[Client]:
        raise CallerError("a process has no client of another image", "leave the option out", "--client-image")

    def shell_command(self, plan: ServerPlan, config: Path, port: int, labels: Labels) -> str:
        environment = [f"{name}={value}" for name, value in process_environment(plan).items()]
        command = process_command(_environment(plan.engine), config)
        return shlex.join([*(["env", *environment] if environment else []), *command])

    @contextmanager
    def letter_box(self, client: Client) -> Iterator[str]:
        with TemporaryDirectory(prefix="vllm-qualify-bench-") as folder:
            yield folder

    @contextmanager
    def run(self, client: Client, command: list[str], log: Path, place: str) -> Iterator[Running]:
        with guarded(command, quiet_environment(OFFLINE), log) as process:
            yield process

    def put(self, client: Client, file: str, body: bytes, place: str) -> None:
        with writing(place):
            part = Path(f"{file}.part")
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(body)
            part.replace(file)

    def give(self, client: Client, file: Path, folder: str, place: str) -> str:
        return str(file)

    def results_folder(self, client: Client, folder: Path) -> str:
        return str(folder)

    def fetch(self, client: Client, file: str, into: Path, place: str) -> None:
        """Nothing to copy: the client wrote it there."""

    def shown(self, client: Client, command: list[str]) -> list[str]:
        return command

    def leftovers(self, place: str = "check") -> list[Leftover]:
        return []

    def remove_leftovers(self, place: str = "check") -> list[Leftover]:
        return []


def process_command(engine: EngineEnvironment, config: Path) -> list[str]:
    return [str(engine.vllm), "serve", "--config", str(config)]


def process_environment(plan: ServerPlan) -> dict[str, str]:
    """The variables that a server process gets besides this process's own environment."""
    # Without this order CUDA counts the fastest device first, but NVML counts by the PCI bus.
    chosen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: ",".join(map(str, plan.gpus))}
    return (chosen if plan.gpus else {}) | OFFLINE | plan.environment


def _environment(engine: Engine) -> EngineEnvironment:
    assert isinstance(engine, EngineEnvironment)  # noqa: S101  (its `launcher` says so)
    return engine
