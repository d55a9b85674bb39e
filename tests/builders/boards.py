"""Boards and pages of cells as a browser reads them, and the rows that they are made of."""

import json
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

from tests.approval.builder import CELL, NOW, RUN
from vllm_qualify.approval.cell_page import render_cell_page
from vllm_qualify.approval.pointer import Entry, Revocation, revocation
from vllm_qualify.approval.row import ReportLine, Row, Standing
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.publish.bundle import Score, StoredObject, Summary

TAKEN_BACK = revocation("Grace", "it answers in Latin", NOW)
BEGAN = datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC)


class Page(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.rows: list[list[str]] = []
        self.open: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.inside:
            self.open = tag
            self.inside[tag].append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.open = "tr"
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "script", "style"):
            self.open = None

    def handle_data(self, data: str) -> None:
        if self.open == "tr":
            self.rows[-1][-1] += data
        elif self.open:
            self.inside[self.open][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def links(self) -> list[str]:
        return [str(link["href"]) for link in self.all("a")]

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.inside["script"][0]))


def cell_page_of(row: Row) -> Page:
    return Page(render_cell_page(row.model_copy(update={"revision": 3})))


def line(
    run_id: str = RUN,
    standing: Standing = "waiting for a decision",
    summary: Summary = Summary(engine="vllm", engine_version="0.32.0"),  # noqa: B008  (it is frozen)
    **others: Any,
) -> ReportLine:
    outcome = "not passed" if standing == "not passed" else "passed"
    return ReportLine(
        run_id=run_id, sequence=1, outcome=outcome, started_at=BEGAN, standing=standing, summary=summary, **others
    )


def entry(run_id: str = RUN, cell: str = CELL, revoked: Revocation | None = None) -> Entry:
    key = f"approvals/{cell}/{run_id}/approval.json"
    approval = StoredObject(key=key, sha256="0" * 64, size=100)
    return Entry(run_id=run_id, sequence=1, approval=approval, by="Ada", at=NOW, expires=date(2026, 6, 12), revoked=revoked)


def large_row(number: int) -> Row:
    """Ten reports of different versions with all their figures, as an old cell has them."""
    gpu_type, profile = ("h100", "h200", "b200", "gb200", "a100")[number // 2 % 5], ("throughput", "latency")[number % 2]
    cell = f"model-{number // 20:03}-70b-instruct/{('bf16', 'fp8')[number // 10 % 2]}/{gpu_type}/{profile}"
    reports = []
    for back in range(10):
        at, version = BEGAN - timedelta(days=14 * back, seconds=number), f"0.{33 - back}.{number % 3}"
        value = 0.83 + 0.00012345 * ((number + back) % 97)
        score = Score(
            metric="exact_match (gsm8k, strict-match)", value=value, interval=Interval(lower=value - 0.02, upper=value + 0.02)
        )
        summary = Summary(
            engine="vllm",
            engine_version=version,
            image=f"registry.example:5000/vllm/vllm-openai:v{version}",
            gpus=8,
            score=score,
            output_tok_s_per_gpu=1576.0512345 + number,
        )
        standing = f"approved by Ada on {at:%Y-%m-%d}"
        run_id = f"{at:%Y%m%dT%H%M%SZ}-{number:06x}"
        reports.append(line(run_id, "superseded" if back else "approved", told=standing, summary=summary))
    return Row(cell=cell, last=entry(reports[0].run_id, cell), reports=reports)
