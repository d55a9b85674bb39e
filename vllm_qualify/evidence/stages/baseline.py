"""The baseline stage: it brings the evidence of the run that this one is compared with."""

from collections.abc import Callable
from pathlib import Path

from vllm_qualify.evidence.measurement import Measurement, StageEvidence
from vllm_qualify.evidence.stages.stage import Stage
from vllm_qualify.evidence.stages.world import Commands
from vllm_qualify.plan.cell import CellPlan


class BaselineStage(Stage, name="baseline", is_timed=False, is_reusable=False, on_server=False):
    """The evidence of another run. Every run brings it again: that is cheap, and the store has it anyway."""

    def is_wanted(self, plan: CellPlan) -> bool:
        return plan.baseline is not None

    def bring(self, plan: CellPlan, evidence: Path, bring: Callable[[Path], None]) -> StageEvidence:
        """Let `bring` put the evidence of the run that this one is compared with into the stage's folder."""

        def measure(folder: Path) -> Commands:
            bring(folder)
            return []

        return self.record(plan, evidence, measure)

    def parse(self, _plan: CellPlan, _evidence: Path) -> list[Measurement]:
        return []


BASELINE = BaselineStage()
