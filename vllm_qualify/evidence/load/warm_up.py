"""What both servers of a load in turns are asked before its first repeat, so that both begin it alike.

The candidate has answered smoke, contract and accuracy by then, the baseline beside it nothing. Each gets requests of the
load's own lengths, at its own concurrency or rate, and both get the same ones at the same time. So each has compiled, captured
and allocated what the load needs, and both devices were busy until the same moment. Its files have the number of no repeat:
`bench-0.json`, `metrics-0-before.txt`, `metrics-0-after.txt`, `warm-up-0.log`.
"""

import math
import statistics

from vllm_qualify.recipe.traces.trace import Trace
from vllm_qualify.recipe.workload import LEAST_PROMPTS_PER_CLIENT, SEEDS, Load

# Repeats count from 1.
WARM_UP = 0


def warm_up_of_both(settings: Load, trace: Trace | None = None) -> Load:
    """The load that warms up both servers: a fifth of a repeat's requests, and at least as many as are under way at once.

    With a fifth, the shortest steady load fills its concurrency once. Of a `trace` the requests are as long as its median one,
    and come at its mean rate; of chats they are first turns. Their seed is one of warm-ups.
    """
    number = max(math.ceil(settings.num_prompts / LEAST_PROMPTS_PER_CLIENT), settings.max_concurrency)
    # The warm-up of a repeat after the last one would have this seed, so that none has it.
    seed = SEEDS + settings.bench_seed(settings.looks[-1] + 1)
    changed = {"num_prompts": number, "num_warmups": 0, "turns": 1, "slo": None, "min_duration_s": 0.0}
    # `bench_seed` counts from repeat 1.
    changed |= {"seeded_by": None, "seed": seed + 1 - WARM_UP}
    return (settings if trace is None else _at_mean_rate(trace, settings)).model_copy(update=changed)


def typical(trace: Trace, settings: Load) -> Load:
    """A load of random prompts as long as a trace's median request."""
    lengths = {"input_len": trace.input_toks, "output_len": trace.output_toks}
    return settings.model_copy(update={"trace": None, **{name: statistics.median_low(each) for name, each in lengths.items()}})


def _at_mean_rate(trace: Trace, settings: Load) -> Load:
    number, last_s = len(trace.requests), trace.arrivals_s[-1]
    # A trace whose requests all arrive at once has no rate.
    paced = {"request_rate": number / last_s} if last_s else {"max_concurrency": number}
    return typical(trace, settings).model_copy(update=paced)
