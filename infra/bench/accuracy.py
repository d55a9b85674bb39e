"""Simulate a release's answers as a run asks them: its baseline, its starts, its looks, and what the store knows of starts."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.bench import price, worlds
from infra.bench.answer_worlds import FIRST, Build, BuildPair
from infra.bench.ended import EndedRelease, Seen, worst
from infra.bench.plans import AnswerPlan, Task
from vllm_qualify.evidence.accuracy import blocks
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.starts import LEAST, LEAST_OF_A_BASELINE
from vllm_qualify.judge import paired
from vllm_qualify.judge.paired import LEAST_OF_A_CANDIDATE, Answers, AnswersLook, Record
from vllm_qualify.judge.start_means import StartMeans
from vllm_qualify.judge.verdict import Checks, verdict_from
from vllm_qualify.plan.cell import Between
from vllm_qualify.recipe.accuracy import LEAST_REPETITIONS
from vllm_qualify.recipe.gates import Verdict

# No candidate has so many looks: only the look at the last start that a plan allows ends the comparison whatever is known.
ENDLESS = 10**6
LABEL = "score"


def release(
    rng: np.random.Generator, plan: AnswerPlan, pairs: Sequence[BuildPair], known: Sequence[Between | None] = ()
) -> EndedRelease:
    """One candidate with a new baseline: a pair of builds for each task of the plan, and what is known of each one's starts."""
    baselines = [establish(rng, plan, task, pair.baseline) for task, pair in zip(plan.tasks, pairs, strict=True)]
    return against(rng, plan, baselines, [pair.candidate for pair in pairs], known)


def against(
    rng: np.random.Generator,
    plan: AnswerPlan,
    baselines: Sequence[Answers],
    builds: Sequence[Build],
    known: Sequence[Between | None] = (),
) -> EndedRelease:
    """One candidate with a baseline, as `tasks.measure` and `tasks.starts` ask it: see `judge.stopping`."""
    about = zip(plan.tasks, baselines, builds, known or [None] * len(builds), strict=True)
    gates = [_Gate(rng, plan, *each) for each in about]
    for gate in gates:
        gate.ask_first_start()
    starts = 1
    while starts < plan.starts and not any(gate.verdict == "fail" for gate in gates):
        waiting = [gate for gate in gates if not gate.is_settled]
        if not waiting:
            break
        starts += 1
        for gate in waiting:
            gate.ask_another_start()
    asked = sum(gate.asked / gate.task.questions for gate in gates)
    before = [int(answers.asked.max()) for answers in baselines]
    return EndedRelease(
        verdict=worst([gate.verdict for gate in gates]),
        starts=starts,
        asked=asked,
        minutes=price.of_answers(starts, sum(gate.asked for gate in gates)) + _of_baselines(baselines),
        baseline_asked=max(before),
        seen=[gate.seen for gate in gates],
    )


def _of_baselines(baselines: Sequence[Answers]) -> float:
    """Minutes of a baseline; its tasks are asked on the same starts."""
    starts = max(max(1, len(each.starts.shifts)) for each in baselines)
    return price.of_answers(starts, sum(int(each.asked.sum()) for each in baselines))


def establish(rng: np.random.Generator, plan: AnswerPlan, task: Task, build: Build) -> Answers:
    """A baseline: started until its answers are enough for its own noise, and for what differs between its starts."""
    least, order = min(plan.starts, LEAST_OF_A_BASELINE["answers"]), np.arange(task.questions)
    record, repetition, started = None, 0, build.started(rng)
    for repetition in range(task.most_repetitions):
        record = _added(record, build, order, started.answered(rng), repetition, 0)
        known = paired.answers_by_question(record)
        if repetition + 1 >= LEAST_OF_A_CANDIDATE and repetition + 1 >= _needed(known, plan, task, least):
            break
    assert record is not None
    again = max(1, repetition)
    for start in range(1, plan.starts):
        if start >= least and _is_known(known, plan, task):
            break
        started = build.started(rng)
        for _ in range(again):
            repetition += 1
            record = _added(record, build, order, started.answered(rng), repetition, start)
        known = paired.answers_by_question(record)
    return known


def _needed(baseline: Answers, plan: AnswerPlan, task: Task, starts: int) -> float:
    """As `eligible.repetitions_to_establish`."""
    needed = min(paired.repetitions_for(task.margin, baseline.noise, task.questions, plan.levels), task.most_repetitions)
    return max(LEAST_REPETITIONS + starts - 1, needed) / starts


def _is_known(baseline: Answers, plan: AnswerPlan, task: Task) -> bool:
    """As `enough.is_known_of_baseline`."""
    about = (baseline, task.margin, plan.levels)
    return paired.share_of_a_baseline(*about) >= 1 or not paired.may_tell_enough(*about, plan.starts)


class _Gate:
    """One task of a candidate under way."""

    def __init__(
        self, rng: np.random.Generator, plan: AnswerPlan, task: Task, baseline: Answers, build: Build, known: Between | None
    ) -> None:
        self.task, self.asked, self._starts, self._repetitions = task, 0, 0, 0
        self._rng, self._plan, self._baseline, self._build, self._known = rng, plan, baseline, build, known
        self._record: Record | None = None
        self._growing: list[Answers] = []
        self._planned = planned_looks(task)
        most = len(self._planned) if plan.starts == 1 else ENDLESS
        self._looks = self._all_looks((self._growing[number] for number in itertools.count()), most)

    def ask_first_start(self) -> None:
        """In blocks, until the gate is decided, or the start can tell no more."""
        started, self._starts = self._build.started(self._rng), 1
        for _ in range(self.task.most_repetitions):
            order = self._rng.permutation(self.task.questions)
            scores = started.answered(self._rng, self._first(order) if not self._repetitions else None)
            before = self._repetitions * self.task.questions
            cuts = [look - before for look in self._planned if before < look < before + self.task.questions]
            for block in np.split(order, cuts):
                self._ask(block, scores)
                if self.verdict != "inconclusive" or self._look.is_last_of_start:
                    self._repetitions += 1
                    return
            self._repetitions += 1

    def ask_another_start(self) -> None:
        """Every question once."""
        self._starts += 1
        order = self._rng.permutation(self.task.questions)
        self._ask(order, self._build.started(self._rng).answered(self._rng, self._first(order)))
        self._repetitions += 1

    def _first(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        return order[: round(FIRST * len(order))]

    @property
    def verdict(self) -> Verdict:
        return below(self._look.interval, self.task.margin)

    @property
    def is_settled(self) -> bool:
        """As `stopping`: a few starts decide nothing."""
        if self._starts < LEAST:
            return False
        return self.verdict != "inconclusive" or self._look.is_last

    @property
    def seen(self) -> Seen | None:
        assert self._record is not None
        means = means_of_starts(self._record)
        return Seen(build=means) if means else None

    def _ask(self, block: NDArray[np.int64], scores: worlds.Chances) -> None:
        self._record = _added(self._record, self._build, block, scores, self._repetitions, self._starts - 1)
        self.asked += len(block)
        self._growing.append(paired.answers_by_question(self._record))
        self._look: AnswersLook = next(self._looks)
        if self._starts == self._plan.starts > 1:
            *_, self._look = self._all_looks(iter(self._growing), len(self._growing))

    def _all_looks(self, growing: Iterator[Answers], most: int) -> Iterator[AnswersLook]:
        over_starts = self._plan.starts > 1 or len(self._baseline.starts.shifts) > 1 or self._known is not None
        about = (self.task.margin, self._plan.levels, most, self._known)
        return paired.looks(self._baseline, growing, *about, over_starts=over_starts, most_starts=self._plan.starts)


def means_of_starts(record: Record) -> StartMeans | None:
    """What a run publishes of its starts, as `start_means` makes it of the files; None if its first start shows no noise."""
    first = np.flatnonzero(record.start == 0)
    counts = np.bincount(record.question[first])
    spare = int((counts - 1).clip(0).sum())
    if not spare:
        return None
    sums, squares = (np.bincount(record.question[first], record.score[first] ** power) for power in (1, 2))
    noise = (float((squares - sums**2 / np.maximum(counts, 1)).sum()) + 0.5) / spare
    means, noises = [], []
    for start in range(int(record.start.max()) + 1):
        rows = np.flatnonzero(record.start == start)
        asked = np.bincount(record.question[rows])
        often = asked[asked > 0]
        means.append(float((np.bincount(record.question[rows], record.score[rows])[asked > 0] / often).mean()))
        noises.append(noise * float((1 / often).sum()) / len(often) ** 2)
    return StartMeans(label=LABEL, of="build", means=means, noises=noises)


def _added(
    record: Record | None, build: Build, block: NDArray[np.int64], scores: worlds.Chances, repetition: int, start: int
) -> Record:
    topics = build.topics if build.named else None
    repetitions, starts = (np.full(len(block), each) for each in (repetition, start))
    new = Record(block, scores[block], repetitions, starts, len(scores), topics)
    if record is None:
        return new
    return new._replace(
        question=np.concatenate([record.question, new.question]),
        score=np.concatenate([record.score, new.score]),
        repetition=np.concatenate([record.repetition, new.repetition]),
        start=np.concatenate([record.start, new.start]),
    )


@cache
def planned_looks(task: Task) -> tuple[int, ...]:
    """The numbers of answers of the first start after which the gates are judged."""
    all_steps = blocks.plan_steps(task.settings, task.questions, task.most_repetitions, sequential=True)
    return tuple(itertools.accumulate(len(step.questions) for step in all_steps))


def below(interval: Interval | None, bound: float) -> Verdict:
    """The product's verdict on a value that may not be above its bound."""
    surely = interval is not None and interval.upper <= bound
    maybe = interval is not None and interval.lower <= bound
    known = interval is not None
    return verdict_from(Checks(present=True, trusted=True, noise_known=known, surely_inside=surely, maybe_inside=maybe))


class OneStart(NamedTuple):
    """How a comparison of one start of each build ended: its verdict and its answers."""

    verdict: Verdict
    asked: int


def of_one_start(rng: np.random.Generator, plan: AnswerPlan, pair: BuildPair) -> OneStart:
    """One task asked as with `starts: 1`."""
    ended = release(rng, plan._replace(starts=1), [pair])
    return OneStart(ended.verdict, round(ended.asked * plan.tasks[0].questions))
