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
from vllm_qualify.evidence.stages.paths import PATHS_STAGE
from vllm_qualify.evidence.stages.serve import SERVE
from vllm_qualify.evidence.stages.smoke import SMOKE
from vllm_qualify.evidence.stages.soak import SOAK
from vllm_qualify.evidence.stages.speculation import SPECULATION
from vllm_qualify.evidence.stages.stage import Stage
from vllm_qualify.evidence.stages.starts import STARTS
from vllm_qualify.evidence.stages.sweep import SWEEP
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import StageName

_IN_ORDER = (FIT, BASELINE, SERVE, SMOKE, CONTRACT, ACCURACY, LIKELIHOOD, LOAD, PATHS_STAGE, SPECULATION, SWEEP, SOAK, STARTS)
TABLE: dict[StageName, Stage] = {kind.name: kind for kind in _IN_ORDER}


def wanted_stages(plan: CellPlan) -> list[StageName]:
    """All stages of a plan's run."""
    return [name for name, kind in TABLE.items() if kind.is_wanted(plan)]


def on_the_server(plan: CellPlan) -> list[StageName]:
    """The stages of a plan's run that are measured while its server runs."""
    return [name for name in wanted_stages(plan) if TABLE[name].needs_server(plan)]


def parse(stage: StageName, plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The measurements of a finished stage from its files alone."""
    return TABLE[stage].measurements(plan, evidence)


def parse_unfinished(stage: StageName, plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The measurements so far of a stage that is still running. The machine is not checked: it is recorded at the end."""
    return TABLE[stage].parse(plan, evidence)


def taken_over(stage: StageName, plan: CellPlan, evidence: Path, other: Path, finished: list[StageEvidence]) -> StageEvidence:
    """Take a stage over from another cell, whose evidence folder is `other`, as this cell's own. Raises HostError."""
    (theirs,) = (each for each in finished if each.stage == stage)
    with writing(stage):
        shutil.copytree(other / stage, evidence / stage)
    return judged_by(theirs, plan, evidence)


def judged_by(stage: StageEvidence, plan: CellPlan, evidence: Path) -> StageEvidence:
    """The stage as that of the plan's run: its files were copied into `evidence`, and are parsed by the plan."""
    return stage.model_copy(update={"measurements": parse(stage.stage, plan, evidence), "run_id": plan.run_id})
