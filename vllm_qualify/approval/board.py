"""The board: one page for all cells, drawn from their index. It needs a browser and the store's files, but no server.

It has one row for each cell, which leads to the page of the cell.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from vllm_qualify.approval.layout import BOARD_KEY, day
from vllm_qualify.approval.pages import Page, Texts, address, data_of, page_template, read_page, write_page
from vllm_qualify.approval.row import Brief, BriefApproval, BriefReport, Index, Standing
from vllm_qualify.publish.store import Store
from vllm_qualify.secrets import plain

NEVER: Literal["never qualified"] = "never qualified"
BOARD = "the board"

BoardState = Standing | Literal["never qualified"]


def write_board(store: Store, index: Index) -> None:
    """Draw the board, unless the store has one of this revision of the index or of a newer one. Raises as `write_page`."""
    write_page(store, BOARD_KEY, BOARD, index.revision, lambda: render_board(index))


def read_board(store: Store) -> Page | None:
    """The board in the store; None if there is none yet. Raises StoreError if another object is in its place."""
    return read_page(store, BOARD_KEY, BOARD)


def board_revision(store: Store) -> int:
    """The revision of the index that the board shows; 0 without a board. Raises as `read_board`."""
    board = read_board(store)
    return board.revision if board else 0


def render_board(index: Index) -> str:
    """The page. All text of the index is escaped. The page's policy allows its own script and no request."""
    shown = sorted([*map(_shown, index.cells), *_gaps(index.cells)], key=lambda row: row.cell)
    return page_template("board.html.jinja", "board.js").render(revision=index.revision, rows=shown, data=_data(shown))


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


def _shown(found: Brief) -> ShownRow:
    newest, last = (found.reports[0] if found.reports else None), found.last
    return ShownRow(
        cell=found.cell,
        state=_state(last, newest),
        newer=newest.standing if newest and last and newest.run_id > last.run_id else None,
        engine=found.engine,
        newest_engine=newest.engine if newest else None,
        page=address("cells", found.cell, "index.html"),
        approved=Link(_report(found.cell, last.run_id), day(last.at)) if last else None,
        last=last,
        newest=_link(found.cell, newest) if newest else None,
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


def _gaps(rows: Sequence[Brief]) -> list[ShownRow]:
    """For each variant, the pairs of its GPU types and profiles that have no report."""
    known = {row.cell for row in rows}
    variants: dict[str, tuple[set[str], set[str]]] = {}
    for cell in known:
        recipe, variant, gpu_type, profile = _parts(cell)
        gpu_types, profiles = variants.setdefault(f"{recipe}/{variant}", (set(), set()))
        gpu_types.add(gpu_type)
        profiles.add(profile)
    every = (f"{name}/{gpu}/{profile}" for name, found in variants.items() for gpu, profile in product(*found))
    return [ShownRow(cell=cell, state=NEVER) for cell in every if cell not in known]


# --- the data of the page's script


def _data(shown: Iterable[ShownRow]) -> str:
    """`board.js` reads it in this order."""
    texts = Texts()
    cells = [_cell(found, texts) for found in shown]
    return data_of(texts=list(texts), cells=cells)


def _cell(shown: ShownRow, texts: Texts) -> list[Any]:
    engines = {shown.engine, shown.newest_engine} - {None}
    last, newest = shown.last, shown.newest_report
    return [
        [plain(part) for part in shown.parts],
        texts.number(shown.state),
        texts.number(shown.newer),
        texts.number(last.by) if last else None,
        last.expires.isoformat() if last else None,
        [texts.number(engine) for engine in sorted(filter(None, engines))],
        int(newest.started_at.timestamp()) if newest and newest.started_at else None,
        [plain(found.run_id) for found in (last, newest) if found],
    ]
