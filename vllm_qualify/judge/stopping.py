"""Decides when a stage has measured enough: all its gates are decided, or more measurements would not help."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from vllm_qualify.evidence import starts
from vllm_qualify.evidence.accuracy import blocks, measurements, samples
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement
from vllm_qualify.evidence.stages.table import parse_unfinished
from vllm_qualify.judge import loads
from vllm_qualify.judge.compare.enough import (
    is_known_of_baseline,
    knows_enough,
    needs_no_start,
    paired_gates,
    repetitions_to_establish,
)
from vllm_qualify.judge.compare.gates import compare
from vllm_qualify.judge.compare.loads import loads_of_gate, why_no_time
from vllm_qualify.judge.compare.places import UnlikeError
from vllm_qualify.judge.verdict import is_decided, measurements_of, surely_misses
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS


def accuracy_decided(plan: CellPlan, evidence: Path, task: TaskPlan) -> bool:
    """Whether more answers of the task would not change the cell's verdict. For that, one gate that surely fails is enough."""
    if task.least_repetitions > 1 and not _all_were_asked(evidence, task, task.least_repetitions):
        return False
    gates = [gate for gate in _deciding_gates(plan) if METRICS[gate.metric].stage == "accuracy" and gate.task == task.name]
    measured = [row for row in parse_unfinished("accuracy", plan, evidence) if row.task == task.name]
    paired = paired_gates(plan, task)
    known = [*measured, *compare(plan, evidence, measured, gates)]
    if any(surely_misses(gate, known) for gate in gates):
        return True
    if plan.establishes and paired and not _is_established(plan, evidence, task, paired):
        return False
    # To ask the same questions again would only help a comparison of scores. No question is asked for the anchor alone. What a
    # baseline's own comparison needs beyond its part is asked on further starts.
    on_others = plan.establishes and plan.starts > starts.FIRST
    waiting = [gate for gate in gates if not gate.is_against_anchor and not (on_others and gate.against == "answers")]
    if _all_were_asked(evidence, task):
        waiting = [gate for gate in waiting if gate.against == "answers"]
    else:
        # A filter that has found no answer so far may find one in a later reply.
        reasons = [row.invalid_because or "" for gate in waiting for row in measurements_of(gate, known)]
        if any(measurements.FOUND_NOTHING in reason for reason in reasons):
            return False
    return all(is_decided(gate, known) for gate in waiting) or (bool(paired) and knows_enough(plan, evidence, task))


def _all_were_asked(evidence: Path, task: TaskPlan, times: int = 1) -> bool:
    done = blocks.read_finished(evidence / "accuracy" / task.name, task)
    return sum(len(step.questions) for step in done) >= times * task.settings.num_questions


def load_undecided(plan: CellPlan, evidence: Path) -> list[str]:
    """The gates that more repeats of the load could decide. Empty if one gate surely fails, whatever the others say.

    Gates that further starts of the server decide need another repeat only if those so far are noisy.
    """
    gates = [gate for gate in _deciding_gates(plan) if METRICS[gate.metric].stage == "load"]
    measured = parse_unfinished("load", plan, evidence)
    known = [*measured, *compare(plan, evidence, measured, gates)]
    if any(surely_misses(gate, known) for gate in gates):
        return []
    over_starts = [gate for gate in gates if gate.is_over_starts and plan.starts > starts.FIRST]
    undecided = [gate for gate in gates if gate not in over_starts and not is_decided(gate, known)]
    return [gate.label for gate in (*undecided, *_noisy_gates(over_starts, plan, evidence, measured))]


def start_undecided(plan: CellPlan, evidence: Path, measured: Sequence[Measurement], gates: Sequence[Gate]) -> list[str]:
    """The same for the load of the start that is running, for the gates that it is for. `measured` are all finished stages."""
    so_far = [*(row for row in measured if row.start is None), *parse_unfinished("starts", plan, evidence)]
    return [gate.label for gate in _noisy_gates([gate for gate in gates if gate.against == "load"], plan, evidence, so_far)]


def _noisy_gates(gates: Sequence[Gate], plan: CellPlan, evidence: Path, measured: Sequence[Measurement]) -> list[Gate]:
    """The gates whose last start should have another repeat. What cannot be compared is not made better by one."""
    noisy = []
    for gate in gates:
        with suppress(*UNUSABLE):
            if loads.is_noisy(*loads_of_gate(gate, plan, evidence, measured)):
                noisy.append(gate)
    return noisy


def another_start(plan: CellPlan, evidence: Path, measured: Sequence[Measurement]) -> list[Gate]:
    """The gates against the baseline for which the server should be started once more; empty if it was started often enough.

    `measured` are the measurements of all finished stages. A run that becomes a baseline is started until later runs can be
    compared with it. A gate that surely fails ends the starts, whatever the others say. So does the budget, for the gates on
    the load.
    """
    made = len(starts.further(evidence)) + starts.FIRST
    if made >= plan.starts:
        return []
    deciding = _deciding_gates(plan)
    known = [*measured, *compare(plan, evidence, measured, deciding)]
    if any(surely_misses(gate, known) for gate in deciding):
        return []
    waiting = [gate for gate in deciding if gate.is_over_starts and not _is_settled(gate, plan, evidence, known, made)]
    if plan.establishes:
        waiting += [gate for gate in plan.gates_over_starts if not is_known_of_baseline(gate, plan, evidence, measured, made)]
    return [gate for gate in waiting if gate.against != "load" or why_no_time(plan, evidence, made + 1) is None]


def _is_settled(gate: Gate, plan: CellPlan, evidence: Path, known: Sequence[Measurement], made: int) -> bool:
    """Whether a gate was decided by what enough starts showed, or no other start would decide it."""
    if any(row.invalid_because for row in measurements_of(gate, known)):
        return True
    if made < starts.LEAST:
        return False
    return is_decided(gate, known) or needs_no_start(gate, plan, evidence, known)


def _deciding_gates(plan: CellPlan) -> list[Gate]:
    """The gates that are not waived today. Waived gates do not change the cell's verdict."""
    today = datetime.now(UTC).date()
    waived = {waiver.gate for waiver in plan.waivers if today <= waiver.expires}
    return [gate for gate in plan.judged_gates if gate.label not in waived]


def _is_established(plan: CellPlan, evidence: Path, task: TaskPlan, gates: Sequence[Gate]) -> bool:
    """Whether the first start was asked its part of what their own noise requires, or its answers will stay unusable."""
    try:
        answered = samples.read_answers(evidence / "accuracy" / task.name, task)
        needed = max(repetitions_to_establish(answered, plan, task, gate) for gate in gates)
    except UnlikeError:
        # One repetition shows no noise.
        return False
    except UNUSABLE:
        return True
    return max(answer.repetition for answer in answered.answers) >= needed
