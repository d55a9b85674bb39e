"""The index: one row for each cell, made from its pointer and its reports. It can only be as current as they are.

The board is drawn from it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from pydantic import ValidationError

from vllm_qualify.approval.board import write_board
from vllm_qualify.approval.decision import read_decision
from vllm_qualify.approval.errors import NotApprovedError
from vllm_qualify.approval.layout import INDEX_KEY, JSON, readable, reason_of
from vllm_qualify.approval.pointer import Entry, Pointer, read_pointer
from vllm_qualify.approval.row import Index, ReportLine, Row, Standing
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.bundle import Manifest, read_manifest
from vllm_qualify.publish.order import is_newer, order
from vllm_qualify.publish.store import MissingObjectError, Store, swapped

REPORTS_SHOWN = 10


def read_index(store: Store) -> Index:
    """The index in the store, or an empty one if there is none yet. Raises StoreError if it is not an index of this version."""
    return _stored(store).known


def write_index(store: Store) -> Index:
    """Make the index again from all pointers and manifests, and the board from it.

    Raises:
        TamperedError: a pointer is not as it was written.
        StoreError: a manifest is not valid. StoreBusyError: the index or the board changes all the time.
    """
    index = _changed(store, lambda _: _rows(store, ""))
    write_board(store, index)
    return index


def index_problem(store: Store, cell: str) -> str | None:
    """Update the index and the board; return why that failed, else None.

    Nothing depends on them, and the next update repairs them.
    """
    try:
        index = _refreshed(store, cell)
    except (StoreError, NotApprovedError) as error:
        return f"the index is not up to date: {error}"
    try:
        write_board(store, index)
    except StoreError as error:
        return f"the board is not up to date: {error}"
    return None


def refresh_index(store: Store, cell: str) -> Index:
    """Make one cell's row again, or the whole index if there is none. Raises the same as `write_index`."""
    index = _refreshed(store, cell)
    write_board(store, index)
    return index


class _Stored(NamedTuple):
    """The index in the store. If `tag` is None, there is none."""

    known: Index
    tag: str | None


def _refreshed(store: Store, cell: str) -> Index:
    def rows(found: _Stored) -> Iterable[Row]:
        if found.tag is None:
            return _rows(store, "")
        return [*(row for row in found.known.cells if row.cell != cell), *_rows(store, f"{cell}/")]

    return _changed(store, rows)


def _changed(store: Store, rows: Callable[[_Stored], Iterable[Row]]) -> Index:
    def attempt() -> Index:
        # The index is read before its sources: if another process writes it in between, this write fails.
        found = _stored(store)
        cells = sorted(rows(found), key=lambda row: row.cell)
        if cells == found.known.cells and found.tag is not None:
            return found.known
        fresh = Index(revision=found.known.revision + 1, cells=cells)
        store.swap(INDEX_KEY, readable(fresh.model_dump(mode="json", exclude_none=True)), JSON, found.tag)
        return fresh

    return swapped(attempt, "the index", "try again later", store.locate(INDEX_KEY))


def _stored(store: Store) -> _Stored:
    try:
        body, tag = store.read(INDEX_KEY)
    except MissingObjectError:
        return _Stored(Index(revision=_revision_shown(store)), None)
    try:
        return _Stored(Index.model_validate_json(body), tag)
    except ValidationError as error:
        remedy = "delete it: the next report that is published or decided about makes it again"
        raise StoreError(f"not an index: {reason_of(error)}", remedy, store.locate(INDEX_KEY)) from error


def _revision_shown(store: Store) -> int:
    """The board's revision. A deleted index continues from it: otherwise the old board would count as newer."""
    from vllm_qualify.approval.board import read_board

    board = read_board(store)
    return board.revision if board else 0


@dataclass
class _Runs:
    """The runs of one cell that have a manifest, and those that have a decision."""

    published: list[str] = field(default_factory=list)
    decided: set[str] = field(default_factory=set)


def _rows(store: Store, prefix: str) -> list[Row]:
    return [_row(store, cell, runs) for cell, runs in _cells(store, prefix).items()]


def _cells(store: Store, prefix: str) -> dict[str, _Runs]:
    """Each cell that has reports or a pointer."""
    cells: dict[str, _Runs] = {}
    for key in store.keys(f"reports/{prefix}"):
        cell, run_id, name = _parts(key)
        if name == "manifest.json" and cell.count("/") == 3:
            cells.setdefault(cell, _Runs()).published.append(run_id)
    for key in store.keys(f"approvals/{prefix}"):
        if key.endswith("/pointer.json"):
            cells.setdefault(key.removeprefix("approvals/").removesuffix("/pointer.json"), _Runs())
        cell, run_id, name = _parts(key)
        if name == "decision.json" and cell in cells:
            cells[cell].decided.add(run_id)
    return cells


def _parts(key: str) -> tuple[str, str, str]:
    """Cell, run and file of a key of `reports/` or `approvals/`."""
    path, _, name = key.partition("/")[2].rpartition("/")
    cell, _, run_id = path.rpartition("/")
    return cell, run_id, name


def _row(store: Store, cell: str, runs: _Runs) -> Row:
    pointer = read_pointer(store, cell)
    last = pointer.last if pointer else None
    newest = sorted(runs.published, reverse=True)[:REPORTS_SHOWN]
    approved = [last.run_id] if last and last.run_id in runs.published and last.run_id not in newest else []
    shown = sorted((_manifest(store, cell, run_id) for run_id in newest), key=order, reverse=True)
    shown += [_manifest(store, cell, run_id) for run_id in approved]
    return Row(cell=cell, last=last, reports=[_line(store, manifest, runs, pointer) for manifest in shown])


def _manifest(store: Store, cell: str, run_id: str) -> Manifest:
    return read_manifest(store, f"reports/{cell}/{run_id}/manifest.json")


def _line(store: Store, manifest: Manifest, runs: _Runs, pointer: Pointer | None) -> ReportLine:
    cell, run_id = manifest.cell, manifest.run_id
    entry = pointer.entry(run_id) if pointer else None
    if pointer and entry:
        standing, told = _approved(entry, pointer)
    elif run_id in runs.decided and (rejection := _rejection(store, cell, run_id)):
        standing, told = "rejected", rejection
    else:
        standing, told = _undecided(manifest, pointer), None
    return ReportLine(
        run_id=run_id,
        outcome=manifest.outcome,
        started_at=_started_at(run_id),
        standing=standing,
        told=told,
        summary=manifest.summary,
    )


def _approved(entry: Entry, pointer: Pointer) -> tuple[Standing, str]:
    if entry.revoked:
        return "revoked", entry.revoked.done
    return ("approved" if entry == pointer.last else "superseded"), entry.done


def _rejection(store: Store, cell: str, run_id: str) -> str | None:
    decision = read_decision(store, cell, run_id).decision
    return f"{decision.done}: {decision.reason}" if decision.verdict == "reject" else None


def _undecided(manifest: Manifest, pointer: Pointer | None) -> Standing:
    if manifest.outcome != "passed":
        return "not passed"
    # A pointer never moves to an older report.
    return "superseded" if pointer and is_newer(pointer.last, manifest) else "waiting for a decision"


def _started_at(run_id: str) -> datetime | None:
    try:
        return datetime.strptime(run_id.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
