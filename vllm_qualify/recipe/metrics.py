"""Every metric that a measurement or a gate may name, declared once: its stage, unit and direction."""

from dataclasses import dataclass
from typing import Literal, get_args

Stage = Literal["serve", "smoke", "accuracy", "load"]
STAGES: tuple[Stage, ...] = get_args(Stage)
Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """A metric. `direction` says which way is better; `unit` is the unit of value, interval and bound."""

    name: str
    stage: Stage
    unit: str
    direction: Direction
    meaning: str


_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between two streamed tokens",
    "e2el": "time from request to last token",
}
_STATISTICS = {"mean": "mean", "median": "median", "p90": "90th percentile", "p99": "99th percentile"}

NCCL_INFINIBAND = "nccl_infiniband"
# vLLM's own counters that decide whether a load is valid, as its source names them; on /metrics each ends in `_total`.
PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS = "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"
COUNTERS_READ = (PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS)

_DECLARED = (
    Metric("startup_s", "serve", "s", "lower", "from launching the server to the first completion that came back"),
    Metric(NCCL_INFINIBAND, "serve", "bool", "higher", "every channel that NCCL opened between nodes uses its network IB"),
    Metric("smoke_model_identity", "smoke", "bool", "higher", "the reply and /v1/models name the served model"),
    Metric("smoke_finish_reason", "smoke", "bool", "higher", "every reply ended by `stop` or at the asked `length`"),
    Metric("smoke_usage", "smoke", "bool", "higher", "the usage counts are present and agree with the request"),
    Metric("smoke_determinism", "smoke", "bool", "higher", "the same prompt at temperature 0 gave the same text twice"),
    Metric("smoke_golden", "smoke", "bool", "higher", "the text equals the recipe's golden text"),
    Metric("exact_match", "accuracy", "fraction", "higher", "share of questions answered exactly"),
    Metric("request_throughput_req_s", "load", "req/s", "higher", "requests completed per second"),
    Metric("output_throughput_tok_s", "load", "tok/s", "higher", "output tokens per second"),
    Metric("total_throughput_tok_s", "load", "tok/s", "higher", "input and output tokens per second"),
    *(
        Metric(f"{name}_{statistic}_ms", "load", "ms", "lower", f"{meaning}, {wording}")
        for name, meaning in _LATENCIES.items()
        for statistic, wording in _STATISTICS.items()
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}
SMOKE_METRICS = tuple(metric.name for metric in _DECLARED if metric.stage == "smoke")
