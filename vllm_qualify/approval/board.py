"""The board: one page for all cells, drawn from their index. It needs a browser and the store's files, but no server.

It has one row for each cell, which leads to the page of the cell.
"""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from itertools import product
from typing import Any, Literal

from jinja2 import Template
from markupsafe import Markup

from vllm_qualify.approval.layout import BOARD_KEY, INDEX_KEY, day
from vllm_qualify.approval.pages import BEGIN, Page, address, newest_index, page_revision, page_template, write_page
from vllm_qualify.approval.row import Brief, BriefApproval, BriefReport, Index, Standing
from vllm_qualify.publish.store import Store
from vllm_qualify.report.templates import template
from vllm_qualify.secrets import plain

NEVER: Literal["never qualified"] = "never qualified"
BOARD = "the board"

BoardState = Standing | Literal["never qualified"]


def write_board(store: Store, index: Index, *, after: int = 0) -> None:
    """Draw the board, unless the store has one of this revision of the index or of a newer one. Raises as `write_page`.

    What is drawn is the newest index in the store, or `index` if that is not older. A row of the board that is there stays if
    it says the same revision of its cell. `after` is the revision that others are about to draw: this call lets them.
    """

    def draw(there: Page | None) -> bytes:
        newest = newest_index(store, INDEX_KEY, index, Index.model_validate_json)
        return _draw_page(newest, there.body if there else b"")

    write_page(store, BOARD_KEY, BOARD, index.revision, draw, after=after)


def board_revision(store: Store) -> int:
    """The revision of the index that the board shows; 0 without a board. Raises StoreError if another object is there."""
    return page_revision(store, BOARD_KEY, BOARD)


def render_board(index: Index) -> str:
    """The page. All text of the index is escaped. The page's policy allows its own script and no request."""
    return _draw_page(index, b"").decode()


# --- the page


def _draw_page(index: Index, there: bytes) -> bytes:
    """The page, with those rows of the page that is there which are still right."""
    head, tail, form = _page_frame()
    kept = _rows_in(there) if f'data-form="{form}"'.encode() in there[:BEGIN] else {}
    known = {row.cell: row for row in index.cells}
    rows = []
    for cell in sorted([*known, *_find_gaps(known)]):
        revision = known[cell].revision if cell in known else 0
        row = kept.get(b"%b%b%b%d" % (_ROW, cell.encode(), _OF_REVISION, revision))
        rows.append(row or _draw_row(_shown_row(known[cell]) if cell in known else ShownRow(cell=cell, state=NEVER), revision))
    return b"\n".join([_fill(head, index.revision, len(rows)), *rows, _fill(tail, index.revision, len(rows))])


def _fill(part: bytes, revision: int, count: int) -> bytes:
    return part.replace(_MARKED["revision"], b"%d" % revision).replace(_MARKED["count"], b"%d" % count)


_MARKED = {name: f"@{name}@".encode() for name in ("revision", "count", "rows", "form")}
_ROW, _OF_REVISION, _ROW_ENDS = b'<tr data-cell="', b'" data-revision="', b"</tr>"


@cache
def _page_frame() -> tuple[bytes, bytes, str]:
    """What stands before the rows and after them, and a name for this form of the page."""
    marked = {name: mark.decode() for name, mark in _MARKED.items()}
    page = page_template("board.html.jinja", "board.js").render(**marked).encode()
    source_of_rows = resources.files(__package__).joinpath("row.html.jinja").read_bytes()
    form = hashlib.sha256(page + source_of_rows).hexdigest()[:16]
    head, tail = page.replace(_MARKED["form"], form.encode()).split(_MARKED["rows"])
    return head.rstrip(), tail.lstrip(), form


def _rows_in(there: bytes) -> dict[bytes, bytes]:
    """The rows of a board, by how they begin. No pattern: there are thousands, and nearly all stay."""
    rows = (line for line in there.split(b"\n") if line.startswith(_ROW) and line.endswith(_ROW_ENDS))
    return {row[: row.find(b'"', row.find(_OF_REVISION) + len(_OF_REVISION))]: row for row in rows}


def _draw_row(shown: "ShownRow", revision: int) -> bytes:
    data = json.dumps(_row_data(shown), separators=(",", ":"))
    # Between single quotes. JSON has many double ones: escaped, they were a seventh of the page.
    quoted = data.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")
    text = _row_template().render(
        row=shown,
        revision=revision,
        data=Markup(quoted),  # noqa: S704  (what ends an attribute or begins a tag is escaped)
    )
    return text.replace("\n", "").encode()


@cache
def _row_template() -> Template:
    return template(__package__, "row.html.jinja")


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
        return _split_cell(self.cell)


def _split_cell(cell: str) -> tuple[str, ...]:
    parts = cell.split("/", 3)
    return (*parts, *[""] * (4 - len(parts)))


def _shown_row(line: Brief) -> ShownRow:
    newest, last = (line.reports[0] if line.reports else None), line.last
    state: BoardState = newest.standing if newest else NEVER
    if last:
        state = "revoked" if last.is_revoked else "approved"
    return ShownRow(
        cell=line.cell,
        state=state,
        newer=newest.standing if newest and last and newest.run_id != last.run_id else None,
        engine=line.engine,
        newest_engine=newest.engine if newest else None,
        page=address("cells", line.cell, "index.html"),
        approved=_report_link(line.cell, last.run_id, last.at) if last else None,
        last=last,
        newest=_report_link(line.cell, newest.run_id, newest.started_at) if newest else None,
        newest_report=newest,
    )


def _report_link(cell: str, run_id: str, at: datetime | None) -> Link:
    return Link(address("reports", cell, run_id, "report.html"), day(at) if at else run_id)


def _find_gaps(known: Collection[str]) -> list[str]:
    """For each variant, the pairs of its GPU types and profiles that have no report."""
    variants: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for cell in known:
        parts = _split_cell(cell)
        variants.setdefault(parts[:2], []).append(parts[2:])
    gaps = []
    for name, pairs in variants.items():
        gpu_types, profiles = ({*every} for every in zip(*pairs, strict=True))
        if len(pairs) < len(gpu_types) * len(profiles):
            gaps += ["/".join((*name, *pair)) for pair in product(gpu_types, profiles) if pair not in pairs]
    return gaps


def _row_data(shown: ShownRow) -> list[Any]:
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
