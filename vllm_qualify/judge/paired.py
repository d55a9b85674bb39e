"""The paired comparison: a candidate's answers against the baseline's, question by question.

The questions are the whole population: the loss is judged on just these questions. If each build always gave the same
answers, the loss would be known exactly after each question was asked once. These sources of uncertainty remain: the noise of
answers, also where the questions of a topic share it; what all answers of a repetition have in common; what differs from start
to start of a server. The last is which questions were not asked yet: their order is random, so that it does not matter which of
them change together.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Levels, Sides, rising, sides_after
from vllm_qualify.judge.between import NO_SPREAD, OF_ANSWERS, RESTLESS, Between, Spread, StartMean, spread
from vllm_qualify.judge.together import ONE_REPETITION, Part, Repeated, pooled, repeated

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
    `shifts` are the means of those that answered nearly all questions, less those of all of these together, and `repeated` how
    often each of them answered a question.
    """

    weight: float = 1.0
    shifts: tuple[float, ...] = ()
    repeated: tuple[float, ...] = ()


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
    def start_means(self) -> list[StartMean]:
        """The means of its starts; empty for fewer than two."""
        noises = [self.noise / len(self.asked) / often for often in self.starts.repeated]
        return [StartMean(*each) for each in zip(self.starts.shifts, noises, strict=True)]

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
    shifts = tuple(float((record.score[rows] - usual[record.question[rows]]).mean()) for rows in whole)
    return Starts(weight, shifts, tuple(len(rows) / record.questions for rows in whole))


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

    `error` is its standard error within the starts that answered. `weight` times the variance of starts adds to it.
    `together` is what the answers of a repetition have in common, None if nothing shows that, or if starts have it in them.
    """

    value: float
    error: float
    asked: int
    spread: Spread
    weight: float
    together: Part | None = None

    @property
    def restless(self) -> float | None:
        """The deviation of starts, None if it is not RESTLESS times what is assumed."""
        return self.spread.deviation if self.spread.deviation > RESTLESS * OF_ANSWERS.scale else None

    def reach(self, alpha: float) -> float:
        """How far the true loss lies above the value, or below it, with the chance `alpha`."""
        if self.together:
            return self.together.reach(alpha, self.error**2)
        return self.spread.reach(alpha, self.error**2, self.weight)


def loss(
    baseline: Answers, candidate: Answers, margin: float, history: Between | None = None, *, over_starts: bool = True
) -> Loss:
    """The candidate's loss against the baseline over the questions that both were asked.

    The loss will be compared with `margin`. If few questions differ, the error assumes at least as many differences as a loss
    of that size needs. `history` is what earlier runs showed of starts. What differs between starts is left out if the
    comparison is not `over_starts`.

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
    starts = spread(OF_ANSWERS, [baseline.start_means, candidate.start_means], history) if over_starts else NO_SPREAD
    weight = baseline.starts.weight + candidate.starts.weight
    return Loss(
        value=float(differences.mean()),
        error=math.sqrt(from_noise + from_sampling),
        asked=int(candidate.asked.sum()),
        spread=starts,
        weight=weight,
        together=None if over_starts else _together(baseline, candidate),
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
    # One look has only a part of a chance, and few repetitions reach further out with that.
    part = PART_OF_A_LOOK if difference.together else 1.0
    parts = Levels(false_pass=part * levels.false_pass, false_fail=part * levels.false_fail)
    return min(share_of_information(difference.reach, margin, parts), MOST_OF_FEW if few else 1.0)


def share_of_information(reach: Callable[[float], float], margin: float, levels: Levels) -> float:
    """The share of what a margin needs, from how far a difference can be off with a chance; at most 1."""
    # With few degrees of freedom a small chance reaches further out than the normal distribution has it.
    error = max(reach(alpha) / _z(alpha) for alpha in (levels.false_pass, levels.false_fail))
    return min(1.0, (margin / MARGIN_IN_ERRORS / error) ** 2) if error else 1.0


class Look(NamedTuple):
    """One look at a comparison. After one that `is_last` no more answers would help.

    After one that `is_last_of_start` only answers of another start could: what one start can tell is known.
    """

    loss: Loss
    interval: Interval
    is_last: bool
    is_last_of_start: bool


def looks(
    baseline: Answers,
    growing: Iterable[Answers],
    margin: float,
    levels: Levels,
    most: int,
    history: Between | None = None,
    *,
    over_starts: bool = True,
) -> Iterator[Look]:
    """Each look at a candidate, from its answers at each of them, of which there are at most `most`. Else as `loss`."""
    shares: list[float] = []
    for number, candidate in enumerate(growing, start=1):
        difference = loss(baseline, candidate, margin, history, over_starts=over_starts)
        shares.append(1.0 if number == most else information_share(difference, candidate, margin, levels))
        of_start = information_share(difference._replace(weight=0.0), candidate, margin, levels)
        interval = interval_of(difference, sides_after("lower", levels, rising(shares)))
        yield Look(difference, interval, shares[-1] >= 1, max(shares[-1], of_start) >= 1)


def repetitions_for(margin: float, noise: float, questions: int) -> int:
    """How often each build may have to answer all questions of one start, so that the comparison knows enough.

    `noise` is the variance of one answer. `margin` is the loss that must not be reached, as a share of the questions.
    """
    return max(LEAST_OF_A_CANDIDATE, math.ceil(2 * noise * (MARGIN_IN_ERRORS / margin) ** 2 / questions))


def interval_of(difference: Loss, at: Sides) -> Interval:
    """The bounds of the loss, which is between -1 and 1."""
    lower, upper = difference.value - difference.reach(at.below), difference.value + difference.reach(at.above)
    return Interval(lower=max(-1.0, min(lower, difference.value)), upper=min(1.0, max(upper, difference.value)))


def _z(alpha: float) -> float:
    return -float(special.ndtri(alpha))
