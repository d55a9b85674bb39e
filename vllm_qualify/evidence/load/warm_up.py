"""What both servers of a load in turns are asked before its first repeat, so that both begin it alike.

The candidate has answered smoke, contract and accuracy by then, the baseline beside it nothing. Each gets requests of the
load's own lengths, at its own concurrency or rate, and both get the same ones at the same time. So each has compiled, captured
and allocated what the load needs, and both devices were busy until the same moment. Its files have the number of no repeat:
`bench-0.json`, `metrics-0-before.txt`, `metrics-0-after.txt`, `warm-up-0.log`. Both are held to the same plan: so both were
asked alike if neither has a problem.
"""

import math
import statistics
from pathlib import Path

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.load import agreement
from vllm_qualify.evidence.load.problems import counters_of, request_problems
from vllm_qualify.evidence.load.replay import planned_trace
from vllm_qualify.evidence.load.result import metrics_pages, read_repeat
from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.recipe.load import LEAST_PROMPTS_PER_CLIENT, SEEDS, Load
from vllm_qualify.recipe.traces.trace import Trace

# Repeats count from 1.
WARM_UP = 0
REMEDY = "measure the load again"


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
    if trace is None:
        return settings.model_copy(update=changed)
    # A trace whose requests all arrive at once has no rate.
    requests, last_s = len(trace.requests), trace.arrivals_s[-1]
    paced = {"request_rate": requests / last_s} if last_s else {"max_concurrency": requests}
    return typical_load(trace, settings).model_copy(update=paced | changed)


def typical_load(trace: Trace, settings: Load) -> Load:
    """A load of random prompts as long as a trace's median request."""
    lengths = {"input_len": trace.input_toks, "output_len": trace.output_toks}
    return settings.model_copy(update={"trace": None, **{name: statistics.median_low(each) for name, each in lengths.items()}})


def warm_up_problems(folder: Path, settings: Load, server: ServerPlan) -> list[str]:
    """Why the server was not warmed up as planned before the first repeat in a folder."""
    try:
        problems = _find_problems(folder, settings, server)
    except UNUSABLE as error:
        problems = [in_words(error)]
    # Unlike warmth, and no slowness of a release, could then be what the load shows.
    return [f"the server was not warmed up like the one that it ran in turns with: {each}: {REMEDY}" for each in problems]


def _find_problems(folder: Path, settings: Load, server: ServerPlan) -> list[str]:
    asked, repeat = warm_up_of_both(settings, planned_trace(folder, settings)), read_repeat(folder, folder.name, WARM_UP)
    if problems := request_problems(repeat.summary, asked):
        return problems
    (before, after), counted = counters_of(*metrics_pages(folder, WARM_UP))
    (first, _), _ = counters_of(*metrics_pages(folder, 1))
    is_copy = agreement.share_requests([repeat], [read_repeat(folder, folder.name, 1)])
    return [
        *(["it has the requests of repeat 1, or ran at the same time"] if is_copy else []),
        *agreement.result_problems(repeat.result, asked, server),
        *(agreement.counter_resets(before, after) or agreement.counter_resets(after, first)),
        *agreement.counter_problems(repeat.summary, counted, asked, server.engine_kind),
    ]
