"""The paired comparison: a candidate's answers against the baseline's, question by question.

The questions are the whole population: the loss is judged on just these questions. If each build always gave the same
answers, the loss would be known exactly after each question was asked once. These sources of uncertainty remain: the noise of
answers, also where the questions of a topic share it; what all answers of a repetition have in common; what differs from start
to start of a server. The last is which questions were not asked yet: their order is random, so that it does not matter which of
them change together.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Levels, Sides, rising, sides_after
from vllm_qualify.judge.between import Between, pooled, with_history
from vllm_qualify.judge.together import ONE_REPETITION, Part, Repeated, reach_of_parts, repeated

Counts = NDArray[np.int64]
Scores = NDArray[np.float64]

# With at least so many spare answers, a candidate's own noise is known well enough to count.
ENOUGH_SPARE = 200
# Only a second answer to some questions shows a candidate's own noise. Without it, each change could be noise, or for good.
LEAST_OF_A_CANDIDATE = 2
# A comparison knows enough when the margin is so many standard errors. `make bench-gates` shows the rates that follow: the last
# critical value of a plan with some 20 looks is 2.11, and 1.645 more leave 5 % of the releases without a loss undecided.
MARGIN_IN_ERRORS = 3.95
# The most of a comparison's information that a look has while questions were asked fewer than LEAST_OF_A_CANDIDATE times.
MOST_OF_FEW = 0.98
# The part of a chance of error that the last look has, about: the others spent the rest.
PART_OF_A_LOOK = 0.5
# The share of the questions that a start must have answered, so that its mean counts among those of starts.
WHOLE = 0.9


class Record(NamedTuple):
    """A build's answers in the order in which they were asked: for each its question, its score, the repetition and the start.

    `topics` has the topic of each of the `questions`, None if they have none. All but scores are numbered from 0.
    """

    question: Counts
    score: Scores
    repetition: Counts
    start: Counts
    questions: int
    topics: Counts | None = None

    def until(self, asked: int) -> "Record":
        """The first `asked` answers."""
        arrays = (self.question[:asked], self.score[:asked], self.repetition[:asked], self.start[:asked])
        return Record(*arrays, self.questions, self.topics)


class Starts(NamedTuple):
    """The starts that a build's answers are from.

    `weight` is the sum of the squares of their shares of the answers: one over their number, if all answered as much.
    `variance` is that of the means of those that answered nearly all questions, from `freedom` degrees of freedom, and
    `repeated` the mean of one over how often each of these answered a question.
    """

    weight: float = 1.0
    variance: float = 0.0
    repeated: float = 1.0
    freedom: int = 0


ONE_START = Starts()


@dataclass(frozen=True, eq=False)
class Answers:
    """For each question how often it was asked, and the sums of its answers' scores and of their squares; shape (questions,).

    A score is between 0 and 1. If all scores are 0 or 1, both sums are the number of right answers. `shared` is the variance of
    one answer with what the answers of a topic share in one repetition, 0 if there are no topics. Without topics a repetition
    is taken as one, and `repeated` has what its answers share.
    """

    total: Scores
    squares: Scores
    asked: Counts
    starts: Starts = ONE_START
    shared: float = 0.0
    repeated: Repeated = ONE_REPETITION

    @cached_property
    def mean(self) -> Scores:
        """The score of each question that was asked, NaN for the others."""
        with np.errstate(invalid="ignore"):
            return self.total / np.where(self.asked > 0, self.asked, np.nan)

    @cached_property
    def spare(self) -> int:
        """The number of answers beyond the first of each question: only these show the noise."""
        return int(self.asked.sum()) - int(np.count_nonzero(self.asked))

    @cached_property
    def noise(self) -> float:
        """Variance of one answer to a question around that question's own share, over the questions asked more than once.

        It is half the rate at which two repetitions differ, or more if the answers of a topic differ together. One difference
        more than was seen is counted, because no difference in a few answers does not mean that there is no noise. NaN without
        a spare answer.
        """
        if self.spare == 0:
            return math.nan
        within = float((self.squares - self.total**2 / np.maximum(self.asked, 1)).sum())
        return max((within + 0.5) / self.spare, self.shared)

    @property
    def between(self) -> list[Between]:
        """What its own starts tell of their variance; empty for fewer than two."""
        if not self.starts.freedom:
            return []
        explained = self.noise * self.starts.repeated / len(self.asked)
        return [Between(variance=self.starts.variance, noise=explained, freedom=float(self.starts.freedom))]

    @property
    def together(self) -> list[Between]:
        """What its own repetitions tell of their variance; empty if no start repeated its questions."""
        if not self.repeated.freedom:
            return []
        explained = self.noise / len(self.asked)
        return [Between(variance=self.repeated.variance, noise=explained, freedom=float(self.repeated.freedom))]


def answers_by_question(record: Record) -> Answers:
    """The sums of a record."""

    def of_questions(weights: Scores | None = None) -> Scores:
        return np.bincount(record.question, weights, record.questions).astype(float)

    total, squares, asked = of_questions(record.score), of_questions(record.score**2), of_questions()
    answers = Answers(total, squares, asked.astype(np.int64), _starts(record))
    if answers.spare == 0:
        return answers
    if record.topics is None:
        of = (record.question, record.score, record.repetition, record.start, record.questions)
        return replace(answers, repeated=repeated(*of))
    return replace(answers, shared=_shared(record, answers))


def _starts(record: Record) -> Starts:
    sizes = np.bincount(record.start)
    weight = float(((sizes / sizes.sum()) ** 2).sum())
    of_starts = [np.flatnonzero(record.start == start) for start in range(len(sizes))] if len(sizes) > 1 else []
    whole = [rows for rows in of_starts if np.count_nonzero(np.bincount(record.question[rows])) >= WHOLE * record.questions]
    if len(whole) < 2:
        return Starts(weight)
    rows = np.concatenate(whole)
    asked = np.bincount(record.question[rows], minlength=record.questions)
    usual = np.bincount(record.question[rows], record.score[rows], record.questions) / np.maximum(asked, 1)
    shifts = [float((record.score[rows] - usual[record.question[rows]]).mean()) for rows in whole]
    repeated = float(np.mean([record.questions / len(rows) for rows in whole]))
    return Starts(weight, float(np.var(shifts, ddof=1)), repeated, len(whole) - 1)


def _shared(record: Record, answers: Answers) -> float:
    """The variance of one answer if the answers of a topic in one repetition are taken together (cluster-robust)."""
    topics = np.zeros(record.questions, dtype=np.int64) if record.topics is None else record.topics
    often = answers.asked[record.question]
    repeated = often > 1
    question, often = record.question[repeated], often[repeated]
    # An answer is nearer to the mean that it is part of than to the question's own share.
    away = (record.score[repeated] - answers.mean[question]) * np.sqrt(often / (often - 1))
    together = np.bincount(record.repetition[repeated] * (int(topics.max()) + 1) + topics[question], away)
    return float((together**2).sum() / len(away))


class Loss(NamedTuple):
    """How much the candidate lost, as a share of the questions; a gain is below zero.

    `error` is its standard error within the starts that answered. `weight` times the variance `between` starts adds to it.
    `between` is None if only one start of each answered, and no history tells of others: that part is then not known.
    `together` is what the answers of a repetition have in common, None if nothing shows that.
    """

    value: float
    error: float
    asked: int
    between: Between | None = None
    weight: float = 0.0
    together: Part | None = None

    def reach(self, alpha: float) -> float:
        """How far the true loss lies above the value, or below it, with the chance `alpha`."""
        of_starts = Part(self.weight, self.between) if self.between and self.weight else None
        return reach_of_parts(alpha, self.error**2, [part for part in (of_starts, self.together) if part])


def loss(baseline: Answers, candidate: Answers, margin: float, history: Between | None = None) -> Loss:
    """The candidate's loss against the baseline over the questions that both were asked.

    The loss will be compared with `margin`. If few questions differ, the error assumes at least as many differences as a loss
    of that size needs. `history` is what earlier runs showed of starts on this GPU type.

    Raises:
        ValueError: fewer than two common questions; or neither build answered one twice, so that the noise is not known.
    """
    common = (baseline.asked > 0) & (candidate.asked > 0)
    number, total = int(common.sum()), int((baseline.asked > 0).sum())
    if number < 2:
        raise ValueError("the builds have fewer than two questions in common")
    differences = (baseline.mean - candidate.mean)[common]
    varied = float(differences.var(ddof=1))
    ours, theirs = noise(baseline, candidate), baseline.noise if baseline.spare else candidate.noise
    inverse = float((1 / baseline.asked[common]).sum())
    if candidate.spare < ENOUGH_SPARE:
        # The candidate may be noisier than the baseline. Then the differences themselves show how large its noise can be.
        ours = max(ours, varied - theirs * inverse / number)
    from_noise = (theirs * inverse + ours * float((1 / candidate.asked[common]).sum())) / number**2
    # Sampling without replacement: the more questions were asked, the less the others can change.
    from_sampling = (1 - number / total) * max(varied, margin, 1 / number) / number
    between = with_history([*baseline.between, *candidate.between], history)
    weight = baseline.starts.weight + candidate.starts.weight
    return Loss(
        value=float(differences.mean()),
        error=math.sqrt(from_noise + from_sampling),
        asked=int(candidate.asked.sum()),
        between=between,
        weight=weight,
        together=_together(baseline, candidate),
    )


def _together(baseline: Answers, candidate: Answers) -> Part | None:
    """What the answers of a repetition have in common, by the repetitions of both builds."""
    known = pooled([*baseline.together, *candidate.together])
    return Part(baseline.repeated.weight + candidate.repeated.weight, known) if known else None


def noise(baseline: Answers, candidate: Answers) -> float:
    """The variance of one answer of the candidate: that of both builds together, or its own if that is larger.

    Raises:
        ValueError: neither build has answered a question twice.
    """
    known = [(answers.spare, answers.noise) for answers in (baseline, candidate) if answers.spare]
    if not known:
        raise ValueError("no question was answered twice by one build, so the noise is unknown")
    pooled = sum(spare * variance for spare, variance in known) / sum(spare for spare, _ in known)
    return max(pooled, candidate.noise) if candidate.spare >= ENOUGH_SPARE else pooled


def information_share(difference: Loss, candidate: Answers, margin: float, levels: Levels) -> float:
    """The share of the information that a comparison with this margin needs; it is complete at 1.

    It depends on how exactly the loss is known and not on the loss. So asking can go on until it is complete, whatever that
    takes, and hold its error rates (information-based monitoring: Lan & DeMets 1983; Mehta & Tsiatis 2001, Drug Inf. J. 35).
    """
    few = int(candidate.asked.min()) < LEAST_OF_A_CANDIDATE
    return min(_known(difference, margin, levels), MOST_OF_FEW if few else 1.0)


def _known(difference: Loss, margin: float, levels: Levels) -> float:
    # With few degrees of freedom a small chance reaches further out than the normal distribution has it, and one look has only
    # a part of the chance.
    chances = (PART_OF_A_LOOK * alpha for alpha in (levels.false_pass, levels.false_fail))
    error = max(difference.reach(alpha) / _z(alpha) for alpha in chances)
    return (margin / MARGIN_IN_ERRORS / error) ** 2 if error else 1.0


class Look(NamedTuple):
    """One look at a comparison. After one that `is_last` no more answers would help.

    After one that `is_last_of_start` only answers of another start could: what one start can tell is known.
    """

    loss: Loss
    interval: Interval
    is_last: bool
    is_last_of_start: bool


def looks(
    baseline: Answers, growing: Iterable[Answers], margin: float, levels: Levels, most: int, history: Between | None = None
) -> Iterator[Look]:
    """Each look at a candidate, from its answers at each of them, of which there are at most `most`. Raises as `loss`."""
    shares: list[float] = []
    for number, candidate in enumerate(growing, start=1):
        difference = loss(baseline, candidate, margin, history)
        shares.append(1.0 if number == most else information_share(difference, candidate, margin, levels))
        of_start = information_share(difference._replace(weight=0.0), candidate, margin, levels)
        interval = interval_of(difference, sides_after("lower", levels, rising(shares)))
        yield Look(difference, interval, shares[-1] >= 1, max(shares[-1], of_start) >= 1)


def repetitions_for(margin: float, noise: float, questions: int) -> int:
    """How often each build may have to answer all questions of one start, so that the comparison knows enough.

    `noise` is the variance of one answer. `margin` is the loss that must not be reached, as a share of the questions.
    """
    return max(LEAST_OF_A_CANDIDATE, math.ceil(2 * noise * (MARGIN_IN_ERRORS / margin) ** 2 / questions))


def starts_for(margin: float, noise: float, questions: int, between: Between, levels: Levels, most: int) -> int:
    """As `repetitions_for`, if each repetition is on a start of its own; `most` if more would be needed."""

    def after(number: int) -> Loss:
        return Loss(0.0, math.sqrt(2 * noise / questions / number), 0, between, 2 / number)

    enough = (number for number in range(LEAST_OF_A_CANDIDATE, most) if _known(after(number), margin, levels) >= 1)
    return next(enough, most)


def interval_of(difference: Loss, at: Sides) -> Interval:
    """The bounds of the loss, which is between -1 and 1."""
    lower, upper = difference.value - difference.reach(at.below), difference.value + difference.reach(at.above)
    return Interval(lower=max(-1.0, min(lower, difference.value)), upper=min(1.0, max(upper, difference.value)))


def _z(alpha: float) -> float:
    return -float(special.ndtri(alpha))
