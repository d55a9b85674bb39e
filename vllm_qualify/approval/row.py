"""The rows of the index: a cell, its approval and its newest reports."""

from datetime import datetime
from typing import Literal

from vllm_qualify.approval.pointer import Entry
from vllm_qualify.judge.verdict import Outcome
from vllm_qualify.publish.bundle import Summary
from vllm_qualify.recipe.values import Frozen

INDEX_VERSION: Literal[3] = 3

Standing = Literal["approved", "superseded", "revoked", "rejected", "waiting for a decision", "not passed"]
"""The state of a report. An expired approval is still `approved` here, because expiry depends on the day."""


class ReportLine(Frozen):
    """One report. `started_at` comes from the run's id; None if the id has no time. `told` says who decided what about it."""

    run_id: str
    outcome: Outcome
    started_at: datetime | None = None
    standing: Standing
    told: str | None = None
    summary: Summary | None = None


class Row(Frozen):
    """One cell. `last` is its last approval, whatever its state is.

    `reports` are the newest reports, the newest first. The approved one follows if it is not among them.
    """

    cell: str
    last: Entry | None = None
    reports: list[ReportLine]


class Index(Frozen):
    """All rows. `revision` grows with each write, because a store may identify an object by its content alone."""

    revision: int = 0
    index_version: Literal[3] = INDEX_VERSION
    cells: list[Row] = []
