"""What bench writes of a server of known speed that a closed loop of clients asks."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

STEP_S, PREFILL_S = 0.007, 0.004
CLIENTS, TOKENS = 16, 64

Document = dict[str, Any]
Slowness = Callable[[int], float]


def at_once(_: int) -> float:
    return 1.0


def bench_of(
    lengths: list[int], clients: int = CLIENTS, slowness: Slowness = at_once, admitted: int = 10**9, seed: int | None = None
) -> Document:
    """What bench writes of a server that gives each request under way a token in each step, asked by a closed loop of clients.

    A step is longer by a prefill for each request that it takes in, at most `admitted`; `slowness` of the requests begun so far
    makes it longer still, and `seed` gives it 5 % of noise.
    """
    noise = np.random.default_rng(seed).lognormal(0, 0.05, 10**5) if seed is not None else np.ones(10**5)
    starts, came, waiting, running = [0.0] * clients, [[0.0] for _ in lengths], list(range(clients)), list[int]()
    now, steps = 0.0, 0
    while waiting or running:
        taken, waiting = waiting[:admitted], waiting[admitted:]
        running += taken
        now += (STEP_S + PREFILL_S * len(taken)) * slowness(len(starts)) * float(noise[steps])
        steps += 1
        for number in running:
            came[number].append(now)
        ended = sum(len(came[number]) > lengths[number] for number in running)
        running = [number for number in running if len(came[number]) <= lengths[number]]
        new = range(len(starts), min(len(starts) + ended, len(lengths)))
        waiting += new
        starts += [now] * len(new)
    times = [times[1:] for times in came]
    return {
        "duration": now,
        "start_times": starts,
        "ttfts": [each[0] - start for each, start in zip(times, starts, strict=True)],
        "itls": [[after - before for before, after in pairwise(each)] for each in times],
        "input_lens": [10] * len(lengths),
        "output_lens": lengths,
    }
