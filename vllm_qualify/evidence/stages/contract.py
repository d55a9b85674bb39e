"""The contract stage: it asks for each check of the API's contract."""

from pathlib import Path
from typing import Any

from vllm_qualify.evidence.contract import asking, checks
from vllm_qualify.evidence.measurement import Measurement, StageEvidence
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages.stage import Commands, StageKind, dumped
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.contract import Contract


def contract_stage(served: Served, plan: CellPlan, evidence: Path) -> StageEvidence:
    """Ask the server for what its contract has. Raises QualifyError."""

    def measure(folder: Path) -> Commands:
        asking.measure_contract(served.server, _contract(plan), plan.smoke.prompt, folder)
        return []

    return CONTRACT.run(plan, evidence, measure, {})


def _contract(plan: CellPlan) -> Contract:
    if plan.contract is None:
        raise ValueError("the run has no contract")
    return plan.contract


def _settings(plan: CellPlan) -> dict[str, dict[str, Any]]:
    if plan.contract is None:
        return {}
    promised = {"capabilities": ", ".join(plan.contract.capabilities)} if plan.contract.capabilities else {}
    not_asked = {f"not asked: {name}": reason for name, reason in plan.contract.not_asked.items()}
    return {"contract": promised | not_asked}


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    model, kind = plan.server.served_model_name, plan.server.engine_kind
    return checks.parse_contract(evidence / "contract", _contract(plan), model, kind)


CONTRACT = StageKind(
    name="contract",
    is_wanted=lambda plan: plan.contract is not None,
    needs_server=lambda _: True,
    is_timed=False,
    uses_bench=False,
    grows=False,
    settings=_settings,
    inputs=lambda plan: [dumped(plan.contract), plan.smoke.prompt],
    longest_s=lambda plan: asking.longest_s(plan.contract) if plan.contract else 0.0,
    parse=_parse,
)
