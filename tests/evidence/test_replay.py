"""A trace's replay: what bench is asked, and that another replay than the asked one is no number."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evidence.commands import CLIENT, options
from tests.fakes.capacity import STATISTICS, counts_of, page
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.load.client import command_of
from vllm_qualify.evidence.load.figures import parse_load
from vllm_qualify.evidence.load.replay import TRACE, planned_trace, trace_of
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.recipe.traces.trace import Request, Trace
from vllm_qualify.recipe.workload import Load

Document = dict[str, Any]
Change = Callable[[Document], Document]

COUNT, TTFT_S, GAP_S = 40, 0.02, 0.005
REQUESTS = [Request(0.1 * at, 16 + at, 4 + at % 3, (0, at + 1)) for at in range(COUNT)]
OF = Trace.of(16, REQUESTS)


def load_of(trace: Trace) -> Load:
    return Load(
        trace="trace.jsonl",
        window="whole",
        max_concurrency=1,
        num_prompts=len(trace.requests),
        num_warmups=0,
        repeats=2,
        most_repeats=2,
        min_duration_s=0.1,
        prompts_sha256=trace.digest,
    )


def result_of(trace: Trace, began: float) -> Document:
    """As bench writes it, for a server that answers each request in the same time."""
    inputs, outputs = trace.input_toks, trace.output_toks
    itls = [[GAP_S] * (length - 1) for length in outputs]
    # Each repeat is another one by a trace.
    ttfts = [TTFT_S + began * 1e-9] * len(outputs)
    starts = [began + arrival_s for arrival_s in trace.arrivals_s]
    latencies = np.array([ttft + sum(gaps) for ttft, gaps in zip(ttfts, itls, strict=True)])
    duration = float((starts + latencies).max() - began)
    times = {
        "ttft": np.array(ttfts),
        "tpot": (latencies - ttfts) / (np.array(outputs) - 1),
        "itl": np.concatenate(itls),
        "e2el": latencies,
    }
    figures = {
        f"{name}_{latency}_ms": 1000 * float(each.mean() if percent is None else np.percentile(each, percent))
        for latency, each in times.items()
        for name, percent in STATISTICS.items()
    }
    return figures | {
        "backend": "openai",
        "model_id": "reference",
        "num_prompts": len(outputs),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        "completed": len(outputs),
        "failed": 0,
        "total_input_tokens": sum(inputs),
        "total_output_tokens": sum(outputs),
        "input_lens": inputs,
        "output_lens": outputs,
        "generated_texts": ["x"] * len(outputs),
        "errors": [""] * len(outputs),
        "duration": duration,
        "request_throughput": len(outputs) / duration,
        "output_throughput": sum(outputs) / duration,
        "total_token_throughput": (sum(outputs) + sum(inputs)) / duration,
        "start_times": starts,
        "ttfts": ttfts,
        "itls": itls,
    }


def measured(folder: Path, change: Change = lambda result: result, trace: Trace = OF) -> dict[str, Measurement]:
    """Two repeats of a trace, the results changed."""
    load = load_of(OF)
    (folder / TRACE).write_bytes(trace.body)
    for repeat in (1, 2):
        result = change(result_of(OF, 1000.0 * repeat))
        (folder / f"bench-{repeat}.json").write_text(json.dumps(result))
        (folder / f"metrics-{repeat}-before.txt").write_text(page())
        (folder / f"metrics-{repeat}-after.txt").write_text(page(0, *counts_of(result)))
    return {row.metric: row for row in parse_load(folder, load, Levels())}


def because(rows: dict[str, Measurement]) -> str:
    return rows["ttft_mean_ms"].invalid_because or ""


def test_bench_is_asked_to_replay_it(tmp_path: Path) -> None:
    command = command_of(CLIENT, "reference", load_of(OF), str(tmp_path), 1, "/there/trace.jsonl", trace=OF)
    given = options(command)
    assert (given["--dataset-name"], given["--dataset-path"]) == ("timed_trace", "/there/trace.jsonl")
    assert (given["--timed-trace-chunk-hash-size"], given["--timed-trace-sec-multiplier"]) == ("16", "1")
    assert "--self-timed" in command
    assert not {"--max-concurrency", "--request-rate", "--random-input-len"} & set(command)


def test_a_faithful_replay_is_measured_over_all_of_it(tmp_path: Path) -> None:
    rows = measured(tmp_path)
    assert because(rows) == ""
    assert rows["ttft_mean_ms"].value == pytest.approx(1000 * TTFT_S, rel=1e-3)
    assert rows["ttft_mean_ms"].sample_count == 2 * COUNT


def delayed(by_s: float, requests: int) -> Change:
    def change(result: Document) -> Document:
        starts = result["start_times"]
        return result | {"start_times": [*starts[:-requests], *(start + by_s for start in starts[-requests:])]}

    return change


def longer(result: Document) -> Document:
    """The last requests are late together, so that all of it lasts longer: its rates are those of that time."""
    duration = float(max(result["start_times"]) + 0.05 - min(result["start_times"]))
    totals = {"request_throughput": COUNT, "output_throughput": result["total_output_tokens"]}
    totals["total_token_throughput"] = result["total_output_tokens"] + result["total_input_tokens"]
    return result | {"duration": duration} | {name: total / duration for name, total in totals.items()}


def test_a_client_that_falls_behind_is_no_slow_server(tmp_path: Path) -> None:
    message = because(measured(tmp_path, lambda result: longer(delayed(0.15, 4)(result))))
    assert "10.0% of its requests were sent more than 0.1 s after the trace, the last of them 0.15 s" in message
    assert "the client fell behind: give the client a core or a host of its own" in message


def test_a_client_may_be_late_by_less_than_users_notice(tmp_path: Path) -> None:
    assert because(measured(tmp_path, lambda result: longer(delayed(0.05, 4)(result)))) == ""


@pytest.mark.parametrize("name", ["input_lens", "output_lens"])
def test_another_length_than_the_traces_leaves_no_number(tmp_path: Path, name: str) -> None:
    def change(result: Document) -> Document:
        # As many in all, so that only the trace tells it.
        first, *others, last = result[name]
        return result | {name: [first + 1, *others, last - 1]}

    message = because(measured(tmp_path, change))
    assert f"2 {name} are not the trace's: request 1" in message


def test_a_bench_that_records_no_starts_cannot_show_that_it_kept_time(tmp_path: Path) -> None:
    def change(result: Document) -> Document:
        return {name: value for name, value in result.items() if name != "start_times"}

    assert "does not record when each request started" in because(measured(tmp_path, change))


@pytest.mark.parametrize(
    "changes", [{"request_rate": 10.0}, {"max_concurrency": 8}, {"burstiness": 0.5}], ids=["rate", "clients", "burstiness"]
)
def test_a_replay_with_other_times_or_a_limit_leaves_no_number(tmp_path: Path, changes: Document) -> None:
    (name,) = changes
    assert f"bench had {name} {changes[name]}" in because(measured(tmp_path, lambda result: result | changes))


def test_another_trace_than_the_planned_one_leaves_no_number(tmp_path: Path) -> None:
    """The measured host wrote it, and its own requests would agree with it."""
    easier = Trace.of(16, [request._replace(arrival_s=2 * request.arrival_s) for request in REQUESTS])
    assert "trace.json is not the planned trace" in because(measured(tmp_path, trace=easier))


def test_a_missing_trace_leaves_no_number(tmp_path: Path) -> None:
    measured(tmp_path)
    (tmp_path / TRACE).unlink()
    rows = {row.metric: row for row in parse_load(tmp_path, load_of(OF), Levels())}
    assert TRACE in because(rows)


def test_a_load_of_another_kind_has_no_trace(tmp_path: Path) -> None:
    load = Load(input_len=1, output_len=1, max_concurrency=1, num_prompts=5, num_warmups=0)
    assert planned_trace(tmp_path, load) is None


def test_a_file_that_changed_after_the_plan_is_not_sent(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [json.dumps({"arrival_s": at, "input_tok": 8, "output_tok": 2}) + "\n" for at in range(3)]
    file.write_text("".join(lines))
    planned = load_of(Trace.of(10_000_000, [Request(at, 8, 2, (at,)) for at in range(3)]))
    assert len(trace_of(planned, file).requests) == 3
    file.write_text("".join([*lines[:2], lines[2].replace("8", "9")]))
    with pytest.raises(HostError, match="has changed since this run was planned"):
        trace_of(planned, file)
