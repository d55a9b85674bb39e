"""What a launcher must be able to do. Everything that differs between launchers is behind this protocol.

A launcher returns frozen data: ids, addresses and places. It keeps no state of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.process import Leftover, Running
from vllm_qualify.engine.server import Client, Engine, Labels, ServerPlan, Starting


class Script(NamedTuple):
    """A script for an engine's own Python. Its arguments are `question` and, optionally, a file for its answer.

    Without that file it prints its answer. `servers` are those whose models it may read. `what` describes it to people.
    """

    file: Path
    question: str
    servers: Sequence[ServerPlan]
    what: str
    place: str
    time_limit_s: float


class Launcher(Protocol):
    """One way to run servers and their tools.

    With `from_image` the engine is an image, and its server runs in a container. The container can have a memory limit, may see
    GPUs that this process does not see, and has its own load client. A method that raises, raises QualifyError.
    """

    from_image: bool

    # --- the engine

    def name_engine(self, image: str | None, gpu_type: str) -> Engine:
        """The engine for hosts of a GPU type, from its name alone, without asking a registry."""

    def find(self, image: str | None, option: str) -> Engine:
        """The engine as it is now; an image by its digest. Nothing is pulled. `option` is the caller's option for the image."""

    def pull(self, engine: Engine, progress: Callable[[str], None]) -> float | None:
        """Bring it to where it will run, and verify it there. Returns the seconds that it took; None if it was there."""

    def identity(self, engine: Engine) -> EngineIdentity:
        """What is in it, as its own Python reports it."""

    def tag_for_deployment(self, engine: EngineImage) -> str | None:
        """Give an image of vLLM the name that deployments use, and return that name; None if there is no such name."""

    def machine(self, engine: Engine, gpu_type: str | None) -> Fingerprint:
        """The machine that the engine runs on: its devices of this GPU type."""

    def ask(self, engine: Engine, script: Script, check: Callable[[], None]) -> str:
        """Run a script in the engine's own Python, without a GPU, and return its answer.

        `check` is called until then; it may raise.
        """

    # --- the server

    def serve(self, plan: ServerPlan, folder: Path, port: int, labels: Labels) -> AbstractContextManager[Starting]:
        """Run the server within the block, its config file and its log in `folder`. Nothing of it is left after the block.

        The client that it yields runs beside the server. `labels` name the run and the cell.
        """

    def client_in(
        self, image: EngineImage, plan: ServerPlan, server: Starting, folder: Path, labels: Labels
    ) -> AbstractContextManager[Client]:
        """Run the load client from another image than the server's within the block."""

    def shell_command(self, plan: ServerPlan, config: Path, port: int, labels: Labels) -> str:
        """What a person would type to start exactly the server that `serve` starts, with the config file at `config`."""

    # --- where the client runs

    def letter_box(self, client: Client) -> AbstractContextManager[str]:
        """A new folder where the client runs, for the length of the block."""

    def run(
        self, client: Client, command: list[str], letter_box: str, log: Path, place: str
    ) -> AbstractContextManager[Running]:
        """Run a command where the client runs, within the block, with its output in `log`. It may write to `letter_box`."""

    def put(self, client: Client, file: str, body: bytes, place: str) -> None:
        """Write a file where the client runs. A process that watches for the file never sees a part of it."""

    def give(self, client: Client, file: Path, folder: str, place: str) -> str:
        """Copy a local file into `folder`, where the client can read it. Returns its path for the client."""

    def results_folder(self, client: Client, letter_box: str) -> str:
        """The folder where a client with this letter box must write its results."""

    def fetch(self, client: Client, file: str, into: Path, place: str) -> None:
        """Copy a file of its results folder to `into`, if it exists."""

    def typed_command(self, client: Client, command: list[str]) -> list[str]:
        """A client's command as a person would type it on this machine."""

    # --- after a kill

    def leftovers(self) -> list[Leftover]:
        """What killed runs of this machine left running."""

    def remove_leftovers(self) -> list[Leftover]:
        """Remove what killed runs left running, and return what it was."""
