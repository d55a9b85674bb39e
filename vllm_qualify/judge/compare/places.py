"""Where the evidence of a cell has the parts of its baseline and of its anchor, and what each side measured for a gate."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.evidence.accuracy import lm_eval_process
from vllm_qualify.evidence.measurement import Measurement, StageEvidence
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.gates import Gate, label_of
from vllm_qualify.recipe.metrics import StageName

BASELINE, LOAD_STAGE, STARTS_STAGE = "baseline", "load.json", "starts.json"
# The baseline's stages that are compared by their measurements, each with its file in the folder `baseline`.
MEASURED: dict[StageName, str] = {"load": LOAD_STAGE, "starts": STARTS_STAGE}
# The folder of the anchor's answers, in the baseline's; and its stages with its scores, each with its file there.
ANCHOR, ACCURACY_STAGE = "anchor", "accuracy.json"
ANCHORED: dict[StageName, str] = {"accuracy": ACCURACY_STAGE, "starts": STARTS_STAGE}


def answers_path(task: str) -> str:
    """The path of a task's answers: the cell's own in the evidence folder, and the baseline's in its folder `baseline/`."""
    return f"accuracy/{task}/{lm_eval_process.ANSWERS}"


def is_answers(path: str, task: str) -> bool:
    """Whether a file of the evidence has a task's answers, of any start."""
    return re.fullmatch(rf"(starts/\d+/)?{re.escape(answers_path(task))}", path) is not None


class OtherRun(NamedTuple):
    """The run whose answers are compared with the cell's."""

    word: str
    folder: str
    """its folder in the baseline's"""
    accuracy: Sequence[Accuracy]

    def answers_path(self, task: str) -> str:
        return f"{self.folder}{answers_path(task)}"


def find_other_run(gate: Gate, plan: CellPlan) -> OtherRun:
    if gate.is_against_anchor:
        return OtherRun("anchor", f"{ANCHOR}/", plan.held_against.accuracy)
    return OtherRun("baseline", "", plan.compared_with.accuracy)


class UnlikeError(ValueError):
    """The measurements of the cell and of its baseline are not alike."""

    def __repr__(self) -> str:
        return str(self)


def find_task(plan: CellPlan, gate: Gate) -> TaskPlan:
    """The task of a gate. Raises UnlikeError if it was not asked."""
    for task in plan.accuracy:
        if task.name == gate.task:
            return task
    raise UnlikeError(f"the run was not asked {gate.task}")


def largest_loss(gate: Gate) -> float:
    """The largest loss that a gate allows. Raises ValueError if it does not say."""
    if gate.limits.at_most is None:
        raise ValueError(f"{gate.label} does not say what may be lost at most")
    return gate.limits.at_most


def own_label(gate: Gate) -> str:
    """The label of the gate's metric itself, without the other run."""
    return label_of(gate.metric, gate.task, gate.filter, against_baseline=False)


def find_first_start(gate: Gate, measurements: Sequence[Measurement]) -> Measurement:
    """The cell's own measurement, which must be valid to be compared. Raises ValueError if there is none."""
    before_filters = label_of(gate.metric, gate.task, None, against_baseline=False)
    rows = [measurement for measurement in measurements if measurement.label in (own_label(gate), before_filters)]
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} measurements of {own_label(gate)}")
    return rows[0]


def find_further_starts(gate: Gate, measurements: Iterable[Measurement]) -> list[Measurement]:
    """What further starts measured for a gate. A start that failed before its filter was known counts for all filters."""
    rows = [row for row in measurements if row.start and (row.metric, row.task) == (gate.metric, gate.task)]
    return [row for row in rows if row.filter in (gate.filter, None)]


def read_further_starts(folder: Path, gate: Gate) -> list[Measurement]:
    """What further starts of another run measured for a gate; empty if there were none. Raises one of UNUSABLE."""
    path = folder / STARTS_STAGE
    measurements = StageEvidence.model_validate_json(path.read_bytes()).measurements if path.exists() else []
    return find_further_starts(gate, measurements)
