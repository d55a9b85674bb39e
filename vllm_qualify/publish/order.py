"""The order of a cell's published runs: by the number that the store gave each, never by a host's clock.

A cell has a counter in the store, which moves by compare-and-swap. A number that no run got in the end is missing: only the
order counts.
"""

from typing import Protocol

from pydantic import ValidationError

from vllm_qualify.errors import StoreError
from vllm_qualify.publish.store import MissingObjectError, Store, retry_swap
from vllm_qualify.recipe.values import Count, Frozen

# A run of a cell in each minute has so many in ten weeks.
MOST_BETWEEN = 100_000


class Ordered(Protocol):
    """A published run, or what refers to one."""

    @property
    def run_id(self) -> str: ...

    @property
    def sequence(self) -> int: ...


class Numbered(Frozen):
    """A published run by its id, with the number that the store gave it."""

    run_id: str
    sequence: int


class Counter(Frozen):
    """`sequences/<cell>.json`: the last number that was given to a run of the cell."""

    counter_version: int = 1
    last: Count


def order(run: Ordered) -> tuple[int, str]:
    """A key that sorts the runs of one cell, the newest last."""
    return run.sequence, run.run_id


def is_newer(run: Ordered, than: Ordered) -> bool:
    """Whether `run` was published after `than`, a run of the same cell."""
    return order(run) > order(than)


def sequence_key(cell: str) -> str:
    return f"sequences/{cell}.json"


def next_number(store: Store, cell: str, approved: int = 0) -> int:
    """A number that is larger than all that runs of the cell have.

    `approved` is that of the cell's last approval: whoever may publish could set the counter back, and a run with a smaller
    number than that is never approved. Raises StoreError.
    """
    key = sequence_key(cell)

    def attempt() -> int:
        given, tag = _read_counter(store, key)
        last = max(given, approved)
        store.swap(key, Counter(last=last + 1).model_dump_json().encode(), "application/json", tag)
        return last + 1

    return retry_swap(attempt, "the cell's counter", "publish the run again", store.locate(key))


def check_given(store: Store, run: Ordered, cell: str, approved: int) -> None:
    """Raises StoreError if the store gave no run of the cell the run's number, or it is far beyond that of the last approval.

    After the largest of all numbers nothing could follow.
    """
    last, _ = _read_counter(store, sequence_key(cell))
    said = f"run {run.run_id} says that it is number {run.sequence} of its cell"
    if run.sequence > last:
        problem = f"{said}, and the store gave {last} numbers"
        raise StoreError(problem, "do not trust this run", store.locate(sequence_key(cell)))
    if run.sequence > approved + MOST_BETWEEN:
        problem = f"{said}, and the last approved one is number {approved}: no cell has so many runs between two approvals"
        remedy = "find out who changed the counter, and restore it from an earlier version of the object; do not trust this run"
        raise StoreError(problem, remedy, store.locate(sequence_key(cell)))


def _read_counter(store: Store, key: str) -> tuple[int, str | None]:
    """The last number that was given, 0 before the first, and the counter's tag."""
    try:
        body, tag = store.read(key)
    except MissingObjectError:
        return 0, None
    try:
        return Counter.model_validate_json(body).last, tag
    except ValidationError as error:
        remedy = "restore it from an earlier version of the object"
        raise StoreError("not a counter of published runs", remedy, store.locate(key)) from error
