"""Compares the cell with its baseline and its anchor: measurements of what was lost, from the evidence of both.

Both must be alike: the same questions with the same prompts, and the same load by the same client on the same machine type.
Otherwise the comparison is invalid and says what differs.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid
from vllm_qualify.judge.compare.answers import compare_answers
from vllm_qualify.judge.compare.likelihoods import compare_likelihoods
from vllm_qualify.judge.compare.loads import BaselineLoad, baseline_load_reader, compare_loads, find_unsteadiness
from vllm_qualify.judge.compare.places import find_first_start, find_further_starts
from vllm_qualify.judge.compare.tokens import compare_tokens
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate


def compare(
    plan: CellPlan, evidence: Path, measurements: Sequence[Measurement], gates: Sequence[Gate] | None = None
) -> list[Measurement]:
    """One measurement for each judged gate that is against another run, of `gates` or else of all."""
    judged = plan.judged_gates if plan.is_compared else []
    comparing = [gate for gate in judged if gate.is_compared and (gates is None or gate in gates)]
    # Both are read once for all gates.
    baseline_load = cache(baseline_load_reader(plan, evidence))
    unsteady = cache(partial(find_unsteadiness, plan, evidence, measurements, baseline_load))
    return [_compare_gate(gate, plan, evidence, measurements, baseline_load, unsteady) for gate in comparing]


def _compare_gate(
    gate: Gate,
    plan: CellPlan,
    evidence: Path,
    measurements: Sequence[Measurement],
    baseline_load: BaselineLoad,
    unsteady: Callable[[], str | None],
) -> Measurement:
    other = plan.held_against if gate.is_against_anchor else plan.compared_with
    about: dict[str, Any] = {"task": gate.task, "filter": gate.filter, "against_anchor": gate.is_against_anchor}
    about["against"] = other.run_id
    try:
        ours, further = find_first_start(gate, measurements), find_further_starts(gate, measurements)
        if ours.invalid_because is not None:
            return invalid(gate.metric, ours.invalid_because, ours.source, **about)
        if spoiled := next((row for row in further if row.invalid_because), None):
            return invalid(gate.metric, f"start {spoiled.start}: {spoiled.invalid_because}", spoiled.source, **about)
        match gate.against:
            case "answers" | "anchor":
                return compare_answers(gate, plan, evidence, about)
            case "tokens":
                return compare_tokens(gate, plan, evidence, about)
            case "load":
                if problem := unsteady():
                    return invalid(gate.metric, problem, ours.source, **about)
                return compare_loads(gate, plan, evidence, [ours, *further], baseline_load, about)
            case "likelihood":
                return compare_likelihoods(gate, plan, evidence, ours, about)
            case None:
                raise ValueError(f"{gate.label} is a gate on the metric itself")
    except UNUSABLE as error:
        return invalid(gate.metric, f"no usable comparison: {in_words(error)}", "", **about)
