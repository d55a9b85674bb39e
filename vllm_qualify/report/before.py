"""The run that a cell is compared with: the parts of it that are shown beside the cell's own."""

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from vllm_qualify.drift import finding as drift
from vllm_qualify.drift.finding import Finding
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.load import figures
from vllm_qualify.evidence.load.sweep import CurvePoint
from vllm_qualify.evidence.measurement import Measurement, StageEvidence
from vllm_qualify.evidence.stages.load import parse_beside
from vllm_qualify.judge.compare.places import ACCURACY_STAGE, ANCHOR, BASELINE
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.serving import VLLM
from vllm_qualify.recipe.tables import table_of
from vllm_qualify.recipe.values import Frozen


class Before(Frozen):
    """How the baseline was served, and its measurements. Its load may have been measured again, alternating with ours."""

    run_id: str
    judged_at: datetime
    server: ServerPlan
    measurements: list[Measurement] = []
    load_measured: Literal["then", "in turns"] = "then"
    curve: list[CurvePoint] = []


class Drift(Frozen):
    """What the table of a vLLM version says about the options and names of the server.

    `since` is the baseline's version if it is another one: defaults that the recipe does not set may have changed since then.
    """

    version: str
    since: str | None = None
    findings: list[Finding] = []


class _Sweep(BaseModel):
    curve: list[CurvePoint] = []


class _Details(BaseModel):
    sweep: _Sweep | None = None


class _Report(BaseModel):
    """The parts of the baseline's report that are read."""

    run_id: str
    created_at: datetime
    plan: CellPlan
    stages: list[StageEvidence]
    details: _Details = _Details()


def read_before(plan: CellPlan, evidence: Path) -> Before | None:
    """The baseline, read from its copied report; None without a baseline. Raises one of UNUSABLE if it cannot be read."""
    if plan.baseline is None:
        return None
    report = _Report.model_validate_json((evidence / BASELINE / "report.json").read_bytes())
    if report.run_id != plan.baseline.run_id:
        raise ValueError(f"the report is of run {report.run_id}")
    beside = parse_beside(plan, evidence)
    others = [row for stage in report.stages for row in stage.measurements if not (beside and stage.stage == figures.STAGE)]
    return Before(
        run_id=report.run_id,
        judged_at=report.created_at,
        server=report.plan.server,
        measurements=[row.model_copy(update={"traced_to": []}) for row in [*others, *beside]],
        load_measured="in turns" if beside else "then",
        curve=report.details.sweep.curve if report.details.sweep else [],
    )


def read_anchor(plan: CellPlan, evidence: Path) -> list[Measurement] | None:
    """The anchor's own scores; None without an anchor. Raises one of UNUSABLE if they cannot be read."""
    if plan.anchor is None:
        return None
    stage = StageEvidence.model_validate_json((evidence / BASELINE / ANCHOR / ACCURACY_STAGE).read_bytes())
    return [row.model_copy(update={"traced_to": []}) for row in stage.measurements]


def find_drift(plan: CellPlan) -> Drift | None:
    """The drift, by the catalog's tables alone; None if the engine is not vLLM. Raises CallerError if a table is missing."""
    if plan.server.kind != VLLM:
        return None
    engine, server = plan.cell.release.engine, plan.server
    then = plan.baseline.cell.release.engine if plan.baseline else engine
    since = then.version if then.kind == VLLM and then.version != engine.version else None
    now = table_of(engine.version)
    changed = drift.changed_defaults(server.arguments, table_of(since), now) if since else []
    findings = [*drift.check_server(server.arguments, server.environment, now), *changed]
    return Drift(version=now.version, since=since, findings=findings)
