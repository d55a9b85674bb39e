"""What the indexes hold: of a cell its newest reports, and of all cells a few words each."""

from datetime import date, datetime
from typing import Literal

from vllm_qualify.approval.pointer import Entry
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.judge.verdict import Outcome
from vllm_qualify.publish.bundle import ReleaseTry, Score, Summary
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
    sequence: Count | None = None
    outcome: Outcome
    started_at: datetime | None = None
    standing: Standing
    told: str | None = None
    summary: Summary | None = None
    tried: ReleaseTry | None = None

    @property
    def engine(self) -> str | None:
        """`vLLM 0.32.0`"""
        return f"{KINDS[self.summary.engine].title} {self.summary.engine_version}" if self.summary else None


class ChainLink(Frozen):
    """One approved run, with what its manifest says of it."""

    run_id: str
    score: Score | None = None
    establishes: bool = False
    new_anchor: bool = False
    anchor: str | None = None
    revoked: bool = False


class Row(Frozen):
    """The index of one cell. `last` is its last approval, whatever its state is.

    `reports` are the newest reports, the newest first. The approved one follows if it is not among them. `baseline` is the
    newest run that passed and was made to be a baseline. `coming` are runs whose publication began: each is published whole
    if it has a manifest; one whose manifest cannot be read is among the `unreadable`. `chain` has all approved baselines and
    the newest other approved runs, the oldest first. `revision` grows with each write, because a store may identify an object
    by its content alone.
    """

    index_version: Literal[4] = INDEX_VERSION
    revision: int = 0
    cell: str
    coming: list[str] = []
    unreadable: list[str] = []
    baseline: Numbered | None = None
    last: Entry | None = None
    reports: list[ReportLine] = []
    chain: list[ChainLink] = []

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
    engine: str | None = None
    tries: Count | None = None


class Brief(Frozen):
    """A cell in the index of all cells, as its own index says it at `revision`.

    `reports` are the newest report and, after it, those that wait for a decision. `engine` is the engine that the cell's state
    is about.
    """

    cell: str
    revision: int
    last: BriefApproval | None = None
    engine: str | None = None
    reports: list[BriefReport] = []


class Index(Frozen):
    """The index of all cells. `revision` grows with each write."""

    index_version: Literal[4] = INDEX_VERSION
    revision: int = 0
    cells: list[Brief] = []


def brief(row: Row) -> Brief:
    """The row of the index of all cells."""
    waiting = [line for line in row.reports[1:] if line.standing == "waiting for a decision"]
    return Brief(
        cell=row.cell,
        revision=row.revision,
        last=_approval(row.last) if row.last else None,
        engine=row.subject.engine if row.subject else None,
        reports=[_report(line) for line in [*row.reports[:1], *waiting][:MOST_REPORTS]],
    )


def _approval(entry: Entry) -> BriefApproval:
    return BriefApproval(
        run_id=entry.run_id, by=entry.by, at=entry.at, expires=entry.expires, is_revoked=entry.revoked is not None
    )


def _report(line: ReportLine) -> BriefReport:
    fields = line.model_dump(include={"run_id", "outcome", "started_at", "standing"})
    return BriefReport(**fields, engine=line.engine, tries=line.tried.number if line.tried else None)
