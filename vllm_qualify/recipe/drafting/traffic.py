"""What production asks of a server, as its owner says it, and the latencies that the owner promises."""

import math
import os
from typing import Any, NamedTuple

from vllm_qualify.errors import CallerError

CPU = "cpu"
# Stand-ins for traffic that nobody has named: of a server with GPUs, and of a CPU.
STAND_IN = {"input_tok": 1024, "output_tok": 256, "clients": 64}
STAND_IN_CPU = {"input_tok": 128, "output_tok": 32, "clients": 4}
# The template, and what bench adds to a prompt.
SPARE_TOK = 64
# The quickest that a token follows another on GPUs: a repeat must last `min_duration_s` on a quick server, too.
QUICK_TOKEN_S = 0.01
# A quick core reads prompts at so many bytes of weights times tokens a second, and for a token of all replies the weights at so
# many bytes. SmolLM2 135M on two cores was half as fast (2026-12-01).
QUICK_CORE_PROMPT, QUICK_CORE_REPLY = 25e9, 10e9
MIN_DURATION_S, MIN_DURATION_CPU_S = 60.0, 10.0
LEAST_PER_CLIENT = 5


class Slo(NamedTuple):
    """Most times in ms, by the metric that is gated."""

    limits_ms: dict[str, float]

    def gates(self) -> list[dict[str, Any]]:
        return [{"metric": name, "maximum": _write_number(limit), "unit": "ms"} for name, limit in self.limits_ms.items()]


class Traffic(NamedTuple):
    """Lengths in tokens of a prompt and of a reply; clients, or requests per second; or a trace, with its longest request.

    What nobody said is None.
    """

    input_tok: int | None = None
    output_tok: int | None = None
    clients: int | None = None
    rate: float | None = None
    trace: str | None = None
    longest_tok: int | None = None

    @property
    def is_said(self) -> bool:
        return self.trace is not None or (
            None not in (self.input_tok, self.output_tok) and (self.clients or self.rate) is not None
        )

    @property
    def request_tok(self) -> int:
        """The most tokens of one request."""
        return self.longest_tok or (self.input_tok or 0) + (self.output_tok or 0)

    def complete(self, gpu_type: str, context_tok: int) -> "Traffic":
        """With stand-ins for what nobody said, as short as the context wants them.

        Raises CallerError if the traffic that was said does not fit into the model's context.
        """
        if self.request_tok > context_tok:
            asked = f"a request of {self.request_tok:,} tokens, prompt and reply"
            problem = f"the traffic has {asked}, and the model's context is {context_tok:,}"
            raise CallerError(problem, "name shorter lengths, or another model", "--trace" if self.trace else "--input-len")
        if self.trace:
            return self
        stand_in = STAND_IN_CPU if gpu_type == CPU else STAND_IN
        room = max(2, context_tok - SPARE_TOK)
        output = self.output_tok or max(1, min(stand_in["output_tok"], (room - (self.input_tok or 0)) // 2))
        given = self.input_tok or max(1, min(stand_in["input_tok"], room - output))
        clients = self.clients or (None if self.rate else stand_in["clients"])
        return self._replace(input_tok=given, output_tok=output, clients=clients)

    def load(self, gpu_type: str, least_prompts: int, weights_bytes: int | None) -> dict[str, Any]:
        """The keys of a recipe's `load`. `least_prompts` are those that the gates' percentiles need."""
        lasts_s = MIN_DURATION_CPU_S if gpu_type == CPU else MIN_DURATION_S
        shorter = {"min_duration_s": int(lasts_s)} if gpu_type == CPU else {}
        if self.trace:
            return {"trace": self.trace, "window": "whole", "num_warmups": 10} | shorter
        lengths = {"input_len": self.input_tok, "output_len": self.output_tok}
        if self.rate:
            return lengths | {"request_rate": _write_number(self.rate), "num_warmups": 10} | shorter
        clients = self.clients or 1
        quick_s = self._quick_cpu_s(weights_bytes) if gpu_type == CPU else (self.output_tok or 1) * QUICK_TOKEN_S
        prompts = clients * max(LEAST_PER_CLIENT, math.ceil(lasts_s / quick_s))
        counted = {"max_concurrency": clients, "num_prompts": max(prompts, least_prompts), "num_warmups": clients}
        return lengths | counted | shorter

    def _quick_cpu_s(self, weights_bytes: int | None) -> float:
        """How long one request of each client takes on a quick CPU, in s: prompts one after the other, replies side by side."""
        size, cores = weights_bytes or 10**9, len(os.sched_getaffinity(0))
        prompts_s = (self.clients or 1) * (self.input_tok or 1) * size / (cores * QUICK_CORE_PROMPT)
        return prompts_s + (self.output_tok or 1) * size / (cores * QUICK_CORE_REPLY)

    def at_once(self) -> int:
        """How many requests are under way: of a rate, a stand-in, since nobody knows yet how long one takes."""
        return self.clients or STAND_IN["clients"]


def _write_number(value: float) -> float:
    """Without `.0`, as a person writes it."""
    return int(value) if value == int(value) else value
