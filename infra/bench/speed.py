"""Simulate a release's loads as a run measures them: its starts, the repeats of each, and what the store knows of starts."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from unittest import mock

import numpy as np

from infra.bench import price
from infra.bench.accuracy import below
from infra.bench.ended import EndedRelease, Known, Seen, worst
from infra.bench.plans import RepeatPlan
from infra.bench.speed_worlds import LoadWorld, Logs
from vllm_qualify.evidence import starts
from vllm_qualify.judge import loads, relative, steadiness
from vllm_qualify.judge.loads import LoadPlan, LoadsLook, Repeats
from vllm_qualify.judge.relative import Difference, EarlierRuns
from vllm_qualify.judge.start_means import StartMeans
from vllm_qualify.recipe.gates import Verdict

LABEL = "time"


def release(
    rng: np.random.Generator, plan: RepeatPlan, world: LoadWorld, slowdown: float, known: Sequence[Known] = ()
) -> EndedRelease:
    """One candidate, slower at the first of the plan's gates, as `tasks.measure` and `tasks.starts` measure it."""
    with _remembering():
        return _release(rng, plan, world, slowdown, known)


def _release(
    rng: np.random.Generator, plan: RepeatPlan, world: LoadWorld, slowdown: float, known: Sequence[Known]
) -> EndedRelease:
    measured = _Measured(rng, plan, world, slowdown)
    gates = [_Gate(plan, number, measured, each) for number, each in enumerate(known or [Known()] * len(plan.margins))]
    first = range(plan.repeats, max(plan.repeats, plan.most_repeats) + 1)
    measured.start(first[0])
    while measured.of_start < first[-1] and not _fails(gates) and any(gate.is_noisy for gate in gates):
        measured.repeat()
    further = further_repeats(plan)
    while measured.starts < plan.starts and not measured.is_unsteady and not _fails(gates):
        waiting = [gate for gate in gates if not gate.is_settled]
        if not waiting:
            break
        measured.start(further[0])
        while measured.of_start < further[-1] and any(gate.is_noisy for gate in waiting):
            measured.repeat()
    return EndedRelease(
        verdict="invalid" if measured.is_unsteady else worst([gate.verdict for gate in gates]),
        starts=measured.starts,
        asked=measured.repeats,
        minutes=price.of_loads(measured.starts, measured.repeats, in_turns=world.in_turns),
        seen=[gate.seen for gate in gates],
    )


@contextmanager
def _remembering() -> Iterator[None]:
    """Within the block, each difference of the same repeats is made once: each look has all the looks before it."""
    make, made = loads._measure_difference, {}

    def once(plan: LoadPlan, ours: Repeats, theirs: Repeats, *, over_starts: bool) -> Difference:
        key = id(plan), len(ours.values)
        if key not in made:
            middle, off_by = make(plan, ours, theirs, over_starts=over_starts)
            made[key] = Difference(middle, lru_cache(off_by))
        return made[key]

    with mock.patch.object(loads, "_measure_difference", once):
        yield


def further_repeats(plan: RepeatPlan) -> range:
    """As `starts.repeats_of`."""
    least = min(starts.REPEATS, plan.repeats)
    return range(least, max(least, min(starts.MOST_REPEATS, max(plan.repeats, plan.most_repeats))) + 1)


def _fails(gates: Sequence["_Gate"]) -> bool:
    return any(gate.verdict == "fail" for gate in gates)


class _Measured:
    """The logarithms of the repeats so far, of both builds and all gates; that of a start is made when the start begins."""

    def __init__(self, rng: np.random.Generator, plan: RepeatPlan, world: LoadWorld, slowdown: float) -> None:
        self._rng, self._plan, self._world, self._slowdown = rng, plan, world, slowdown
        self._days = world.machine.days * rng.standard_normal(2) if not world.in_turns else np.zeros(2)
        self._most = max(plan.repeats, plan.most_repeats)
        self.starts, self.of_start, self.repeats = 0, 0, 0
        self._logs: list[tuple[Logs, Logs]] = []
        self.started: list[int] = []
        self.baseline = None if world.in_turns else self._of_baseline()

    def start(self, repeats: int) -> None:
        self.starts, self.of_start = self.starts + 1, 0
        gates = len(self._plan.margins)
        self._logs.append(self._world.start(self._rng, self._most, gates, self._slowdown, is_first=self.starts == 1))
        for _ in range(repeats):
            self.repeat()

    def repeat(self) -> None:
        self.of_start, self.repeats = self.of_start + 1, self.repeats + 1
        self.started.append(self.starts)

    def of_gate(self, gate: int) -> tuple[Repeats, Repeats]:
        ours, theirs = ([] for _ in range(2))
        for number, (candidate, baseline) in enumerate(self._logs, start=1):
            count = self.started.count(number)
            ours += np.exp(candidate[gate, :count] + self._days[0]).tolist()
            theirs += np.exp(baseline[gate, :count]).tolist()
        mine = Repeats(ours, list(self.started))
        return mine, Repeats(theirs, list(self.started)) if self.baseline is None else self.baseline[gate]

    @property
    def is_unsteady(self) -> bool:
        """As `compare` has it of a load, by its first gate."""
        planned = self._most + (self._plan.starts - 1) * further_repeats(self._plan)[-1]
        looks = range(self._plan.repeats, max(planned, self.repeats) + 1)
        counts = [self.started.count(number) for number in range(1, self.starts + 1)]
        ours, theirs = (
            [np.exp(both[side][0, :count]).tolist() for both, count in zip(self._logs, counts, strict=True)] for side in (0, 1)
        )
        return steadiness.problem(ours, theirs if self.baseline is None else [], looks, LABEL) is not None

    def _of_baseline(self) -> list[Repeats]:
        """Measured at its own time, on its own starts. Without anything to compare with, no repeat is noisy."""
        gates, by_start = len(self._plan.margins), [self._plan.repeats]
        by_start += [further_repeats(self._plan)[0]] * (min(self._plan.starts, starts.LEAST_OF_A_BASELINE["load"]) - 1)
        logs = [self._world.start(self._rng, repeats, gates, 0.0)[1] + self._days[1] for repeats in by_start]
        started = [start for start, repeats in enumerate(by_start, start=1) for _ in range(repeats)]
        return [Repeats(np.exp(np.concatenate([each[gate] for each in logs])).tolist(), started) for gate in range(gates)]


class _Gate:
    """One gate of a candidate under way. It looks once at each state of what was measured."""

    def __init__(self, plan: RepeatPlan, number: int, measured: _Measured, known: Known) -> None:
        in_turns = measured.baseline is None
        self._number, self._measured = number, measured
        self._earlier = EarlierRuns(starts=known.pair) if in_turns else EarlierRuns(known.start, known.day)
        self._plan = LoadPlan(
            direction="lower",
            margin=plan.margins[number],
            levels=plan.levels,
            looks=range(plan.repeats, max(plan.repeats, plan.most_repeats) + 1),
            most_starts=plan.starts,
            in_turns=in_turns,
            known=self._earlier,
        )
        self._looked: tuple[int, LoadsLook] | None = None

    @property
    def verdict(self) -> Verdict:
        return below(self._look().interval, self._plan.margin)

    @property
    def is_noisy(self) -> bool:
        return loads.is_noisy(self._plan, *self._measured.of_gate(self._number))

    @property
    def is_settled(self) -> bool:
        """As `stopping`: a few starts decide nothing."""
        if self._measured.starts < starts.LEAST:
            return False
        return self.verdict != "inconclusive" or self._look().is_last

    @property
    def seen(self) -> Seen:
        ours, theirs = self._measured.of_gate(self._number)
        build = _means("build", [math.log(value) for value in ours.values], ours.started)
        if not self._plan.in_turns:
            return Seen(build=build)
        ratios = [math.log(one / other) for one, other in zip(ours.values, theirs.values, strict=True)]
        return Seen(build=build, pair=_means("pair", ratios, ours.started))

    def _look(self) -> LoadsLook:
        if self._looked is None or self._looked[0] != self._measured.repeats:
            self._looked = self._measured.repeats, loads.look(self._plan, *self._measured.of_gate(self._number))
        return self._looked[1]


def _means(of: str, logs: Sequence[float], started: Sequence[int]) -> StartMeans:
    """What a run publishes of its starts, as `start_means` makes it of the measurements."""
    build = relative.build_of([math.exp(log) for log in logs], started)
    means, noises = zip(*build.start_means(build.noise), strict=True)
    return StartMeans(
        label=LABEL,
        of="pair" if of == "pair" else "build",
        means=list(means),
        noises=list(noises),
        repeats=list(map(len, build.groups)),
    )
