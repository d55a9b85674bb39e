"""The order of a cell's published runs: by the number that the store gave each, never by a host's clock.

A cell has a counter in the store, which moves by compare-and-swap. A number that no run got in the end is missing: only the
order counts. Runs of earlier versions have no number. They are older than all that have one, and in the order of their ids.
"""

from typing import Protocol

from pydantic import ValidationError

from vllm_qualify.errors import StoreError
from vllm_qualify.publish.store import MissingObjectError, Store, Stored, swapped
from vllm_qualify.recipe.values import Count, Frozen


class Ordered(Protocol):
    """A published run, or what refers to one."""

    @property
    def run_id(self) -> str: ...

    @property
    def sequence(self) -> int | None: ...


class Numbered(Frozen):
    """A published run by its id, with the number that the store gave it."""

    run_id: str
    sequence: int | None = None


class Counter(Frozen):
    """`sequences/<cell>.json`: the last number that was given to a run of the cell."""

    counter_version: int = 1
    last: Count


def order(run: Ordered) -> tuple[int, str]:
    """A key that sorts the runs of one cell, the newest last."""
    return run.sequence or 0, run.run_id


def is_newer(run: Ordered, than: Ordered) -> bool:
    """Whether `run` was published after `than`, a run of the same cell."""
    return order(run) > order(than)


def sequence_key(cell: str) -> str:
    return f"sequences/{cell}.json"


def next_number(store: Store, cell: str) -> int:
    """A number that is larger than all that runs of the cell have. Raises StoreError."""
    key = sequence_key(cell)

    def attempt() -> int:
        stored = _read(store, key)
        number = _last(stored.body, store.locate(key)) + 1 if stored else 1
        store.swap(key, Counter(last=number).model_dump_json().encode(), "application/json", stored.tag if stored else None)
        return number

    return swapped(attempt, "the cell's counter", "publish the run again", store.locate(key))


def _read(store: Store, key: str) -> Stored | None:
    try:
        return store.read(key)
    except MissingObjectError:
        return None


def _last(body: bytes, place: str) -> int:
    try:
        return Counter.model_validate_json(body).last
    except ValidationError as error:
        raise StoreError(
            "not a counter of published runs", "restore it from an earlier version of the object", place
        ) from error
