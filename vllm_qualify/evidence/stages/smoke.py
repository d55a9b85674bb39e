"""The smoke stage: it asks the fixed prompt."""

from pathlib import Path
from typing import Any

from vllm_qualify.evidence import smoke
from vllm_qualify.evidence.measurement import Measurement, StageEvidence
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages.stage import Commands, StageKind, dumped
from vllm_qualify.plan.cell import CellPlan


def smoke_stage(served: Served, plan: CellPlan, evidence: Path) -> StageEvidence:
    """Ask the fixed prompt. Raises ReleaseError if the server has ended."""

    def measure(folder: Path) -> Commands:
        smoke.measure_smoke(served.server, plan.smoke, folder)
        return []

    return SMOKE.run(plan, evidence, measure, {})


def _settings(plan: CellPlan) -> dict[str, dict[str, Any]]:
    return {"smoke": plan.smoke.model_dump() | {"golden text": plan.smoke_golden}}


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    return smoke.parse_smoke(evidence / "smoke", plan.smoke, plan.server.names, plan.smoke_golden)


SMOKE = StageKind(
    name="smoke",
    is_wanted=lambda _: True,
    needs_server=lambda _: True,
    is_timed=False,
    uses_bench=False,
    grows=False,
    settings=_settings,
    inputs=lambda plan: dumped(plan.smoke),
    # The list of models, and the prompt each time.
    longest_s=lambda plan: (1 + smoke.ASKS) * plan.smoke.time_limit_s,
    parse=_parse,
)
