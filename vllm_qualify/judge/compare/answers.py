"""The scores of a task's answers beside those of the baseline or of the anchor."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_qualify.evidence import starts
from vllm_qualify.evidence.accuracy.answers import Answer, Answered
from vllm_qualify.evidence.accuracy.measurements import LEAST_FORM
from vllm_qualify.evidence.measurement import Measurement, invalid, valid
from vllm_qualify.judge import paired, steadiness
from vllm_qualify.judge.compare import noise
from vllm_qualify.judge.compare.looks import list_questions, look_at_answers, score_key
from vllm_qualify.judge.compare.places import BASELINE, UnlikeError, answers_path, find_other_run, find_task, largest_loss
from vllm_qualify.judge.compare.settings import find_task_difference, gates_on_answers
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate

# MLPerf Inference requires replies of at least 0.9 times the reference's length. Far longer ones are not the same work either.
LENGTHS = (0.9, 1.1)


def compare_answers(gate: Gate, plan: CellPlan, evidence: Path, about: dict[str, Any]) -> Measurement:
    """How much the cell lost against the baseline or the anchor, as a share of the questions."""
    task, other = find_task(plan, gate), find_other_run(gate, plan)
    history = noise.find_history(plan, gate).get("start")
    source = f"{answers_path(task.name)} beside {BASELINE}/{other.answers_path(task.name)}{noise.history_words([history])}"
    if problem := find_task_difference(other, task):
        return invalid(gate.metric, problem, source, **about)
    try:
        look, old, new = look_at_answers(gate, plan, evidence, task)
    except UnlikeError as error:
        return invalid(gate.metric, str(error), source, **about)
    difference, interval, asked = look.loss, look.interval, len(new.answers)
    length = _length_ratio(new.answers, old.answers)
    # A sure loss stays a loss, whatever the length of the replies.
    # How much longer they may be says a gate on their tokens, where there is one.
    longest = math.inf if any(each.against == "tokens" for each in gates_on_answers(plan, task)) else LENGTHS[1]
    is_comparable = LENGTHS[0] <= length <= longest or interval.lower > largest_loss(gate)
    if not is_comparable and asked >= len(list_questions(old.answers)):
        as_long = f"replies are {length:.2f} times as long as the {other.word}'s"
        problem = f"{as_long}, and comparable from {LENGTHS[0]} to {LENGTHS[1]}"
        return invalid(gate.metric, problem, source, **about)
    # A sure loss stays a loss here, too.
    if interval.lower <= largest_loss(gate) and (problem := _find_fading(gate, new.answers, task)):
        return invalid(gate.metric, problem, source, **about)
    traced = dict.fromkeys((answer.start, answer.traced_to.rpartition(":")[0]) for answer in new.answers)
    return valid(
        gate.metric,
        difference.value,
        source,
        sample_count=difference.asked,
        # With only a part of the questions, the lengths say little yet: the gate is undecided, and asking goes on.
        interval=interval if is_comparable else None,
        traced_to=[f"{starts.place(start)}accuracy/{task.name}/{path}" for start, path in sorted(traced)],
        not_in_interval=_lacking_noise(plan, gate, task, difference, new, old),
        finding=_form_words(score_key(gate), new.answers, old.answers, other.word),
        **about,
    )


def _form_words(key: str, new: Sequence[Answer], old: Sequence[Answer], other: str) -> str:
    """How much of a difference may be form: right answers that the filter does not read. Empty for less than LEAST_FORM."""
    ours, theirs = _mean_lost_by_form(key, new), _mean_lost_by_form(key, old)
    common = ours.keys() & theirs.keys()
    if not common:
        return ""
    now, before = (math.fsum(side[question] for question in common) / len(common) for side in (ours, theirs))
    if abs(now - before) < LEAST_FORM:
        return ""
    what = f"{100 * (now - before):+.1f} points of it seem to be form, not knowledge"
    form = "replies that are right in a form that the filter does not read"
    return f"{what}: {form} are {now:.1%}, and {before:.1%} of the {other}'s"


def _mean_lost_by_form(key: str, answers: Iterable[Answer]) -> dict[int, float]:
    lost: dict[int, list[bool]] = {}
    for answer in answers:
        if answer.reads_right is not None:
            lost.setdefault(answer.question, []).append(answer.reads_right and not answer.score(key))
    return {question: fmean(each) for question, each in lost.items()}


def _lacking_noise(
    plan: CellPlan, gate: Gate, task: TaskPlan, difference: paired.Loss, new: Answered, old: Answered
) -> list[str]:
    ours, theirs = (len({answer.start for answer in side.answers}) for side in (new, old))
    of_starts = [] if "start" in noise.find_history(plan, gate) else noise.lacking_with_starts(plan, ours, theirs)
    if noise.STARTS not in of_starts:
        deviation = difference.restless if max(ours, theirs) > starts.FIRST else None
        return [*of_starts, *([noise.restless_words(f"{100 * deviation:.1f} points")] if deviation else [])]
    # What the answers of one repetition have in common is a part of what differs between starts.
    is_sampled = task.sampling is not None and not task.sampling.is_greedy
    return [*of_starts, *([noise.SAMPLES] if is_sampled else []), *([] if difference.together else [noise.TOGETHER])]


def _find_fading(gate: Gate, answered: Iterable[Answer], task: TaskPlan) -> str | None:
    """Why the mean over repetitions is not that of a steady server: it answers worse with time, in one start. Else None."""
    scores: dict[int, list[float]] = {}
    for answer in answered:
        if answer.start == starts.FIRST:
            scores.setdefault(answer.repetition, []).append(answer.score(score_key(gate)))
    most = max(map(len, scores.values()))
    # Of a repetition that was broken off the questions are others.
    means = [fmean(scores[repetition]) for repetition in sorted(scores) if len(scores[repetition]) == most]
    looks = range(1, max(task.settings.most_repetitions, len(means)) + 1)
    if steadiness.direction_of([means], looks) >= 0:
        return None
    fell = f"its score fell from {means[0]:.2%} in the first repetition to {means[-1]:.2%} in the last of {len(means)}"
    return f"the server answers worse the longer it runs: {fell}: look for what wears out, as a cache, and measure again"


def _length_ratio(new: Iterable[Answer], old: Iterable[Answer]) -> float:
    """The replies' mean length divided by that of the baseline's, over questions that both answered; 1 without replies."""
    ours, theirs = _mean_lengths(new), _mean_lengths(old)
    common = ours.keys() & theirs.keys()
    before = sum(theirs[question] for question in common)
    return sum(ours[question] for question in common) / before if before else 1.0


def _mean_lengths(answers: Iterable[Answer]) -> dict[int, float]:
    lengths: dict[int, list[int]] = {}
    for answer in answers:
        if answer.length is not None and not answer.unanswered:
            lengths.setdefault(answer.question, []).append(answer.length)
    return {question: fmean(each) for question, each in lengths.items()}
