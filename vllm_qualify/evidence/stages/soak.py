"""The soak stage: a part of the load for a long time, after the loads."""

from pathlib import Path
from typing import Any

from vllm_qualify.evidence.load import soak
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.stages.stage import Stage, inputs_of, keep_watched, settled
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.plan.cell import CellPlan

NO_SOAK = "the profile has no soak"


class SoakStage(Stage, name="soak", is_timed=True, uses_bench=True):
    """What a server does that is busy for long: what memory grows, which latencies rise, what fails."""

    def is_wanted(self, plan: CellPlan) -> bool:
        return plan.soak is not None

    def settings(self, plan: CellPlan) -> dict[str, dict[str, Any]]:
        return {"soak": plan.soak.model_dump()} if plan.soak else {}

    def inputs(self, plan: CellPlan) -> Any:
        return [inputs_of(plan.load), inputs_of(plan.soak)]

    def measure(self, world: World, folder: Path) -> Commands:
        settings = settled(world.plan.soak, NO_SOAK)
        with keep_watched(world.plan, world.evidence, folder):
            return soak.measure_soak(world.served.driven(world.plan), world.plan.load, settings, folder, world.tell)

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        settings = settled(plan.soak, NO_SOAK)
        return soak.parse_soak(evidence / soak.STAGE, plan.load, settings, plan.server, levels_for(plan))


SOAK = SoakStage()
