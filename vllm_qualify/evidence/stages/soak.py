"""The soak stage: a part of the load for a long time, after the loads."""

from pathlib import Path
from typing import Any

from vllm_qualify.engine.process import Tell
from vllm_qualify.evidence.load import soak
from vllm_qualify.evidence.measurement import Measurement, StageEvidence
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages import bench
from vllm_qualify.evidence.stages.stage import Commands, StageKind, dumped, order_s
from vllm_qualify.evidence.watched import watched_in
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.workload import Soak


def soak_stage(served: Served, plan: CellPlan, evidence: Path, tell: Tell) -> StageEvidence:
    """Soak the server. Raises QualifyError as `soak.measure_soak`."""

    def measure(folder: Path) -> Commands:
        with bench.meanwhile(plan, evidence, folder):
            return soak.measure_soak(served.driven(plan), plan.load, _planned(plan), folder, tell)

    return SOAK.run(plan, evidence, measure, bench.bench_tools(plan))


def _planned(plan: CellPlan) -> Soak:
    if plan.soak is None:
        raise ValueError("the profile has no soak")
    return plan.soak


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    server, folder = plan.server, evidence / soak.STAGE
    of = soak.Of(plan.load, _planned(plan), server.kind, server.gpus, server.served_model_name)
    return soak.parse_soak(folder, of, levels_for(plan), watched_in(folder, evidence / "serve"))


def _settings(plan: CellPlan) -> dict[str, dict[str, Any]]:
    return {"soak": plan.soak.model_dump()} if plan.soak else {}


def _longest_s(plan: CellPlan) -> float:
    """The prompts that are made ahead come to an end, a first run, the soak, and a round that begins at its end."""
    return 0.0 if plan.soak is None else plan.soak.duration_s + 3 * order_s(plan.load.time_limit_s)


SOAK = StageKind(
    name="soak",
    is_wanted=lambda plan: plan.soak is not None,
    needs_server=lambda _: True,
    is_timed=True,
    uses_bench=True,
    grows=False,
    settings=_settings,
    inputs=lambda plan: [dumped(plan.load), dumped(plan.soak)],
    longest_s=_longest_s,
    parse=_parse,
)
