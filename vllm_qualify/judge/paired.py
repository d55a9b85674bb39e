"""The paired comparison: a candidate's answers against the baseline's, question by question.

The questions are the whole population: the loss is judged on just these questions. If each build always gave the same answers,
the loss would be known exactly after each question was asked once. Two sources of uncertainty remain. One is the noise between
repetitions, which the baseline's own repetitions show. The other is which questions were not asked yet.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Sides

Counts = NDArray[np.int64]
Scores = NDArray[np.float64]

# With at least so many spare answers, a candidate's own noise is known well enough to count.
ENOUGH_SPARE = 200
# Only a second answer to some questions shows a candidate's own noise. Without it, each change could be noise, or for good.
LEAST_OF_A_CANDIDATE = 2
# z for the chance that a release without a loss stays undecided, and the last critical value of a plan with some 20 looks.
UNDECIDED_Z, LAST_CRITICAL = 1.645, 2.11


class Answers(NamedTuple):
    """For each question how often it was asked, and the sums of its answers' scores and of their squares; shape (questions,).

    A score is between 0 and 1. If all scores are 0 or 1, both sums are the number of right answers.
    """

    total: Scores
    squares: Scores
    asked: Counts

    @property
    def mean(self) -> Scores:
        """The score of each question that was asked, NaN for the others."""
        with np.errstate(invalid="ignore"):
            return self.total / np.where(self.asked > 0, self.asked, np.nan)

    @property
    def spare(self) -> int:
        """The number of answers beyond the first of each question: only these show the noise."""
        return int(np.maximum(self.asked - 1, 0).sum())

    @property
    def noise(self) -> float:
        """Variance of one answer to a question around that question's own share, over the questions asked more than once.

        It is half the rate at which two repetitions differ. One difference more than was seen is counted, because no difference
        in a few answers does not mean that there is no noise. NaN without a spare answer.
        """
        if self.spare == 0:
            return math.nan
        within = float((self.squares - self.total**2 / np.maximum(self.asked, 1)).sum())
        return (within + 0.5) / self.spare


class Loss(NamedTuple):
    """How much the candidate lost, as a share of the questions; a gain is below zero. `error` is its standard error."""

    value: float
    error: float
    asked: int


def loss(baseline: Answers, candidate: Answers, margin: float) -> Loss:
    """The candidate's loss against the baseline over the questions that both were asked.

    The loss will be compared with `margin`. If few questions differ, the error assumes at least as many differences as a loss
    of that size needs.

    Raises:
        ValueError: fewer than two common questions; or neither build answered one twice, so that the noise is not known.
    """
    common = (baseline.asked > 0) & (candidate.asked > 0)
    number, total = int(common.sum()), int((baseline.asked > 0).sum())
    if number < 2:
        raise ValueError("the builds have fewer than two questions in common")
    differences = (baseline.mean - candidate.mean)[common]
    varied = float(differences.var(ddof=1))
    per_answer = noise(baseline, candidate)
    if candidate.spare < ENOUGH_SPARE:
        # The candidate may be noisier than the baseline. Then the differences themselves show how large its noise can be.
        per_answer = max(per_answer, varied / (1 + float((1 / baseline.asked[common]).mean())))
    repeated = float((1 / baseline.asked[common] + 1 / candidate.asked[common]).sum())
    from_noise = per_answer * repeated / number**2
    # Sampling without replacement: the more questions were asked, the less the others can change.
    from_sampling = (1 - number / total) * max(varied, margin, 1 / number) / number
    return Loss(float(differences.mean()), math.sqrt(from_noise + from_sampling), int(candidate.asked.sum()))


def noise(baseline: Answers, candidate: Answers) -> float:
    """The variance of one answer: that of both builds together, or the candidate's own if that is larger.

    Raises:
        ValueError: neither build has answered a question twice.
    """
    known = [(answers.spare, answers.noise) for answers in (baseline, candidate) if answers.spare]
    if not known:
        raise ValueError("no question was answered twice by one build, so the noise is unknown")
    pooled = sum(spare * variance for spare, variance in known) / sum(spare for spare, _ in known)
    return max(pooled, candidate.noise) if candidate.spare >= ENOUGH_SPARE else pooled


def repetitions_for(margin: float, noise: float, questions: int) -> int:
    """How often each build may have to answer all questions, so that at most 5 % of the releases without a loss stay undecided.

    `noise` is the variance of one answer. `margin` is the loss that must not be reached, as a share of the questions.
    """
    error = margin / (LAST_CRITICAL + UNDECIDED_Z)
    return max(LEAST_OF_A_CANDIDATE, math.ceil(2 * noise / (questions * error**2)))


def information(looks: Sequence[int], questions: int, baseline_repetitions: int) -> list[float]:
    """The information on the loss at each look, for `sequential.sides`. `looks` are numbers of the candidate's answers.

    It is one over the loss's variance, in units of one answer's, and follows from how often the questions were asked by then.
    """
    return [1 / _planned_variance(asked, questions, baseline_repetitions) for asked in looks]


def _planned_variance(asked: int, questions: int, baseline_repetitions: int) -> float:
    """The loss's variance, in units of one answer's variance divided by the number of questions."""
    if asked < questions:
        differing = 1 / baseline_repetitions + 1
        return (differing + (1 - asked / questions) * differing) * questions / asked
    whole, rest = divmod(asked, questions)
    mean_inverse = (rest / (whole + 1) + (questions - rest) / whole) / questions
    return 1 / baseline_repetitions + mean_inverse


def interval_of(found: Loss, at: Sides) -> Interval:
    """The bounds of the loss, which is between -1 and 1."""
    lower, upper = found.value - _z(at.below) * found.error, found.value + _z(at.above) * found.error
    return Interval(lower=max(-1.0, min(lower, found.value)), upper=min(1.0, max(upper, found.value)))


def _z(alpha: float) -> float:
    return -float(special.ndtri(alpha))
