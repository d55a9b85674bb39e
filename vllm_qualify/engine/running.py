"""Running processes and containers as data that any task may hold: ids and paths, no handle."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from vllm_qualify.engine.failure import End
from vllm_qualify.recipe.values import Frozen


class Running(Frozen, ABC):
    """Something that runs, writes a log, and ends. Each launcher has its own kind: a guarded process, a container."""

    state_file: Path
    log: Path

    @abstractmethod
    def end(self) -> End | None:
        """How it ended; None while it runs. Raises HostError if its end cannot be known."""

    @abstractmethod
    def processes(self) -> Collection[int]:
        """The ids of its first processes on this machine, to sample them with their children. Empty if they are unknown."""

    def commands(self) -> Collection[int]:
        """The ids of the processes that run its command, without what guards them. Empty if they are unknown."""
        return self.processes()


class Leftover(Frozen):
    """What a killed run left running. `id` is the launcher's own id: a container's or a pod's."""

    id: str
    name: str
    run: str
    cell: str
    state: str
