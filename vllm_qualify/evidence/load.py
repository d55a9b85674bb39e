"""Load: `vllm bench serve` with random prompts, repeated, with the server's counters before and after each repeat."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import JsonValue

from vllm_qualify.engine.process import Progress
from vllm_qualify.engine.server import Client, Server, recorded, results_folder, run_client
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, geometric_mean, in_words, invalid, repeat_interval, valid
from vllm_qualify.recipe import metrics
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.model import VLLM, EngineName, Load, ServerArguments

STAGE = "load"
PREFIX_HITS_ALLOWED = 0.01
PREEMPTIONS = f"{metrics.PREEMPTIONS}_total"
PREFIX_QUERIES, PREFIX_HITS = f"{metrics.PREFIX_QUERIES}_total", f"{metrics.PREFIX_HITS}_total"
# Those of TensorRT-LLM, from its tensorrt_llm/metrics/collector.py. A counter is there from its first count on.
SUCCEEDED = "trtllm_request_success_total"
REUSED_BLOCKS, MISSED_BLOCKS = "trtllm_kv_cache_reused_blocks_total", "trtllm_kv_cache_missed_blocks_total"
# Of its scheduler's policies the one, and the default, under which a request that began is never paused for another.
NO_EVICTION = "GUARANTEED_NO_EVICT"
Counters = dict[str, float]
THROUGHPUT_KEYS = {
    "request_throughput_req_s": "request_throughput",
    "output_throughput_tok_s": "output_throughput",
    "total_throughput_tok_s": "total_token_throughput",
}


def measure(server: Server, client: Client, settings: Load, folder: Path, progress: Progress) -> list[list[str]]:
    """Run every repeat with `client`; `bench-N.json` is bench's own result file. Returns the commands.

    Raises:
        HostError: bench failed or took longer than its time limit.
        ReleaseError: the server ended meanwhile.
    """
    commands = []
    for repeat in range(1, settings.repeats + 1):
        command = command_of(client, server.served_model_name, settings, results_folder(client, folder), repeat)
        (folder / f"metrics-{repeat}-before.txt").write_text(_metrics(server))
        told = _of_repeat(progress, repeat, settings)
        log = folder / f"bench-{repeat}.log"
        run_client(client, command, f"bench-{repeat}.json", log, settings.time_limit_s, server.check_alive, told)
        (folder / f"metrics-{repeat}-after.txt").write_text(_metrics(server))
        commands.append(recorded(client, command))
    return commands


def _of_repeat(progress: Progress, repeat: int, settings: Load) -> Progress:
    def told(done: int, total: int) -> None:
        if total == settings.num_prompts:
            progress((repeat - 1) * total + done, settings.repeats * total)

    return told


def _metrics(server: Server) -> str:
    try:
        return httpx.get(f"{server.url}{server.metrics_path}", timeout=30, follow_redirects=True).raise_for_status().text
    except httpx.HTTPError as error:
        server.check_alive()
        return f"# no answer: {type(error).__name__}\n"


def command_of(client: Client, model: str, settings: Load, folder: str, repeat: int) -> list[str]:
    return [
        *(client.program, "bench", "serve"),
        *("--backend", "openai", "--endpoint", "/v1/completions", "--base-url", client.url),
        *("--model", model, "--tokenizer", client.model),
        *(("--trust-remote-code",) if client.trust_remote_code else ()),
        *("--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", str(settings.input_len), "--random-output-len", str(settings.output_len)),
        *("--num-prompts", str(settings.num_prompts), "--max-concurrency", str(settings.max_concurrency)),
        *("--num-warmups", str(settings.num_warmups)),
        # Another seed each repeat: the same prompts again would measure the prefix cache.
        *("--seed", str(settings.seed + repeat - 1)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *("--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", f"bench-{repeat}.json"),
    ]


def parse(folder: Path, settings: Load, kind: EngineName = VLLM, arguments: ServerArguments | None = None) -> list[Measurement]:
    """One measurement per load metric over the repeats; all invalid if any repeat is.

    `kind` and `arguments` are the server's: its counters have other names, and what it does not count must be switched off.
    """
    source = f"{folder.name}/bench-*.json"
    names = [metric.name for metric in METRICS.values() if metric.stage == STAGE]
    numbers = range(1, settings.repeats + 1)
    try:
        results = [json.loads((folder / f"bench-{number}.json").read_text()) for number in numbers]
        problems = [
            f"repeat {number}: {problem}"
            for number, result in zip(numbers, results, strict=True)
            for problem in [
                *_request_problems(result, settings),
                *_server_problems(folder, number, settings, kind, arguments or {}),
            ]
        ]
        if problems:
            return [invalid(name, "; ".join(problems), source) for name in names]
        return [_over_repeats(name, [_value(name, result) for result in results], settings, source) for name in names]
    except UNUSABLE as error:
        return [invalid(name, f"bench left no usable result: {in_words(error)}", source) for name in names]


def _request_problems(result: dict[str, Any], settings: Load) -> list[str]:
    """bench exits 0 with every request failed, and then writes 0.0 for the latencies."""
    asked, completed, failed = settings.num_prompts, result["completed"], result["failed"]
    problems = []
    if completed != asked or failed != 0:
        problems.append(f"{completed} of {asked} requests completed, {failed} failed")
    lengths = result["output_lens"]
    if len(lengths) != asked:
        problems.append(f"{len(lengths)} lengths of {asked} replies")
    short = sum(length != settings.output_len for length in lengths)
    if short:
        problems.append(f"{short} replies do not have {settings.output_len} tokens")
    # `not … <=`: NaN is no duration.
    if not settings.min_duration_s <= result["duration"] < math.inf:
        problems.append(f"it lasted {result['duration']:.1f} s, under min_duration_s {settings.min_duration_s:g}")
    return problems


def _server_problems(folder: Path, number: int, settings: Load, kind: EngineName, arguments: ServerArguments) -> list[str]:
    before, after = (_counters((folder / f"metrics-{number}-{when}.txt").read_text()) for when in ("before", "after"))
    if kind == VLLM:
        return _vllm_problems(before, after)
    return _tensorrt_llm_problems(before, after, settings, arguments)


def _vllm_problems(before: Counters, after: Counters) -> list[str]:
    # A server without a prefix cache need not count its hits; one that counts them does so from its start.
    watched = {PREEMPTIONS} | ({PREFIX_QUERIES, PREFIX_HITS} & (before.keys() | after.keys()))
    if missing := _missing(watched, before, after):
        return missing
    gained = {name: after[name] - before[name] for name in watched}
    problems = []
    if gained[PREEMPTIONS]:
        problems.append(f"{gained[PREEMPTIONS]:.0f} preemptions: the KV cache is too small for this load")
    return [*problems, *_too_many_hits(gained.get(PREFIX_HITS, 0.0), gained.get(PREFIX_QUERIES, 0.0), "prefix-cache queries")]


def _tensorrt_llm_problems(before: Counters, after: Counters, settings: Load, arguments: ServerArguments) -> list[str]:
    """Its server counts neither pauses nor, with reuse switched off, blocks: there its own configuration must rule them out."""
    if missing := _missing({SUCCEEDED}, before, after):
        return missing
    problems = []
    succeeded = after[SUCCEEDED] - before[SUCCEEDED]
    if not succeeded >= settings.num_prompts:
        problems.append(f"the server counts {succeeded:.0f} requests of {settings.num_prompts}")
    policy = _setting(arguments, "scheduler_config", "capacity_scheduler_policy", NO_EVICTION)
    if policy != NO_EVICTION:
        problems.append(f"under {policy} the server may pause requests, which it does not count: use {NO_EVICTION}")
    if _setting(arguments, "kv_cache_config", "enable_block_reuse", True) is False:
        return problems
    reused, missed = (after.get(name, 0.0) - before.get(name, 0.0) for name in (REUSED_BLOCKS, MISSED_BLOCKS))
    if not missed > 0:
        problems.append(f"the server does not count {MISSED_BLOCKS}: set enable_block_reuse to false in kv_cache_config")
    return [*problems, *_too_many_hits(reused, reused + missed, "blocks of the KV cache")]


def _setting(arguments: ServerArguments, section: str, name: str, default: JsonValue) -> JsonValue:
    found = arguments.get(section)
    return found.get(name, default) if isinstance(found, dict) else default


def _missing(watched: set[str], before: Counters, after: Counters) -> list[str]:
    for when, counters in (("before", before), ("after", after)):
        if missing := sorted(watched - counters.keys()):
            return [f"the server's /metrics {when} it has no {', '.join(missing)}"]
    return []


def _too_many_hits(hits: float, of: float, what: str) -> list[str]:
    if hits <= PREFIX_HITS_ALLOWED * of:
        return []
    return [f"{hits:.0f} of {of:.0f} {what} hit on random prompts: switch prefix caching off"]


def _counters(text: str) -> Counters:
    """Counters by name, summed over their labels."""
    totals: Counters = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def _value(name: str, result: dict[str, Any]) -> float:
    if name in THROUGHPUT_KEYS:
        return float(result[THROUGHPUT_KEYS[name]])
    latency, statistic, _ = name.rsplit("_", 2)
    return float(result[f"{statistic}_{latency}_ms"])


def _over_repeats(name: str, repeats: Sequence[float], settings: Load, source: str) -> Measurement:
    if not all(math.isfinite(value) and value > 0 for value in repeats):
        return invalid(name, f"repeats gave {list(repeats)}, which is no measured time or rate", source)
    return valid(
        name,
        geometric_mean(repeats),
        source,
        sample_count=settings.num_prompts * len(repeats),
        repeats=list(repeats),
        interval=repeat_interval(repeats),
    )
