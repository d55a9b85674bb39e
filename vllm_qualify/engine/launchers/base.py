"""What a launcher must be able to do. Everything that differs between them is behind this protocol.

What a launcher returns is frozen data: ids, addresses and places. It keeps no state of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.running import Leftover, Running
from vllm_qualify.engine.server import Client, Engine, Labels, ServerPlan, Starting


class Launched(NamedTuple):
    """A server that was launched. `url` is its address from here, `command` what a person would type for it."""

    url: str
    process: Running
    command: list[str]
    client: Client


class Script(NamedTuple):
    """A script for an engine's own Python. `file` takes `question` and, as a second argument, a file that its answer goes to.

    Without the file it prints its answer. `servers` are those whose models the script may look at. `what` says it to people.
    """

    file: Path
    question: str
    servers: Sequence[ServerPlan]
    what: str
    place: str
    time_limit_s: float


class Launcher(Protocol):
    """One way to run servers and their tools.

    With `from_image` the engine is an image: its server runs in a container, which can have a limit on its memory, sees GPUs
    that this process may not see, and brings a load client of its own. Every method that raises raises QualifyError.
    """

    from_image: bool

    # --- the engine

    def named(self, image: str | None, gpu_type: str) -> Engine:
        """The engine for hosts of a GPU type, from its name alone: nobody is asked."""

    def find(self, image: str | None, option: str) -> Engine:
        """The engine as it is now; an image by its digest. Nothing is pulled. `option` is where the caller named the image."""

    def pull(self, engine: Engine, progress: Callable[[str], None]) -> float | None:
        """Bring it to where it will run, and verify it there. The seconds that this took; None if it is there anyway."""

    def identity(self, engine: Engine) -> EngineIdentity:
        """What is in it, told by its own Python."""

    def tag_for_deployment(self, engine: EngineImage) -> str | None:
        """Give an image of vLLM the name that deployments use, and return it; None where there is no such name."""

    def machine(self, engine: Engine, gpu_type: str | None) -> Fingerprint:
        """The machine that the engine runs on: its devices of this GPU type."""

    def ask(self, engine: Engine, script: Script, check: Callable[[], None]) -> str:
        """What a script says in the engine's own Python, without a GPU. `check` is called all the while; it may raise."""

    # --- the server

    def serve(self, plan: ServerPlan, folder: Path, port: int, labels: Labels) -> AbstractContextManager[Launched]:
        """The server runs within the block, its config file and its log in `folder`; nothing of it is left after the block.

        The client of what it yields runs beside the server. `labels` name the run and the cell.
        """

    def client_in(
        self, image: EngineImage, plan: ServerPlan, server: Starting, folder: Path, labels: Labels
    ) -> AbstractContextManager[Client]:
        """The load client of another image than the server's, for the length of the block."""

    def shell_command(self, plan: ServerPlan, config: Path, port: int, labels: Labels) -> str:
        """What a person would type to start the very server that `serve` starts, the config file being there."""

    # --- where the client runs

    def letter_box(self, client: Client) -> AbstractContextManager[str]:
        """A folder of its own where the client runs, for the length of the block."""

    def run(self, client: Client, command: list[str], log: Path, place: str) -> AbstractContextManager[Running]:
        """A command where the client runs, for the length of the block, its output in `log`."""

    def put(self, client: Client, file: str, body: bytes, place: str) -> None:
        """Write a file where the client runs, with its folder. Whoever watches for the file sees all of it."""

    def give(self, client: Client, file: Path, folder: str, place: str) -> str:
        """A local file where the client can read it, in `folder` if it must be brought there; its path there."""

    def results_folder(self, client: Client, folder: Path) -> str:
        """Where the client is to write what belongs into `folder`."""

    def fetch(self, client: Client, file: str, into: Path, place: str) -> None:
        """Copy a file of its results folder to `into`; nothing if there is none."""

    def shown(self, client: Client, command: list[str]) -> list[str]:
        """A command of the client's as a person would type it on this machine."""

    # --- after a kill

    def leftovers(self, place: str = "check") -> list[Leftover]:
        """What killed runs of this machine left running."""

    def remove_leftovers(self, place: str = "check") -> list[Leftover]:
        """Remove it, and tell what it was."""
