"""The question whether an engine accepts planned cells, asked while their server starts."""

import threading
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_qualify.drift.check import check_plans, is_kept
from vllm_qualify.engine.process import POLL_S
from vllm_qualify.errors import HostError, QualifyError, RecipeError
from vllm_qualify.plan.cell import CellPlan


class Question:
    """One thread asks. Meanwhile others do work that is useful only if the engine accepts the recipe."""

    def __init__(self, plans: Sequence[CellPlan], cache: Path) -> None:
        self._plans, self._cache = plans, cache
        self._over, self._given_up = threading.Event(), threading.Event()
        self._problem: BaseException | None = None
        self._unasked: list[str] = []

    @property
    def is_kept(self) -> bool:
        """Whether its answer is in the cache, so that the engine will not be asked."""
        return is_kept(self._plans, self._cache)

    @property
    def unasked(self) -> list[str]:
        """What the engine could not say, in words. Waits for it, and raises what `ask` raises."""
        self.wait(lambda: None)
        return self._unasked

    def ask(self) -> list[str]:
        """Ask to the end, or until `give_up`. Returns what the engine could not say. Raises as `check_plans`."""
        try:
            self._unasked = check_plans(self._plans, self._cache, self._check_wanted)
        except _GivenUpError as error:
            self._problem = error
        except CancelledError:
            # The time of the task that asks is over. Those who wait for the answer get an error with a remedy.
            self.settle()
            raise
        except BaseException as error:
            self._problem = error
            raise
        finally:
            self._over.set()
        return self._unasked

    def check(self) -> None:
        """Raises what `ask` raised, if it has ended."""
        if self._over.is_set() and self._problem:
            raise self._problem

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait for the answer, and call `meanwhile` until then. Raises as `ask`, and whatever `meanwhile` raises."""
        while not self._over.wait(POLL_S):
            meanwhile()
        self.check()

    def explain(self, failure: QualifyError) -> None:
        """Explain why a server did not start: if the recipe is at fault, the engine's own answer names every problem.

        Waits for the answer. Raises RecipeError if the engine does not accept the recipe.
        """
        self._over.wait()
        if isinstance(self._problem, RecipeError):
            raise self._problem from failure

    def settle(self) -> None:
        """Say that the asking task has ended. If it ended before it asked, waiting for the answer ends with an error."""
        if not self._over.is_set():
            problem = "the engine was not asked whether it takes the recipe: what was to ask it ended before"
            self._problem = HostError(problem, "see the run's log, and start it again", "check")
            self._over.set()

    def give_up(self) -> None:
        """The answer is no longer needed: `ask` ends soon, and leaves no process."""
        self._given_up.set()

    def _check_wanted(self) -> None:
        if self._given_up.is_set():
            raise _GivenUpError


class _GivenUpError(Exception):
    """The answer is no longer needed."""
