"""The question whether an engine takes what planned cells ask of it, asked while a server of theirs starts."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_qualify.engine.candidate import check_plans, is_kept
from vllm_qualify.engine.plan import CellPlan
from vllm_qualify.engine.process import POLL_S
from vllm_qualify.errors import HostError, QualifyError, RecipeError


class Question:
    """One thread asks, and others do something meanwhile that is only worth it if the engine takes the recipe."""

    def __init__(self, plans: Sequence[CellPlan], cache: Path) -> None:
        self._plans, self._cache = plans, cache
        self._over, self._given_up = threading.Event(), threading.Event()
        self._problem: BaseException | None = None
        self._unasked: list[str] = []

    @property
    def is_kept(self) -> bool:
        """Whether its answer is known already, so that the engine will not be asked."""
        return is_kept(self._plans, self._cache)

    @property
    def unasked(self) -> list[str]:
        """What the engine could not tell, in words. Raises as `wait`."""
        self.wait(_nothing)
        return self._unasked

    def ask(self) -> list[str]:
        """To the end, or until it is given up; what the engine could not tell.

        Raises:
            RecipeError: the engine does not take what the recipe asks of it; names each problem.
            HostError: the engine cannot be asked.
        """
        try:
            self._unasked = check_plans(self._plans, self._cache, self._check_wanted)
        except _GivenUpError as error:
            self._problem = error
        except BaseException as error:
            self._problem = error
            raise
        finally:
            self._over.set()
        return self._unasked

    def check(self) -> None:
        """Raises what asking raised, if it is over."""
        if self._over.is_set() and self._problem:
            raise self._problem

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Until the answer is there, calling `meanwhile` all the while. Raises as `ask`, and whatever `meanwhile` raises."""
        while not self._over.wait(POLL_S):
            meanwhile()
        self.check()

    def explain(self, failure: QualifyError) -> None:
        """A server did not start: if that is the recipe's fault, the engine's own answer names every problem.

        Waits for the answer. Raises RecipeError if the engine does not take the recipe.
        """
        self._over.wait()
        if isinstance(self._problem, RecipeError):
            raise self._problem from failure

    def settle(self) -> None:
        """Whoever was to ask has ended. If that was before the engine was asked, nobody waits for an answer for ever."""
        if not self._over.is_set():
            problem = "the engine was not asked whether it takes the recipe: what was to ask it ended before"
            self._problem = HostError(problem, "see the run's log, and start it again", "check")
            self._over.set()

    def give_up(self) -> None:
        """Nobody wants to know any more: `ask` ends soon, and leaves no process."""
        self._given_up.set()

    def _check_wanted(self) -> None:
        if self._given_up.is_set():
            raise _GivenUpError


class _GivenUpError(Exception):
    """Nobody wants to know any more."""


def _nothing() -> None:
    """Nothing is done meanwhile."""
