"""The smoke stage: it asks the fixed prompt, and one that is drawn for the run."""

from pathlib import Path
from typing import Any

from vllm_qualify.evidence import smoke
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.stages.stage import Stage, inputs_of
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.plan.cell import CellPlan


class Smoke(Stage, name="smoke", is_timed=False):
    """The fixed prompt and a drawn one, each asked twice, and the list of models."""

    def settings(self, plan: CellPlan) -> dict[str, dict[str, Any]]:
        return {"smoke": plan.smoke.model_dump() | {"golden text": plan.smoke_golden}}

    def inputs(self, plan: CellPlan) -> Any:
        return [inputs_of(plan.smoke), bool(plan.drawn)]

    def measure(self, world: World, folder: Path) -> Commands:
        smoke.measure_smoke(world.served.server, world.plan.smoke, folder, world.plan.drawn)
        return []

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        has_drawn = bool(plan.drawn)
        return smoke.parse_smoke(evidence / "smoke", plan.smoke, plan.server.names, plan.smoke_golden, has_drawn=has_drawn)


SMOKE = Smoke()
