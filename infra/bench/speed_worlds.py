"""Worlds of loads: what the repeats of two builds vary by, from start to start and within each."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Logs = NDArray[np.float64]
Own = Callable[[np.random.Generator, int], Logs]
# The part of a repeat's usual noise that gates of one load do not share, as a standard deviation.
OF_A_GATE = 0.3
# The standard deviation of the usual noise, as a logarithm.
NOISE = 0.01
# The share of its wandering that a server keeps from repeat to repeat; how often a neighbour slows a repeat, and by how much.
KEPT, VISITS, SLOWED = 0.5, 0.1, 0.05
# How often a GPU's clock is low, and by how much that slows it.
LOW, BY_LOW_CLOCK = 0.3, 0.04
# A neighbour that both sides of a pair have; a cold server's first repeats; and the repeats over which a leak is what it says.
SHARED, COLD, WARM_AFTER, LEAKED_OVER = 0.03, 0.06, 2.0, 10


class Machine(NamedTuple):
    """What the times of one build vary by: `own` makes a start's repeats, the others are standard deviations or states."""

    own: Own
    between: float = 0.0
    days: float = 0.0
    clock: float = 0.0

    def started(self, rng: np.random.Generator, repeats: int) -> Logs:
        shift = self.between * rng.standard_normal() + self.clock * (rng.random() < LOW)
        return self.own(rng, repeats) + shift


class LoadWorld(NamedTuple):
    """A machine, and what is other than usual.

    `earlier` is the machine of the history, None for the same machine. `shared` is the noise that both of a pair share.
    `cold` has two slownesses: the candidate's at the beginning of each start, and the baseline's at the beginning of the first
    start. On further starts both servers are equally fresh. With `leaks` the slowdown of the candidate grows in a start, and
    is its mean over ten repeats. `gates` is the number of gates with noise of their own; 0 takes the gates of the plan.
    """

    machine: Machine
    earlier: Machine | None = None
    shared: float = 0.0
    cold: tuple[float, float] = (0.0, 0.0)
    leaks: bool = False
    in_turns: bool = True
    gates: int = 0

    def start(
        self, rng: np.random.Generator, repeats: int, gates: int, slowdown: float, *, is_first: bool = True
    ) -> tuple[Logs, Logs]:
        """The logarithms of the times of one start, of the candidate and of the baseline; shapes (gates, repeats)."""
        both = self.shared * rng.standard_normal(repeats)
        candidate, baseline = (self._of_gates(rng, repeats, gates) + both for _ in range(2))
        number = np.arange(repeats)
        warming = np.exp(-number / WARM_AFTER)
        candidate += self.cold[0] * warming
        if is_first:
            baseline += self.cold[1] * warming
        growing = (number + 0.5) / (LEAKED_OVER / 2) if self.leaks else np.ones(repeats)
        candidate[0] += math.log1p(slowdown) * growing
        return candidate, baseline

    def _of_gates(self, rng: np.random.Generator, repeats: int, gates: int) -> Logs:
        if self.gates:
            return np.array([self.machine.started(rng, repeats) for _ in range(gates)])
        common = self.machine.started(rng, repeats)
        if gates == 1:
            return common[None, :].copy()
        return common + OF_A_GATE * (self.machine.own(rng, gates * repeats).reshape(gates, repeats))

    def before(self) -> "LoadWorld":
        """The world of the runs that history has."""
        return self._replace(machine=self.earlier or self.machine)


def normal(noise: float) -> Own:
    """Repeats with normal noise."""
    return lambda rng, repeats: noise * rng.standard_normal(repeats)


usual = normal(NOISE)


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


def clocked(rng: np.random.Generator, repeats: int) -> Logs:
    """The clock is low in some of the repeats."""
    return NOISE / 2 * rng.standard_normal(repeats) + BY_LOW_CLOCK * (rng.random(repeats) < LOW)


QUIET, USUAL = Machine(normal(NOISE / 2)), Machine(usual)
WORLDS = {
    "noise 0.5 %": LoadWorld(QUIET),
    "noise 1 %": LoadWorld(USUAL),
    "starts of 0.5 %, noise 0.5 %": LoadWorld(QUIET._replace(between=0.005)),
    "starts of 0.5 %": LoadWorld(USUAL._replace(between=0.005)),
    "starts of 1 %": LoadWorld(USUAL._replace(between=0.01)),
    "clock of each start": LoadWorld(QUIET._replace(clock=BY_LOW_CLOCK)),
    "clock of each repeat": LoadWorld(Machine(clocked)),
    "neighbour of both": LoadWorld(QUIET, shared=SHARED),
    "neighbours": LoadWorld(Machine(visited)),
    "autocorrelated": LoadWorld(Machine(wandering)),
    "skewed": LoadWorld(Machine(skewed)),
    "twelve gates": LoadWorld(Machine(normal(1.5 * NOISE)), gates=12),
    "only the candidate warms up": LoadWorld(QUIET, cold=(COLD, 0.0)),
    "only the baseline warms up": LoadWorld(QUIET, cold=(0.0, COLD)),
    "slow leak": LoadWorld(QUIET, leaks=True),
    "history was quieter": LoadWorld(USUAL._replace(between=0.01), earlier=QUIET),
    "history was noisier": LoadWorld(QUIET, earlier=Machine(normal(2 * NOISE), between=0.01)),
    "another day": LoadWorld(USUAL._replace(days=0.01), in_turns=False),
    "not in turns": LoadWorld(USUAL, in_turns=False),
}
