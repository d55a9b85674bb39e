"""Simulate loads in turns whose servers warm up or leak: `python -m infra.bench.steadiness [releases] [seed]`.

A load is measured as by default: repeats 5 to 10 of the first start, then three on each of three more. It is judged by the
product's own functions, once as before and once with `judge.steadiness`: a sure trend makes it `invalid`, and a `pass` needs
the margin to hold where the first start's trend leads, too.
"""

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from infra.bench.speed_worlds import KEPT, SLOWED, VISITS, Logs
from vllm_qualify.evidence.load.repeats import repeat_sides
from vllm_qualify.evidence.sequential import Levels, Sides
from vllm_qualify.judge import relative, steadiness

REPEATS, FURTHER, STARTS = range(5, 11), 3, 4
MARGIN_OF_SPEED, PAST_OF_SPEED = 0.025, 0.0001
PAST = math.log1p(MARGIN_OF_SPEED + PAST_OF_SPEED)
LEVELS = Levels(false_fail=0.0125)
Noise = Callable[[np.random.Generator, int], Logs]
Course = Callable[[Logs], Logs]


class Setting(NamedTuple):
    """The noise of one server's repeats with its size, and the course of the worsening over the repeats of each start."""

    noise: str
    size: float
    course: str
    starts: int = STARTS

    @property
    def looks(self) -> range:
        return range(REPEATS.start, REPEATS.stop + FURTHER * (self.starts - 1))


def _wandering(rng: np.random.Generator, repeats: int) -> Logs:
    steps = rng.standard_normal(repeats)
    for place in range(1, repeats):
        steps[place] = KEPT * steps[place - 1] + math.sqrt(1 - KEPT**2) * steps[place]
    return steps


NOISES: dict[str, Noise] = {
    "normal": lambda rng, repeats: rng.standard_normal(repeats),
    "skewed": lambda rng, repeats: rng.exponential(size=repeats) - 1,
    "autocorrelated": _wandering,
    "neighbours": lambda rng, repeats: rng.standard_normal(repeats) + SLOWED / 0.01 * (rng.random(repeats) < VISITS),
}
# By the number of a repeat in its start, from 0. Of the last four the loss of the last repeat is past the margin.
COURSES: dict[str, Course] = {
    "unchanged": lambda at: 0 * at,
    "5 % slower": lambda at: 0 * at + math.log1p(0.05),
    "just past": lambda at: 0 * at + PAST,
    "candidate warms up: 6 % over 2": lambda at: 0.06 * np.exp(-at / 2),
    "baseline warms up: 6 % over 2": lambda at: PAST - 0.06 * np.exp(-at / 2),
    "baseline warms up: 2 % over 1": lambda at: PAST - 0.02 * np.exp(-at),
    "baseline's first repeat: 1 %": lambda at: PAST - 0.01 * (at == 0),
    "leak: 0.5 % a repeat": lambda at: 0.005 * at,
}


class Ended(NamedTuple):
    verdict: str
    repeats: int


def release(rng: np.random.Generator, setting: Setting, *, steady: bool) -> Ended:
    """One candidate at one gate, without a history. Only a sure loss or a trend ends it before the last start."""
    measured = _measured(rng, setting, REPEATS.stop - 1)
    looks = {count: repeat_sides("lower", LEVELS, setting.looks, count) for count in setting.looks}
    groups: list[list[float]] = []
    verdict = "inconclusive"
    for count in REPEATS:
        groups = [measured[:count]]
        verdict = _verdict(groups, looks[count], setting, steady=steady)
        if verdict != "inconclusive":
            break
    while verdict in ("pass", "inconclusive") and len(groups) < setting.starts:
        groups.append(_measured(rng, setting, FURTHER))
        verdict = _verdict(groups, looks[sum(map(len, groups))], setting, steady=steady)
    return Ended(verdict, sum(map(len, groups)))


def _verdict(groups: list[list[float]], at: Sides | None, setting: Setting, *, steady: bool) -> str:
    if steady and steadiness.direction_of(groups, setting.looks):
        return "invalid"
    assert at is not None
    times = [math.exp(each) for group in groups for each in group]
    starts = [start for start, group in enumerate(groups) for _ in group] if len(groups) > 1 else None
    interval = relative.of_pairs(times, [1.0] * len(times), "lower", starts).worsening(at).interval
    ahead = steadiness.leads_to(groups[0], REPEATS.stop - 1) if steady else None
    upper = interval.upper if ahead is None else max(interval.upper, math.expm1(ahead))
    return "pass" if upper <= MARGIN_OF_SPEED else "fail" if interval.lower > MARGIN_OF_SPEED else "inconclusive"


def _measured(rng: np.random.Generator, setting: Setting, repeats: int) -> list[float]:
    one, other = (setting.size * NOISES[setting.noise](rng, repeats) for _ in range(2))
    return [float(each) for each in one - other + COURSES[setting.course](np.arange(repeats, dtype=float))]


def main(releases: int, seed: int) -> None:
    settings = [
        Setting(noise, size, course, starts)
        for starts in (1, STARTS)
        for noise in NOISES
        for size in (0.005, 0.01)
        for course in (COURSES if noise == "normal" else list(COURSES)[:3])
    ]
    print("starts, noise, size, course: pass, fail, invalid, inconclusive in %, repeats; before, and with steadiness")
    for line, setting in enumerate(settings):
        shown = []
        for steady in (False, True):
            rng = np.random.default_rng((seed, line))
            ended = [release(rng, setting, steady=steady) for _ in range(releases)]
            rates = [
                100 * sum(one.verdict == each for one in ended) / releases
                for each in ("pass", "fail", "invalid", "inconclusive")
            ]
            shown.append(" ".join(f"{rate:5.1f}" for rate in rates) + f" n {np.mean([one.repeats for one in ended]):5.2f}")
        print(f"{setting.starts}  {setting.noise:14} {setting.size:.3f}  {setting.course:32} {'  |  '.join(shown)}", flush=True)


if __name__ == "__main__":
    main(*(int(word) for word in [*sys.argv[1:], *("1000", "1")[len(sys.argv) - 1 :]]))
