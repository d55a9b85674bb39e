"""The contract stage: it asks for each check of the API's contract."""

from pathlib import Path
from typing import Any

from vllm_qualify.evidence.contract import checks, measure
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.stages.stage import Stage, inputs_of, settled
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.plan.cell import CellPlan

NO_CONTRACT = "the run has no contract"


class ContractStage(Stage, name="contract", is_timed=False):
    """What everyone relies on, and what the recipe's capabilities promise."""

    def is_wanted(self, plan: CellPlan) -> bool:
        return plan.contract is not None

    def settings(self, plan: CellPlan) -> dict[str, dict[str, Any]]:
        if plan.contract is None:
            return {}
        promised = {"capabilities": ", ".join(plan.contract.capabilities)} if plan.contract.capabilities else {}
        not_asked = {f"not asked: {name}": reason for name, reason in plan.contract.not_asked.items()}
        return {"contract": promised | not_asked}

    def inputs(self, plan: CellPlan) -> Any:
        return [inputs_of(plan.contract), plan.smoke.prompt]

    def measure(self, world: World, folder: Path) -> Commands:
        contract = settled(world.plan.contract, NO_CONTRACT)
        measure.measure_contract(world.served.server, contract, world.plan.smoke.prompt, folder)
        return []

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        contract = settled(plan.contract, NO_CONTRACT)
        return checks.parse_contract(evidence / "contract", contract, plan.server.served_model_name, plan.server.engine_kind)


CONTRACT = ContractStage()
