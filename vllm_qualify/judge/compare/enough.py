"""Whether a comparison knows enough: how often questions may be asked, whether another start would tell what is needed, and
whether a run can be the baseline of later ones."""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from vllm_qualify.evidence import starts
from vllm_qualify.evidence.accuracy import answers
from vllm_qualify.evidence.accuracy.answers import Answered
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid
from vllm_qualify.evidence.sequential import levels_of
from vllm_qualify.judge import loads, paired
from vllm_qualify.judge.compare import places, tokens
from vllm_qualify.judge.compare.loads import loads_of_gate, why_no_time
from vllm_qualify.judge.compare.looks import drop_unanswered, list_questions, look_at_answers, make_record
from vllm_qualify.judge.compare.settings import gates_on_answers
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.accuracy import LEAST_REPETITIONS
from vllm_qualify.recipe.gates import Gate


def paired_gates(plan: CellPlan, task: TaskPlan) -> list[Gate]:
    """The gates that compare a task's scores with the baseline's."""
    return [gate for gate in plan.gates_against_baseline if gate.task == task.name and gate.against == "answers"]


def repetitions(plan: CellPlan, evidence: Path, task: TaskPlan) -> int:
    """How often all questions of a task may be asked: within the recipe's bound if they are compared, else as often as samples.

    Asking ends sooner, when the comparison knows enough (`knows_enough`).
    """
    if plan.establishes:
        return task.repetitions
    kept = evidence / places.BASELINE / places.answers_path(task.name)
    for gate in paired_gates(plan, task):
        # Nothing can be compared with a baseline that is gone or shows no noise, and the comparison will say so.
        with suppress(*UNUSABLE):
            repetitions_to_establish(answers.load(kept), plan, task, gate)
            return task.settings.most_repetitions
    return task.least_repetitions


def knows_enough(plan: CellPlan, evidence: Path, task: TaskPlan) -> bool:
    """Whether more answers of the same starts would tell a task's comparisons nothing that they need."""
    try:
        return all(look_at_answers(gate, plan, evidence, task)[0].is_last_of_start for gate in paired_gates(plan, task))
    except UNUSABLE:
        # The comparison says why it is invalid, and its gate is decided by that.
        return False


def needs_no_start(gate: Gate, plan: CellPlan, evidence: Path, measurements: Sequence[Measurement]) -> bool:
    """Whether another start would tell a gate nothing that it needs: its margin is many standard errors."""
    with suppress(*UNUSABLE):
        if gate.against == "load":
            return loads.look(*loads_of_gate(gate, plan, evidence, measurements)).is_last
        return look_at_answers(gate, plan, evidence, places.find_task(plan, gate))[0].is_last
    # The comparison says why it is invalid.
    return False


def is_known_of_baseline(gate: Gate, plan: CellPlan, evidence: Path, measurements: Sequence[Measurement], made: int) -> bool:
    """Whether the starts that were `made` of a run tell enough of a baseline: of its answers, by how they differ.

    No more starts are made, either, where even all that are allowed would hardly tell enough, or where one that is needed does
    not count.
    """
    if made < least_starts_of_a_baseline(gate, plan):
        return False
    if gate.against != "answers" or find_lacking_start(gate, plan, evidence, measurements):
        return True
    spoiled = {row.start for row in places.find_further_starts(gate, measurements) if row.invalid_because}
    with suppress(*UNUSABLE):
        answered = drop_unanswered(starts.answers_of(plan, evidence, places.find_task(plan, gate)))
        counting = [answer for answer in answered if answer.start not in spoiled]
        scores = paired.answers_by_question(make_record(counting, gate, list_questions(counting)))
        about = (scores, places.largest_loss(gate), levels_of(plan.gates))
        return paired.share_of_a_baseline(*about) >= 1 or not paired.may_tell_enough(*about, plan.starts)
    # More starts do not mend it: see `not_established`.
    return True


def not_established(plan: CellPlan, evidence: Path, measurements: Sequence[Measurement]) -> list[tuple[Gate, Measurement]]:
    """The gates for which this run cannot be the baseline of a later run, each with what is missing."""
    if not plan.establishes:
        return []
    unusable = []
    for gate in plan.gates_against_baseline:
        try:
            problem = _find_lacking(gate, plan, evidence, measurements)
        except UNUSABLE as error:
            problem = in_words(error)
        if problem:
            about = {"task": gate.task, "filter": gate.filter, "against": plan.run_id}
            unusable.append((gate, invalid(gate.metric, f"it cannot be a baseline for this: {problem}", "", **about)))
    return unusable


def _find_lacking(gate: Gate, plan: CellPlan, evidence: Path, measurements: Sequence[Measurement]) -> str | None:
    """What a later run would lack for a gate, or None. Raises one of UNUSABLE."""
    problem = places.find_first_start(gate, measurements).invalid_because
    if gate.is_over_starts:
        problem = problem or find_lacking_start(gate, plan, evidence, measurements)
    if problem is None and gate.against == "answers":
        answered = starts.answers_of(plan, evidence, places.find_task(plan, gate)).answers
        asked = len({(answer.start, answer.repetition) for answer in answered})
        if asked < LEAST_REPETITIONS:
            return f"its questions were asked {asked} times, and {LEAST_REPETITIONS} are needed"
    if problem is None and gate.against == "tokens":
        tokens.by_question(tokens.read_first_answers(plan, evidence, gate).answers)
    return problem


def find_lacking_start(gate: Gate, plan: CellPlan, evidence: Path, measurements: Iterable[Measurement]) -> str | None:
    """Which of the planned starts does not count for a gate, and why; None if all do, or the budget ended their loads."""
    reasons = {row.start: row.invalid_because for row in places.find_further_starts(gate, measurements)}
    for number in range(starts.FIRST + 1, least_starts_of_a_baseline(gate, plan) + 1):
        if number not in reasons and not (gate.against == "load" and why_no_time(plan, evidence, number)):
            return f"start {number} did not measure it"
        if reasons.get(number):
            return f"start {number}: {reasons[number]}"
    return None


def least_starts_of_a_baseline(gate: Gate, plan: CellPlan) -> int:
    """How often the server of a run that becomes a baseline is started at least for a gate."""
    return min(plan.starts, starts.LEAST_OF_A_BASELINE.get(str(gate.against), starts.FIRST))


def repetitions_to_establish(answered: Answered, plan: CellPlan, task: TaskPlan, gate: Gate) -> int:
    """How often a baseline's first start must be asked all questions for the gate's margin, by the noise of these answers.

    Each of its further starts is asked once less, so that together they have about what is needed, and LEAST_REPETITIONS.
    Raises UnlikeError if no question was answered twice.
    """
    scores = paired.answers_by_question(make_record(drop_unanswered(answered), gate, list_questions(answered.answers)))
    if scores.spare == 0:
        raise places.UnlikeError("the baseline was asked each question once, so the noise is unknown: establish it anew")
    needed = paired.repetitions_for(places.largest_loss(gate), scores.noise, len(scores.asked), levels_of(plan.gates))
    needed, least = min(needed, task.settings.most_repetitions), least_starts_of_a_baseline(gate, plan)
    at_least = math.ceil((LEAST_REPETITIONS + least - 1) / least)
    return max(paired.LEAST_OF_A_CANDIDATE, at_least, math.ceil(needed / least))


def unusable_baseline(plan: CellPlan, folder: Path) -> str | None:
    """Why nothing can be compared with the answers in a `baseline` folder, whatever the cell will answer; else None."""
    for task in plan.accuracy:
        for gate in gates_on_answers(plan, task):
            other = places.find_other_run(gate, plan)
            try:
                kept = answers.load(folder / other.answers_path(task.name))
                if gate.against == "tokens":
                    tokens.by_question(kept.answers)
                else:
                    repetitions_to_establish(kept, plan, task, gate)
            except UNUSABLE as error:
                return f"{other.word}: {in_words(error)}"
    return None
