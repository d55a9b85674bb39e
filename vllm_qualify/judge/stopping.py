"""Decides when a stage has measured enough: all its gates are decided, or more measurements would not help."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from vllm_qualify.evidence import accuracy, answers, starts
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.stages import parse_unfinished
from vllm_qualify.judge.compare import STARTS, UnlikeError, compare, knows_enough, paired_gates, repetitions_to_establish
from vllm_qualify.judge.verdict import is_decided, measurements_of, surely_misses
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.workload import LEAST_REPETITIONS


def accuracy_decided(plan: CellPlan, evidence: Path, task: TaskPlan) -> bool:
    """Whether more answers of the task would not change the cell's verdict. For that, one gate that surely fails is enough."""
    if task.least_repetitions > 1 and not _all_were_asked(evidence, task, task.least_repetitions):
        return False
    gates = [gate for gate in _deciding(plan) if METRICS[gate.metric].stage == "accuracy" and gate.task == task.name]
    measured = [row for row in parse_unfinished("accuracy", plan, evidence) if row.task == task.name]
    paired = paired_gates(plan, task)
    known = [*measured, *compare(plan, evidence, measured, gates)]
    if any(surely_misses(gate, known) for gate in gates):
        return True
    if plan.establishes and paired and not _is_established(plan, evidence, task, paired):
        return False
    # To ask the same questions again would only help a comparison of scores. No question is asked for the anchor alone.
    waiting = [gate for gate in gates if not gate.is_against_anchor]
    if _all_were_asked(evidence, task):
        waiting = [gate for gate in waiting if gate.against == "answers"]
    elif any(_may_find(gate, known) for gate in waiting):
        return False
    return all(is_decided(gate, known) for gate in waiting) or (bool(paired) and knows_enough(plan, evidence, task))


def _may_find(gate: Gate, known: Sequence[Measurement]) -> bool:
    """Whether a gate's filter has found no answer so far: it may find one in a later reply."""
    return any(accuracy.FOUND_NOTHING in (row.invalid_because or "") for row in measurements_of(gate, known))


def _all_were_asked(evidence: Path, task: TaskPlan, times: int = 1) -> bool:
    folder = evidence / "accuracy" / task.name
    done = answers.finished(folder, task)
    return sum(len(step.questions) for step in done) >= times * task.settings.num_questions


def load_undecided(plan: CellPlan, evidence: Path) -> list[str]:
    """The gates that more repeats of the load could decide. Empty if one gate surely fails, whatever the others say."""
    gates = [gate for gate in _deciding(plan) if METRICS[gate.metric].stage == "load"]
    measured = parse_unfinished("load", plan, evidence)
    compared = compare(plan, evidence, measured, gates)
    known = [*measured, *compared]
    if any(surely_misses(gate, known) for gate in gates):
        return []
    return [gate.label for gate in gates if not is_decided(gate, known)]


def another_start(plan: CellPlan, evidence: Path, measured: Sequence[Measurement]) -> list[Gate]:
    """The gates against the baseline for which the server should be started once more; empty if it was started often enough.

    `measured` are the measurements of all finished stages. A run that becomes a baseline is started as often as planned. A gate
    that surely fails ends the starts, whatever the others say. So does the budget, for the gates on the load.
    """
    number = len(starts.further(evidence)) + starts.FIRST + 1
    if number > plan.starts:
        return []
    deciding = _deciding(plan)
    known = [*measured, *compare(plan, evidence, measured, deciding)]
    if any(surely_misses(gate, known) for gate in deciding):
        return []
    undecided = [gate for gate in deciding if gate.is_over_starts and not _is_surely_decided(gate, known)]
    waiting = plan.over_starts if plan.establishes else undecided
    return [gate for gate in waiting if gate.against != "load" or _has_time(plan, evidence, number)]


def _is_surely_decided(gate: Gate, known: Sequence[Measurement]) -> bool:
    """Whether a gate is decided, and how much starts differ was part of that."""
    return is_decided(gate, known) and not any(STARTS in row.not_in_interval for row in measurements_of(gate, known))


def _has_time(plan: CellPlan, evidence: Path, number: int) -> bool:
    return starts.too_long(starts.plan_of(plan, evidence, number).load, evidence, number) is None


def _deciding(plan: CellPlan) -> list[Gate]:
    """The gates that are not waived today. Waived gates do not change the cell's verdict."""
    today = datetime.now(UTC).date()
    waived = {waiver.gate for waiver in plan.waivers if today <= waiver.expires}
    return [gate for gate in plan.judged if gate.label not in waived]


def _is_established(plan: CellPlan, evidence: Path, task: TaskPlan, gates: Sequence[Gate]) -> bool:
    """Whether the questions were asked as often as their own noise requires, or their answers will stay unusable."""
    try:
        answered = answers.read_answers(evidence / "accuracy" / task.name, task)
        needed = max(repetitions_to_establish(answered, task, gate, levels_for(plan)) for gate in gates)
    except UnlikeError:
        # One repetition shows no noise.
        return False
    except UNUSABLE:
        return True
    return max(answer.repetition for answer in answered.answers) >= max(LEAST_REPETITIONS, needed)
