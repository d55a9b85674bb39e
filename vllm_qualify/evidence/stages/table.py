"""The table of the stages, in the order of reports. Other modules look a stage up here."""

import shutil
from pathlib import Path

from vllm_qualify.errors import writing
from vllm_qualify.evidence.measurement import Measurement, StageEvidence
from vllm_qualify.evidence.stages.accuracy import ACCURACY
from vllm_qualify.evidence.stages.baseline import BASELINE
from vllm_qualify.evidence.stages.contract import CONTRACT
from vllm_qualify.evidence.stages.fit import FIT
from vllm_qualify.evidence.stages.likelihood import LIKELIHOOD
from vllm_qualify.evidence.stages.load import LOAD
from vllm_qualify.evidence.stages.serve import SERVE
from vllm_qualify.evidence.stages.smoke import SMOKE
from vllm_qualify.evidence.stages.soak import SOAK
from vllm_qualify.evidence.stages.speculation import SPECULATION
from vllm_qualify.evidence.stages.stage import StageKind
from vllm_qualify.evidence.stages.starts import STARTS
from vllm_qualify.evidence.stages.sweep import SWEEP
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import Stage

_IN_ORDER = (FIT, BASELINE, SERVE, SMOKE, CONTRACT, ACCURACY, LIKELIHOOD, LOAD, SPECULATION, SWEEP, SOAK, STARTS)
TABLE: dict[Stage, StageKind] = {kind.name: kind for kind in _IN_ORDER}
# What a stage does besides its waits: parsing at each look, copying, hashing. And keeping it in a store that does not answer:
# five tries of a quarter of an hour each, with their waits 80 minutes.
MARGIN_S = 2 * 3600.0


def wanted(plan: CellPlan) -> list[Stage]:
    """All stages of a plan's run."""
    return [name for name, kind in TABLE.items() if kind.is_wanted(plan)]


def on_the_server(plan: CellPlan) -> list[Stage]:
    """The stages of a plan's run that are measured while its server runs."""
    return [name for name in wanted(plan) if TABLE[name].needs_server(plan)]


def longest_s(plan: CellPlan, stage: Stage) -> float:
    """How long a stage may take, in s. No stage takes as long in which everything that it waits for keeps its own limit."""
    return TABLE[stage].longest_s(plan) + MARGIN_S


def parse(stage: Stage, plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The measurements of a finished stage from its files alone."""
    return TABLE[stage].measurements(plan, evidence)


def parse_unfinished(stage: Stage, plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The measurements so far of a stage that is still running. The machine is not checked: it is recorded at the end."""
    return TABLE[stage].parse(plan, evidence)


def taken_over(stage: Stage, plan: CellPlan, evidence: Path, other: Path, finished: list[StageEvidence]) -> StageEvidence:
    """Take a stage over from another cell, whose evidence folder is `other`, as this cell's own."""
    (theirs,) = (each for each in finished if each.stage == stage)
    with writing(stage):
        shutil.copytree(other / stage, evidence / stage)
    return judged_by(theirs, plan, evidence)


def judged_by(stage: StageEvidence, plan: CellPlan, evidence: Path) -> StageEvidence:
    """The stage as that of the plan's run: its files were copied into `evidence`, and are parsed by the plan."""
    measurements = parse(stage.stage, plan, evidence)
    return stage.model_copy(update={"measurements": measurements, "run_id": plan.run_id})
