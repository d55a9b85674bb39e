"""What the indexes hold: of a cell its newest reports, and of all cells a few words each."""

from datetime import UTC, date, datetime
from typing import Literal

from vllm_qualify.approval.pointer import Entry
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.judge.verdict import Outcome
from vllm_qualify.publish.bundle import Manifest, ReleaseTry, Score, Summary
from vllm_qualify.publish.layout import is_run_id
from vllm_qualify.publish.order import Numbered
from vllm_qualify.recipe.values import Count, Frozen

INDEX_VERSION: Literal[4] = 4
MOST_REPORTS = 10

Standing = Literal["approved", "superseded", "revoked", "rejected", "waiting for a decision", "not passed"]
"""The state of a report. An expired approval is still `approved` here, because expiry depends on the day."""


class ReportLine(Frozen):
    """One report. `started_at` comes from the run's id; None if the id has no time. `told` says who decided what about it."""

    run_id: str
    sequence: Count
    outcome: Outcome
    started_at: datetime | None = None
    standing: Standing
    told: str | None = None
    summary: Summary
    tried: ReleaseTry | None = None

    @property
    def engine(self) -> str:
        """`vLLM 0.32.0`"""
        return f"{KINDS[self.summary.engine].title} {self.summary.engine_version}"


class ChainLink(Frozen):
    """One approved run, with what its manifest says of it."""

    run_id: str
    score: Score | None = None
    establishes: bool = False
    new_anchor: bool = False
    anchor: str | None = None
    revoked: bool = False


class Row(Frozen):
    """The index of one cell."""

    index_version: Literal[4] = INDEX_VERSION
    revision: int = 0
    """Grows with each write: a store may identify an object by its content alone."""
    cell: str
    coming: list[str] = []
    """Runs whose publication began. A run with a manifest is published whole."""
    unreadable: list[str] = []
    """Runs whose manifest cannot be read."""
    baseline: Numbered | None = None
    """The newest run that passed and was made to be a baseline."""
    last: Entry | None = None
    """The last approval, whatever its state is."""
    reports: list[ReportLine] = []
    """The newest reports, the newest first. The approved one follows if it is not among them."""
    chain: list[ChainLink] = []
    """All approved baselines and the newest other approved runs, the oldest first."""

    @property
    def anchor(self) -> str | None:
        """What the newest approved run was held against for good, or is itself for later ones; else the first baseline."""
        holding = [link for link in self.chain if not link.revoked]
        anchors = (link.run_id if link.new_anchor else link.anchor for link in reversed(holding))
        first = next((link.run_id for link in holding if link.establishes), None)
        return next(filter(None, anchors), first)

    @property
    def subject(self) -> ReportLine | None:
        """The report that the cell's state is about: of its last approval, or else its newest one."""
        if self.last is None:
            return self.reports[0] if self.reports else None
        return next((line for line in self.reports if line.run_id == self.last.run_id), None)


def parse_row(body: bytes, cell: str) -> Row:
    """The index of this cell. Raises ValueError, of which ValidationError is one, if it is not."""
    row = Row.model_validate_json(body)
    if row.cell != cell:
        raise ValueError("the index of another cell")
    named = [*row.coming, *row.unreadable, *(line.run_id for line in row.reports)]
    if not all(map(is_run_id, [*named, *([row.baseline.run_id] if row.baseline else [])])):
        raise ValueError("an index that names what is no run")
    return row


class BriefApproval(Frozen):
    run_id: str
    by: str
    at: datetime
    expires: date
    is_revoked: bool = False


class BriefReport(Frozen):
    run_id: str
    outcome: Outcome
    started_at: datetime | None = None
    standing: Standing
    engine: str
    tries: Count | None = None


class Brief(Frozen):
    """A cell in the index of all cells, as its own index says it at `revision`."""

    cell: str
    revision: int
    last: BriefApproval | None = None
    engine: str | None = None
    """The engine that the cell's state is about."""
    reports: list[BriefReport] = []
    """The newest report and, after it, those that wait for a decision."""


class Index(Frozen):
    """The index of all cells, sorted. `revision` grows with each write."""

    index_version: Literal[4] = INDEX_VERSION
    revision: int = 0
    cells: list[Brief] = []

    def revision_of(self, cell: str) -> int | None:
        """The revision of the cell's own index that its row says; None without a row."""
        return next((row.revision for row in self.cells if row.cell == cell), None)

    def with_row(self, row: Brief) -> "Index":
        others = [other for other in self.cells if other.cell != row.cell]
        return self.model_copy(update={"cells": sorted([*others, row], key=lambda each: each.cell)})


def brief(row: Row) -> Brief:
    waiting = [line for line in row.reports[1:] if line.standing == "waiting for a decision"]
    last = None
    if row.last:
        fields = row.last.model_dump(include={"run_id", "by", "at", "expires"})
        last = BriefApproval(**fields, is_revoked=row.last.revoked is not None)
    return Brief(
        cell=row.cell,
        revision=row.revision,
        last=last,
        engine=row.subject.engine if row.subject else None,
        reports=[_brief_report(line) for line in [*row.reports[:1], *waiting][:MOST_REPORTS]],
    )


def _brief_report(line: ReportLine) -> BriefReport:
    fields = line.model_dump(include={"run_id", "outcome", "started_at", "standing"})
    return BriefReport(**fields, engine=line.engine, tries=line.tried.number if line.tried else None)


def report_line(manifest: Manifest) -> ReportLine:
    """What the manifest says of its run; its standing is that of a run about which nothing was decided."""
    said = {name: getattr(manifest, name) for name in ("run_id", "sequence", "outcome", "summary", "tried")}
    return ReportLine(**said, started_at=started_at(manifest.run_id), standing="waiting for a decision")


def chain_link(manifest: Manifest) -> ChainLink:
    return ChainLink(
        run_id=manifest.run_id,
        score=manifest.summary.score,
        establishes=manifest.is_baseline,
        new_anchor=manifest.new_anchor and manifest.is_baseline,
        anchor=manifest.anchor,
    )


def started_at(run_id: str) -> datetime | None:
    """The time in a run's id; None if it has none."""
    try:
        return datetime.strptime(run_id.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
