"""A run that ended with an error, as JSON and as a page for people: who must act, what to do, and what the log said."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.errors import QualifyError
from vllm_qualify.plan.cell import Cell, CellPlan
from vllm_qualify.recipe.metrics import STAGES, StageName
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.rerun import rerun
from vllm_qualify.report.templates import template
from vllm_qualify.secrets import redact

STEPS = ("check", *STAGES, "judge", "publish")
MOST_LINES, LONGEST_LINE, LONGEST_TEXT, MOST_FILES = 40, 1000, 4000, 200
CUT = " …"


class RawFile(Frozen):
    """A file of the run, `path` relative to the run's folder."""

    path: str
    size: int


class RunFailure(Frozen):
    """Why a run has no report.

    `stage` and `kind` are null if the error does not name them. `retry` says whether a retry may succeed; it is null if `kind`
    is. `lines` are the lines of the log that show the error. `lines_left_out` and `files_left_out` are counts. `rerun` is the
    command for only this cell. `ended_with` are other runs on the same server that have no report either.
    """

    failure_version: Literal[1] = 1
    made_by: str
    ended_at: datetime
    run_id: str
    cell: Cell
    fingerprint: Fingerprint
    stage: str | None
    place: str
    kind: str | None
    whose_turn: str
    problem: str
    remedy: str
    retry: bool | None
    lines: list[str]
    lines_left_out: int
    finished: list[StageName]
    ended_with: list[str]
    files: list[RawFile]
    files_left_out: int
    rerun: list[str]


def run_failure(
    error: QualifyError, plan: CellPlan, folder: Path, finished: Sequence[StageName] = (), ended_with: Sequence[str] = ()
) -> RunFailure:
    """The failure of the run in `folder` by `error`, without secrets. Raises OSError if its files cannot be listed."""
    lines = [line for text in error.log_tail for line in text.splitlines()]
    paths = sorted(path for path in (folder / "plan.json", *(folder / "evidence").rglob("*")) if path.is_file())
    return RunFailure(
        made_by=f"vllm-qualify {metadata.version('vllm-qualify')}",
        ended_at=datetime.now(UTC),
        run_id=plan.run_id,
        cell=plan.cell,
        fingerprint=plan.fingerprint,
        stage=_stage_of_place(error.place),
        place=_shorten_text(error.place, LONGEST_LINE),
        kind=error.kind or None,
        whose_turn=error.who_acts,
        problem=_shorten_text(error.problem, LONGEST_TEXT),
        remedy=_shorten_text(error.remedy, LONGEST_TEXT),
        retry=error.retry if error.kind else None,
        lines=[_shorten_text(line, LONGEST_LINE) for line in lines[:MOST_LINES]],
        lines_left_out=max(0, len(lines) - MOST_LINES),
        finished=list(finished),
        ended_with=list(ended_with),
        files=[RawFile(path=path.relative_to(folder).as_posix(), size=path.stat().st_size) for path in paths[:MOST_FILES]],
        files_left_out=max(0, len(paths) - MOST_FILES),
        rerun=rerun(plan, anew=False),
    )


def render_failure(failure: RunFailure) -> str:
    """The page of `failure`, for the run's folder. All outside text is escaped, and scripts and requests are forbidden."""
    page = template(__package__, "failure.html.jinja")
    return page.render(failure=failure, cell=failure.cell, release=failure.cell.release)


def _stage_of_place(place: str) -> str | None:
    """The stage of a place like `serve`, `accuracy.gsm8k` or `fit/try-1`: its first part. A path or an address has no stage."""
    first = re.split(r"[./]", place, maxsplit=1)[0]
    return first if first in STEPS else None


def _shorten_text(text: str, most: int) -> str:
    shown = redact(text)
    return shown if len(shown) <= most else f"{shown[:most]}{CUT}"
