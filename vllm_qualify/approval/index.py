"""The indexes: one for each cell, made of its pointer and its reports, and one above them with a row for each cell.

They can only be as current as what they are made of. A cell's index is written before each of the cell's manifests and after
it, so that it has every run whose publication began: what a killed process left out, the next one completes. The board is
drawn from them. How long a write takes depends on no number of reports.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import reduce
from typing import NamedTuple

from pydantic import ValidationError

from vllm_qualify.approval.board import board_revision, write_board
from vllm_qualify.approval.cell_page import page_revision, write_cell_page
from vllm_qualify.approval.decision import read_decision
from vllm_qualify.approval.errors import NotApprovedError
from vllm_qualify.approval.layout import (
    INDEX_KEY,
    JSON,
    approvals_folder,
    cell_index_key,
    cell_of_index,
    decision_key,
    reason_of,
)
from vllm_qualify.approval.lines import Lines, lines_with, parse_lines, write_lines
from vllm_qualify.approval.pointer import Entry, Pointer, read_pointer
from vllm_qualify.approval.row import Brief, ChainLink, Index, ReportLine, Row, Standing, brief, parse_row
from vllm_qualify.approval.waiting import wait_for_index, waiting_rows
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.bundle import Manifest, UnreadableError, read_manifest
from vllm_qualify.publish.layout import earlier_layout, manifest_key
from vllm_qualify.publish.order import Numbered, is_newer, order
from vllm_qualify.publish.store import ChangedError, MissingObjectError, Store, swapped

REPORTS_SHOWN = 25
# Of the approved runs that are no baseline.
LINKS_SHOWN = 25
# A run whose publisher never ended stays among those that are coming: the newest of them are kept.
MOST_COMING = 100


def read_index(store: Store) -> Index:
    """The index of all cells, or an empty one if there is none yet. Raises StoreError if it is not one of this version."""
    try:
        body = store.get(INDEX_KEY)
    except MissingObjectError:
        return Index()
    try:
        return Index.model_validate_json(_of_this_layout(store, body))
    except ValidationError as error:
        raise _no_index(error, store.locate(INDEX_KEY)) from error


def read_row(store: Store, cell: str) -> Row:
    """What a cell's index says once it is up to date. Nothing is written. Raises as `refresh`."""
    return _current(store, cell, _stored_row(store, cell))


def baseline_of(store: Store, cell: str) -> str | None:
    """The newest approved run of a cell that was made to be a baseline, as its manifest says; None if the cell has none.

    In a cell without an approved one, it is the newest that passed and that nobody rejected or revoked. So a new baseline,
    which is compared with nothing, follows an approved one only when somebody approved it.

    Raises:
        TamperedError: the cell's pointer is not as it was written.
        StoreError: the store cannot be read.
    """
    listed = set(store.keys(approvals_folder(cell)))
    pointer = read_pointer(store, cell, listed)
    approved = (entry.run_id for entry in reversed(pointer.entries if pointer else []) if not entry.revoked)
    baseline = next((run_id for run_id in approved if _establishes(store, cell, run_id)), None)
    return baseline or _undecided_baseline(store, cell, listed)


def decided_against(store: Store, cell: str, run_id: str) -> str | None:
    """Who rejected a run or revoked its approval, and why; None if nobody did. Raises TamperedError, StoreError."""
    listed = set(store.keys(approvals_folder(cell)))
    pointer = read_pointer(store, cell, listed)
    entry = pointer.entry(run_id) if pointer else None
    if entry:
        return entry.revoked.done if entry.revoked else None
    return _rejection(store, cell, run_id) if decision_key(cell, run_id) in listed else None


def _establishes(store: Store, cell: str, run_id: str) -> bool:
    manifest = _manifest(store, cell, run_id)
    return manifest is not None and manifest.is_baseline


def _undecided_baseline(store: Store, cell: str, listed: Collection[str]) -> str | None:
    row = _stored_row(store, cell).known or _made(store, cell)
    manifest = _baseline(row, _arrived(store, row)[0])
    if manifest is None:
        return None
    # The index may be wrong; the manifests are not.
    if decision_key(cell, manifest.run_id) not in listed and _establishes(store, cell, manifest.run_id):
        return manifest.run_id
    every = (manifest for manifest in manifests(store, cell)[0].values() if decision_key(cell, manifest.run_id) not in listed)
    newest = max((manifest for manifest in every if manifest.is_baseline), key=order, default=None)
    return newest.run_id if newest else None


def announce(store: Store, cell: str, run_id: str) -> None:
    """Write into the cell's index that a run is about to be published, before its manifest is written. Raises StoreError."""

    def attempt() -> None:
        stored = _stored_row(store, cell)
        row = stored.known or _made(store, cell)
        if run_id not in (*row.coming, *row.unreadable, *(line.run_id for line in row.reports)):
            row = row.model_copy(update={"coming": [*row.coming, run_id]})
        _put(store, row, stored)

    swapped(attempt, "the cell's index", "publish the run again", store.locate(cell_index_key(cell)))


def index_problem(store: Store, cell: str) -> str | None:
    """Bring the indexes and the board up to date with a cell; return why that failed, else None. The next update repairs it."""
    try:
        row = refresh(store, cell)
        written = _with_row(store, row)
    except (StoreError, NotApprovedError) as error:
        return f"the index is not up to date: {error}"
    try:
        write_cell_page(store, row)
        write_board(store, written.lines, written.cells, after=written.after)
    except StoreError as error:
        return f"the board is not up to date: {error}"
    if row.unreadable:
        return f"the manifest of run {', '.join(row.unreadable)} of {cell} cannot be read: see `vllm-qualify report show`"
    return None


def refresh(store: Store, cell: str) -> Row:
    """Bring a cell's own index up to date, or make it if there is none.

    Raises:
        TamperedError: the cell's pointer is not as it was written.
        StoreError: a manifest or the index is not valid. StoreBusyError: the index changes all the time.
    """

    def attempt() -> Row:
        # The index is read before its sources: if another process writes it in between, this write fails.
        stored = _stored_row(store, cell)
        return _put(store, _current(store, cell, stored), stored)

    return swapped(attempt, "the cell's index", "try again later", store.locate(cell_index_key(cell)))


def is_whole(store: Store, cell: str, run_ids: Sequence[str]) -> bool:
    """Whether a cell's index and page are there with the newest of these runs, which are the cell's, the newest first."""
    known = _stored_row(store, cell).known
    if known is None or page_revision(store, cell) < known.revision:
        return False
    return {*run_ids[:REPORTS_SHOWN]} <= {*known.coming, *known.unreadable, *(line.run_id for line in known.reports)}


def make_again(store: Store, cell: str) -> Row:
    """Make a cell's index and its page from all reports of the cell, whatever they said before. Raises as `refresh`."""

    def attempt() -> Row:
        stored = _stored_row(store, cell)
        coming = stored.known.coming if stored.known else []
        made = _completed(store, _made(store, cell).model_copy(update={"coming": coming}))
        return _put(store, made, stored)

    row = swapped(attempt, "the cell's index", "try again later", store.locate(cell_index_key(cell)))
    write_cell_page(store, row)
    return row


def write_index(store: Store) -> Index:
    """Make the index of all cells from the indexes of the cells, and the board from it.

    Raises:
        StoreError: an index is not valid. StoreBusyError: the index or the board changes all the time.
    """

    def attempt() -> Lines:
        stored = _stored_lines(store, of_any_version=True)
        return _put_lines(store, lines_with(map(brief, _rows(store))), stored)

    lines = swapped(attempt, "the index", "try again later", store.locate(INDEX_KEY))
    write_board(store, lines)
    return Index.model_validate_json(write_lines(lines))


# --- the index of all cells


class _StoredLines(NamedTuple):
    """The index in the store: `known` is None if there is none, or only one of an earlier version. `revision` is its own."""

    known: Lines | None
    tag: str | None
    revision: int


class _Written(NamedTuple):
    """The index, and the cells of which the call wrote a row, if it changed nothing else.

    `after` is the revision of the board that others draw, who wrote the index before.
    """

    lines: Lines
    cells: Collection[str] = ()
    after: int = 0


def _with_row(store: Store, row: Row) -> _Written:
    """The index of all cells, with this row unless it has a newer one. If there is none yet, it is made of all rows.

    Who loses the race for the index leaves its row for others to write, and writes what others left.
    """
    own = brief(row)
    lost: list[Lines] = []

    def attempt() -> _Written:
        stored = _stored_lines(store)
        if stored.known is None:
            return _Written(_put_lines(store, lines_with(map(brief, _rows(store))), stored))
        if not _is_newer(own, stored.known):
            return _Written(stored.known, after=stored.known.revision)
        others = list(waiting_rows(store, stored.known)) if lost else []
        new = {each.cell: each for each in (*others, own)}
        try:
            lines = _put_lines(store, reduce(Lines.changed, new.values(), stored.known), stored)
        except ChangedError:
            if not lost:
                wait_for_index(store, own, stored.known)
            lost.append(stored.known)
            raise
        return _Written(lines, new, lines.revision - 1)

    return swapped(attempt, "the index", "try again later", store.locate(INDEX_KEY))


def _is_newer(row: Brief, lines: Lines) -> bool:
    known = lines.revision_of(row.cell)
    return known is None or known < row.revision


def _put_lines(store: Store, lines: Lines, stored: _StoredLines) -> Lines:
    """Write the index as the next revision, unless the store says the same. Raises ChangedError."""
    if stored.known is not None and stored.known.text == lines.text:
        return stored.known
    fresh = replace(lines, revision=stored.revision + 1)
    store.swap(INDEX_KEY, write_lines(fresh), JSON, stored.tag)
    return fresh


def _stored_lines(store: Store, *, of_any_version: bool = False) -> _StoredLines:
    try:
        body, tag = store.read(INDEX_KEY)
    except MissingObjectError:
        # It goes on from the board: otherwise the old board would count as newer.
        return _StoredLines(None, None, board_revision(store))
    if of_any_version and _is_earlier(body):
        return _StoredLines(None, tag, board_revision(store))
    try:
        known = parse_lines(_of_this_layout(store, body))
    except ValidationError as error:
        raise _no_index(error, store.locate(INDEX_KEY)) from error
    return _StoredLines(known, tag, known.revision)


def _of_this_layout(store: Store, body: bytes) -> bytes:
    if _is_earlier(body):
        raise earlier_layout(store)
    return body


def _is_earlier(body: bytes) -> bool:
    """Whether it is the index of a store whose cells have none."""
    return b'"index_version": 3' in body


def _rows(store: Store) -> Iterator[Row]:
    """The indexes of all cells, sorted."""
    for cell in filter(None, map(cell_of_index, store.keys("cells/"))):
        if row := _stored_row(store, cell).known:
            yield row


# --- the index of a cell


class _StoredRow(NamedTuple):
    """The index of a cell in the store: `known` is None if there is none. `revision` is its own, or else its page's."""

    known: Row | None
    tag: str | None
    revision: int


def _put(store: Store, row: Row, stored: _StoredRow) -> Row:
    """Write the row as the next revision, unless the store says the same. Raises ChangedError."""
    if stored.known is not None and row.model_copy(update={"revision": stored.revision}) == stored.known:
        return stored.known
    fresh = row.model_copy(update={"revision": stored.revision + 1})
    store.swap(cell_index_key(row.cell), fresh.model_dump_json(exclude_none=True).encode(), JSON, stored.tag)
    return fresh


def _stored_row(store: Store, cell: str) -> _StoredRow:
    key = cell_index_key(cell)
    try:
        body, tag = store.read(key)
    except MissingObjectError:
        return _StoredRow(None, None, page_revision(store, cell))
    try:
        known = parse_row(body, cell)
    except ValidationError as error:
        raise _no_index(error, store.locate(key)) from error
    except ValueError as error:
        raise StoreError(str(error), _DELETE, store.locate(key)) from error
    return _StoredRow(known, tag, known.revision)


_DELETE = "delete it: the next report that is published or decided about makes it again"


def _no_index(error: ValidationError, place: str) -> StoreError:
    return StoreError(f"not an index: {reason_of(error)}", _DELETE, place)


def _current(store: Store, cell: str, stored: _StoredRow) -> Row:
    return _completed(store, stored.known) if stored.known else _made(store, cell)


def _completed(store: Store, row: Row) -> Row:
    """The row with the runs that have come, and with what was decided until now."""
    arrived, unreadable = _arrived(store, row)
    missing = [run_id for run_id in row.coming if run_id not in arrived and run_id not in unreadable]
    known = {line.run_id: line for line in row.reports} | {run_id: _line(manifest) for run_id, manifest in arrived.items()}
    update = {"coming": missing[-MOST_COMING:], "unreadable": unreadable[-MOST_COMING:], "baseline": _baseline(row, arrived)}
    return _decided(store, row.model_copy(update=update), known)


def _arrived(store: Store, row: Row) -> tuple[dict[str, Manifest], list[str]]:
    """The manifests of runs that were coming, and are published whole by now; and the runs whose manifest cannot be read."""
    return _readable(store, row.cell, [*row.unreadable, *row.coming])


def _baseline(row: Row, arrived: dict[str, Manifest]) -> Numbered | None:
    known = [row.baseline] if row.baseline else []
    return max(
        [*known, *(_numbered(manifest) for manifest in arrived.values() if manifest.is_baseline)], key=order, default=None
    )


def _numbered(manifest: Manifest) -> Numbered:
    return Numbered(run_id=manifest.run_id, sequence=manifest.sequence)


def _made(store: Store, cell: str) -> Row:
    """The row, made of all manifests of the cell."""
    readable, unreadable = manifests(store, cell)
    row = Row(cell=cell, unreadable=unreadable[-MOST_COMING:])
    row = row.model_copy(update={"baseline": _baseline(row, readable)})
    return _decided(store, row, {run_id: _line(manifest) for run_id, manifest in readable.items()})


def manifests(store: Store, cell: str) -> tuple[dict[str, Manifest], list[str]]:
    """All manifests of a cell, by run, and the runs whose manifest cannot be read."""
    folder = f"reports/{cell}/"
    names = (key.removeprefix(folder).partition("/") for key in store.keys(folder))
    run_ids = [run_id for run_id, _, name in names if name == "manifest.json"]
    return _readable(store, cell, run_ids)


def _readable(store: Store, cell: str, run_ids: Iterable[str]) -> tuple[dict[str, Manifest], list[str]]:
    """The manifests that are there, by run, and the runs whose manifest cannot be read: one of these must not hide others."""
    readable, unreadable = {}, []
    for run_id in run_ids:
        try:
            readable[run_id] = read_manifest(store, manifest_key(cell, run_id))
        except MissingObjectError:
            continue
        except UnreadableError:
            unreadable.append(run_id)
    return readable, unreadable


def _manifest(store: Store, cell: str, run_id: str) -> Manifest | None:
    try:
        return read_manifest(store, manifest_key(cell, run_id))
    except MissingObjectError:
        return None


def _line(manifest: Manifest) -> ReportLine:
    """What the manifest says of its run; its standing is that of a run about which nothing was decided."""
    return ReportLine(
        run_id=manifest.run_id,
        sequence=manifest.sequence,
        outcome=manifest.outcome,
        started_at=started_at(manifest.run_id),
        standing="waiting for a decision",
        summary=manifest.summary,
        tried=manifest.tried,
    )


def _decided(store: Store, row: Row, known: dict[str, ReportLine]) -> Row:
    """The row with the newest of the known reports and the approved one, each with what was decided about it."""
    listed = set(store.keys(approvals_folder(row.cell)))
    pointer = read_pointer(store, row.cell, listed)
    last = pointer.last if pointer else None
    shown = sorted(known.values(), key=order, reverse=True)[:REPORTS_SHOWN]
    if last and last.run_id not in {line.run_id for line in shown}:
        shown += map(_line, _readable(store, row.cell, [last.run_id])[0].values())
    reports = [_with_standing(store, row.cell, line, pointer, listed) for line in shown]
    chain = list(_chain(store, row, pointer.entries if pointer else []))
    return row.model_copy(update={"last": last, "reports": reports, "chain": chain})


def _chain(store: Store, row: Row, entries: Sequence[Entry]) -> Iterator[ChainLink]:
    """The approved baselines and the newest other approved runs. Each manifest is read once, when its run is new here."""
    known = {link.run_id: link for link in row.chain}
    shown = {entry.run_id for entry in entries[-LINKS_SHOWN:]}
    # An older run that the row does not have is no baseline: else it would have it.
    wanted = [entry for entry in entries if not known or entry.run_id in known or entry.run_id in shown]
    new = _readable(store, row.cell, [entry.run_id for entry in wanted if entry.run_id not in known])[0]
    known |= {run_id: _link(manifest) for run_id, manifest in new.items()}
    for entry in wanted:
        link = known.get(entry.run_id)
        if link and (link.establishes or entry.run_id in shown):
            yield link.model_copy(update={"revoked": entry.revoked is not None})


def _link(manifest: Manifest) -> ChainLink:
    return ChainLink(
        run_id=manifest.run_id,
        score=manifest.summary.score if manifest.summary else None,
        establishes=manifest.is_baseline,
        new_anchor=manifest.new_anchor and manifest.is_baseline,
        anchor=manifest.anchor,
    )


def _with_standing(store: Store, cell: str, line: ReportLine, pointer: Pointer | None, listed: Collection[str]) -> ReportLine:
    entry = pointer.entry(line.run_id) if pointer else None
    words: str | None = None
    standing: Standing
    if pointer and entry:
        standing, words = _approved(entry, pointer)
    elif decision_key(cell, line.run_id) in listed and (rejection := _rejection(store, cell, line.run_id)):
        standing, words = "rejected", rejection
    else:
        standing = _undecided(line, pointer)
    return line.model_copy(update={"standing": standing, "told": words})


def _approved(entry: Entry, pointer: Pointer) -> tuple[Standing, str]:
    if entry.revoked:
        return "revoked", entry.revoked.done
    return ("approved" if entry == pointer.last else "superseded"), entry.done


def _rejection(store: Store, cell: str, run_id: str) -> str | None:
    decision = read_decision(store, cell, run_id).decision
    return f"{decision.done}: {decision.reason}" if decision.verdict == "reject" else None


def _undecided(line: ReportLine, pointer: Pointer | None) -> Standing:
    if line.outcome != "passed":
        return "not passed"
    # A pointer never moves to an older report.
    return "superseded" if pointer and is_newer(pointer.last, line) else "waiting for a decision"


def started_at(run_id: str) -> datetime | None:
    """The time in a run's id; None if it has none."""
    try:
        return datetime.strptime(run_id.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
