"""Simulate gates on speed: this project's and its peers', on made-up times."""

from functools import cache
from typing import NamedTuple

import numpy as np

from infra.bench import peers, worlds
from infra.bench.accuracy import EndedRelease, GateName, below
from vllm_qualify.evidence.load.repeats import repeat_sides
from vllm_qualify.evidence.sequential import Levels, Sides
from vllm_qualify.judge import relative
from vllm_qualify.recipe.workload import Load

LOAD = Load(input_len=1024, output_len=1024, max_concurrency=256, num_prompts=1280, num_warmups=20)
HISTORIES = (10, 5)


class Setting(NamedTuple):
    """One row of releases: shares of the time, and the noise's standard deviation."""

    noise: float
    slowdown: float
    margin: float


def release(rng: np.random.Generator, setting: Setting, levels: dict[str, Levels]) -> dict[GateName, EndedRelease]:
    """Judge one candidate's times at every gate. This project's gates are judged at each of the named levels.

    Repeats in turns share a drift as large as the noise. A build and its history share none.
    """
    most = LOAD.looks[-1]
    turns = worlds.times(rng, most, setting.slowdown, setting.noise, drift=setting.noise)
    apart = worlds.times(rng, most, setting.slowdown, setting.noise, drift=0.0)
    ended: dict[GateName, EndedRelease] = {}
    for name, level in levels.items():
        ended[f"in turns, {name}"] = _judged(turns, setting, level, history=None)
        for history in HISTORIES:
            ended[f"from history of {history}, {name}"] = _judged(apart, setting, level, history)
    for name, passes in peers.SPEED.items():
        ended[name] = EndedRelease("pass" if passes(apart.candidate[0], apart.baseline[0]) else "fail", 1, 1)
    return ended


def _judged(times: worlds.Times, setting: Setting, levels: Levels, history: int | None) -> EndedRelease:
    for count, at in bounds(LOAD.looks, levels):
        if history is None:
            change = relative.in_turns(times.candidate[:count], times.baseline[:count], "lower", at)
        else:
            change = relative.from_history(times.candidate[:count], times.baseline[:history], "lower", at)
        verdict = below(change.interval, setting.margin)
        if verdict != "inconclusive":
            break
    return EndedRelease(verdict, count, LOAD.looks[-1])


@cache
def bounds(looks: range, levels: Levels) -> list[tuple[int, Sides]]:
    """The number of repeats at each look that shows noise, with the look's sides."""
    sides = ((count, repeat_sides("lower", levels, looks, count)) for count in looks)
    return [(count, at) for count, at in sides if at is not None]
