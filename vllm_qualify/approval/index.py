"""The index: one row a cell, made of its pointer and its reports, and never more true than these."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Literal

from pydantic import ValidationError

from vllm_qualify.approval.errors import NotApprovedError
from vllm_qualify.approval.layout import INDEX_KEY, JSON, readable, reason_of
from vllm_qualify.approval.pointer import Entry, read_pointer
from vllm_qualify.errors import StoreBusyError, StoreError
from vllm_qualify.publish.bundle import read_manifest
from vllm_qualify.publish.store import ChangedError, MissingObjectError, Store
from vllm_qualify.recipe.model import Frozen

REPORTS_SHOWN = 10
MOST_TRIES = 50


class ReportLine(Frozen):
    """`started_at` is told by the run's id; None of an id that tells none."""

    run_id: str
    outcome: str
    started_at: datetime | None


class Row(Frozen):
    """`last` is the cell's last approval, whatever its state; `reports` are the newest ones, the newest first."""

    cell: str
    last: Entry | None
    reports: list[ReportLine]


class Index(Frozen):
    """`revision` grows with each write: a store may know an object by its content alone."""

    revision: int = 0
    index_version: Literal[1] = 1
    cells: list[Row] = []


def read_index(store: Store) -> Index:
    """An empty one before there is any. Raises StoreError if it is of another version or no index."""
    return _stored(store)[0]


def write_index(store: Store) -> Index:
    """Make the index again from all pointers and manifests.

    Raises:
        TamperedError: a pointer is not as it was written.
        StoreError: a manifest is none; StoreBusyError: the index changes all the time.
    """
    return _written(store, lambda _: [_row(store, *cell) for cell in _cells(store, "").items()])


def index_problem(store: Store, cell: str) -> str | None:
    """Bring the index up to date; why that could not be. Nothing else depends on it, and the next time makes up for it."""
    try:
        refresh_index(store, cell)
    except (StoreError, NotApprovedError) as error:
        return f"the index is not up to date: {error}"
    return None


def refresh_index(store: Store, cell: str) -> Index:
    """Make one cell's row again; the whole index if there is none. Raises as `write_index`."""
    if not store.exists(INDEX_KEY):
        return write_index(store)
    return _written(store, lambda index: [*(row for row in index.cells if row.cell != cell), *_rows(store, cell)])


def _written(store: Store, rows: Callable[[Index], Iterable[Row]]) -> Index:
    for _ in range(MOST_TRIES):
        # Read before what it is made of: whoever writes in between makes this write fail.
        index, tag = _stored(store)
        cells = sorted(rows(index), key=lambda row: row.cell)
        if cells == index.cells and tag is not None:
            return index
        fresh = Index(revision=index.revision + 1, cells=cells)
        try:
            store.swap(INDEX_KEY, readable(fresh.model_dump(mode="json")), JSON, tag)
        except ChangedError:
            continue
        return fresh
    raise StoreBusyError("the index changes all the time", "try again later", store.locate(INDEX_KEY))


def _stored(store: Store) -> tuple[Index, str | None]:
    try:
        stored = store.read(INDEX_KEY)
    except MissingObjectError:
        return Index(), None
    try:
        return Index.model_validate_json(stored.body), stored.tag
    except ValidationError as error:
        remedy = "delete it, and make it again"
        raise StoreError(f"not an index: {reason_of(error)}", remedy, store.locate(INDEX_KEY)) from error


def _rows(store: Store, cell: str) -> list[Row]:
    return [_row(store, *found) for found in _cells(store, f"{cell}/").items()]


def _cells(store: Store, prefix: str) -> dict[str, list[str]]:
    """The runs with a manifest of each cell that has reports or a pointer."""
    cells: dict[str, list[str]] = {}
    for key in store.keys(f"reports/{prefix}"):
        path, _, name = key.removeprefix("reports/").rpartition("/")
        cell, _, run_id = path.rpartition("/")
        if name == "manifest.json" and cell.count("/") == 3:
            cells.setdefault(cell, []).append(run_id)
    for key in store.keys(f"approvals/{prefix}"):
        cell, _, name = key.removeprefix("approvals/").rpartition("/")
        if name == "pointer.json":
            cells.setdefault(cell, [])
    return cells


def _row(store: Store, cell: str, run_ids: list[str]) -> Row:
    pointer = read_pointer(store, cell)
    newest = sorted(run_ids, reverse=True)[:REPORTS_SHOWN]
    return Row(cell=cell, last=pointer.last if pointer else None, reports=[_line(store, cell, run_id) for run_id in newest])


def _line(store: Store, cell: str, run_id: str) -> ReportLine:
    manifest = read_manifest(store, f"reports/{cell}/{run_id}/manifest.json")
    return ReportLine(run_id=run_id, outcome=manifest.outcome, started_at=_started_at(run_id))


def _started_at(run_id: str) -> datetime | None:
    try:
        return datetime.strptime(run_id.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
