"""The paired comparison: a candidate's answers against the baseline's, question by question.

The questions are the whole population: the loss is judged on just these questions. If each build always gave the same
answers, the loss would be known exactly after each question was asked once. These sources of uncertainty remain: the noise of
answers, also where the questions of a topic share it; what all answers of a repetition have in common; what differs from start
to start of a server. The last is which questions were not asked yet: their order is random, so that it does not matter which of
them change together.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Levels, Sides, rising, sides_after
from vllm_qualify.judge import between, information
from vllm_qualify.judge.between import OF_ANSWERS, WHOLE, Array, Counts, Repeated, RepetitionNoise, Spread, StartMean, spread
from vllm_qualify.judge.information import OF_A_DEVIATION, errors_in_margin
from vllm_qualify.plan.cell import Between

# With at least so many spare answers, a candidate's own noise is known well enough to count.
ENOUGH_SPARE = 200
# Only a second answer to some questions shows a candidate's own noise. Without it, each change could be noise, or for good.
LEAST_OF_A_CANDIDATE = 2
# The most of a comparison's information that a look has while questions were asked fewer than LEAST_OF_A_CANDIDATE times.
MOST_OF_FEW = 0.98
# When the information is complete, a release without a loss has no verdict with this chance. The promise is that a loss of
# twice the margin fails in 85 % of the cases.
UNDECIDED_WHEN_COMPLETE = 0.02
# The variance of a comparison over that of its baseline, with a candidate of twice the baseline's answers and starts.
OF_BOTH = 1.5


class Record(NamedTuple):
    """A build's answers in the order in which they were asked: for each its question, its score, the repetition and the start.

    `topics` has the topic of each of the `questions`, None if they have none. All but scores are numbered from 0.
    """

    question: Counts
    score: Array
    repetition: Counts
    start: Counts
    questions: int
    topics: Counts | None = None

    def first_answers(self, asked: int) -> "Record":
        arrays = (self.question[:asked], self.score[:asked], self.repetition[:asked], self.start[:asked])
        return Record(*arrays, self.questions, self.topics)


class Starts(NamedTuple):
    """The starts that a build's answers are from.

    `weight` is the sum of the squares of their shares of the answers: one over their `number`, if all answered as much.
    `shifts` are the means of those that answered nearly all questions, less those of all of these together, and `repeated` how
    often each of them answered a question.
    """

    weight: float = 1.0
    number: int = 1
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

    total: Array
    squares: Array
    asked: Counts
    starts: Starts = ONE_START
    shared: float = 0.0
    repeated: Repeated = between.ONE_REPETITION

    @cached_property
    def mean(self) -> Array:
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
    question, score, repetition, start, questions, topics = record
    total, squares = (np.bincount(question, weights, questions).astype(float) for weights in (score, score**2))
    answers = Answers(total, squares, np.bincount(question, minlength=questions), _starts_of_record(record))
    if answers.spare == 0:
        return answers
    if topics is None:
        return replace(answers, repeated=between.find_repetitions(question, score, repetition, start, questions))
    return replace(answers, shared=_variance_with_topics(record, topics, answers))


def _starts_of_record(record: Record) -> Starts:
    sizes = np.bincount(record.start)
    weight = float(((sizes / sizes.sum()) ** 2).sum())
    of_starts = [np.flatnonzero(record.start == start) for start in range(len(sizes))] if len(sizes) > 1 else []
    whole = [rows for rows in of_starts if np.count_nonzero(np.bincount(record.question[rows])) >= WHOLE * record.questions]
    if len(whole) < 2:
        return Starts(weight, len(sizes))
    rows = np.concatenate(whole)
    asked = np.bincount(record.question[rows], minlength=record.questions)
    usual = np.bincount(record.question[rows], record.score[rows], record.questions) / np.maximum(asked, 1)
    shifts = tuple(float((record.score[rows] - usual[record.question[rows]]).mean()) for rows in whole)
    return Starts(weight, len(sizes), shifts, tuple(len(rows) / record.questions for rows in whole))


def _variance_with_topics(record: Record, topics: Counts, answers: Answers) -> float:
    """The variance of one answer if the answers of a topic in one repetition are taken together (cluster-robust)."""
    often = answers.asked[record.question]
    repeated = often > 1
    question, often = record.question[repeated], often[repeated]
    # An answer is nearer to the mean that it is part of than to the question's own share.
    away = (record.score[repeated] - answers.mean[question]) * np.sqrt(often / (often - 1))
    together = np.bincount(record.repetition[repeated] * (int(topics.max()) + 1) + topics[question], away)
    return float((together**2).sum() / len(away))


class Loss(NamedTuple):
    """How much the candidate lost, as a share of the questions; a gain is below zero.

    `error` is its standard error within the starts that answered; its square has the part `ours` from the candidate's noise.
    `weight` times the variance of starts adds to it.
    `together` is what the answers of a repetition have in common, None if nothing shows that, or if starts have it in them.
    """

    value: float
    error: float
    asked: int
    spread: Spread
    weight: float
    together: RepetitionNoise | None = None
    ours: float = 0.0

    @property
    def restless(self) -> float | None:
        """The deviation of starts, None if it is not RESTLESS times what is assumed."""
        return self.spread.deviation if self.spread.deviation > between.RESTLESS * OF_ANSWERS.scale else None

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

    Raises ValueError for fewer than two common questions; or if neither build answered one twice, so that noise is unknown.
    """
    common = (baseline.asked > 0) & (candidate.asked > 0)
    number, total = int(common.sum()), int((baseline.asked > 0).sum())
    if number < 2:
        raise ValueError("the builds have fewer than two questions in common")
    differences = (baseline.mean - candidate.mean)[common]
    varied = float(differences.var(ddof=1))
    ours, theirs = noise(baseline, candidate), baseline.noise if baseline.spare else candidate.noise
    inverse, inverse_of_candidate = (float((1 / answers.asked[common]).sum()) for answers in (baseline, candidate))
    if candidate.spare < ENOUGH_SPARE:
        # The candidate may be noisier than the baseline. Then the differences themselves show how large its noise can be.
        ours = max(ours, varied - theirs * inverse / number)
    of_baseline, of_candidate = theirs * inverse / number**2, ours * inverse_of_candidate / number**2
    # Sampling without replacement: the more questions were asked, the less the others can change.
    from_sampling = (1 - number / total) * max(varied, margin, 1 / number) / number
    starts = spread(OF_ANSWERS, [baseline.start_means, candidate.start_means], history) if over_starts else between.NO_SPREAD
    together = None if over_starts else between.pool_estimates([*baseline.together, *candidate.together])
    return Loss(
        value=float(differences.mean()),
        error=math.sqrt(of_baseline + of_candidate + from_sampling),
        asked=int(candidate.asked.sum()),
        spread=starts,
        weight=baseline.starts.weight + candidate.starts.weight,
        together=RepetitionNoise(baseline.repeated.weight + candidate.repeated.weight, together) if together else None,
        ours=of_candidate,
    )


def noise(baseline: Answers, candidate: Answers) -> float:
    """The variance of one answer of the candidate: that of both builds together, or its own if that is larger.

    Raises ValueError if neither build has answered a question twice.
    """
    known = [(answers.spare, answers.noise) for answers in (baseline, candidate) if answers.spare]
    if not known:
        raise ValueError("no question was answered twice by one build, so the noise is unknown")
    pooled = sum(spare * variance for spare, variance in known) / sum(spare for spare, _ in known)
    return max(pooled, candidate.noise) if candidate.spare >= ENOUGH_SPARE else pooled


def information_share(difference: Loss, candidate: Answers, margin: float, levels: Levels) -> float:
    """The share of the information that a comparison with this margin needs; it is complete at 1."""
    share = information.share_of_information(difference.reach, margin, levels, UNDECIDED_WHEN_COMPLETE)
    return min(share, MOST_OF_FEW) if int(candidate.asked.min()) < LEAST_OF_A_CANDIDATE else share


class AnswersLook(NamedTuple):
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
    most_starts: int = 1,
) -> Iterator[AnswersLook]:
    """The looks at a candidate. `growing` has the answers at each look, and there are at most `most` looks.

    The candidate's server is started at most `most_starts` times. The other arguments are those of `loss`.
    """
    shares: list[float] = []
    for number, candidate in enumerate(growing, start=1):
        difference = loss(baseline, candidate, margin, history, over_starts=over_starts)
        shares.append(1.0 if number == most else information_share(difference, candidate, margin, levels))
        of_start = information_share(difference._replace(weight=0.0), candidate, margin, levels)
        interval = information.interval_of_loss(partial(_interval_at_levels, difference, rising(shares)), levels)
        about = (difference.value, difference.reach, margin, levels, _least_error(difference, candidate.starts, most_starts))
        is_last = shares[-1] >= 1 or information.is_hardly_decided(*about)
        yield AnswersLook(difference, interval, is_last, is_last or of_start >= 1)


def _interval_at_levels(difference: Loss, shares: Sequence[float], levels: Levels) -> Interval:
    return interval_of(difference, sides_after("lower", levels, shares))


def _least_error(difference: Loss, starts: Starts, most_starts: int) -> float:
    """About the standard error when the last start has answered, if those to come are like the candidate's `starts` so far.

    0 with one start, which shows too little of the others.
    """
    if starts.number == 1:
        return 0.0
    left_out = 1 - starts.number / max(most_starts, starts.number)
    error = math.sqrt(max(0.0, difference.error**2 - left_out * difference.ours))
    return difference._replace(error=error, weight=difference.weight - left_out * starts.weight).reach(OF_A_DEVIATION)


def share_of_a_baseline(answers: Answers, margin: float, levels: Levels) -> float:
    """The share of a margin's information that a baseline allows, with a candidate of twice its answers and starts.

    What a baseline lacks no candidate can replace, whatever its starts; and a candidate's starts are not paid for others.
    """
    reach = partial(_baseline_reach, answers, 1.0)
    return information.share_of_information(reach, margin, levels, information.UNDECIDED)


def may_tell_enough(answers: Answers, margin: float, levels: Levels, most_starts: int) -> bool:
    """Whether the error may be small enough for the margin after all of a baseline's starts, if they are like those so far."""
    left = min(1.0, answers.starts.number / most_starts)
    return _baseline_reach(answers, left, OF_A_DEVIATION) <= margin / errors_in_margin(levels)


def _baseline_reach(answers: Answers, left: float, alpha: float) -> float:
    """How far a difference with a candidate of twice a baseline's answers can be off, if this share of its variance is left."""
    asked, variance_left = answers.asked[answers.asked > 0], left * OF_BOTH
    noise = answers.noise * float((1 / asked).sum()) / len(asked) ** 2
    starts = spread(OF_ANSWERS, [answers.start_means])
    return starts.reach(alpha, variance_left * noise, variance_left * answers.starts.weight)


def repetitions_for(margin: float, noise: float, questions: int, levels: Levels) -> int:
    """How often each build may have to answer all questions of one start, so that the comparison knows enough.

    `noise` is the variance of one answer. `margin` is the loss that must not be reached, as a share of the questions.
    """
    return max(LEAST_OF_A_CANDIDATE, math.ceil(2 * noise * (errors_in_margin(levels) / margin) ** 2 / questions))


def interval_of(difference: Loss, at: Sides) -> Interval:
    """The bounds of the loss, which is between -1 and 1."""
    lower, upper = difference.value - difference.reach(at.below), difference.value + difference.reach(at.above)
    return Interval(lower=max(-1.0, min(lower, difference.value)), upper=min(1.0, max(upper, difference.value)))
