"""The indexes: one for each cell, made of its pointer and its reports, and one above them with a row for each cell.

They can only be as current as what they are made of. A cell's index is written before each of the cell's manifests and after
it, so that it has every run whose publication began: what a killed process left out, the next one completes. The board is
drawn from them. How long a write takes depends on no number of reports.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from vllm_qualify.approval import layout
from vllm_qualify.approval.board import board_revision, write_board
from vllm_qualify.approval.cell_page import page_revision, write_cell_page
from vllm_qualify.approval.decision import read_decision
from vllm_qualify.approval.errors import NotApprovedError
from vllm_qualify.approval.layout import INDEX_KEY, approvals_folder, cell_index_key, decision_key
from vllm_qualify.approval.pointer import Entry, Pointer, read_pointer
from vllm_qualify.approval.row import ChainLink, Index, ReportLine, Row, Standing, brief, chain_link, parse_row, report_line
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.bundle import Manifest, UnreadableError, find_manifest, read_manifest
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.order import Numbered, is_newer, order
from vllm_qualify.publish.store import MissingObjectError, Store, retry_swap

REPORTS_SHOWN = 25
# Of the approved runs that are no baseline.
LINKS_SHOWN = 25
# A run whose publisher never ended stays among those that are coming: the newest of them are kept.
MOST_COMING = 100
D = TypeVar("D", Row, Index)


def read_index(store: Store) -> Index:
    """The index of all cells, or an empty one if there is none yet. Raises StoreError if it is not one of this version."""
    return _read_stored(store, INDEX_KEY, Index.model_validate_json, lambda: 0).known or Index()


def read_row(store: Store, cell: str) -> Row:
    """What a cell's index says once it is up to date. Nothing is written. Raises as `refresh`."""
    return _current_row(store, cell, _stored_row(store, cell).known)


def chain_of(store: Store, cell: str) -> list[Manifest]:
    """The chain of a cell: its approved baselines that were not revoked, the oldest first.

    Each of them may be a little worse than the one before it. Raises TamperedError, StoreError.
    """
    pointer = read_pointer(store, cell)
    approved = [entry.run_id for entry in pointer.entries if not entry.revoked] if pointer else []
    manifests = (find_manifest(store, cell, run_id) for run_id in approved)
    return [manifest for manifest in manifests if manifest and manifest.is_baseline]


def anchor_in(chain: Sequence[Manifest]) -> Manifest | None:
    """The newest baseline that was made to be an anchor, or else the first; None of an empty chain."""
    return next((manifest for manifest in reversed(chain) if manifest.new_anchor), next(iter(chain), None))


def baseline_of(store: Store, cell: str, stands: Callable[[str], bool] = lambda _: False) -> str | None:
    """The newest approved run of a cell that was made to be a baseline, as its manifest says; None if the cell has none.

    In a cell without an approved one, it is the newest that passed and that nobody rejected or revoked. So a new baseline,
    which is compared with nothing, follows an approved one only when somebody approved it. Such a run that was judged again
    counts only there, and only if `stands` says so of it. Raises TamperedError, StoreError.
    """
    listed = set(store.keys(approvals_folder(cell)))
    pointer = read_pointer(store, cell, listed)
    approved = (entry.run_id for entry in reversed(pointer.entries if pointer else []) if not entry.revoked)
    baseline = next((run_id for run_id in approved if _is_baseline(store, cell, run_id)), None)
    return baseline or _undecided_baseline(store, cell, listed, stands)


def decided_against(store: Store, cell: str, run_id: str) -> str | None:
    """Who rejected a run or revoked its approval, and why; None if nobody did. Raises TamperedError, StoreError."""
    listed = set(store.keys(approvals_folder(cell)))
    pointer = read_pointer(store, cell, listed)
    entry = pointer.entry(run_id) if pointer else None
    if entry:
        return entry.revoked.summary if entry.revoked else None
    return _find_rejection(store, cell, run_id) if decision_key(cell, run_id) in listed else None


def _is_baseline(store: Store, cell: str, run_id: str) -> bool:
    manifest = find_manifest(store, cell, run_id)
    return manifest is not None and manifest.is_baseline


def _undecided_baseline(store: Store, cell: str, listed: Collection[str], stands: Callable[[str], bool]) -> str | None:
    def counts(manifest: Manifest | None) -> bool:
        if manifest is None or not manifest.is_baseline_again:
            return manifest is not None and manifest.is_baseline and decision_key(cell, manifest.run_id) not in listed
        # Its approval makes it no link of the chain. So an approved one counts as an undecided one does.
        return decided_against(store, cell, manifest.run_id) is None and stands(manifest.run_id)

    row = _stored_row(store, cell).known or _make_row(store, cell)
    newest = _newest_baseline(row, _read_manifests(store, cell, [*row.unreadable, *row.coming])[0])
    if newest is None:
        return None
    # The index may be wrong; the manifests are not.
    if counts(find_manifest(store, cell, newest.run_id)):
        return newest.run_id
    others = (each for run_id, each in read_manifests(store, cell)[0].items() if run_id != newest.run_id)
    return next((each.run_id for each in sorted(others, key=order, reverse=True) if counts(each)), None)


def announce(store: Store, cell: str, run_id: str) -> None:
    """Write into the cell's index that a run is about to be published, before its manifest is written. Raises StoreError."""

    def with_coming(known: Row | None) -> Row:
        row = known or _make_row(store, cell)
        is_known = run_id in (*row.coming, *row.unreadable, *(line.run_id for line in row.reports))
        return row if is_known else row.model_copy(update={"coming": [*row.coming, run_id]})

    _change_row(store, cell, with_coming, "publish the run again")


def index_problem(store: Store, cell: str) -> str | None:
    """Bring the indexes and the board up to date with a cell; return why that failed, else None. The next update repairs it."""
    try:
        row = refresh(store, cell)
        index, after = _write_row(store, row)
    except (StoreError, NotApprovedError) as error:
        return f"the index is not up to date: {error}"
    try:
        write_cell_page(store, row)
        write_board(store, index, after=after)
    except StoreError as error:
        return f"the board is not up to date: {error}"
    if row.unreadable:
        return f"the manifest of run {', '.join(row.unreadable)} of {cell} cannot be read: see `vllm-qualify report show`"
    return None


def refresh(store: Store, cell: str) -> Row:
    """Bring a cell's own index up to date, or make it if there is none.

    Raises TamperedError if the cell's pointer is not as it was written, StoreError if a manifest or the index is not valid, and
    StoreBusyError if the index changes all the time.
    """
    return _change_row(store, cell, lambda known: _current_row(store, cell, known))


def make_again(store: Store, cell: str) -> Row:
    """Make a cell's index and its page from all reports of the cell, whatever they said before. Raises as `refresh`."""

    def made_again(known: Row | None) -> Row:
        coming = known.coming if known else []
        return _complete_row(store, _make_row(store, cell).model_copy(update={"coming": coming}))

    row = _change_row(store, cell, made_again)
    write_cell_page(store, row)
    return row


def write_index(store: Store) -> Index:
    """Make the index of all cells from the indexes of the cells, and the board from it. Raises StoreError."""

    def attempt() -> Index:
        # First the index: a row that another process writes while the rows are read makes the swap fail.
        stored = _stored_index(store)
        return _put(store, INDEX_KEY, _all_rows(store), stored)

    index = retry_swap(attempt, "the index", "try again later", store.locate(INDEX_KEY))
    write_board(store, index)
    return index


# --- what is in the store


class _Stored(NamedTuple, Generic[D]):
    """An index in the store: `known` is None if there is none. `revision` is its own, or else its page's."""

    known: D | None
    tag: str | None
    revision: int


def _stored_index(store: Store) -> _Stored[Index]:
    return _read_stored(store, INDEX_KEY, Index.model_validate_json, lambda: board_revision(store))


def _stored_row(store: Store, cell: str) -> _Stored[Row]:
    return _read_stored(store, cell_index_key(cell), lambda body: parse_row(body, cell), lambda: page_revision(store, cell))


def _read_stored(store: Store, key: str, parse: Callable[[bytes], D], drawn_revision: Callable[[], int]) -> _Stored[D]:
    try:
        body, tag = store.read(key)
    except MissingObjectError:
        # It goes on from its page: otherwise the old page would count as newer.
        return _Stored(None, None, drawn_revision())
    try:
        known = parse(body)
    except ValueError as error:
        problem = f"not an index: {layout.reason_of(error)}" if isinstance(error, ValidationError) else str(error)
        remedy = "delete it: the next report that is published or decided about makes it again"
        raise StoreError(problem, remedy, store.locate(key)) from error
    return _Stored(known, tag, known.revision)


def _change_row(store: Store, cell: str, change: Callable[[Row | None], Row], remedy: str = "try again later") -> Row:
    """Write what `change` makes of a cell's index, which is None if there is none."""
    key = cell_index_key(cell)

    def attempt() -> Row:
        # The index is read before its sources: if another process writes it in between, this write fails.
        stored = _stored_row(store, cell)
        return _put(store, key, change(stored.known), stored)

    return retry_swap(attempt, "the cell's index", remedy, store.locate(key))


def _put(store: Store, key: str, index: D, stored: _Stored[D]) -> D:
    """Write an index as the next revision, unless the store says the same. Raises ChangedError."""
    if stored.known is not None and index.model_copy(update={"revision": stored.revision}) == stored.known:
        return stored.known
    fresh = index.model_copy(update={"revision": stored.revision + 1})
    store.swap(key, fresh.model_dump_json(exclude_none=True).encode(), layout.JSON, stored.tag)
    return fresh


# --- the index of all cells


def _write_row(store: Store, row: Row) -> tuple[Index, int]:
    """The index of all cells, with this row unless it has a newer one. If there is none yet, it is made of all rows.

    Also the revision of the board that others draw, who wrote the index before.
    """

    def attempt() -> tuple[Index, int]:
        stored = _stored_index(store)
        if stored.known is None:
            return _put(store, INDEX_KEY, _all_rows(store), stored), 0
        known_revision = stored.known.revision_of(row.cell)
        if known_revision is not None and known_revision >= row.revision:
            return stored.known, stored.known.revision
        index = _put(store, INDEX_KEY, stored.known.with_row(brief(row)), stored)
        return index, index.revision - 1

    return retry_swap(attempt, "the index", "try again later", store.locate(INDEX_KEY))


def _all_rows(store: Store) -> Index:
    cells = filter(None, map(layout.cell_of_index, store.keys("cells/")))
    rows = [brief(row) for cell in cells if (row := _stored_row(store, cell).known)]
    return Index(cells=sorted(rows, key=lambda row: row.cell))


# --- the index of a cell


def _current_row(store: Store, cell: str, known: Row | None) -> Row:
    return _complete_row(store, known) if known else _make_row(store, cell)


def _complete_row(store: Store, row: Row) -> Row:
    """The row with the runs that were coming and are published whole by now, and with what was decided until now."""
    arrived, unreadable = _read_manifests(store, row.cell, [*row.unreadable, *row.coming])
    missing = [run_id for run_id in row.coming if run_id not in arrived and run_id not in unreadable]
    return _fill_row(store, row, arrived, unreadable, missing)


def _make_row(store: Store, cell: str) -> Row:
    return _fill_row(store, Row(cell=cell), *read_manifests(store, cell), missing=[])


def _may_be_baseline(manifest: Manifest) -> bool:
    return manifest.is_baseline or manifest.is_baseline_again


def _newest_baseline(row: Row, arrived: dict[str, Manifest]) -> Numbered | None:
    new = (Numbered(run_id=each.run_id, sequence=each.sequence) for each in arrived.values() if _may_be_baseline(each))
    return max([*([row.baseline] if row.baseline else []), *new], key=order, default=None)


def read_manifests(store: Store, cell: str) -> tuple[dict[str, Manifest], list[str]]:
    """All manifests of a cell, by run, and the runs whose manifest cannot be read."""
    folder = f"reports/{cell}/"
    names = (key.removeprefix(folder).partition("/") for key in store.keys(folder))
    return _read_manifests(store, cell, [run_id for run_id, _, name in names if name == "manifest.json"])


def _read_manifests(store: Store, cell: str, run_ids: Iterable[str]) -> tuple[dict[str, Manifest], list[str]]:
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


def _fill_row(store: Store, row: Row, arrived: dict[str, Manifest], unreadable: list[str], missing: list[str]) -> Row:
    """The row with the newest of its reports and the approved one, each with what was decided about it."""
    listed = set(store.keys(approvals_folder(row.cell)))
    pointer = read_pointer(store, row.cell, listed)
    last = pointer.last if pointer else None
    lines = {line.run_id: line for line in row.reports} | {run_id: report_line(each) for run_id, each in arrived.items()}
    shown = sorted(lines.values(), key=order, reverse=True)[:REPORTS_SHOWN]
    if last and last.run_id not in {line.run_id for line in shown}:
        shown += map(report_line, _read_manifests(store, row.cell, [last.run_id])[0].values())
    update = {
        "coming": missing[-MOST_COMING:],
        "unreadable": unreadable[-MOST_COMING:],
        "baseline": _newest_baseline(row, arrived),
        "last": last,
        "reports": [_with_standing(store, row.cell, line, pointer, listed) for line in shown],
        "chain": list(_chain_links(store, row, pointer.entries if pointer else [])),
    }
    return row.model_copy(update=update)


def _chain_links(store: Store, row: Row, entries: Sequence[Entry]) -> Iterator[ChainLink]:
    """The approved baselines and the newest other approved runs. Each manifest is read once, when its run is new here."""
    known = {link.run_id: link for link in row.chain}
    shown = {entry.run_id for entry in entries[-LINKS_SHOWN:]}
    # An older run that the row does not have is no baseline: else it would have it.
    wanted = [entry for entry in entries if not known or entry.run_id in known or entry.run_id in shown]
    new = _read_manifests(store, row.cell, [entry.run_id for entry in wanted if entry.run_id not in known])[0]
    known |= {run_id: chain_link(manifest) for run_id, manifest in new.items()}
    for entry in wanted:
        link = known.get(entry.run_id)
        if link and (link.establishes or entry.run_id in shown):
            yield link.model_copy(update={"revoked": entry.revoked is not None})


def _with_standing(store: Store, cell: str, line: ReportLine, pointer: Pointer | None, listed: Collection[str]) -> ReportLine:
    standing: Standing
    told: str | None = None
    if pointer and (entry := pointer.entry(line.run_id)):
        standing = "revoked" if entry.revoked else "approved" if entry == pointer.last else "superseded"
        told = entry.revoked.summary if entry.revoked else entry.summary
    elif decision_key(cell, line.run_id) in listed and (rejection := _find_rejection(store, cell, line.run_id)):
        standing, told = "rejected", rejection
    elif line.outcome != "passed":
        standing = "not passed"
    else:
        # A pointer never moves to an older report.
        standing = "superseded" if pointer and is_newer(pointer.last, line) else "waiting for a decision"
    return line.model_copy(update={"standing": standing, "told": told})


def _find_rejection(store: Store, cell: str, run_id: str) -> str | None:
    decision = read_decision(store, cell, run_id).decision
    return f"{decision.summary}: {decision.reason}" if decision.verdict == "reject" else None
