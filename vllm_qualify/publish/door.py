"""While a store is pruned its door is closed: nothing is published, so that nothing comes to rest on evidence that goes.

A publisher says first that a run is coming, and then looks at the door. Who prunes closes the door first, and then looks for
runs that are coming. So one of the two always sees the other.
"""

from pydantic import ValidationError

from vllm_qualify.errors import StoreBusyError, StoreError
from vllm_qualify.publish.store import MissingObjectError, Store, retry_swap
from vllm_qualify.recipe.values import Frozen

DOOR_KEY = "pruning.json"


class Door(Frozen):
    """`pruning.json`: whether the store is being pruned. `revision` grows with each write."""

    revision: int = 0
    is_closed: bool = False


def check_open(store: Store) -> None:
    """Raises StoreBusyError while the store is pruned."""
    if _read_door(store)[0].is_closed:
        remedy = "try again when `vllm-qualify prune` has ended; if none runs, run it again: it goes on where it was stopped"
        raise StoreBusyError("the store is being pruned", remedy, store.locate(DOOR_KEY))


def set_door(store: Store, *, is_closed: bool) -> None:
    def attempt() -> None:
        door, tag = _read_door(store)
        if door.is_closed != is_closed:
            fresh = Door(revision=door.revision + 1, is_closed=is_closed)
            store.swap(DOOR_KEY, fresh.model_dump_json().encode(), "application/json", tag)

    retry_swap(attempt, "the store's door", "try again later", store.locate(DOOR_KEY))


def _read_door(store: Store) -> tuple[Door, str | None]:
    try:
        body, tag = store.read(DOOR_KEY)
    except MissingObjectError:
        return Door(), None
    try:
        return Door.model_validate_json(body), tag
    except ValidationError as error:
        raise StoreError("this does not say whether the store is pruned", "delete it", store.locate(DOOR_KEY)) from error
