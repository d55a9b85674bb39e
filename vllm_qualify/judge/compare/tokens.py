"""How many more tokens a candidate's answers have than its baseline's, question by question.

The questions stand for all of their kind, so the interval has what differs from question to question. All answers to a question
are one cluster: they count with their mean. What all answers of one start of a server have in common is not in it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from vllm_qualify.evidence.accuracy import answers, samples
from vllm_qualify.evidence.accuracy.answers import Answer, Answered
from vllm_qualify.evidence.measurement import Interval, Measurement, around, invalid, valid
from vllm_qualify.evidence.sequential import Sides, levels_for, sides_of
from vllm_qualify.judge.between import Array
from vllm_qualify.judge.compare.looks import find_difference
from vllm_qualify.judge.compare.noise import FIRST_STARTS, rare_changes
from vllm_qualify.judge.compare.places import BASELINE, answers_path, find_other_run, find_task
from vllm_qualify.judge.compare.settings import find_task_difference
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS

# The largest ratio that is looked at, and how often an interval is halved: to a millionth of it.
MOST, HALVINGS = 1000.0, 40


class NotKeptError(ValueError):
    """It is not known how many tokens answers have."""

    def __repr__(self) -> str:
        return str(self)


def by_question(answers: Iterable[Answer]) -> dict[int, float]:
    """The mean number of output tokens of the answers to each question. Raises NotKeptError if one has none."""
    answers = list(answers)
    tokens: dict[int, list[int]] = {}
    for answer in answers:
        if answer.output_tok is not None:
            tokens.setdefault(answer.question, []).append(answer.output_tok)
    if unknown := sum(answer.output_tok is None for answer in answers):
        raise NotKeptError(f"of {unknown} of {len(answers)} answers it was not kept how many tokens they have")
    return {question: math.fsum(each) / len(each) for question, each in tokens.items()}


def worsening(theirs: Sequence[float], ours: Sequence[float], at: Sides) -> tuple[float, Interval | None]:
    """How many times as many tokens the candidate's answers have, less 1, from each question's mean; shapes (questions,).

    A ratio is in the interval if the mean of ours less the ratio times theirs may be 0 (Fieller 1954, "Some problems in
    interval estimation", JRSS B 16): by Student's t, or by Hall's t with the skew taken out (1992, "On the removal of skewness
    by transformation", JRSS B 54). Lengths are skewed: few answers that loop have most of the tokens. None for fewer than two
    questions, or if no ratio can be ruled out. Raises ValueError if the baseline's answers have no tokens.
    """
    x, y = np.asarray(theirs, dtype=float), np.asarray(ours, dtype=float)
    if not x.mean() > 0:
        raise ValueError("the baseline's answers have no tokens, and nothing is so many times nothing")
    mean_x, mean_y = float(x.mean()), float(y.mean())
    ratio = mean_y / mean_x
    if len(x) < 2:
        return ratio - 1, None
    below, above = (-float(special.stdtrit(len(x) - 1, alpha)) for alpha in at)
    apart_x, apart_y = x - mean_x, y - mean_y

    def statistics(by: float) -> tuple[float, float]:
        # A bound is found by some 40 ratios: means are taken once.
        return _t_statistics(mean_y - by * mean_x, apart_y - by * apart_x)

    lower = _search_bound(lambda by: min(statistics(by)) < below, ratio, 0.0)
    upper = _search_bound(lambda by: max(statistics(by)) > -above, ratio, MOST)
    return ratio - 1, None if lower is None or upper is None else around(ratio - 1, lower - 1, upper - 1)


def _t_statistics(mean: float, apart: Array) -> tuple[float, float]:
    """Student's t of a mean that should be 0, and Hall's; of values that lie so far from it."""
    number, squares = len(apart), apart * apart
    error = math.sqrt(float(squares.sum()) / (number - 1) / number)
    if error == 0:
        t = math.copysign(math.inf, mean) if mean else 0.0
        return t, t
    t = mean / error
    skew = float(squares @ apart) / (error**3 * number**3)
    return t, t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6


def _search_bound(may_be: Callable[[float], bool], ratio: float, end: float) -> float | None:
    """Where ratios end that may be, from the estimate towards an end; None if even MOST may be."""
    if may_be(end):
        return None if end else 0.0
    inside, outside = ratio, end
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if may_be(middle) else (inside, middle)
    return outside


def compare_tokens(gate: Gate, plan: CellPlan, evidence: Path, about: dict[str, Any]) -> Measurement:
    """How many times as many tokens the answers have as the baseline's, less 1.

    It is judged once, when all questions were asked as often as they are at least: lengths are skewed, so that a few questions
    tell too little of the rest for an early verdict to hold its error rate.
    """
    task, path = find_task(plan, gate), answers_path(str(gate.task))
    source = f"{path} beside {BASELINE}/{path}"
    new, old = read_first_answers(plan, evidence, gate), answers.load(evidence / BASELINE / path)
    if problem := find_task_difference(find_other_run(gate, plan), task) or find_difference(old, new, "baseline"):
        return invalid(gate.metric, problem, source, **about)
    try:
        theirs = by_question(old.answers)
    except NotKeptError as error:
        return invalid(gate.metric, f"the baseline's: {error}", source, **about)
    asked = [answer for answer in new.answers if answer.repetition <= task.least_repetitions]
    ours, levels = by_question(asked), levels_for(plan)
    at = sides_of(METRICS[gate.metric].compared_direction, levels.false_pass, levels.false_fail)
    value, interval = worsening([theirs[question] for question in ours], list(ours.values()), at)
    traced = dict.fromkeys(answer.traced_to.rpartition(":")[0] for answer in asked)
    return valid(
        gate.metric,
        value,
        source,
        sample_count=len(ours),
        interval=interval if len(asked) == task.least_repetitions * len(theirs) else None,
        traced_to=[f"accuracy/{task.name}/{file}" for file in traced],
        not_in_interval=[FIRST_STARTS, rare_changes(len(ours), levels.false_pass, "questions")],
        **about,
    )


def read_first_answers(plan: CellPlan, evidence: Path, gate: Gate) -> Answered:
    """The cell's own answers of the first start. Raises one of UNUSABLE."""
    return samples.read_answers(evidence / "accuracy" / str(gate.task), find_task(plan, gate))
