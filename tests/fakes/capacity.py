"""A server of known capacity and bench in front of it, as a simulation: it leaves the files that bench leaves, in no time.

The server gives each request under way a token in each step. A step takes longer the more are under way, of which there are at
most `slots`; the others wait, first come, first served.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vllm_qualify.recipe.load import Load

Document = dict[str, Any]
Change = Callable[[Document], Document]
STATISTICS = {"mean": None, "median": 50, "p50": 50, "p90": 90, "p99": 99}


def as_it_is(result: Document) -> Document:
    return result


@dataclass
class Capacity:
    """A step takes `step_s` and `per_request_s` for each request under way, times lognormal noise of this spread.

    `change` spoils bench's results, `counters` are what vLLM counts from before to after each run. `runs` has the load of
    each.
    """

    step_s: float = 0.01
    per_request_s: float = 0.001
    slots: int = 256
    noise: float = 0.0
    change: Change = as_it_is
    preemptions: int = 0
    runs: list[Load] = field(default_factory=list)

    def run(self, load: Load, folder: Path) -> None:
        """As `sweep.RunPoint`."""
        self.runs.append(load)
        count, rate = load.num_prompts, load.request_rate
        arrivals = [0.0] * min(load.max_concurrency, count) if rate is None else poisson(count, rate, load.seed)
        result = self.change(_document(load, self.answer(load, arrivals, count)))
        (folder / "bench-1.json").write_text(json.dumps(result))
        (folder / "metrics-1-before.txt").write_text(page())
        (folder / "metrics-1-after.txt").write_text(page(self.preemptions, *counts_of(result)))

    def answer(self, load: Load, arrivals: list[float], count: int) -> list[list[float]]:
        """Of each request when it was sent, and when each of its tokens came. With fewer arrivals one follows one that ends."""
        times, noise = [[at] for at in arrivals], self._noise(load.seed)
        # Those under way with the step that gave them the first token. All get as many, so they end as they began.
        waiting, running, steps = deque(range(len(arrivals))), deque[tuple[int, int]](), list[float]()
        now, tokens = 0.0, max(load.output_len, 1)
        while waiting or running:
            if not running:
                now = max(now, times[waiting[0]][0])
            while waiting and len(running) < self.slots and times[waiting[0]][0] <= now:
                running.append((waiting.popleft(), len(steps)))
            now += (self.step_s + self.per_request_s * len(running)) * next(noise)
            steps.append(now)
            while running and running[0][1] + tokens == len(steps):
                number, first = running.popleft()
                times[number] += steps[first:]
                if len(times) < count:
                    waiting.append(len(times))
                    times.append([now])
        return times

    def _noise(self, seed: int) -> Iterator[float]:
        """Of a request, too, and not only of a step: what lasts for 20 steps does not average out."""
        random = np.random.default_rng((seed, 1))
        while True:
            yield from [float(random.lognormal(0, self.noise)) if self.noise else 1.0] * 20


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """As bench sends: at random, and then stretched so that all are sent in just the time that the rate gives them."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    sent = np.cumsum(gaps)
    return [float(at) for at in sent * (count / rate / sent[-1])]


def _document(load: Load, times: list[list[float]]) -> Document:
    """As bench writes its detailed result."""
    ttfts = np.array([each[1] - each[0] for each in times])
    itls = [[after - before for before, after in pairwise(each[1:])] for each in times]
    latencies = np.array([each[-1] - each[0] for each in times])
    outputs = [len(each) - 1 for each in times]
    count, duration = len(times), max(each[-1] for each in times) - times[0][0]
    tpots = (latencies - ttfts) / np.maximum(np.array(outputs) - 1, 1)
    inputs = [load.input_len or 0] * count
    gaps = np.concatenate(itls) if any(itls) else np.zeros(1)
    document: Document = {
        **about(load, load.request_rate, inputs, outputs),
        "duration": duration,
        "request_throughput": count / duration,
        "output_throughput": sum(outputs) / duration,
        "total_token_throughput": (sum(outputs) + count * (load.input_len or 0)) / duration,
        "start_times": [each[0] for each in times],
        "ttfts": ttfts.tolist(),
        "itls": itls,
    }
    of = {"ttft": ttfts, "tpot": tpots if load.output_len > 1 else np.zeros(1), "itl": gaps, "e2el": latencies}
    for latency, each in of.items():
        for name, percent in STATISTICS.items():
            document[f"{name}_{latency}_ms"] = 1000 * float(each.mean() if percent is None else np.percentile(each, percent))
    if load.slo:
        limits = {"ttft": ttfts, "tpot": tpots, "e2el": latencies}
        good = np.all([limits[name] <= limit / 1000 for name, limit in load.slo.limits_ms.items()], axis=0)
        document["request_goodput"] = float(good.sum()) / duration
    return document


def about(load: Load, rate: float | None, inputs: list[int], outputs: list[int]) -> Document:
    """All of bench's result but its times: its settings, and what it tells of requests that were all answered."""
    return {
        "backend": "openai",
        "model_id": "reference",
        "num_prompts": len(outputs),
        "request_rate": "inf" if rate is None else rate,
        "burstiness": 1.0,
        "max_concurrency": load.max_concurrency if rate is None else None,
        "completed": len(outputs),
        "failed": 0,
        "total_input_tokens": sum(inputs),
        "total_output_tokens": sum(outputs),
        "input_lens": inputs,
        "output_lens": outputs,
        "generated_texts": ["x" * length for length in outputs],
        "errors": [""] * len(outputs),
    }


def counts_of(result: Document) -> tuple[int, int, int]:
    """What vLLM counts of a result: requests, tokens of prompts and generated tokens."""
    inputs, outputs = (result[name] for name in ("input_lens", "output_lens"))
    return len(outputs), sum(inputs), sum(outputs)


def page(preemptions: float = 0, requests: float = 0, prompt_tok: float = 0, generation_tok: float = 0, **others: float) -> str:
    """A /metrics page of vLLM with these totals; `others` by their names without `vllm:`."""
    counters = {
        "num_preemptions": preemptions,
        "request_success": requests,
        "prompt_tokens": prompt_tok,
        "generation_tokens": generation_tok,
        **others,
    }
    return "".join(f"# TYPE vllm:{name} counter\nvllm:{name}_total {float(value)!r}\n" for name, value in counters.items())
