"""A trace's replay: what bench is asked, and that another replay than the asked one is no number."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.loads import measure
from tests.evidence.commands import CLIENT, options
from tests.fakes.capacity import STATISTICS, about, counts_of, page
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.load.client import command_of
from vllm_qualify.evidence.load.replay import TRACE, trace_of
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.traces.trace import Request, Trace

Document = dict[str, Any]
Change = Callable[[Document], Document]

COUNT, TTFT_S, GAP_S = 40, 0.02, 0.005
REQUESTS = [Request(0.1 * at, 16 + at, 4 + at % 3, (0, at + 1)) for at in range(COUNT)]
OF = Trace.from_requests(16, REQUESTS)


def load_of(trace: Trace) -> Load:
    about = {"trace": "trace.jsonl", "window": "whole", "prompts_sha256": trace.digest, "num_prompts": len(trace.requests)}
    rest = {"max_concurrency": 1, "num_warmups": 0, "repeats": 2, "most_repeats": 2, "min_duration_s": 0.1}
    return Load.model_validate(about | rest)


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
    rates = {"request": len(outputs), "output": sum(outputs), "total_token": sum(outputs) + sum(inputs)}
    figures |= {f"{name}_throughput": total / duration for name, total in rates.items()}
    itself = about(load_of(trace), None, inputs, outputs) | {"max_concurrency": None}
    return figures | itself | {"duration": duration, "start_times": starts, "ttfts": ttfts, "itls": itls}


def measured(folder: Path, change: Change = lambda result: result, trace: Trace = OF) -> dict[str, Measurement]:
    """Two repeats of a trace, the results changed."""
    folder.mkdir(exist_ok=True)
    (folder / TRACE).write_bytes(trace.body)
    for repeat in (1, 2):
        result = change(result_of(OF, 1000.0 * repeat))
        (folder / f"bench-{repeat}.json").write_text(json.dumps(result))
        (folder / f"metrics-{repeat}-before.txt").write_text(page())
        (folder / f"metrics-{repeat}-after.txt").write_text(page(0, *counts_of(result)))
    return measure(folder, load_of(OF))


def because(rows: dict[str, Measurement]) -> str:
    return rows["ttft_mean_ms"].invalid_because or ""


def test_bench_is_asked_to_replay_it(tmp_path: Path) -> None:
    command = command_of(CLIENT, "reference", load_of(OF), str(tmp_path), 1, "/there/trace.jsonl", trace=OF)
    given = options(command)
    assert (given["--dataset-name"], given["--dataset-path"]) == ("timed_trace", "/there/trace.jsonl")
    assert (given["--timed-trace-chunk-hash-size"], given["--timed-trace-sec-multiplier"]) == ("16", "1")
    assert "--self-timed" in command
    assert not {"--max-concurrency", "--request-rate", "--random-input-len"} & set(command)


def delayed(by_s: float, requests: int) -> Change:
    """The last requests are late together, so that all of it lasts longer: its rates are those of that time."""

    def change(result: Document) -> Document:
        starts = result["start_times"]
        return longer(result | {"start_times": [*starts[:-requests], *(start + by_s for start in starts[-requests:])]})

    return change


def longer(result: Document) -> Document:
    duration = float(max(result["start_times"]) + 0.05 - min(result["start_times"]))
    totals = {"request_throughput": COUNT, "output_throughput": result["total_output_tokens"]}
    totals["total_token_throughput"] = result["total_output_tokens"] + result["total_input_tokens"]
    return result | {"duration": duration} | {name: total / duration for name, total in totals.items()}


@pytest.mark.parametrize(("by_s", "requests", "share"), [(0.15, 4, "10.0%"), (1.2, 1, "2.5%"), (300.0, 1, "2.5%")])
def test_a_client_that_falls_behind_is_no_slow_server(tmp_path: Path, by_s: float, requests: int, share: str) -> None:
    message = because(measured(tmp_path, lambda result: longer(delayed(by_s, requests)(result))))
    assert f"{share} of its requests were sent more than 0.1 s after the trace, the last of them {by_s:.2g} s" in message
    assert "the client fell behind: give the client a core or a host of its own" in message


def with_small_delays(result: Document) -> Document:
    """They would make a slow server and its baseline more alike."""
    return longer(delayed(0.09, 30)(result))


@pytest.mark.parametrize("change", [lambda result: result, with_small_delays], ids=["faithful", "small delays"])
def test_a_replay_in_time_is_measured_over_all_of_it(tmp_path: Path, change: Change) -> None:
    rows = measured(tmp_path, change)
    assert because(rows) == ""
    assert rows["ttft_mean_ms"].value == pytest.approx(1000 * TTFT_S, rel=1e-3)
    assert rows["ttft_mean_ms"].sample_count == 2 * COUNT


def test_a_few_late_requests_wait_from_their_time_in_the_trace_on(tmp_path: Path) -> None:
    """By hand: 2 of 40 requests are 0.2 s late, and the last token comes 0.2 s later."""
    in_time, late = (tmp_path / name for name in ("in-time", "late"))
    in_time.mkdir()
    late.mkdir()
    prompt = measured(in_time, longer)
    rows = measured(late, lambda result: longer(delayed(0.2, 2)(result)))
    assert because(rows) == ""
    where = "from each late request's time in the trace on, over whole runs with their ramp-up and tail"
    assert rows["ttft_mean_ms"].source.endswith(where)
    values = {name: row.value for name, row in rows.items()}
    assert values["ttft_mean_ms"] == pytest.approx(1000 * (TTFT_S + 2 * 0.2 / COUNT), rel=1e-3)
    assert values["ttft_p50_ms"] == pytest.approx(1000 * TTFT_S, rel=1e-3)
    assert values["e2el_mean_ms"] == pytest.approx((prompt["e2el_mean_ms"].value or 0) + 2 * 200 / COUNT, rel=1e-3)
    assert values["tpot_mean_ms"] == pytest.approx(prompt["tpot_mean_ms"].value, rel=1e-3)


def test_a_first_request_that_is_late_began_in_time_too(tmp_path: Path) -> None:
    """All of it then began earlier, and lasted longer."""

    def change(result: Document) -> Document:
        first, *others = result["start_times"]
        # The last one is there: so the delay of the first shows.
        return longer(result | {"start_times": [first + 0.15, *others]})

    rows = measured(tmp_path, change)
    assert because(rows) == ""
    assert rows["ttft_mean_ms"].value == pytest.approx(1000 * (TTFT_S + 0.15 / COUNT), rel=1e-3)
    assert rows["request_throughput_req_s"].value == pytest.approx(COUNT / (OF.arrivals_s[-1] + 0.05), rel=1e-3)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -float("inf")])
def test_a_start_that_is_no_time_is_never_in_time(tmp_path: Path, time: float) -> None:
    message = because(measured(tmp_path, lambda result: result | {"start_times": [*result["start_times"][:-1], time]}))
    assert "the client fell behind" in message


@pytest.mark.parametrize("name", ["input_lens", "output_lens"])
def test_another_length_than_the_traces_leaves_no_number(tmp_path: Path, name: str) -> None:
    def change(result: Document) -> Document:
        # As many in all, so that only the trace tells it.
        first, *others, last = result[name]
        return result | {name: [first + 1, *others, last - 1]}

    assert f"2 {name} are not the trace's: request 1" in because(measured(tmp_path, change))


def without_starts(result: Document) -> Document:
    return {name: value for name, value in result.items() if name != "start_times"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_starts, "does not record when each request started"),
        (lambda result: result | {"request_rate": 10.0}, "bench had request_rate 10.0"),
        (lambda result: result | {"max_concurrency": 8}, "bench had max_concurrency 8"),
        (lambda result: result | {"burstiness": 0.5}, "bench had burstiness 0.5"),
    ],
)
def test_a_replay_without_times_with_others_or_a_limit_leaves_no_number(tmp_path: Path, change: Change, message: str) -> None:
    assert message in because(measured(tmp_path, change))


def test_another_trace_than_the_planned_one_leaves_no_number(tmp_path: Path) -> None:
    """The measured host wrote it, and its own requests would agree with it."""
    easier = Trace.from_requests(16, [request._replace(arrival_s=2 * request.arrival_s) for request in REQUESTS])
    assert "trace.json is not the planned trace" in because(measured(tmp_path, trace=easier))
    (tmp_path / TRACE).unlink()
    assert TRACE in because(measure(tmp_path, load_of(OF)))


def test_a_file_that_changed_after_the_plan_is_not_sent(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [json.dumps({"arrival_s": at, "input_tok": 8, "output_tok": 2}) + "\n" for at in range(3)]
    file.write_text("".join(lines))
    planned = load_of(Trace.from_requests(10_000_000, [Request(at, 8, 2, (at,)) for at in range(3)]))
    assert len(trace_of(planned, file).requests) == 3
    file.write_text("".join([*lines[:2], lines[2].replace("8", "9")]))
    with pytest.raises(HostError, match="has changed since this run was planned"):
        trace_of(planned, file)
