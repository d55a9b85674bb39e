"""The baseline stage: it brings the evidence of the run that this one is compared with."""

from collections.abc import Callable
from pathlib import Path

from vllm_qualify.evidence.measurement import StageEvidence
from vllm_qualify.evidence.stages.stage import Commands, StageKind
from vllm_qualify.plan.cell import CellPlan


def baseline_stage(plan: CellPlan, evidence: Path, bring: Callable[[Path], None]) -> StageEvidence:
    """Let `bring` put the evidence of the run that this one is compared with into the stage's folder."""

    def measure(folder: Path) -> Commands:
        bring(folder)
        return []

    return BASELINE.run(plan, evidence, measure, {})


BASELINE = StageKind(
    name="baseline",
    is_wanted=lambda plan: plan.baseline is not None,
    needs_server=lambda _: False,
    is_timed=False,
    uses_bench=False,
    grows=False,
    settings=lambda _: {},
    # Every run brings it again: that is cheap, and the store has it anyway.
    inputs=None,
    # It waits for the store alone.
    longest_s=lambda _: 0.0,
    parse=lambda _plan, _evidence: [],
)
