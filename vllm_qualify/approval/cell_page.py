"""The page of a cell: its newest reports with what was decided about each, and how their figures went."""

from dataclasses import dataclass
from typing import Any

from vllm_qualify.approval import pages
from vllm_qualify.approval.chain_chart import chart_of
from vllm_qualify.approval.layout import cell_index_key, cell_page_key
from vllm_qualify.approval.pages import Page, Texts, newest_index, page_template, round_shown, write_page
from vllm_qualify.approval.row import ReportLine, Row, parse_row
from vllm_qualify.publish.store import Store
from vllm_qualify.secrets import plain

CELL_PAGE = "the cell's page"
# From cells/<recipe>/<variant>/<GPU type>/<profile>/ to the store's root.
TO_ROOT = "../" * 5
SHORT_DIGITS, SHA256 = 12, "sha256:"


def write_cell_page(store: Store, row: Row) -> None:
    """Draw a cell's page, unless the store has one of this revision or of a newer one. Raises as `write_page`.

    What is drawn is the newest index of the cell in the store, or `row` if that is not older.
    """
    key = cell_index_key(row.cell)

    def draw(_: Page | None) -> bytes:
        return render_cell_page(newest_index(store, key, row, lambda body: parse_row(body, row.cell))).encode()

    write_page(store, cell_page_key(row.cell), CELL_PAGE, row.revision, draw)


def page_revision(store: Store, cell: str) -> int:
    """The revision of the index that the cell's page shows; 0 without a page. Raises StoreError if it is not one."""
    return pages.page_revision(store, cell_page_key(cell), CELL_PAGE)


def render_cell_page(row: Row) -> str:
    """The page. All text of the row is escaped. The page's policy allows its own script and no request."""
    texts, last = Texts(), row.last
    # `cell.js` reads them in this order.
    runs = [_run_data(line, texts) for line in row.reports]
    expires = last.expires.isoformat() if last and not last.revoked else None
    data = pages.data_of(texts=list(texts), expires=expires, last=plain(last.run_id) if last else None, runs=runs)
    return page_template("cell.html.jinja", "cell.js").render(
        row=row,
        runs=[ShownRun(row.cell, line) for line in row.reports],
        chain=chart_of(row),
        data=data,
        board=f"{TO_ROOT}index.html",
    )


@dataclass(frozen=True)
class ShownRun:
    """One report with its link, which is empty if its names could lead to another place. What is not known is None."""

    cell: str
    line: ReportLine

    @property
    def address(self) -> str:
        page = pages.address("reports", self.cell, self.line.run_id, "report.html")
        return f"{TO_ROOT}{page}" if page else ""

    @property
    def start_time(self) -> str | None:
        return f"{self.line.started_at:%Y-%m-%d %H:%M} UTC" if self.line.started_at else None

    @property
    def revision(self) -> str | None:
        """The model's commit or digest, short enough for a column and long enough to tell two apart."""
        revision = self.line.summary.revision
        if revision is None:
            return None
        return revision[: SHORT_DIGITS + (len(SHA256) if revision.startswith(SHA256) else 0)]

    @property
    def output(self) -> str | None:
        rate_tok_s = self.line.summary.output_tok_s_per_gpu
        return None if rate_tok_s is None else f"{float(f'{rate_tok_s:.5g}'):,.10g} tok/s"


def _run_data(line: ReportLine, texts: Texts) -> list[Any]:
    score = line.summary.score
    interval = score.interval if score else None
    return [
        plain(line.run_id),
        texts.number(line.engine),
        texts.number(score.metric if score else None),
        round_shown(score.value if score else None),
        round_shown(interval.lower if interval else None),
        round_shown(interval.upper if interval else None),
        round_shown(line.summary.output_tok_s_per_gpu),
    ]
