"""The page of a cell: its newest reports with what was decided about each, and how their figures went."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_qualify.approval.chain_chart import chart_of
from vllm_qualify.approval.layout import cell_index_key, cell_page_key
from vllm_qualify.approval.pages import Page, Texts, address, data_of, page_template, read_page, rounded, write_page
from vllm_qualify.approval.row import ReportLine, Row, parse_row
from vllm_qualify.publish.bundle import Score, Summary
from vllm_qualify.publish.store import MissingObjectError, Store
from vllm_qualify.secrets import plain

CELL_PAGE = "the cell's page"
# From cells/<recipe>/<variant>/<GPU type>/<profile>/ to the store's root.
TO_ROOT = "../" * 5


def write_cell_page(store: Store, row: Row) -> None:
    """Draw a cell's page, unless the store has one of this revision or of a newer one. Raises as `write_page`.

    What is drawn is the newest index of the cell in the store, or `row` if that is not older.
    """

    def draw(_: Page | None) -> bytes:
        return render_cell_page(_newest(store, row)).encode()

    write_page(store, cell_page_key(row.cell), CELL_PAGE, row.revision, draw)


def _newest(store: Store, own: Row) -> Row:
    """What is no index of this cell is passed over: its next writer reports it."""
    try:
        there = parse_row(store.get(cell_index_key(own.cell)), own.cell)
    except (MissingObjectError, ValueError):
        return own
    return there if there.revision > own.revision else own


def page_revision(store: Store, cell: str) -> int:
    """The revision of the index that the cell's page shows; 0 without a page. Raises StoreError if it is not one."""
    page = read_page(store, cell_page_key(cell), CELL_PAGE)
    return page.revision if page else 0


def render_cell_page(row: Row) -> str:
    """The page. All text of the row is escaped. The page's policy allows its own script and no request."""
    shown = [_shown(row.cell, line) for line in row.reports]
    return page_template("cell.html.jinja", "cell.js").render(
        row=row, runs=shown, chain=chart_of(row), data=_data(row, row.reports), to_root=TO_ROOT, board=f"{TO_ROOT}index.html"
    )


@dataclass(frozen=True)
class ShownRun:
    """One report with its link, which is empty if its names could lead to another place. What is not known is None."""

    line: ReportLine
    address: str

    @property
    def at(self) -> str | None:
        return f"{self.line.started_at:%Y-%m-%d %H:%M} UTC" if self.line.started_at else None

    @property
    def summary(self) -> Summary | None:
        return self.line.summary

    @property
    def score(self) -> Score | None:
        return self.summary.score if self.summary else None

    @property
    def output(self) -> str | None:
        rate_tok_s = self.summary.output_tok_s_per_gpu if self.summary else None
        return None if rate_tok_s is None else f"{float(f'{rate_tok_s:.5g}'):,.10g} tok/s"


def _shown(cell: str, line: ReportLine) -> ShownRun:
    page = address("reports", cell, line.run_id, "report.html")
    return ShownRun(line, f"{TO_ROOT}{page}" if page else "")


def _data(row: Row, lines: Sequence[ReportLine]) -> str:
    """`cell.js` reads it in this order."""
    texts, last = Texts(), row.last
    runs = [_run(line, texts) for line in lines]
    expires = last.expires.isoformat() if last and not last.revoked else None
    return data_of(texts=list(texts), expires=expires, last=plain(last.run_id) if last else None, runs=runs)


def _run(line: ReportLine, texts: Texts) -> list[Any]:
    score = line.summary.score if line.summary else None
    interval = score.interval if score else None
    return [
        plain(line.run_id),
        texts.number(line.engine),
        texts.number(score.metric if score else None),
        rounded(score.value if score else None),
        rounded(interval.lower if interval else None),
        rounded(interval.upper if interval else None),
        rounded(line.summary.output_tok_s_per_gpu if line.summary else None),
    ]
