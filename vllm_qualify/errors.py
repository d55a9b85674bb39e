"""Errors, grouped by who must act. Each says what is wrong, where, and the remedy.

An error's class has the command's exit code. A failed gate is a verdict, not an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class QualifyError(Exception):
    """Something that stops a qualification.

    Args:
        problem: what is wrong, in one sentence.
        remedy: what `who_acts` can do about it.
        place: where it is: a file and key path for the caller, a stage (`serve`, `load`, `publish`, …) for the world.
        log_tail: the lines of a failed process's log that show it.
        kind: the class of the failure, such as `cuda-out-of-memory`, if it is a known one.
        retry: whether another try may well succeed.
        retry_after_s: how long the other side asked to wait before another try, in seconds.
    """

    exit_code = 3
    who_acts = "the operator"

    def __init__(
        self,
        problem: str,
        remedy: str,
        place: str = "",
        log_tail: Sequence[str] = (),
        kind: str = "",
        retry: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        # All arguments go to Exception, so that the error survives pickling between processes.
        super().__init__(problem, remedy, place, tuple(log_tail), kind, retry, retry_after_s)
        self.problem, self.remedy, self.place, self.log_tail = problem, remedy, place, tuple(log_tail)
        self.kind, self.retry, self.retry_after_s = kind, retry, retry_after_s

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        return f"{where}{self.problem}\n  remedy: {self.remedy}"


class CallerError(QualifyError):
    """The caller must change the command line or the recipe. Raised before anything starts."""

    exit_code = 2
    who_acts = "the caller"


class HostError(QualifyError):
    """This machine lacks something, or something on it broke."""


@contextmanager
def writing(place: str) -> Iterator[None]:
    """Within the block, a full disk or a folder that cannot be written raises HostError at `place`."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        remedy = "free space on its disk and check its permissions, or set VLLM_QUALIFY_HOME"
        raise HostError(f"{where}{error.strerror or error}", remedy, place) from error


class RecipeError(QualifyError):
    """The engine does not accept the recipe: it says so when it is asked, or its server fails to start."""

    who_acts = "the recipe's author"


class ReleaseError(QualifyError):
    """The release did not start or stopped serving. Never retried: the same release would do it again."""

    who_acts = "the release's owner"


class UnclearError(QualifyError):
    """A server did not start or stopped serving, and its log does not tell whose fault that is. Not retried."""

    who_acts = "unclear"


class HubError(QualifyError):
    """The model hub did not give what was requested."""

    who_acts = "the hub's side"


class StoreError(QualifyError):
    """An object could not be written to the store or read from it."""

    who_acts = "the store's owner"


class StoreBusyError(StoreError):
    """The store did not answer in time or asked to slow down; the same call may succeed later."""

    def __init__(self, problem: str, remedy: str, place: str = "", *others: Any) -> None:
        super().__init__(problem, remedy, place, *others)
        self.retry = True


class AlreadyExistsError(StoreError):
    """A create-only write failed because the object already exists."""
