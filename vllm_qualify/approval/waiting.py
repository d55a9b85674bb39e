"""Rows that wait for the index of all cells: who loses a race for it leaves its row here, and the next writer takes it in.

They only save time. Each publisher looks until the index has its row, and writes it itself if nobody does: so a row that went
missing here is not lost, and a place that cannot be read or written here ends nothing.
"""

import random
from collections.abc import Iterator

from pydantic import ValidationError

from vllm_qualify.approval.layout import JSON, waiting_key
from vllm_qualify.approval.lines import Lines
from vllm_qualify.approval.row import Brief
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.store import ChangedError, MissingObjectError, Store
from vllm_qualify.recipe.values import Frozen

# Several, because writers get in each other's way here too; few, because whoever writes the index reads them all.
PLACES = 4
# Tries to leave a row. Each takes another place.
TRIES = 3
# A row that waits for longer than so many writes of the index was forgotten here, and is not taken in.
LONGEST_REVISIONS = 100


class WaitingRow(Frozen):
    """`since` is the revision of the index when it was left."""

    since: int
    row: Brief


class Waiting(Frozen):
    """One of the places. `revision` grows with each write."""

    waiting_version: int = 1
    revision: int = 0
    rows: list[WaitingRow] = []


def wait_for_index(store: Store, row: Brief, index: Lines) -> None:
    """Leave a row that `index` lacks, and remove those that it has."""
    first = random.randrange(PLACES)
    for number in range(TRIES):
        try:
            return _leave(store, (first + number) % PLACES, row, index)
        except ChangedError:
            continue
        except StoreError:
            return None
    return None


def waiting_rows(store: Store, index: Lines) -> Iterator[Brief]:
    """The rows that wait and are newer than those of the index."""
    for place in range(PLACES):
        try:
            waiting = _read(store, place)[0]
        except StoreError:
            continue
        yield from (each.row for each in waiting.rows if _is_wanted(each, index))


def _leave(store: Store, place: int, row: Brief, index: Lines) -> None:
    waiting, tag = _read(store, place)
    kept = [each for each in waiting.rows if _is_wanted(each, index) and each.row.cell != row.cell]
    rows = [*kept, WaitingRow(since=index.revision, row=row)]
    fresh = Waiting(revision=waiting.revision + 1, rows=rows)
    store.swap(waiting_key(place), fresh.model_dump_json(exclude_none=True).encode(), JSON, tag)


def _read(store: Store, place: int) -> tuple[Waiting, str | None]:
    """The rows of a place; none if it is not one, so that the next writer makes it anew."""
    try:
        body, tag = store.read(waiting_key(place))
    except MissingObjectError:
        return Waiting(), None
    try:
        return Waiting.model_validate_json(body), tag
    except ValidationError:
        return Waiting(), tag


def _is_wanted(each: WaitingRow, index: Lines) -> bool:
    known = index.revision_of(each.row.cell)
    is_newer = known is None or known < each.row.revision
    return is_newer and 0 <= index.revision - each.since <= LONGEST_REVISIONS
