"""The price of the plan that recipes had by default before: two starts, of which the first is measured until it decides.

Its first start is asked in blocks, or its load repeated 5 to 10 times, until the comparison without what differs between starts
is decided or knows enough. Unless the gate fails, the second one is asked every question once, or its load repeated 3 times. A
baseline is started twice (docs/design/0031). Only the price is simulated: its verdicts held none of the promises.
"""

from functools import cache

import numpy as np

from infra.bench import accuracy, price
from infra.bench.accuracy import below
from infra.bench.answer_worlds import BuildPair
from infra.bench.plans import AnswerPlan, RepeatPlan
from infra.bench.speed_worlds import LoadWorld
from vllm_qualify.evidence.load.repeats import repeat_sides
from vllm_qualify.evidence.sequential import Levels, Sides
from vllm_qualify.judge import relative

LOOKS, FURTHER = range(5, 11), 3
# Its chance of a wrong `pass`. Losses at the margin had no chance of a wrong `fail` of their own.
FALSE_PASS, AT_MARGIN = 0.04, 0.0


def minutes_of_answers(rng: np.random.Generator, plan: AnswerPlan, pairs: list[BuildPair]) -> float:
    """Of the server, for a candidate and a new baseline."""
    ended = accuracy.release(rng, plan._replace(starts=1, false_pass=FALSE_PASS, false_fail_at_margin=AT_MARGIN), pairs)
    every = sum(task.questions for task in plan.tasks)
    again = 0.0 if ended.verdict == "fail" else price.of_answers(1, every)
    return ended.minutes + again + price.of_answers(1, every)


def minutes_of_loads(rng: np.random.Generator, plan: RepeatPlan, world: LoadWorld, slowdown: float) -> float:
    gates = len(plan.margins)
    candidate, baseline = world.start(rng, LOOKS[-1], gates, slowdown)
    ours, theirs = np.exp(candidate).tolist(), np.exp(baseline).tolist()
    for count, at in _bounds(plan._replace(false_pass=FALSE_PASS, false_fail_at_margin=AT_MARGIN).levels):
        changes = [relative.in_turns(ours[gate][:count], theirs[gate][:count], "lower", at) for gate in range(gates)]
        verdicts = [below(change.interval, margin) for change, margin in zip(changes, plan.margins, strict=True)]
        if "fail" in verdicts or "inconclusive" not in verdicts:
            break
    fails = "fail" in verdicts
    return price.of_loads(1 if fails else 2, count + (0 if fails else FURTHER), in_turns=world.in_turns)


@cache
def _bounds(levels: Levels) -> list[tuple[int, Sides]]:
    sides = ((count, repeat_sides("lower", levels, LOOKS, count)) for count in LOOKS)
    return [(count, at) for count, at in sides if at is not None]
