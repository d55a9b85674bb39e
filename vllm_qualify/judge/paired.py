"""The paired comparison: a candidate's answers against the baseline's, question by question.

The questions are the population: what is judged is the loss on just these. If both builds answered always alike, it would be
known exactly after each was asked once. What remains is noise from one repetition to the next, which the baseline's own
repetitions tell, and, while some questions have not been asked, which ones those are.
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

# Spare answers from which a candidate's own noise is known well enough to count.
ENOUGH_SPARE = 200
# z for the chance that a release without a loss stays undecided, and the last critical value of a plan with some 20 looks.
UNDECIDED_Z, LAST_CRITICAL = 1.645, 2.11


class Answers(NamedTuple):
    """For each question how often it was asked, and the sums of its answers' scores and of their squares; shape (questions,).

    A score lies between 0 and 1. Where it is one of the two, both sums are the number of right answers.
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
        """Answers beyond the first of each question: only these tell of noise."""
        return int(np.maximum(self.asked - 1, 0).sum())

    @property
    def noise(self) -> float:
        """Variance of one answer to a question around that question's own share, over the questions asked more than once.

        It is half the rate at which two repetitions differ. One difference more than was seen is counted, so that none in a
        few answers does not mean none at all. NaN without a spare answer.
        """
        if self.spare == 0:
            return math.nan
        within = float((self.squares - self.total**2 / np.maximum(self.asked, 1)).sum())
        return (within + 0.5) / self.spare


class Loss(NamedTuple):
    """How much the candidate lost, in shares of the questions; below zero it gained. `error` is its standard error."""

    value: float
    error: float
    asked: int


def loss(baseline: Answers, candidate: Answers, margin: float) -> Loss:
    """The candidate's loss against the baseline over the questions that both were asked.

    It is to be held against `margin`: where few questions differ, at least as many are taken to as a loss of that size needs.

    Raises:
        ValueError: no common question, or neither build has answered one twice, so that nobody knows the noise.
    """
    common = (baseline.asked > 0) & (candidate.asked > 0)
    number, total = int(common.sum()), int((baseline.asked > 0).sum())
    if number < 2:
        raise ValueError("the builds have fewer than two questions in common")
    differences = (baseline.mean - candidate.mean)[common]
    varied = float(differences.var(ddof=1))
    per_answer = noise(baseline, candidate)
    if candidate.spare < ENOUGH_SPARE:
        # Not known yet to be as calm as the baseline: then the differences themselves tell how much it can be.
        per_answer = max(per_answer, varied / (1 + float((1 / baseline.asked[common]).mean())))
    repeated = float((1 / baseline.asked[common] + 1 / candidate.asked[common]).sum())
    from_noise = per_answer * repeated / number**2
    # Sampling without replacement: the more of the questions were asked, the less the others can change.
    from_sampling = (1 - number / total) * max(varied, margin, 1 / number) / number
    return Loss(float(differences.mean()), math.sqrt(from_noise + from_sampling), int(candidate.asked.sum()))


def noise(baseline: Answers, candidate: Answers) -> float:
    """The variance of one answer: that of both builds together, or the candidate's own where that is larger.

    Raises:
        ValueError: neither build has answered a question twice.
    """
    known = [(answers.spare, answers.noise) for answers in (baseline, candidate) if answers.spare]
    if not known:
        raise ValueError("no question was answered twice by one build, so that nobody knows the noise")
    pooled = sum(spare * variance for spare, variance in known) / sum(spare for spare, _ in known)
    return max(pooled, candidate.noise) if candidate.spare >= ENOUGH_SPARE else pooled


def repetitions_for(margin: float, noise: float, questions: int) -> int:
    """How often each build must answer all questions, so that of releases without a loss at most 5 % stay undecided.

    `noise` is the variance of one answer, `margin` the loss that may not be reached, in shares of the questions.
    """
    error = margin / (LAST_CRITICAL + UNDECIDED_Z)
    return max(1, math.ceil(2 * noise / (questions * error**2)))


def information(looks: Sequence[int], questions: int, baseline_repetitions: int) -> list[float]:
    """What is known of the loss at each look, for `sequential.sides`. A look is after so many answers of the candidate.

    It follows from how often questions have been asked by then: one over the loss's variance, of which one answer's is 1.
    """
    return [1 / _planned_variance(asked, questions, baseline_repetitions) for asked in looks]


def _planned_variance(asked: int, questions: int, baseline_repetitions: int) -> float:
    """In units of one answer's variance over the number of questions."""
    if asked < questions:
        differing = 1 / baseline_repetitions + 1
        return (differing + (1 - asked / questions) * differing) * questions / asked
    whole, rest = divmod(asked, questions)
    mean_inverse = (rest / (whole + 1) + (questions - rest) / whole) / questions
    return 1 / baseline_repetitions + mean_inverse


def interval(found: Loss, at: Sides) -> Interval:
    """The bounds of the loss; no loss lies outside of -1 and 1."""
    lower, upper = found.value - _z(at.below) * found.error, found.value + _z(at.above) * found.error
    return Interval(lower=max(-1.0, min(lower, found.value)), upper=min(1.0, max(upper, found.value)))


def _z(alpha: float) -> float:
    return -float(special.ndtri(alpha))
