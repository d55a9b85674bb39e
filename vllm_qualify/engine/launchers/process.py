"""Servers as processes of this machine, from an engine environment, each under a guard."""

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_qualify.engine.confinement import confining_process, folders_of, isolation_problem
from vllm_qualify.engine.environment import EngineEnvironment, EngineIdentity, find_engine
from vllm_qualify.engine.gpu import VISIBLE, Fingerprint, detect
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.landlock import can_confine
from vllm_qualify.engine.launchers.base import Script
from vllm_qualify.engine.letter_box import copy_plain, write_plain
from vllm_qualify.engine.process import Leftover, Running, running_guarded, text_of, wait_for
from vllm_qualify.engine.server import CONFIG_FILE, HOST, LOG, OFFLINE, STAGE, Client, Engine, Labels, ServerPlan, Starting
from vllm_qualify.errors import CallerError, writing

SCRIPT_FILE = "script.py"


class ProcessLauncher:
    """Runs processes without Docker, confined by Landlock, and in namespaces of their own where this machine gives them.

    Killed runs leave nothing running: the guards end it.
    """

    from_image = False

    def name_engine(self, image: str | None, gpu_type: str) -> Engine:
        return find_engine()

    def find(self, image: str | None, option: str) -> Engine:
        return find_engine()

    def pull(self, engine: Engine, progress: Callable[[str], None]) -> None:
        """Nothing to pull: the environment is here."""

    def identity(self, engine: Engine) -> EngineIdentity:
        return _as_environment(engine).identity()

    def tag_for_deployment(self, engine: EngineImage) -> None:
        """There is no image to tag."""

    def machine(self, engine: Engine, gpu_type: str | None) -> Fingerprint:
        return detect(gpu_type).model_copy(update={"confined": can_confine(), "isolated": not isolation_problem()})

    def ask(self, engine: Engine, script: Script, check: Callable[[], None]) -> str:
        python, answered = _as_environment(engine).python, "answer.json"
        with ExitStack() as stack:
            # The guard's own files are not where the script may write.
            folder, box = (Path(stack.enter_context(TemporaryDirectory())) for _ in range(2))
            confinement = stack.enter_context(
                confining_process(
                    OFFLINE,
                    named=[path for server in script.servers for path in server.local_paths],
                    readable=folders_of(python),
                    writable=[box],
                    is_trusting=any(server.trust_remote_code for server in script.servers),
                )
            )
            # A copy: code of a model runs in it, and the path of the file itself names this project.
            copied = box / SCRIPT_FILE
            copied.write_bytes(script.file.read_bytes())
            command = [str(python), "-I", str(copied), script.question, str(box / answered)]
            log = folder / "probe.log"
            process = stack.enter_context(running_guarded(command, confinement.environment, log, rules=confinement.rules))
            wait_for(process, script.time_limit_s, check, script.what)
            copy_plain(box / answered, folder / answered)
            return (folder / answered).read_text() if (folder / answered).exists() else text_of(process.log)

    @contextmanager
    def serve(self, plan: ServerPlan, folder: Path, port: int, labels: Labels) -> Iterator[Starting]:
        engine, launched_at = _as_environment(plan.engine), time.monotonic()
        command, url = process_command(engine, folder / CONFIG_FILE), f"http://{HOST}:{port}"
        with ExitStack() as stack:
            confinement = stack.enter_context(
                confining_process(
                    process_environment(plan),
                    named=plan.local_paths,
                    readable=folders_of(engine.python),
                    is_trusting=plan.trust_remote_code,
                )
            )
            # The path of the file in `folder` would tell a model's code that a run has started it.
            config = Path(confinement.environment["TMPDIR"], CONFIG_FILE)
            with writing(STAGE):
                config.write_bytes((folder / CONFIG_FILE).read_bytes())
            own_command = process_command(engine, config)
            process = stack.enter_context(
                running_guarded(own_command, confinement.environment, folder / LOG, rules=confinement.rules)
            )
            client = Client(
                program=str(engine.vllm),
                python=str(engine.python),
                url=url,
                model=plan.model,
                trust_remote_code=plan.trust_remote_code,
                paths=plan.local_paths,
            )
            yield Starting(url=url, process=process, command=command, client=client, launched_at=launched_at)

    def client_in(
        self, image: EngineImage, plan: ServerPlan, server: Starting, folder: Path, labels: Labels
    ) -> AbstractContextManager[Client]:
        raise CallerError("a process has no client of another image", "leave the option out", "--client-image")

    def shell_command(self, plan: ServerPlan, config: Path, port: int, labels: Labels) -> str:
        environment = [f"{name}={value}" for name, value in process_environment(plan).items()]
        command = process_command(_as_environment(plan.engine), config)
        return shlex.join([*(["env", *environment] if environment else []), *command])

    def letter_box(self, client: Client) -> AbstractContextManager[str]:
        return TemporaryDirectory()

    @contextmanager
    def run(self, client: Client, command: list[str], letter_box: str, log: Path, place: str) -> Iterator[Running]:
        with (
            confining_process(
                OFFLINE,
                named=client.paths,
                readable=folders_of(Path(client.python)),
                writable=[Path(letter_box)],
                is_trusting=client.trust_remote_code,
            ) as confinement,
            running_guarded(command, confinement.environment, log, rules=confinement.rules) as process,
        ):
            yield process

    def put(self, client: Client, file: str, body: bytes, place: str) -> None:
        with writing(place):
            write_plain(Path(file), body)

    def give(self, client: Client, file: Path, folder: str, place: str) -> str:
        there = f"{folder}/given-{file.name}"
        self.put(client, there, file.read_bytes(), place)
        return there

    def results_folder(self, client: Client, letter_box: str) -> str:
        return letter_box

    def fetch(self, client: Client, file: str, into: Path, place: str) -> None:
        with writing(str(into)):
            copy_plain(Path(file), into)

    def typed_command(self, client: Client, command: list[str]) -> list[str]:
        return command

    def leftovers(self) -> list[Leftover]:
        return []

    def remove_leftovers(self) -> list[Leftover]:
        return []


def process_command(engine: EngineEnvironment, config: Path) -> list[str]:
    return [str(engine.vllm), "serve", "--config", str(config)]


def process_environment(plan: ServerPlan) -> dict[str, str]:
    """The variables that a server process gets besides those on the list of `confinement`."""
    # Without this order CUDA counts the fastest device first, but NVML counts by the PCI bus.
    chosen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: ",".join(map(str, plan.gpus))}
    return (chosen if plan.gpus else {}) | OFFLINE | plan.environment


def _as_environment(engine: Engine) -> EngineEnvironment:
    assert isinstance(engine, EngineEnvironment)  # noqa: S101  (its `launcher` says so)
    return engine
