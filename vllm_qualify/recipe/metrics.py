"""Every metric that a measurement or a gate may name, declared once: its stage, unit and direction."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from vllm_qualify.recipe import contract

StageName = Literal[
    "fit",
    "baseline",
    "serve",
    "smoke",
    "contract",
    "accuracy",
    "likelihood",
    "load",
    "paths",
    "speculation",
    "sweep",
    "soak",
    "starts",
]
STAGES: tuple[StageName, ...] = get_args(StageName)
Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """A metric. `direction` says which way is better. `unit` is the unit of value, interval and bound.

    `is_score`: lm-eval's tasks give each answer this score, by filter. A percentile has its `quantile`. `is_growth`: it may be
    negative. No other value is below `least`.
    """

    name: str
    stage: StageName
    unit: str
    direction: Direction
    meaning: str
    is_score: bool = False
    quantile: float | None = None
    is_growth: bool = False
    least: float = 0.0

    @property
    def possible(self) -> tuple[float, float]:
        """The least and the most that a measurement can give."""
        least = -math.inf if self.is_growth else self.least
        return least, 1.0 if self.unit in ("fraction", "bool") else math.inf

    @property
    def is_only_compared(self) -> bool:
        """Whether it is measured only beside a baseline, so that it has no absolute gate."""
        return self.stage == "likelihood"

    @property
    def compared_unit(self) -> str:
        """The unit of a comparison with the baseline: a share, or how many times worse, less 1. Likelihoods keep their own."""
        return self.unit if self.is_only_compared else "fraction"

    @property
    def compared_direction(self) -> Direction:
        """Which way a comparison with the baseline is better: a loss or a worsening is better small, an agreement large."""
        return "higher" if self.name in TOP1_SHARES else "lower"


_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between two streamed tokens",
    "e2el": "time from request to last token",
}
_STATISTICS = {
    "mean": ("mean", None),
    "p50": ("median", 0.50),
    "p90": ("90th percentile", 0.90),
    "p99": ("99th percentile", 0.99),
}
# The scores that lm-eval's tasks give each answer, by lm-eval's names. All are between 0 and 1, and higher is better.
_SCORES = {
    "exact_match": "share of questions answered exactly",
    "acc": "share of questions whose right choice is the likeliest, or is named; with tools, that make the right calls",
    "acc_norm": "share of questions whose right choice is the likeliest for its length",
    "f1": "mean F1 of the answers' words",
    "em": "share of questions answered exactly",
    "prompt_level_strict_acc": "share of prompts all of whose instructions are followed",
    "prompt_level_loose_acc": "share of prompts all of whose instructions are followed, loosely read",
    "relaxed_accuracy": "share of questions whose final answer is right, or a number within 5 % of the right one",
    "anywhere_accuracy": "as relaxed_accuracy; without a final answer, the right one may stand anywhere in the text",
    "string_match_all": "mean share of the texts asked for that an answer has, in capital or small letters",
}

ANSWER_NLL, ANSWER_TOP1 = "answer_nll_nat_per_tok", "answer_top1_share"
TEXT_NLL, TEXT_TOP1 = "text_nll_nat_per_tok", "text_top1_share"
LIKELIHOODS, TOP1_SHARES = (ANSWER_NLL, TEXT_NLL), (ANSWER_TOP1, TEXT_TOP1)
NCCL_INFINIBAND, GPU_IDLE = "nccl_infiniband", "gpu_idle_share"
# Of the answers of lm-eval's tasks, beside their scores.
ANSWER_TOKENS, LOOPING, OTHER_SCRIPT = "output_tok_per_answer", "looping_answers", "other_script_answers"
UNREAD, LOST_BY_FORM = "unread_answers", "lost_by_form_answers"
UNTHINKING = "unthinking_answers"
SLO_CONCURRENCY, SLO_RATE = "slo_concurrency_req", "slo_request_rate_req_s"
SLO_GOODPUT, SLO_COST = "slo_goodput_req_s", "slo_cost_usd_mtok"
GOODPUT, SPEEDUP, SPEEDUP_BATCH1 = "goodput_req_s", "speculative_speedup", "speculative_speedup_batch1"
PREFIX_HIT_SHARE = "prefix_hit_share"
OUTPUT_THROUGHPUT = "output_throughput_tok_s"
# Throughputs over the number of the server's GPUs, each with the one that it is made of.
PER_GPU = {f"{name}_throughput_tok_s_gpu": f"{name}_throughput_tok_s" for name in ("output", "total")}
# The time to the first token of a chat's first turn, and of those after it.
TURN_TTFTS = ("first_turn_ttft_p50_ms", "later_turns_ttft_p50_ms")
PEAK_CHUNKS = "peak_output_chunks_per_s"
HOST_GROWTH, GPU_GROWTH = "soak_host_memory_growth_mib_h", "soak_gpu_memory_growth_mib_h"
FAILED_SHARE = "soak_failed_share"
# The growths of a soak's latencies, by bench's names of the latencies.
LATENCY_GROWTHS = {name: f"soak_{name}_growth_pct_h" for name in ("ttft", "tpot", "itl")}
ACCEPTANCE_BATCH1, SAME_TEXT = "acceptance_length_batch1_tok", "speculative_same_text"
# The paths of answers through a busy server, each with what its answers have gone through.
PATHS = {
    "cold": "asked twice, with nothing of them in the cache",
    "cached": "asked again, with the prompts in the cache",
    "concurrent": "asked beside as many other long prompts and replies",
    "aborted": "asked after clients have hung up in the queue, in the prefill and in the decode",
    "evicted": "asked again, after other prompts have pushed them out of the cache",
    "awake": "asked again, after the server was put to sleep and woken up",
}
# The path of a server that can be put to sleep.
AWAKE = "awake"
# The path of replies that must have a form, which are not compared with cold ones.
CONSTRAINED = "constrained"
# The path of such replies by a server that was started again, and whose first form was another one.
REORDERED = "reordered"
SCHEMA_VALID, TOOL_CALL_VALID = "schema_valid_share", "tool_call_valid_share"
CHANGED, FIRST_TOKEN = "changed_share", "first_token_nll_change_nat"
RECOVERED = "recovered_after_aborts_s"
# vLLM's own counters that decide whether a load is valid, by the names in its source. On /metrics each ends in `_total`.
PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS = "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"
COUNTERS_READ = (PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS)


def path_metric(path: str, of: str = "") -> str:
    """The name of a path's metric: whether no answer changed, or with `of` that share, or that likelihood."""
    return f"path_{path}_{of}" if of else f"path_{path}"


_DECLARED = (
    Metric("startup_s", "serve", "s", "lower", "from launching the server to the first completion that came back"),
    Metric("startup_warm_s", "serve", "s", "lower", "startup_s of a server whose graphs were compiled before"),
    Metric("startup_image_s", "serve", "s", "lower", "pulling the image, before the launch"),
    Metric("startup_process_s", "serve", "s", "lower", "from launching the server until it begins to load the weights"),
    Metric("startup_weights_s", "serve", "s", "lower", "loading the weights"),
    Metric("startup_compile_s", "serve", "s", "lower", "compiling the model, or loading what was compiled before"),
    Metric("startup_graphs_s", "serve", "s", "lower", "capturing CUDA graphs"),
    Metric("startup_ready_s", "serve", "s", "lower", "the rest of startup_s, until the first completion that came back"),
    Metric(
        GPU_IDLE,
        "serve",
        "fraction",
        "lower",
        "share of the time, from launching the server to its end, in which its GPUs idled",
    ),
    Metric(NCCL_INFINIBAND, "serve", "bool", "higher", "every channel that NCCL opened between nodes uses its network IB"),
    Metric("smoke_model_identity", "smoke", "bool", "higher", "the reply and /v1/models name the served model"),
    Metric("smoke_finish_reason", "smoke", "bool", "higher", "every reply ended by `stop` or at the asked `length`"),
    Metric("smoke_usage", "smoke", "bool", "higher", "the usage counts are present and agree with the request"),
    Metric("smoke_determinism", "smoke", "bool", "higher", "the same prompt at temperature 0 gave the same text twice"),
    Metric("smoke_golden", "smoke", "bool", "higher", "the text equals the recipe's golden text"),
    *(Metric(check.name, "contract", "bool", "higher", check.meaning) for check in contract.CHECKS),
    *(Metric(name, "accuracy", "fraction", "higher", meaning, is_score=True) for name, meaning in _SCORES.items()),
    Metric("truncated_answers", "accuracy", "fraction", "lower", "share of answers that were cut at the most tokens allowed"),
    Metric(
        ANSWER_TOKENS, "accuracy", "tok", "lower", "output tokens of an answer with its thinking, mean by the server's count"
    ),
    Metric(LOOPING, "accuracy", "fraction", "lower", "share of answers that end in a part repeated 4 times or more"),
    Metric(OTHER_SCRIPT, "accuracy", "fraction", "lower", "share of answers in another script than what was asked"),
    Metric(UNREAD, "accuracy", "fraction", "lower", "share of answers in which no filter of the task finds an answer"),
    Metric(
        LOST_BY_FORM,
        "accuracy",
        "fraction",
        "lower",
        "share of answers that no filter reads as right, and that a second, tolerant reader reads as right",
    ),
    Metric(UNTHINKING, "accuracy", "fraction", "lower", "share of answers without thinking, where the task's model thinks"),
    Metric(
        ANSWER_NLL,
        "likelihood",
        "nat/tok",
        "lower",
        "negative log-likelihood of the baseline's answers, mean over their tokens",
    ),
    Metric(
        ANSWER_TOP1, "likelihood", "fraction", "higher", "share of the tokens of the baseline's answers that are the likeliest"
    ),
    Metric(TEXT_NLL, "likelihood", "nat/tok", "lower", "negative log-likelihood of the recipe's texts, mean over their tokens"),
    Metric(TEXT_TOP1, "likelihood", "fraction", "higher", "share of the tokens of the recipe's texts that are the likeliest"),
    Metric("request_throughput_req_s", "load", "req/s", "higher", "requests completed per second"),
    Metric(OUTPUT_THROUGHPUT, "load", "tok/s", "higher", "output tokens per second"),
    Metric("total_throughput_tok_s", "load", "tok/s", "higher", "input and output tokens per second"),
    *(
        Metric(name, "load", "tok/s/GPU", "higher", f"{whole} over the number of the server's GPUs")
        for name, whole in PER_GPU.items()
    ),
    Metric(
        PEAK_CHUNKS,
        "load",
        "chunk/s",
        "higher",
        "most chunks of replies in one of the seconds since the first request. Bench calls it `max_output_tokens_per_s`, but a"
        " chunk can have several tokens",
    ),
    *(
        Metric(f"{name}_{statistic}_ms", "load", "ms", "lower", f"{meaning}, {wording}", quantile=quantile)
        for name, meaning in _LATENCIES.items()
        for statistic, (wording, quantile) in _STATISTICS.items()
    ),
    *(
        Metric(name, "load", "ms", "lower", f"time to first token of {what}, median", quantile=0.50)
        for name, what in zip(TURN_TTFTS, ("chats' first turns", "chats' turns after the first"), strict=True)
    ),
    Metric(GOODPUT, "load", "req/s", "higher", "requests completed per second that met the workload's SLO"),
    Metric(PREFIX_HIT_SHARE, "load", "fraction", "higher", "share of the prompts that the server's prefix cache had"),
    Metric(
        "acceptance_length_tok",
        "load",
        "tok",
        "higher",
        "tokens per step of speculative decoding, the draft's and one",
        least=1.0,
    ),
    *(
        metric
        for path, through in PATHS.items()
        for metric in (
            Metric(path_metric(path), "paths", "bool", "higher", f"no answer changed, {through}"),
            Metric(path_metric(path, CHANGED), "paths", "fraction", "lower", f"share of answers that changed, {through}"),
            Metric(
                path_metric(path, FIRST_TOKEN),
                "paths",
                "nat",
                "lower",
                f"how much less likely the first token of the cold answers is, mean, {through}",
                is_growth=True,
            ),
        )
    ),
    Metric(
        path_metric(CONSTRAINED), "paths", "bool", "higher", "all replies of a busy server have the form that they must have"
    ),
    Metric(
        path_metric(REORDERED),
        "serve",
        "bool",
        "higher",
        "all replies have their form, after a start that began with another form",
    ),
    Metric(SCHEMA_VALID, "paths", "fraction", "higher", "share of replies that fit their JSON schema, many at once"),
    Metric(TOOL_CALL_VALID, "paths", "fraction", "higher", "share of replies that call the tool that they must, many at once"),
    Metric(RECOVERED, "paths", "s", "lower", "until no request runs and the KV cache is free again, after clients hung up"),
    Metric(SPEEDUP, "speculation", "ratio", "higher", "output tokens per second over those of the same server without it"),
    Metric(SPEEDUP_BATCH1, "speculation", "ratio", "higher", "the same with one request at a time"),
    Metric(
        ACCEPTANCE_BATCH1,
        "speculation",
        "tok",
        "higher",
        "tokens per step of speculative decoding, one request at a time",
        least=1.0,
    ),
    Metric(SAME_TEXT, "speculation", "fraction", "higher", "share of prompts whose greedy text is the same without it"),
    Metric(SLO_CONCURRENCY, "sweep", "req", "higher", "most requests at once that meet the sweep's SLO"),
    Metric(SLO_RATE, "sweep", "req/s", "higher", "highest rate of requests that meets the sweep's SLO"),
    Metric(SLO_GOODPUT, "sweep", "req/s", "higher", "requests in time per second, at the most that meets the sweep's SLO"),
    Metric(SLO_COST, "sweep", "usd/Mtok", "lower", "price of a million output tokens, at the most that meets the sweep's SLO"),
    Metric(HOST_GROWTH, "soak", "MiB/h", "lower", "growth of the resident memory of the server's processes", is_growth=True),
    Metric(GPU_GROWTH, "soak", "MiB/h", "lower", "growth of the used memory of the server's GPUs together", is_growth=True),
    *(
        Metric(growth, "soak", "%/h", "lower", f"growth of the {_LATENCIES[name]}, in percent of its mean", is_growth=True)
        for name, growth in LATENCY_GROWTHS.items()
    ),
    Metric(FAILED_SHARE, "soak", "fraction", "lower", "share of the soak's requests that failed"),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}
CONTRACT_METRICS = contract.NAMES
# The metrics of the paths that gate by themselves.
PATH_METRICS = tuple(path_metric(path) for path in (*PATHS, CONSTRAINED, REORDERED))
SMOKE_METRICS = tuple(metric.name for metric in _DECLARED if metric.stage == "smoke")

# The required confidence that a percentile is met if no request misses it.
PERCENTILE_CONFIDENCE = 0.99
# A load's warm-up and tail are cut off: only half of its requests are certain to be counted.
PROMPTS_PER_REQUEST = 2


def least_prompts(metric: str) -> int:
    """How many prompts a load needs for a gate on the metric: its requests, and those that are cut off."""
    least = least_requests(metric)
    return PROMPTS_PER_REQUEST * least if least > 1 else 1


def least_requests(metric: str) -> int:
    """How many requests a percentile needs: if all of them are in time, it is met with PERCENTILE_CONFIDENCE (p99: 459).

    This is the least n with quantile^n below 1 - PERCENTILE_CONFIDENCE, as in MLPerf Inference's early stopping. It is 1 for
    other metrics.
    """
    quantile = METRICS[metric].quantile
    return 1 if quantile is None else math.ceil(math.log(1 - PERCENTILE_CONFIDENCE) / math.log(quantile))
