"""The board: one page for all cells, drawn from their index. It needs a browser and the store's files, but no server.

It has one row for each cell, which leads to the page of the cell.
"""

import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import product
from typing import Any, Literal

from jinja2 import Template
from markupsafe import Markup

from vllm_qualify.approval.layout import BOARD_KEY, day
from vllm_qualify.approval.lines import Lines, lines_of, newest_lines
from vllm_qualify.approval.pages import BEGIN, Page, address, page_template, read_page, write_page
from vllm_qualify.approval.row import Brief, BriefApproval, BriefReport, Index, Standing
from vllm_qualify.publish.store import Store
from vllm_qualify.report.templates import template
from vllm_qualify.secrets import plain

NEVER: Literal["never qualified"] = "never qualified"
BOARD = "the board"

BoardState = Standing | Literal["never qualified"]


def write_board(store: Store, lines: Lines, changed: Collection[str] = (), *, after: int = 0) -> None:
    """Draw the board, unless the store has one of this revision of the index or of a newer one. Raises as `write_page`.

    What is drawn is the newest index in the store, or `lines` if that is not older.

    A row of the board that is there stays if it says the same revision of its cell: the others alone are drawn. `changed` are
    the only cells in which this revision differs from the one before; then the board of that one gets new rows of these, and no
    other row is read. `after` is the revision that others are about to draw: this call lets them.
    """

    def draw(there: Page | None) -> bytes:
        shown = newest_lines(store, lines)
        if there is None:
            return _drawn(shown, b"")
        is_the_one_before = shown is lines and there.revision == lines.revision - 1
        cells = (is_the_one_before and changed) or _changed_cells(shown, there.body)
        return (cells and _with_new_rows(shown, there, cells)) or _drawn(shown, there.body)

    write_page(store, BOARD_KEY, BOARD, lines.revision, draw, after=after)


def read_board(store: Store) -> Page | None:
    """The board in the store; None if there is none yet. Raises StoreError if another object is in its place."""
    return read_page(store, BOARD_KEY, BOARD)


def board_revision(store: Store) -> int:
    """The revision of the index that the board shows; 0 without a board. Raises as `read_board`."""
    board = read_board(store)
    return board.revision if board else 0


def render_board(index: Index) -> str:
    """The page. All text of the index is escaped. The page's policy allows its own script and no request."""
    return _drawn(lines_of(index), b"").decode()


# --- the page


def _drawn(lines: Lines, there: bytes) -> bytes:
    head, tail, form = _frame()
    kept = _rows_in(there) if f'data-form="{form}"'.encode() in there[:BEGIN] else {}
    known = dict(lines.revisions())
    gaps = _gaps(known)
    every = sorted([*known.items(), *((cell, 0) for cell in gaps)])
    never = {cell: ShownRow(cell=cell, state=NEVER) for cell in gaps}
    rows = [
        kept.get(b"%b%d" % (_begin(cell), revision)) or _row(never.get(cell) or _of_brief(lines.brief(cell)), revision)
        for cell, revision in every
    ]
    return b"\n".join([_filled(head, lines.revision, len(rows)), *rows, _filled(tail, lines.revision, len(rows))])


def _changed_cells(lines: Lines, there: bytes) -> Collection[str]:
    """The cells of which the board has an older row. Empty if its cells are not those of the index: all is drawn then."""
    shown = [row for row in _ROWS.findall(there) if row[1] != b"0"]
    known = lines.plain_revisions()
    if [cell for cell, _ in shown] != [cell for cell, _ in known]:
        return ()
    return [cell.decode() for (cell, revision), (_, old) in zip(known, shown, strict=True) if revision != old]


def _with_new_rows(lines: Lines, page: Page, cells: Collection[str]) -> bytes | None:
    """An older board with new rows for these cells; None if it is of another form, or has not one row for each."""
    there = page.body
    (head, tail, _), count = _frame(), there.count(b"\n" + _ROW)
    before, after = ([_filled(part, revision, count) for part in (head, tail)] for revision in (page.revision, lines.revision))
    places = sorted((_place_of_row(there, cell), cell) for cell in cells)
    if not all(place for place, _ in places) or not there.startswith(before[0]) or not there.endswith(before[1]):
        return None
    # Views: the rows that stay are copied once.
    seen, stay = memoryview(there), len(before[0])
    parts: list[bytes | memoryview] = [after[0]]
    for (begins, ends), cell in places:
        line = lines.brief(cell)
        parts += [seen[stay:begins], _row(_of_brief(line), line.revision)]
        stay = ends
    return b"".join([*parts, seen[stay : len(there) - len(before[1])], after[1]])


def _place_of_row(there: bytes, cell: str) -> tuple[int, ...]:
    """Where the row of a cell begins and ends; empty if the board has not one."""
    begin = b"\n" + _begin(cell)
    at = there.find(begin)
    if at < 0 or there.find(begin, at + 1) >= 0:
        return ()
    return at + 1, there.find(b"\n", at + 1)


def _filled(part: bytes, revision: int, count: int) -> bytes:
    return part.replace(_MARKED["revision"], b"%d" % revision).replace(_MARKED["count"], b"%d" % count)


_MARKED = {name: f"@{name}@".encode() for name in ("revision", "count", "rows", "form")}
_ROW, _OF_REVISION, _ROW_ENDS = b'<tr data-cell="', b'" data-revision="', b"</tr>"
_ROWS = re.compile(rb'\n%b([^"\n]*)%b([0-9]{1,18})"' % (_ROW, _OF_REVISION))


@cache
def _frame() -> tuple[bytes, bytes, str]:
    """What stands before the rows and after them, and a name for this form of the page."""
    marked = {name: mark.decode() for name, mark in _MARKED.items()}
    page = page_template("board.html.jinja", "board.js").render(**marked).encode()
    form = hashlib.sha256(page + _source_of_rows()).hexdigest()[:16]
    head, tail = page.replace(_MARKED["form"], form.encode()).split(_MARKED["rows"])
    return head.rstrip(), tail.lstrip(), form


def _begin(cell: str) -> bytes:
    """How the row of a cell begins; the revision follows."""
    return _ROW + cell.encode() + _OF_REVISION


def _rows_in(there: bytes) -> dict[bytes, bytes]:
    """The rows of a board, by how they begin. No pattern: there are thousands, and nearly all stay."""
    rows = (line for line in there.split(b"\n") if line.startswith(_ROW) and line.endswith(_ROW_ENDS))
    return {row[: row.find(b'"', row.find(_OF_REVISION) + len(_OF_REVISION))]: row for row in rows}


def _row(shown: "ShownRow", revision: int) -> bytes:
    text = _row_template().render(
        row=shown, revision=revision, data=_in_quotes(json.dumps(_data(shown), separators=(",", ":")))
    )
    return text.replace("\n", "").encode()


def _in_quotes(text: str) -> Markup:
    """Text of an attribute between single quotes. JSON has many double ones: escaped, they were a seventh of the page."""
    return Markup(text.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;"))  # noqa: S704  (what ends an attribute or begins a tag is escaped)


@cache
def _row_template() -> Template:
    return template(__package__, "row.html.jinja")


@cache
def _source_of_rows() -> bytes:
    return resources.files(__package__).joinpath("row.html.jinja").read_bytes()


# --- the rows


@dataclass(frozen=True)
class Link:
    """A link to a page, relative to the board. The address is empty if the names could lead to another place."""

    address: str
    text: str


@dataclass(frozen=True)
class ShownRow:
    """One cell. `state` is the state of its last approval, else of its newest report.

    `newer` is the state of a report that is newer than the last approval. `engine` is the engine that `state` is about.
    `newest_engine` is that of the newest report. A field without a value is None.
    """

    cell: str
    state: BoardState
    newer: Standing | None = None
    engine: str | None = None
    newest_engine: str | None = None
    page: str = ""
    approved: Link | None = None
    last: BriefApproval | None = None
    newest: Link | None = None
    newest_report: BriefReport | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Recipe, variant, GPU type, profile."""
        return _parts(self.cell)


def _parts(cell: str) -> tuple[str, ...]:
    parts = cell.split("/", 3)
    return (*parts, *[""] * (4 - len(parts)))


def _of_brief(line: Brief) -> ShownRow:
    newest, last = (line.reports[0] if line.reports else None), line.last
    return ShownRow(
        cell=line.cell,
        state=_state(last, newest),
        newer=newest.standing if newest and last and newest.run_id != last.run_id else None,
        engine=line.engine,
        newest_engine=newest.engine if newest else None,
        page=address("cells", line.cell, "index.html"),
        approved=Link(_report(line.cell, last.run_id), day(last.at)) if last else None,
        last=last,
        newest=_link(line.cell, newest) if newest else None,
        newest_report=newest,
    )


def _state(last: BriefApproval | None, newest: BriefReport | None) -> BoardState:
    if last:
        return "revoked" if last.is_revoked else "approved"
    return newest.standing if newest else NEVER


def _link(cell: str, report: BriefReport) -> Link:
    return Link(_report(cell, report.run_id), day(report.started_at) if report.started_at else report.run_id)


def _report(cell: str, run_id: str) -> str:
    return address("reports", cell, run_id, "report.html")


def _gaps(known: Collection[str]) -> list[str]:
    """For each variant, the pairs of its GPU types and profiles that have no report."""
    variants: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for cell in known:
        parts = _parts(cell)
        variants.setdefault(parts[:2], []).append(parts[2:])
    gaps = []
    for name, pairs in variants.items():
        gpu_types, profiles = ({*every} for every in zip(*pairs, strict=True))
        if len(pairs) < len(gpu_types) * len(profiles):
            gaps += ["/".join((*name, *pair)) for pair in product(gpu_types, profiles) if pair not in pairs]
    return gaps


def _data(shown: ShownRow) -> list[Any]:
    """What `board.js` reads of a row, in its order."""
    last, newest = shown.last, shown.newest_report
    return [
        shown.state,
        shown.newer,
        plain(last.by) if last else None,
        last.expires.isoformat() if last else None,
        sorted({plain(engine) for engine in (shown.engine, shown.newest_engine) if engine}),
        int(newest.started_at.timestamp()) if newest and newest.started_at else None,
        [plain(report.run_id) for report in (last, newest) if report],
    ]
