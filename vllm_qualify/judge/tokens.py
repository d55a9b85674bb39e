"""How many more tokens a candidate's answers have than its baseline's, question by question.

The questions stand for all of their kind, so the interval has what differs from question to question. All answers to a question
are one cluster: they count with their mean. What all answers of one start of a server have in common is not in it.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vllm_qualify.evidence.answers import Answer
from vllm_qualify.evidence.measurement import Interval, around
from vllm_qualify.evidence.sequential import Sides

Values = NDArray[np.float64]
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
    questions, or if no ratio can be ruled out.

    Raises:
        ValueError: the baseline's answers have no tokens.
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
    # A bound is found by some 40 ratios: means are taken once.
    lower = _bound(lambda by: min(_both(mean_y - by * mean_x, apart_y - by * apart_x)) < below, ratio, 0.0)
    upper = _bound(lambda by: max(_both(mean_y - by * mean_x, apart_y - by * apart_x)) > -above, ratio, MOST)
    return ratio - 1, None if lower is None or upper is None else around(ratio - 1, lower - 1, upper - 1)


def _both(mean: float, apart: Values) -> tuple[float, float]:
    """Student's t of a mean that should be 0, and Hall's; of values that lie so far from it."""
    number, squares = len(apart), apart * apart
    error = math.sqrt(float(squares.sum()) / (number - 1) / number)
    if error == 0:
        t = math.copysign(math.inf, mean) if mean else 0.0
        return t, t
    t = mean / error
    skew = float(squares @ apart) / (error**3 * number**3)
    return t, t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6


def _bound(may_be: Callable[[float], bool], ratio: float, end: float) -> float | None:
    """Where ratios end that may be, from the estimate towards an end; None if even MOST may be."""
    if may_be(end):
        return None if end else 0.0
    inside, outside = ratio, end
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if may_be(middle) else (inside, middle)
    return outside
