"""The p-values of a judgement's gates, from the evidence that was judged."""

from pathlib import Path

from vllm_qualify.evidence.sequential import Levels, at_levels
from vllm_qualify.evidence.stages.table import parse
from vllm_qualify.judge.chance import p_value
from vllm_qualify.judge.compare.gates import compare
from vllm_qualify.judge.compare.speedup import speedup
from vllm_qualify.judge.verdict import GateVerdict, Judgement, is_missed, surely_misses
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import METRICS


def with_p_values(judgement: Judgement, plan: CellPlan, evidence: Path) -> Judgement:
    """The judgement, in which each gate with noise that fails or is undecided has its p-value. No verdict changes by it."""
    gates = [_with_p_value(verdict, judgement.levels, plan, evidence) for verdict in judgement.gates]
    return judgement.model_copy(update={"gates": gates})


def _with_p_value(verdict: GateVerdict, levels: Levels, plan: CellPlan, evidence: Path) -> GateVerdict:
    gate, value = verdict.gate, verdict.value
    if not gate.has_noise or verdict.interval is None or verdict.verdict not in ("fail", "inconclusive"):
        return verdict

    def still_fails(chance: float) -> bool:
        with at_levels(levels.model_copy(update={"false_fail": chance})):
            measured = parse(METRICS[gate.metric].stage, plan, evidence)
            compared = compare(plan, evidence, measured, [gate])
            return surely_misses(gate, [*measured, *compared, *speedup(plan, evidence, measured)])

    # If the value itself meets the bound, no chance below a half would fail the gate.
    p = p_value(still_fails) if value is not None and is_missed(gate, value, value) else 1.0
    return verdict.model_copy(update={"p_value": p})
