"""Worlds in which loads are not what the simplest reading of their repeats takes them to be."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.bench.accuracy import EndedRelease, below
from infra.bench.speed import bounds
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge import relative
from vllm_qualify.judge.between import Between
from vllm_qualify.judge.relative import NOTHING, EarlierRuns
from vllm_qualify.recipe.gates import Verdict

Logs = NDArray[np.float64]
# Standard deviations of logarithms: of a repeat, and of the shift of each start and of each day.
NOISE, BETWEEN_STARTS, BETWEEN_DAYS = 0.01, 0.005, 0.01
# The share of its wandering that a server keeps from repeat to repeat; how often a neighbour slows a repeat, and by how much.
KEPT, VISITS, SLOWED = 0.5, 0.1, 0.05
# The starts of one build that a history is made of.
IN_HISTORY = 21


class Machine(NamedTuple):
    """What the times of one build vary by. `own` makes a start's repeats, and `shared` what both builds have in each pair."""

    own: Callable[[np.random.Generator, int], Logs]
    between: float = 0.0
    days: float = 0.0

    def started(self, rng: np.random.Generator, repeats: int) -> Logs:
        return self.own(rng, repeats) + self.between * rng.standard_normal()


class RepeatPlan(NamedTuple):
    """How a world's loads are measured: the numbers of repeats of each start, the looks, and whether history is known.

    With `history` the baseline was measured on another day. All of `gates` must pass, each with its own noise.
    """

    starts: Sequence[int]
    looks: range
    known: bool = False
    history: bool = False
    gates: int = 1


class LoadWorld(NamedTuple):
    """A machine, and how loads were measured before, and are now."""

    machine: Machine
    before: RepeatPlan
    now: RepeatPlan


def usual(rng: np.random.Generator, repeats: int) -> Logs:
    return NOISE * rng.standard_normal(repeats)


def noisier(rng: np.random.Generator, repeats: int) -> Logs:
    return 1.5 * NOISE * rng.standard_normal(repeats)


def skewed(rng: np.random.Generator, repeats: int) -> Logs:
    """Most repeats are somewhat fast, and some are much slower: an exponential distribution."""
    return NOISE * (rng.exponential(size=repeats) - 1)


def wandering(rng: np.random.Generator, repeats: int) -> Logs:
    """Each repeat is like the one before it (a first-order autoregression)."""
    steps, logs = rng.standard_normal(repeats), np.empty(repeats)
    for place, step in enumerate(steps):
        logs[place] = KEPT * logs[place - 1] + math.sqrt(1 - KEPT**2) * step if place else step
    return NOISE * logs


def visited(rng: np.random.Generator, repeats: int) -> Logs:
    """A neighbour slows some of the repeats."""
    return usual(rng, repeats) + SLOWED * (rng.random(repeats) < VISITS)


ONE_START, MORE = RepeatPlan([10], range(5, 11)), RepeatPlan([12], range(5, 13))
WORLDS = {
    "starts": LoadWorld(Machine(usual, between=BETWEEN_STARTS), ONE_START, RepeatPlan([2] * 6, range(5, 13), known=True)),
    "days": LoadWorld(Machine(usual, days=BETWEEN_DAYS), ONE_START._replace(history=True), MORE),
    "autocorrelated": LoadWorld(Machine(wandering), ONE_START, RepeatPlan([2] * 10, range(6, 21), known=True)),
    "skewed": LoadWorld(Machine(skewed), ONE_START, MORE),
    "neighbours": LoadWorld(Machine(visited), ONE_START, RepeatPlan([32], range(5, 33))),
    "twelve gates": LoadWorld(Machine(noisier), ONE_START._replace(gates=12), RepeatPlan([28], range(5, 29), gates=12)),
    "three repeats": LoadWorld(Machine(usual), RepeatPlan([3], range(3, 4)), RepeatPlan([12], range(3, 13))),
    "usual, with history": LoadWorld(Machine(usual), ONE_START, ONE_START._replace(known=True)),
    "skewed, with history": LoadWorld(Machine(skewed), ONE_START, MORE._replace(known=True)),
}


def release(
    rng: np.random.Generator, world: LoadWorld, slowdown: float, margin: float, levels: Levels, *, before: bool
) -> EndedRelease:
    """One candidate at all gates of the plan, slower at the first of them. A gate that fails ends the load; else the gate that
    needs most repeats does.
    """
    plan = world.before if before else world.now
    known = _history(rng, world.machine, plan) if plan.known else NOTHING
    slower = [slowdown] + [0.0] * (plan.gates - 1)
    ended = [_at_one_gate(rng, world.machine, plan, each, margin, levels, known) for each in slower]
    failed = [one for one in ended if one.verdict == "fail"]
    if failed:
        return min(failed, key=lambda one: one.asked)
    verdict: Verdict = "pass" if all(one.verdict == "pass" for one in ended) else "inconclusive"
    return max(ended, key=lambda one: one.asked)._replace(verdict=verdict)


def _at_one_gate(
    rng: np.random.Generator,
    machine: Machine,
    plan: RepeatPlan,
    slowdown: float,
    margin: float,
    levels: Levels,
    known: EarlierRuns,
) -> EndedRelease:
    candidate, baseline = (_measured(rng, machine, plan) for _ in range(2))
    starts = [number for number, repeats in enumerate(plan.starts) for _ in range(repeats)]
    times, others = [float(time) * (1 + slowdown) for time in np.exp(candidate)], [float(time) for time in np.exp(baseline)]
    for count, at in bounds(plan.looks, levels):
        if plan.history:
            change = relative.from_history(times[:count], others, "lower", at, known)
        else:
            of = starts[:count] if len(plan.starts) > 1 else None
            change = relative.of_pairs(times[:count], others[:count], "lower", of, known).worsening(at)
        verdict = below(change.interval, margin)
        if verdict != "inconclusive":
            break
    return EndedRelease(verdict, count, plan.looks[-1], starts=starts[count - 1] + 1)


def _measured(rng: np.random.Generator, machine: Machine, plan: RepeatPlan) -> Logs:
    """The logarithms of one build's times. In turns both builds have the same day."""
    logs = np.concatenate([machine.started(rng, repeats) for repeats in plan.starts])
    return logs + machine.days * rng.standard_normal() if plan.history else logs


def _history(rng: np.random.Generator, machine: Machine, plan: RepeatPlan) -> EarlierRuns:
    """What earlier starts of one build on this machine showed, with as many repeats each."""
    starts = [machine.started(rng, max(2, plan.starts[0])) for _ in range(IN_HISTORY)]
    repeats, freedom = len(starts[0]), IN_HISTORY - 1.0
    noise = fmean(variance(map(float, start)) for start in starts)
    means = variance([float(start.mean()) for start in starts])
    twice = Between(variance=2 * means, noise=2 * noise / repeats, freedom=freedom, runs=IN_HISTORY)
    return EarlierRuns(starts=twice)
