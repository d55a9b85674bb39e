"""Load: what bench's captured files say, and that bad ones give no number."""

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.builders.loads import (
    CAPTURED,
    CAPTURED_FOLDER,
    HITS,
    LOAD_SERVER,
    MEASURED,
    PEAK,
    REPEATS,
    SETTINGS,
    SHORT,
    bounds_of,
    by_metric,
    change,
    copy_repeat,
    count,
    load_server,
    measure,
    read_at_once,
    read_result,
    restated,
    scale,
    trtllm_page,
    with_goodput_of_none,
    with_settings,
)
from tests.directions import HIGHER_IS_BETTER
from tests.evidence.commands import BENCH, CLIENT, SERVER, driven, options
from vllm_qualify.engine import bench as benches
from vllm_qualify.engine.bench import Bench
from vllm_qualify.engine.kinds.base import Conditions, Counted
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.kinds.vllm import PREEMPTION_REMEDY
from vllm_qualify.engine.process import Progress
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES
from vllm_qualify.evidence.load import result as results
from vllm_qualify.evidence.load.client import (
    Following,
    Made,
    command_of,
    driven_by,
    measure_load,
    prepare_prompts,
    warm_up_command,
)
from vllm_qualify.evidence.load.ended import ENDED, Ended
from vllm_qualify.evidence.load.figures import first_repeat_problem
from vllm_qualify.evidence.load.problems import preemptions, problems_of
from vllm_qualify.evidence.load.result import BESIDE, steady_of
from vllm_qualify.evidence.load.steady import UnsteadyError
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.evidence.stages.table import parse_unfinished
from vllm_qualify.judge.verdict import surely_misses
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.load import Load, Slo
from vllm_qualify.recipe.serving import ServerArguments

NEEDED = {"p90": 44, "p99": 459}
STATISTICS = ("mean", "p50", "p90", "p99")
SECOND = read_result(CAPTURED)
OF_FILE = Load.model_validate(
    {**SETTINGS.model_dump(), "input_len": None, "prompts": "prompts.jsonl", "prompts_sha256": "0" * 64}
)
# Student's t with 1 degree of freedom, one-sided: of 97 % for the bound that decides `pass`, of 95 % for that of `fail`.
T_OF_PASS, T_OF_FAIL = 10.578895, 6.313752
PREEMPTIONS = "vllm:num_preemptions_total"
FULL = [8] * 39
EMPTIED = "/reset_prefix_cache 200\n"

Document = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "load")


def value_of(folder: Path, settings: Load = SETTINGS, watched: Path | None = None) -> float | None:
    return by_metric(folder, settings, watched=watched)["output_throughput_tok_s"].value


def assert_nothing(folder: Path, *message: str, settings: Load = SETTINGS, watched: Path | None = None) -> None:
    """A repeat that cannot be trusted leaves no number at all."""
    for row in by_metric(folder, settings, watched=watched).values():
        assert (row.value, row.interval, row.sample_count) == (None, None, 0)
        for words in message:
            assert words in (row.invalid_because or "")


@pytest.mark.parametrize("metric", REPEATS)
def test_the_captured_files_give_every_metric_over_both_repeats(metric: str) -> None:
    row, repeats = by_metric(CAPTURED)[metric], REPEATS[metric]
    assert row.source == "load/bench-*.json"
    assert row.unit == {"req_s": "req/s", "tok_s": "tok/s"}.get("_".join(metric.split("_")[-2:]), "ms")
    assert row.traced_to == ["load/bench-1.json:1", "load/bench-2.json:1"]
    if repeats is None:
        needed = NEEDED[metric.split("_")[1]]
        message = f"20 requests in a repeat's steady state, and {metric} needs {needed}: use more num_prompts"
        assert (row.value, row.invalid_because) == (None, message)
        return
    first, second = repeats
    mean, error = math.sqrt(first * second), abs(math.log(first / second)) / 2
    assert [*row.repeats, row.value] == pytest.approx([first, second, mean])
    assert row.sample_count == 32 + 20
    below, above = (T_OF_PASS, T_OF_FAIL) if metric in HIGHER_IS_BETTER else (T_OF_FAIL, T_OF_PASS)
    assert bounds_of(row) == pytest.approx((mean * math.exp(-below * error), mean * math.exp(above * error)), rel=1e-5)


def test_the_values_are_those_counted_by_hand() -> None:
    """Of the second repeat, whose steady state is from the wave of requests 16 to 19 to that of 36 to 39."""
    result = read_result(CAPTURED)
    starts, stretches = result["start_times"], range(4)
    assert starts == sorted(starts)
    length = sum(starts[36 + each] - starts[16 + each] for each in stretches) / 4
    tokens = 0
    for start, ttft, gaps in zip(starts, result["ttfts"], result["itls"], strict=True):
        for number in range(8):
            came = start + ttft + sum(gaps[:number])
            tokens += sum(starts[16 + each] <= came < starts[36 + each] for each in stretches)
    rows = by_metric(CAPTURED)
    assert rows["output_throughput_tok_s"].repeats[1] == pytest.approx(tokens / 4 / length)
    assert rows["request_throughput_req_s"].repeats[1] == pytest.approx(20 / length)
    chosen = range(16, 36)
    assert rows["ttft_mean_ms"].repeats[1] == pytest.approx(1000 * sum(result["ttfts"][each] for each in chosen) / 20)
    good = sum(result["ttfts"][each] <= 0.020 and sum(result["itls"][each]) / 7 <= 0.006 for each in chosen)
    assert rows["goodput_req_s"].repeats[1] == pytest.approx(good / length)


def test_one_repeat_shows_no_noise_and_without_an_slo_there_is_no_goodput(folder: Path) -> None:
    (folder / "bench-2.json").unlink()
    rows = by_metric(folder, with_settings(repeats=1, slo=None))
    assert "goodput_req_s" not in rows
    row = rows["output_throughput_tok_s"]
    assert row.value == pytest.approx(502.54100383558114)
    assert (row.interval, row.sample_count) == (None, 32)


def test_an_early_look_is_surer_than_the_last() -> None:
    rows = (by_metric(CAPTURED, with_settings(most_repeats=most))["output_throughput_tok_s"] for most in (8, 2))
    early, last = map(bounds_of, rows)
    assert early[0] < last[0] < last[1] < early[1]


@pytest.mark.parametrize(("metric", "failing_is_above"), [("output_throughput_tok_s", True), ("ttft_mean_ms", False)])
def test_the_bound_that_fails_a_release_is_the_surer(metric: str, failing_is_above: bool) -> None:
    rows = (by_metric(CAPTURED, levels=levels)[metric] for levels in (Levels(), Levels(false_fail=0.01)))
    plain, shared = map(bounds_of, rows)
    assert (shared[1] > plain[1], shared[0] < plain[0]) == (failing_is_above, not failing_is_above)


def test_the_baseline_beside_is_parsed_the_same(folder: Path) -> None:
    beside = shutil.copytree(CAPTURED, folder / "beside")
    row = by_metric(beside)["output_throughput_tok_s"]
    assert row.value == value_of(folder)
    assert row.source == "load/beside/bench-*.json"
    assert row.traced_to == ["load/beside/bench-1.json:1", "load/beside/bench-2.json:1"]


def test_each_number_is_traced_to_its_line(folder: Path) -> None:
    for number in (1, 2):
        # A reply that quotes the key is not it.
        result = {"generated_texts": ['"mean_ttft_ms": 1\n'], **read_result(folder, number)}
        (folder / f"bench-{number}.json").write_text(json.dumps(result, indent=1 if number == 2 else None))
    lines = (folder / "bench-2.json").read_text().splitlines()
    line = next(number for number, line in enumerate(lines, 1) if line.startswith(' "mean_ttft_ms":'))
    assert by_metric(folder)["ttft_mean_ms"].traced_to == ["load/bench-1.json:1", f"load/bench-2.json:{line}"]


@pytest.mark.parametrize("repeat", [1, 2])
def test_a_repeat_with_every_request_failed_is_no_fast_one(folder: Path, repeat: int) -> None:
    """As bench leaves it, with exit code 0: zeros for what it could not measure."""
    zeros = dict.fromkeys([f"{name}_{latency}_ms" for latency in ("ttft", "tpot", "itl", "e2el") for name in STATISTICS], 0.0)
    rates = dict.fromkeys(["request_throughput", "output_throughput", "total_token_throughput"], 0.0)
    change(folder, repeat, completed=0, failed=40, output_lens=[0] * 40, **zeros, **rates)
    assert_nothing(folder, f"repeat {repeat}: 0 of 40 requests completed, 40 failed", "40 replies do not have 8 tokens")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"completed": 39, "failed": 1, "output_lens": [*FULL, 0]}, "repeat 2: 39 of 40 requests completed, 1 failed"),
        ({"completed": 39}, "39 of 40 requests completed, 0 failed"),
        ({"failed": 1}, "40 of 40 requests completed, 1 failed"),
        ({"completed": 41}, "41 of 40 requests completed"),
        ({"completed": None}, "None of 40 requests completed"),
        ({"output_lens": [*FULL, 7]}, "1 replies do not have 8 tokens"),
        ({"output_lens": [*FULL[:-1], 9, 0]}, "2 replies do not have 8 tokens"),
        ({"output_lens": FULL}, "39 lengths of 40 replies"),
        ({"output_lens": []}, "0 lengths of 40 replies"),
        ({"duration": 0.009}, "it lasted 0.0 s, under min_duration_s 0.01"),
        ({"duration": math.nan}, "it lasted nan s"),
        ({"duration": math.inf}, "it lasted inf s"),
        ({"duration": -1.0}, "it lasted -1.0 s"),
        # Without what is read.
        ({"completed": ...}, "KeyError('completed')"),
        ({"failed": ...}, "KeyError('failed')"),
        ({"output_lens": ...}, "KeyError('output_lens')"),
        ({"output_lens": 0}, "TypeError"),
        ({"duration": ...}, "KeyError('duration')"),
        ({"duration": None}, "TypeError"),
        ({"p99_ttft_ms": ...}, "KeyError('p99_ttft_ms')"),
        ({"output_throughput": ...}, "KeyError('output_throughput')"),
        ({"request_goodput": None}, "NoneType"),
        ({"p99_ttft_ms": None}, "NoneType"),
        ({"p99_ttft_ms": "fast"}, "ValueError"),
        ({"p99_ttft_ms": 10**400}, "OverflowError"),
        ({"itls": ...}, "KeyError('itls')"),
        ({"itls": [[0.1]] * 39}, "ValueError"),
        ({"ttfts": ["fast"] * 40}, "ValueError"),
        ({"start_times": None}, "TypeError"),
        ({"start_times": [0.0] * 39}, "not equally long"),
        # With times that cannot be.
        ({"ttfts": [math.nan] * 40}, "40 of its times to a token are no times"),
        ({"ttfts": [ttft * 0.9999 for ttft in SECOND["ttfts"]], "latencies": ...}, "contradicts its requests: mean_ttft_ms"),
        (
            {"start_times": [start * (1 + number / 40) for number, start in enumerate(SECOND["start_times"])]},
            "its duration is 0.61 s, and its requests took 4.03e+04 s from the first to the last",
        ),
        ({"start_times": [SECOND["start_times"][0]] * 40}, "40 requests were under way at once, and max_concurrency is 4"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:60],
)
def test_a_repeat_with_bad_requests_leaves_no_number(folder: Path, fields: Document, message: str) -> None:
    change(folder, **fields)
    assert_nothing(folder, message)


@pytest.mark.parametrize(("repeat", "lasted"), [(1, "0.7"), (2, "0.6")])
def test_another_load_than_the_asked_one_leaves_no_number(repeat: int, lasted: str, folder: Path) -> None:
    assert_nothing(CAPTURED, "40 of 80 requests completed", settings=with_settings(num_prompts=80))
    assert_nothing(CAPTURED, "40 replies do not have 9 tokens", settings=with_settings(output_len=9))
    change(folder, 3 - repeat, duration=70.5)
    message = f"repeat {repeat}: it lasted {lasted} s, under min_duration_s 60"
    assert_nothing(folder, message, settings=with_settings(min_duration_s=60.0))


def test_every_problem_of_every_repeat_is_reported(folder: Path) -> None:
    change(folder, 1, completed=39, failed=1)
    change(folder, 2, output_lens=[*FULL, 1])
    count(folder, "after", 2, num_preemptions=3.0)
    first, second = "repeat 1: 39 of 40 requests completed, 1 failed", "repeat 2: 1 replies do not have 8 tokens"
    assert_nothing(folder, f"{first}; {second}; repeat 2: 3 preemptions")


@pytest.mark.parametrize("name", sorted(path.name for path in CAPTURED.iterdir()))
def test_a_missing_file_leaves_no_number(folder: Path, name: str) -> None:
    (folder / name).unlink()
    # Of results the last one there says how many repeats there were.
    assert_nothing(folder, "1 of at least 2 repeats" if name == "bench-2.json" else f"No such file or directory: {name}")


@pytest.mark.parametrize("repeats", [0, 1, 2])
def test_fewer_repeats_than_asked_for_leave_no_number(folder: Path, repeats: int) -> None:
    for number in (1, 2)[repeats:]:
        (folder / f"bench-{number}.json").unlink()
    assert_nothing(folder, f"{repeats} of at least 3 repeats", settings=with_settings(repeats=3, most_repeats=5))


def test_more_repeats_than_asked_for_leave_no_number(folder: Path) -> None:
    copy_repeat(folder, 3, of=2)
    assert_nothing(folder, "3 repeats of at most 2")
    three = with_settings(most_repeats=3)
    assert by_metric(folder, three)["output_throughput_tok_s"].sample_count == 32 + 20 + 20
    (folder / "bench-2.json").unlink()
    assert_nothing(folder, "No such file or directory: bench-2.json", settings=three)


@pytest.mark.parametrize("name", ["bench-1.json", "bench-2.json"])
@pytest.mark.parametrize("cut", [0.0, 0.1, 0.5, 0.99, "null", "[]", "{}", "7"])
def test_a_cut_result_or_one_of_another_form_leaves_no_number(folder: Path, name: str, cut: float | str) -> None:
    text = (folder / name).read_text()
    (folder / name).write_text(cut if isinstance(cut, str) else text[: int(len(text) * cut)])
    assert_nothing(folder, "bench left no usable result", *(() if isinstance(cut, str) else ("JSONDecodeError",)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308])
@pytest.mark.parametrize("key", ["p99_ttft_ms", "p50_tpot_ms", "output_throughput", "request_throughput", "request_goodput"])
@pytest.mark.parametrize("repeat", [1, 2])
def test_a_figure_that_is_not_its_requests_leaves_no_number(folder: Path, key: str, value: float, repeat: int) -> None:
    change(folder, repeat, **{key: value})
    assert_nothing(folder, f"repeat {repeat}: bench's own figure contradicts its requests: {key} is {value:g}, and by them")


@pytest.mark.parametrize(("off", "is_invalid"), [(0.9999, True), (1 - 1e-7, False), (1 + 1e-7, False), (1.0001, True)])
def test_a_figure_may_differ_from_its_requests_by_rounding(folder: Path, off: float, is_invalid: bool) -> None:
    change(folder, output_throughput=off * read_result(folder)["output_throughput"])
    assert (value_of(folder) is None) == is_invalid


def test_a_bench_that_tells_no_starts_gives_nearly_the_same(folder: Path) -> None:
    """vLLM 0.12 to 0.14 wrote the same file without them, and without the latencies."""
    for repeat in (1, 2):
        change(folder, repeat, start_times=..., latencies=...)
    for name, row in by_metric(folder).items():
        assert row.source == "load/bench-*.json, the requests' start times from their latencies"
        if name in MEASURED:
            assert row.repeats == pytest.approx(REPEATS[name], rel=0.015)


def test_without_tokens_after_the_first_there_is_no_time_per_token(folder: Path) -> None:
    settings = with_settings(output_len=1, slo=None)
    for repeat in (1, 2):
        ttfts = read_result(folder, repeat)["ttfts"]
        # One client after another, as their new times to the only token have it.
        starts = [repeat + sum(ttfts[number % 4 : number : 4]) for number in range(40)]
        end = max(start + ttft for start, ttft in zip(starts, ttfts, strict=True)) - repeat
        one = {"output_lens": [1] * 40, "itls": [[]] * 40, "latencies": ttfts, "start_times": starts, "queue_times": ...}
        change(folder, repeat, **one, duration=end)
        change(folder, repeat, **restated(read_result(folder, repeat)))
        for when, tokens in (("before", 0), ("after", 44)):
            count(folder, when, repeat, generation_tokens=tokens)
    rows = by_metric(folder, settings)
    assert rows["ttft_mean_ms"].value is not None
    for name in ("tpot_mean_ms", "itl_p50_ms"):
        assert rows[name].invalid_because == "repeats gave [0.0, 0.0], which is not a measured time or rate"


def test_preemptions_are_those_of_a_repeat(folder: Path) -> None:
    assert preemptions(folder, 2) == 0
    count(folder, "before", num_preemptions=2.0)
    count(folder, "after", num_preemptions=7.0)
    assert preemptions(folder, 2) == 5
    # Those that nobody counts are no zero.
    for number, message in ((None, "has no vllm:num_preemptions_total"), (-1.0, "went back")):
        count(folder, "after", num_preemptions=number)
        with pytest.raises(ValueError, match=message):
            preemptions(folder, 2)


# --- Chunks that were read at once


def burst(folder: Path, first: int) -> dict[str, Measurement]:
    """What is measured where the second repeat's chunks came so."""
    result = read_at_once(read_result(folder), first)
    times = zip(result["ttfts"], result["itls"], strict=True)
    good = sum(ttft <= 0.020 and sum(gaps) / 7 <= 0.006 for ttft, gaps in times)
    change(folder, **result | {"request_goodput": good / result["duration"]})
    return by_metric(folder)


def test_chunks_that_were_read_at_once_make_the_gaps_invalid_and_nothing_else(folder: Path) -> None:
    rows, before = burst(folder, 3), by_metric(CAPTURED)
    message = (
        "repeat 2: 60 of 140 gaps between chunks are under 50 µs: they were read at once, give the client a core or a host"
    )
    for name in ("itl_mean_ms", "itl_p50_ms"):
        assert (rows[name].value, (rows[name].invalid_because or "").startswith(message)) == (None, True)
        assert rows[name].traced_to == ["load/bench-1.json:1", "load/bench-2.json:1"]
    assert {name for name in MEASURED if rows[name].value is None} == {"itl_mean_ms", "itl_p50_ms"}
    # Over the four gaps after the first read: bench would have four sevenths of it.
    assert rows["tpot_p50_ms"].repeats[1] == pytest.approx(before["tpot_p50_ms"].repeats[1], rel=0.15)
    assert rows["e2el_p50_ms"].value == pytest.approx(before["e2el_p50_ms"].value, rel=1e-3)
    assert rows["request_throughput_req_s"].value == before["request_throughput_req_s"].value


def test_replies_in_one_piece_have_no_time_per_token(folder: Path) -> None:
    rows = burst(folder, 7)
    for name in ("tpot_mean_ms", "tpot_p50_ms", "goodput_req_s"):
        assert "repeat 2: 0 of 20 replies show a time per token" in (rows[name].invalid_because or "")
    refused = {name for name in MEASURED if rows[name].value is None}
    assert refused == {"itl_mean_ms", "itl_p50_ms", "tpot_mean_ms", "tpot_p50_ms", "goodput_req_s"}


def test_of_chats_the_first_chunk_is_left_out(folder: Path) -> None:
    for repeat in (1, 2):
        result = read_result(folder, repeat) | {"backend": "openai-chat"}
        result["itls"] = [[SHORT, *gaps] for gaps in result["itls"]]
        change(folder, repeat, **(read_at_once(result, 0) | {"latencies": ...}))
    rows, before = by_metric(folder, with_settings(api="chat")), by_metric(CAPTURED)
    assert [rows[name].value for name in MEASURED] == pytest.approx([before[name].value for name in MEASURED], rel=1e-3)
    for repeat in (1, 2):
        change(folder, repeat, backend="openai", latencies=...)
    assert by_metric(folder)["itl_p50_ms"].value is None


# --- Goodput where some repeat has none


def test_no_goodput_at_all_is_0_and_its_bound_is_honest(folder: Path) -> None:
    row = with_goodput_of_none(folder, (1, 2))
    lower, upper = bounds_of(row)
    assert (row.value, row.repeats, lower) == (0.0, [0.0, 0.0], 0.0)
    # Two repeats say little of a third: Wilson's bound for 0 of 2 is 66 %, of a rate that is itself uncertain.
    assert upper > 0.6 * 32
    for repeat in range(3, 9):
        copy_repeat(folder, repeat, of=2 - repeat % 2)
    row = by_metric(folder, with_settings(repeats=8, most_repeats=8))["goodput_req_s"]
    lower, upper = bounds_of(row)
    assert row.value == lower == 0.0
    # Of 32 req/s that it served.
    assert 0.3 * 32 < upper < 0.4 * 32


def test_goodput_in_one_of_two_repeats_is_their_mean(folder: Path) -> None:
    row = with_goodput_of_none(folder, (2,))
    mean = 11.812912920718851 / 2
    assert [*row.repeats, row.value] == pytest.approx([2 * mean, 0.0, mean])
    lower, upper = bounds_of(row)
    assert lower < mean < upper


# --- Throughput per GPU, and bench's peak


def test_the_throughput_per_gpu_is_over_the_servers_gpus(folder: Path) -> None:
    rows = measure(folder, server=load_server(gpus=range(4)))
    for name in ("output", "total"):
        whole, each = rows[f"{name}_throughput_tok_s"], rows[f"{name}_throughput_tok_s_gpu"]
        assert whole.value is not None
        assert each.unit == "tok/s/GPU"
        assert [each.value, *each.repeats] == pytest.approx([value / 4 for value in (whole.value, *whole.repeats)])
        assert bounds_of(each) == pytest.approx([bound / 4 for bound in bounds_of(whole)])
        assert (each.traced_to, each.sample_count) == (whole.traced_to, whole.sample_count)


def test_it_is_invalid_with_the_load_and_absent_without_a_gpu(folder: Path) -> None:
    names = {"output_throughput_tok_s_gpu", "total_throughput_tok_s_gpu"}
    assert not names & measure(folder).keys()
    change(folder, completed=39, failed=1)
    rows = measure(folder, server=load_server(gpus=range(4)))
    assert all("1 failed" in (rows[name].invalid_because or "") for name in names)
    (folder / "bench-2.json").write_text("{")
    assert names <= measure(folder, server=load_server(gpus=range(4))).keys()


def test_the_peak_is_benchs_own_and_that_of_its_requests(folder: Path) -> None:
    """The captured repeats last less than a second: so in one of them is every chunk. Times four, they last longer."""
    assert measure(folder)[PEAK].repeats == [320, 320]
    for repeat in (1, 2):
        scale(folder, repeat, 4.0)
        result = read_result(folder, repeat)
        first, times = min(result["start_times"]), zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
        came = [start + ttft + sum(gaps[:at]) - first for start, ttft, gaps in times for at in range(len(gaps) + 1)]
        counts = np.bincount([int(time) for time in came])
        assert len(counts) > 2
        change(folder, repeat, max_output_tokens_per_s=float(counts.max()))
    row = measure(folder, with_settings(slo=None))[PEAK]
    assert row.value is not None
    assert row.value < 200
    assert (row.unit, row.traced_to) == ("chunk/s", ["load/bench-1.json:1", "load/bench-2.json:1"])


@pytest.mark.parametrize(("told", "shown"), [(321.0, "321.0"), (math.nan, "nan"), ("320", "320"), (..., "None")])
def test_a_peak_that_the_requests_do_not_show_is_invalid_alone(folder: Path, told: Any, shown: str) -> None:
    change(folder, max_output_tokens_per_s=told)
    rows = measure(folder)
    assert rows[PEAK].invalid_because == f"repeat 2: max_output_tokens_per_s is {shown}, and by its requests 320"
    assert rows["output_throughput_tok_s"].value is not None


def test_a_peak_under_its_bound_fails_and_an_older_bench_has_none(folder: Path) -> None:
    row = measure(folder)[PEAK]
    gates = [gate_of(metric=PEAK, minimum=minimum, unit="chunk/s") for minimum in (0.8 * 320, 1.2 * 320)]
    assert [surely_misses(gate, [row]) for gate in gates] == [False, True]
    for repeat in (1, 2):
        change(folder, repeat, max_output_tokens_per_s=...)
    assert PEAK not in measure(folder)


# --- Speculative decoding


def draft(folder: Path, repeat: int, accepted: int) -> None:
    """What bench and the server count if of 100 drafts so many tokens were accepted. Bench tells the length that follows."""
    counts = {"spec_decode_num_drafts": 100, "spec_decode_accepted_tokens": accepted}
    change(folder, repeat, spec_decode_acceptance_length=1 + accepted / 100, **counts)
    for when, times in (("before", 0), ("after", 1)):
        more = {"spec_decode_num_drafts": 100 * times, "spec_decode_num_accepted_tokens": accepted * times}
        count(folder, when, repeat, **more)


def test_the_acceptance_length_is_of_a_server_with_a_draft_model(folder: Path) -> None:
    draft(folder, 1, accepted=150)
    draft(folder, 2, accepted=160)
    row = measure(folder)["acceptance_length_tok"]
    assert row.value == pytest.approx(math.sqrt(2.5 * 2.6))
    assert (row.unit, row.sample_count, row.interval is None) == ("tok", 80, False)
    assert row.traced_to == ["load/bench-1.json:1", "load/bench-2.json:1"]


@pytest.mark.parametrize("length", [..., None])
def test_an_acceptance_length_of_some_repeats_is_invalid(folder: Path, length: Any) -> None:
    draft(folder, 1, accepted=150)
    change(folder, 2, spec_decode_acceptance_length=length)
    rows = measure(folder)
    because = rows["acceptance_length_tok"].invalid_because or ""
    assert "only 1 of 2 repeats have spec_decode_acceptance_length" in because
    assert rows["output_throughput_tok_s"].value is not None


# --- The first repeat


def test_a_first_repeat_that_was_still_warming_up_is_left_out(folder: Path) -> None:
    for repeat in (3, 4):
        copy_repeat(folder, repeat, of=2 - repeat % 2)
    settings = with_settings(most_repeats=4, slo=None)
    whole = by_metric(folder, settings)["output_throughput_tok_s"]
    scale(folder, 1, 1 / 0.6)
    row = by_metric(folder, settings)["output_throughput_tok_s"]
    assert (whole.source, row.repeats) == ("load/bench-*.json", whole.repeats[1:])
    assert row.source == (
        "load/bench-*.json without the first: its 301.5 tok/s are far off the others' 502.5 to 522.9, more num_warmups may help"
    )
    assert row.traced_to == whole.traced_to[1:]


@pytest.mark.parametrize(
    ("values", "is_off"),
    [
        ([60.0, 100.0, 101.0], True),
        ([160.0, 100.0, 101.0], True),
        ([60.0, 100.0, 100.0, 100.0], True),
        ([60.0, 100.0], False),
        ([60.0], False),
        ([], False),
        ([85.0, 100.0, 100.0], False),
        ([60.0, 100.0, 120.0], False),
        ([100.0, 60.0, 100.0], False),
        ([0.0, 100.0, 100.0], False),
    ],
)
def test_only_a_first_repeat_far_off_the_others_is_reported(values: list[float], is_off: bool) -> None:
    assert (first_repeat_problem(values) is not None) == is_off


@pytest.mark.parametrize("count", [3, 5, 8])
def test_noise_is_no_warm_up(count: int) -> None:
    draw = random.Random(count)
    runs = [[100 * math.exp(draw.gauss(0, 0.03)) for _ in range(count)] for _ in range(10_000)]
    assert [values for values in runs if first_repeat_problem(values)] == []
    slow = [[0.6 * values[0], *values[1:]] for values in runs]
    # Of 3 % noise the others' spread is seldom so wide that 40 % less is not 5 times as far.
    assert sum(first_repeat_problem(values) is not None for values in slow) > 0.5 * len(slow)


# --- Preemptions and the prefix cache


@pytest.mark.parametrize("repeat", [1, 2])
def test_preemptions_leave_no_number(folder: Path, repeat: int) -> None:
    count(folder, "after", repeat, num_preemptions=7.0)
    assert_nothing(folder, f"repeat {repeat}: 7 preemptions: the KV cache is too small for this load: {PREEMPTION_REMEDY}")
    for option in ("gpu-memory-utilization", "max-num-seqs", "max-num-batched-tokens", "tensor-parallel", "pipeline-parallel"):
        assert option in PREEMPTION_REMEDY


def test_preemptions_of_every_engine_count_and_none_before_the_repeat(folder: Path) -> None:
    path = folder / "metrics-2-after.txt"
    line = f'{PREEMPTIONS}{{engine="0",model_name="reference"}} 0.0\n'
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, line.replace('engine="0"', 'engine="1"').replace("0.0", "2.0") + line))
    assert_nothing(folder, "2 preemptions")
    count(folder, "before", num_preemptions=7.0)
    count(folder, "after", num_preemptions=2.0)
    assert_nothing(folder, f"repeat 2: the server's count of {PREEMPTIONS} went back: it was started anew meanwhile")
    count(folder, "after", num_preemptions=7.0)
    assert value_of(folder) is not None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("text", [None, "", "# no answer: ReadTimeout\n"])
def test_a_page_without_the_count_of_preemptions_leaves_no_number(folder: Path, when: str, text: str | None) -> None:
    if text is None:
        count(folder, when, num_preemptions=None)
    else:
        (folder / f"metrics-2-{when}.txt").write_text(text)
    assert_nothing(folder, f"repeat 2: the server's /metrics {when} it has no {PREEMPTIONS}")


@pytest.mark.parametrize("text", ["<html>", '{"detail": "Not Found"}', "vllm:num_preemptions_total{engine="])
def test_a_page_that_is_no_metrics_page_leaves_no_number(folder: Path, text: str) -> None:
    (folder / "metrics-1-after.txt").write_text(text)
    assert_nothing(folder, "bench left no usable result")


@pytest.mark.parametrize("is_emptied", [False, True])
@pytest.mark.parametrize(("hits", "is_invalid"), [(0.0, False), (10.0, False), (11.0, True), (1000.0, True), (math.nan, True)])
def test_prefix_cache_hits_over_1_percent_leave_no_number(
    folder: Path, hits: float, is_invalid: bool, is_emptied: bool
) -> None:
    """Of 1000 queries of the repeat; those before it were all hits, and are not the repeat's."""
    if is_emptied:
        (folder / "reset-2.txt").write_text(EMPTIED)
    count(folder, "before", prefix_cache_queries=5000.0, prefix_cache_hits=5000.0)
    count(folder, "after", prefix_cache_queries=6000.0, prefix_cache_hits=5000.0 + hits)
    if is_invalid:
        remedy = "give the load a `seed` that no other load on this server has, or add no-enable-prefix-caching to the server"
        assert_nothing(folder, f"repeat 2: {hits:.0f} of 1000 prefix-cache queries hit on random prompts: {remedy}")
    else:
        assert value_of(folder) is not None


@pytest.mark.parametrize(
    ("drawn_before", "hits", "is_invalid"), [(0.05, 59.0, False), (0.05, 60.0, True), (0.9, 109.0, False), (0.9, 110.0, True)]
)
def test_prompts_that_bench_drew_before_may_hit(folder: Path, drawn_before: float, hits: float, is_invalid: bool) -> None:
    """Bench tells how many; a tenth at most, and 1 % of the rest."""
    (folder / "client-2.json").write_text(json.dumps({"cpu_s": [[1.0, 1.0]], "max_rss_mib": 1, "drawn_before": drawn_before}))
    ask_cache(folder, None, hits)
    assert (value_of(folder) is None) == is_invalid


def ask_cache(folder: Path, *hits: float | None) -> None:
    """Of 1000 tokens in each repeat, so many hit; None if the server has no prefix cache."""
    for repeat, each in enumerate(hits, start=1):
        queries = 0.0 if each is None else 1000.0
        count(folder, "before", repeat, prefix_cache_queries=500.0, prefix_cache_hits=400.0)
        count(folder, "after", repeat, prefix_cache_queries=500.0 + queries, prefix_cache_hits=400.0 + (each or 0.0))


@pytest.mark.parametrize("answer", [None, "", "200", *(f"/reset_prefix_cache {of}" for of in ("404", "2000", "no answer"))])
@pytest.mark.parametrize(("hits", "is_invalid"), [(10.0, False), (11.0, True)])
def test_prompts_of_a_file_may_hit_each_other_in_an_emptied_cache_and_not_those_of_earlier_repeats(
    folder: Path, answer: str | None, hits: float, is_invalid: bool
) -> None:
    # The other repeat's own cache was emptied.
    (folder / "reset-1.txt").write_text(EMPTIED)
    if answer is not None:
        (folder / "reset-2.txt").write_text(f"{answer}\n")
    ask_cache(folder, None, hits)
    if is_invalid:
        hits_of_earlier = "repeat 2: 11 of 1000 prefix-cache queries hit, and earlier repeats asked the same prompts: "
        remedy = "add no-enable-prefix-caching to the server, or measure prompts that are drawn anew for each repeat"
        assert_nothing(folder, hits_of_earlier + remedy, settings=OF_FILE)
    else:
        assert value_of(folder, OF_FILE) is not None
    (folder / "reset-2.txt").write_text(EMPTIED)
    ask_cache(folder, None, 900.0)
    assert value_of(folder, OF_FILE) is not None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("missing", ["prefix_cache_queries", "prefix_cache_hits"])
def test_a_prefix_cache_counted_only_in_part_leaves_no_number(folder: Path, when: str, missing: str) -> None:
    ask_cache(folder, None, 10.0)
    count(folder, when, 2, **{missing: None})
    assert_nothing(folder, f"/metrics {when} it has no vllm:{missing}_total")
    # Nor do hits without queries.
    for page, hits in (("before", 0.0), ("after", 10.0)):
        count(folder, page, prefix_cache_queries=500.0, prefix_cache_hits=hits)
    assert_nothing(folder, "10 of 0 prefix-cache queries hit")


SHARING = with_settings(input_len=4, shared_prefix_len=12)


def hits_of(folder: Path, settings: Load = SHARING) -> Measurement:
    return measure(folder, settings)[HITS]


def test_what_hits_by_intent_is_measured(folder: Path) -> None:
    ask_cache(folder, 600.0, 640.0)
    row = hits_of(folder)
    assert [*row.repeats, row.value] == pytest.approx([0.6, 0.64, math.sqrt(0.6 * 0.64)])
    assert (row.unit, row.sample_count, row.interval is None) == ("fraction", 80, False)
    assert row.traced_to == ["load/metrics-1-after.txt", "load/metrics-2-after.txt"]
    assert value_of(folder, SHARING) is not None


@pytest.mark.parametrize(("hits", "is_invalid"), [(752.0, False), (753.0, True), (1000.0, True), (math.nan, True)])
def test_prompts_hit_no_more_than_they_share(folder: Path, hits: float, is_invalid: bool) -> None:
    """Three quarters of them are shared, and 1 % of the rest may hit by chance; more was asked before."""
    ask_cache(folder, 600.0, hits)
    row = hits_of(folder)
    if not is_invalid:
        assert row.invalid_because is None
        return
    message = f"repeat 2: {hits:.0f} of 1000 prefix-cache queries hit, and its prompts share 75.0%: give the load a `seed`"
    assert message in (row.invalid_because or "")
    assert_nothing(folder, message, settings=SHARING)


def test_without_a_prefix_cache_in_each_repeat_there_are_no_hits_to_measure(folder: Path) -> None:
    assert HITS not in measure(folder, SHARING)
    ask_cache(folder, None, None)
    assert HITS not in measure(folder, SHARING)
    assert value_of(folder, SHARING) is not None
    ask_cache(folder, None, 600.0)
    row, because = hits_of(folder), "the server counts what its prefix cache was asked in only 1 of 2 repeats"
    assert (row.value, row.invalid_because) == (None, because)


@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.0, 600.0)])
def test_a_cache_that_hits_nothing_is_measured_too(folder: Path, shares: tuple[float, float]) -> None:
    ask_cache(folder, *shares)
    row, mean = hits_of(folder), sum(shares) / 2000
    assert row.value == pytest.approx(mean)
    lower, upper = bounds_of(row)
    assert lower <= mean < upper


@pytest.mark.parametrize(("hits", "is_invalid"), [(300.0, False), (900.0, True)])
def test_a_chats_template_may_hit_and_its_message_not(folder: Path, hits: float, is_invalid: bool) -> None:
    """The server counts 719 tokens of prompts, and 640 of them are the messages'."""
    for repeat in (1, 2):
        change(folder, repeat, backend="openai-chat")
    ask_cache(folder, 300.0, hits)
    because = hits_of(folder, with_settings(input_len=10, api="chat")).invalid_because or ""
    assert ("on this server has" in because) == is_invalid


# --- What was watched meanwhile, and what the client used

WATCHED = CAPTURED_FOLDER / "watched" / "enough"
# The spans of the repeats, of 0.65 s and 0.61 s, end with these samples of the server, of which there is one each 0.1 s.
BEGAN, ENDS = 1795221538.0, {1: 8, 2: 16}
WITHIN = {1: range(2, 9), 2: range(10, 17)}
RUNNING, WAITING = (f'vllm:num_requests_{name}{{engine="0",model_name="reference"}}' for name in ("running", "waiting"))


@pytest.fixture
def watched(folder: Path) -> Path:
    """The serve stage's folder beside the load's: a real server's samples, in other steps, and a client that has time."""
    serve = shutil.copytree(WATCHED, folder.parent / "serve")
    for name in (SCRAPES, HOST_SAMPLES):
        change_lines(serve / name, range(17), lambda number, line: line | {"time": BEGAN + number / 10})
    for repeat in ENDS:
        use(folder, repeat)
    return serve


def change_lines(path: Path, numbers: range, edit: Callable[[int, Document], Document | None]) -> None:
    """Edit the lines with these numbers; None removes one."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edited = [edit(number, line) if number in numbers else line for number, line in enumerate(lines)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in edited if line is not None))


def use(folder: Path, repeat: int = 2, cores: float = 0.5, seen: float = 1.0, warm_up_s: float = 1.0) -> None:
    """What the client of a repeat used: all of a core in its warm-ups, and of the repeat it was seen in such a last part."""
    ended = BEGAN + ENDS[repeat] / 10
    began = ended - read_result(folder, repeat)["duration"]
    first = ended - seen * (ended - began)
    measured = [first + (ended - first) * step / 10 for step in range(11)]
    samples = [(began - warm_up_s, 0.0), *((time, warm_up_s + cores * (time - began)) for time in measured)]
    (folder / f"client-{repeat}.json").write_text(json.dumps({"cpu_s": samples, "max_rss_mib": 640}))


def queue(watched: Path, repeat: int, up_to: int | None = None, running: float = 2.0) -> None:
    """Of the four requests the others wait, in the samples of a repeat up to this one."""
    seen = {RUNNING: running, WAITING: 4.0 - running}
    change_lines(watched / SCRAPES, WITHIN[repeat][:up_to], lambda _, line: line | {"values": line["values"] | seen})


SLOWED = {"index": 0, "clock_reasons": ["hw_thermal_slowdown"]}


def slow_down(watched: Path, repeat: int) -> None:
    change_lines(watched / HOST_SAMPLES, WITHIN[repeat][3:4], lambda _, line: line | {"gpus": [SLOWED]})


def miss_samples(watched: Path, repeat: int) -> None:
    gpu = {"index": 0, "clock_reasons": []}
    change_lines(watched / HOST_SAMPLES, range(1), lambda _, line: line | {"gpus": [gpu]})
    change_lines(watched / HOST_SAMPLES, WITHIN[repeat], lambda *_: None)


RULES: list[tuple[Callable[[Path, int], None], str]] = [
    (queue, "on average 50% of the requests in the server waited, although 4 clients are no more than its max-num-seqs 4"),
    (slow_down, "GPU 0 was slowed down in 1 of 7 samples (hw_thermal_slowdown)"),
    (miss_samples, "the machine was looked at only 0 of 1 times"),
]


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize(("break_rule", "message"), RULES)
def test_what_was_watched_of_a_repeat_leaves_no_number(
    folder: Path, watched: Path, break_rule: Callable[[Path, int], None], message: str, repeat: int
) -> None:
    break_rule(watched, repeat)
    assert_nothing(folder, f"repeat {repeat}: {message}", watched=watched)
    (reason,) = {row.invalid_because or "" for row in by_metric(folder, watched=watched).values()}
    assert reason.count("repeat ") == 1
    assert value_of(folder) is not None


def test_a_load_that_was_watched_gives_the_same(folder: Path, watched: Path) -> None:
    assert by_metric(folder, watched=watched) == by_metric(CAPTURED)
    # A short load without a GPU need not be looked at: between two looks at the machine they could tell nothing.
    changed = shutil.copytree(watched, watched.parent / "without-looks")
    change_lines(changed / HOST_SAMPLES, WITHIN[1], lambda *_: None)
    assert value_of(folder, watched=changed) is not None
    # What was watched between repeats is of none.
    for between in (range(2), range(9, 10)):
        change_lines(watched / HOST_SAMPLES, between, lambda _, line: line | {"gpus": [SLOWED]})
    assert value_of(folder, watched=watched) is not None


@pytest.mark.parametrize("arguments", [{}, {"max-num-seqs": 3}])
def test_clients_that_have_to_wait_are_no_problem(folder: Path, watched: Path, arguments: ServerArguments) -> None:
    for repeat in ENDS:
        queue(watched, repeat)
    rows = measure(folder, server=load_server(arguments), watched=watched)
    assert [name for name, row in rows.items() if row.value is not None and name != PEAK] == MEASURED


@pytest.mark.parametrize("name", [SCRAPES, HOST_SAMPLES])
def test_what_was_not_watched_at_all_leaves_no_number(folder: Path, watched: Path, name: str) -> None:
    (watched / name).unlink()
    message = f"repeat 1: what was watched during the load cannot be read: No such file or directory: {name}"
    assert_nothing(folder, message, watched=watched)


def test_preemptions_and_a_duration_that_is_none_are_reported_once(folder: Path, watched: Path) -> None:
    counted = {f'{PREEMPTIONS}{{engine="0",model_name="reference"}}': 7.0}
    change_lines(watched / SCRAPES, range(12, 17), lambda _, line: line | {"values": line["values"] | counted})
    count(folder, "after", num_preemptions=7.0)
    message = f"repeat 2: 7 preemptions: the KV cache is too small for this load: {PREEMPTION_REMEDY}"
    assert {row.invalid_because for row in by_metric(folder, watched=watched).values()} == {message}
    count(folder, "after", num_preemptions=0.0)
    change(folder, duration=math.nan)
    message = "repeat 2: it lasted nan s, under min_duration_s 0.01"
    assert {row.invalid_because for row in by_metric(folder, watched=watched).values()} == {message}


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("is_watched", [True, False])
@pytest.mark.parametrize("cores", [0.0, 0.89, 0.91, 1.0])
def test_a_client_that_fills_its_core_leaves_no_number(
    folder: Path, watched: Path, repeat: int, is_watched: bool, cores: float
) -> None:
    use(folder, repeat, cores=cores)
    seen = watched if is_watched else None
    if cores > 0.9:
        remedy = "run the client on a faster host, or several clients"
        message = f"repeat {repeat}: the client used {cores:.2f} of a core, so that it measured itself: {remedy}"
        assert_nothing(folder, message, watched=seen)
    else:
        assert value_of(folder, watched=seen) is not None


@pytest.mark.parametrize(("seen", "is_invalid"), [(0.51, False), (0.49, True), (0.0, True), (None, True)])
def test_a_client_must_be_seen_in_half_of_the_repeat(folder: Path, watched: Path, seen: float | None, is_invalid: bool) -> None:
    if seen is None:
        # Once only.
        (folder / "client-2.json").write_text(json.dumps({"cpu_s": [[BEGAN + 1.6, 1.0]], "max_rss_mib": 640}))
    else:
        use(folder, seen=seen)
    if is_invalid:
        assert_nothing(folder, "repeat 2: the client was seen too seldom to know how busy it was", watched=watched)
    assert (value_of(folder, watched=watched) is None) == is_invalid
    assert value_of(folder) is not None


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "null",
        '{"cpu_s": [], "max_rss_mib": 640}',
        '{"cpu_s": [[1795221539.6, null]], "max_rss_mib": 640}',
        '{"cpu_s": [[1795221539.6, 1.0], [NaN, 2.0]], "max_rss_mib": 640}',
        '{"cpu_s": [[1795221539.6, 1.0], [17952',
    ],
)
def test_a_client_of_which_nothing_is_known_leaves_no_number_where_it_was_watched(
    folder: Path, watched: Path, text: str | None, repeat: int
) -> None:
    path = folder / f"client-{repeat}.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    because = f"No such file or directory: {path.name}" if text is None else "1 validation error for ClientUse"
    unknown = f"repeat {repeat}: it is not known when its client was busy, and how much: {because}"
    assert_nothing(folder, unknown, watched=watched)
    assert value_of(folder) is not None


def test_a_plan_says_whether_the_server_was_watched(folder: Path, watched: Path) -> None:
    queue(watched, 1)
    fields: Document = {"load": SETTINGS, "server": LOAD_SERVER, "gates": [], "baseline": None}

    def parse(is_watched: bool) -> Measurement:
        measured = parse_unfinished("load", CellPlan.model_construct(**fields, watched=is_watched), folder.parent)
        return next(each for each in measured if each.metric == "output_throughput_tok_s")

    assert "waited, although 4 clients" in (parse(True).invalid_because or "")
    assert parse(False).value == value_of(folder)


def test_the_command_asks_for_what_is_parsed(tmp_path: Path) -> None:
    settings = Load(input_len=1024, output_len=128, max_concurrency=16, num_prompts=128, num_warmups=32, seed=40)
    command = command_of(CLIENT, "reference", settings, str(tmp_path), 2)
    assert command[:3] == ["/engine/bin/vllm", "bench", "serve"]
    asked = options(command)
    wanted = {"--backend": "openai", "--base-url": "http://127.0.0.1:8123", "--endpoint": "/v1/completions"}
    wanted |= {"--model": "reference", "--tokenizer": "org/model", "--dataset-name": "random", "--num-warmups": "0"}
    wanted |= {"--random-input-len": "1024", "--random-output-len": "128", "--num-prompts": "128", "--max-concurrency": "16"}
    wanted |= {"--percentile-metrics": "ttft,tpot,itl,e2el", "--metric-percentiles": "50,90,99"}
    assert asked | wanted == asked
    assert "--random-prefix-len" not in asked
    assert {"--ignore-eos", "--save-result", "--save-detailed"} <= set(command)
    assert Path(asked["--result-dir"], asked["--result-filename"]) == tmp_path / "bench-2.json"


def test_a_warm_up_asks_as_the_load_does_with_other_prompts(tmp_path: Path) -> None:
    """Bench's own warm-up, and older versions' check for readiness, would ask the first measured prompt."""
    settings = SHARING.model_copy(update={"num_warmups": 6, "api": "chat", "seed": 40})
    measured = options(command_of(CLIENT, "reference", settings, str(tmp_path), 2))
    asked = options(warm_up_command(CLIENT, "reference", settings, 2))
    for each in (measured, asked):
        assert (each["--num-warmups"], each["--ready-check-timeout-sec"]) == ("0", "0")
    assert (asked["--num-prompts"], asked["--max-concurrency"], asked["--random-prefix-len"]) == ("6", "4", "12")
    seeds = {options(command_of(CLIENT, "reference", settings, "", repeat))["--seed"] for repeat in range(1, 11)}
    assert asked["--seed"] not in seeds
    assert int(asked["--seed"]) < 2**32
    of_result = {"--save-result", "--save-detailed", "--result-dir", "--result-filename"}
    of_result |= {"--percentile-metrics", "--metric-percentiles", "--goodput"}
    assert measured.keys() - of_result == asked.keys()
    assert {name for name in asked if measured[name] != asked[name]} == {"--num-prompts", "--seed"}


def test_a_warm_up_for_a_files_prompts_has_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, made = tmp_path / "prompts.jsonl", dict[str, str]()
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in ("One\u2028two", "Three")))
    monkeypatch.setattr(benches, "give_file", lambda _, file: f"/given/{file.name}")
    monkeypatch.setattr(benches, "give_text", lambda _, name, text: made.setdefault(name, text) and f"/given/{name}")
    driven_there = driven_by(SERVER, BENCH, OF_FILE, prompts)
    assert (driven_there.prompts, driven_there.warm_ups) == ("/given/prompts.jsonl", "/given/warm-up-prompts.jsonl")
    asked = [json.loads(line)["prompt"] for line in made["warm-up-prompts.jsonl"].splitlines()]
    assert [(one[0], one[-3:]) for one in asked] == [("W", "two"), ("W", "ree")], "none of the prompts begins so"


def test_every_repeat_has_its_own_prompts_and_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "shhhhhhhh")
    commands = [command_of(CLIENT, "reference", SETTINGS, str(tmp_path), repeat) for repeat in (1, 2, 3)]
    asked = [options(command) for command in commands]
    assert [each["--seed"] for each in asked] == ["0", "1", "2"]
    assert [each["--result-filename"] for each in asked] == ["bench-1.json", "bench-2.json", "bench-3.json"]
    assert "shhhhhhhh" not in " ".join(commands[0]), "no secret is in the command"
    # The profile's name is in all seeds.
    settings = with_settings(seeded_by="latency", seed=3)
    of_profile = command_of(CLIENT, "reference", settings, "", 2), warm_up_command(CLIENT, "reference", settings, 2)
    assert [options(each)["--seed"] for each in of_profile] == [str(1035020360), str(2**31 + 1035020360)]


def test_goodput_and_trust_in_a_tokenizers_code_are_asked_for_where_they_are_wanted(tmp_path: Path) -> None:
    settings = with_settings(slo=Slo(ttft_ms=200.0, tpot_ms=30.5, e2el_ms=1234567.0))
    trusting = CLIENT.model_copy(update={"trust_remote_code": True})
    command = command_of(trusting, "reference", settings, str(tmp_path), 1)
    at = command.index("--goodput")
    assert command[at + 1 : at + 5] == ["ttft:200.0", "tpot:30.5", "e2el:1234567.0", "--save-result"]
    assert "--trust-remote-code" in command
    plain = command_of(CLIENT, "reference", with_settings(slo=None), str(tmp_path), 1)
    assert not {"--goodput", "--trust-remote-code"} & set(plain)


# --- TensorRT-LLM: pages made here, in the form of its collector (tensorrt_llm/metrics/collector.py of NVIDIA/TensorRT-LLM)

NO_REUSE: ServerArguments = {"kv_cache_config": {"enable_block_reuse": False}}
Counters = Mapping[str, tuple[float, float] | None]
COUNTED: Counters = {"request_success": (3, 44), "kv_cache_missed_blocks": (10, 110)}


def on_trtllm(
    folder: Path,
    arguments: ServerArguments,
    counters: Counters = COUNTED,
    settings: Load = SETTINGS,
    watched: Path | None = None,
) -> str:
    """Why the load is invalid; empty if it is valid."""
    pairs = {name: pair for name, pair in {**COUNTED, **counters}.items() if pair is not None}
    for repeat in (1, 2):
        for place, when in enumerate(("before", "after")):
            trtllm_page(folder, repeat, when, {name: pair[place] for name, pair in pairs.items()})
    rows = measure(folder, settings, load_server(arguments, "tensorrt-llm"), watched=watched)
    (reason,) = {rows[name].invalid_because or "" for name in MEASURED}
    return reason


@pytest.mark.parametrize(
    ("arguments", "counters", "message"),
    [
        # What it counts or rules out is trusted.
        ({}, {}, None),
        ({}, {"kv_cache_reused_blocks": (50, 51)}, None),
        (NO_REUSE, {"kv_cache_missed_blocks": None}, None),
        ({"scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}}, {}, None),
        ({"scheduler_config": {"enable_prefix_aware_scheduling": False}}, {}, None),
        ({}, {"request_success": None}, "has no trtllm_request_success_total"),
        (NO_REUSE, {"request_success": None}, "has no trtllm_request_success_total"),
        ({}, {"request_success": (3, 42)}, "the server counts 39 requests of 40"),
        ({}, {"request_success": (3, math.nan)}, "the server counts nan requests of 40"),
        ({}, {"kv_cache_reused_blocks": (0, 2)}, "2 of 102 blocks of the KV cache hit on random prompts"),
        ({}, {"kv_cache_missed_blocks": None}, "does not count trtllm_kv_cache_missed_blocks_total"),
        ({}, {"kv_cache_missed_blocks": (10, 10)}, "does not count trtllm_kv_cache_missed_blocks_total"),
        ({"kv_cache_config": {"dtype": "fp8"}}, {"kv_cache_missed_blocks": None}, "set enable_block_reuse to false"),
        (
            {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}},
            {},
            "under MAX_UTILIZATION the server may pause",
        ),
    ],
)
def test_what_tensorrt_llm_neither_counts_nor_rules_out_leaves_no_number(
    folder: Path, arguments: ServerArguments, counters: Counters, message: str | None
) -> None:
    because = on_trtllm(folder, arguments, counters)
    assert because == "" if message is None else message in because


def test_of_another_engine_only_the_client_is_looked_at(folder: Path, watched: Path) -> None:
    (watched / SCRAPES).write_text("")
    assert on_trtllm(folder, NO_REUSE, watched=watched) == ""
    use(folder, cores=0.95)
    assert "repeat 2: the client used 0.95 of a core" in on_trtllm(folder, NO_REUSE, watched=watched)
    (folder / "client-2.json").unlink()
    assert "repeat 2: it is not known when its client was busy" in on_trtllm(folder, NO_REUSE, watched=watched)


def test_reused_blocks_have_their_remedy(folder: Path) -> None:
    message, remedy = "2 of 102 blocks of the KV cache hit", "set enable_block_reuse to false in kv_cache_config"
    reused = {"kv_cache_reused_blocks": (0, 2)}
    assert on_trtllm(folder, {}, reused).endswith(f"on this server has, or {remedy}")
    assert f"{message} on random prompts: " in on_trtllm(folder, {}, reused)
    assert on_trtllm(folder, {}, reused, OF_FILE).endswith(f"{message}, and earlier repeats asked the same prompts: {remedy}")
    assert on_trtllm(folder, {}, reused, SHARING) == ""


def test_vllms_counters_are_none_of_tensorrt_llms(folder: Path) -> None:
    (reason,) = {row.invalid_because or "" for row in measure(folder, server=load_server(NO_REUSE, "tensorrt-llm")).values()}
    assert "repeat 1: the server's /metrics before it has no trtllm_request_success_total" in reason
    on_trtllm(folder, {})
    assert_nothing(folder, "has no vllm:num_preemptions_total")


def test_a_third_kind_of_engine_is_judged_by_its_own_rule(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(counted: Counted, under: Conditions) -> list[str]:
        gained = counted.gained("vllm:prompt_tokens_total")
        return [f"{gained:.0f} tokens, {under.num_prompts} prompts, shared: {under.shared}, {under.arguments}"]

    name: Any = "third"
    monkeypatch.setitem(KINDS, name, replace(KINDS["tensorrt-llm"], load_problems=problems))
    third = load_server({"slots": 8}).model_copy(update={"kind": name})
    (reason,) = {row.invalid_because for row in measure(folder, server=third).values()}
    assert re.search(r"repeat 2: [1-9]\d* tokens, 40 prompts, shared: 0.0, \{'slots': 8\}", reason or "")


@pytest.mark.parametrize("path", ["/metrics", "/prometheus/metrics"])
def test_counters_are_read_where_the_server_has_them(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    asked: list[str] = []

    def get(_method: str, url: str, *_: object) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, text="# page", request=httpx.Request("GET", url))

    monkeypatch.setattr("vllm_qualify.answers.ask_within", get)
    assert SERVER.model_copy(update={"metrics_path": path}).metrics_page() == "# page"
    assert asked == [f"{SERVER.url}{path}"]


# --- Measuring: the order of the repeats, with bench's captured files in place of bench

Runs = list[tuple[str, str]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, settled: list[str]) -> Runs:
    """Each run of bench: its server's address and its file below the stage's folder."""
    runs: Runs = []
    warmed_up: list[tuple[str, int]] = []

    def run(
        bench: Bench, command: list[str], result: str | None, log: Path, _: float, check: object, progress: Progress
    ) -> None:
        progress(20, 40)
        url = options(command)["--base-url"]
        if result is None:
            repeat = int(log.stem.rpartition("-")[2])
            warmed_up.append((url, repeat))
            assert command == warm_up_command(bench.client, "reference", SETTINGS, repeat)
        # The one before the first repeat is of both servers of a load in turns, at the same time: `test_warming` looks at it.
        elif result != "bench-0.json":
            assert warmed_up[-1] == (url, int(result[6]))
            shutil.copy(CAPTURED / "bench-1.json", log.parent / result)
            runs.append((url, f"{log.parent.name}/{result}"))
            assert command == command_of(bench.client, "reference", SETTINGS, benches.results_folder(bench), int(result[6]))
            assert callable(check)

    def settle(bench: Bench, *_: object) -> None:
        assert not runs, "a client that makes prompts would disturb what is measured"
        settled.append(bench.client.url)

    monkeypatch.setattr(benches, "run_command", run)
    monkeypatch.setattr(benches, "stop_preparing", settle)
    monkeypatch.setattr(type(SERVER), "post", lambda *_: "404")
    monkeypatch.setattr(type(SERVER), "metrics_page", lambda server: f"# page of {server.url}\n")
    return runs


GATE = "ttft_p50_ms"


@pytest.fixture
def settled() -> list[str]:
    """The servers whose clients were told to make no more prompts."""
    return []


@dataclass
class Follower:
    """Is undecided until a look. Its clock goes on by `repeat_s` with each run of bench, the first of which takes `first_s`."""

    runs: Runs
    decided_at: int = 99
    repeat_s: float = 10.0
    first_s: float = 10.0
    asked: list[int] = field(default_factory=list)
    made: list[tuple[int, float, list[str] | None]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    @property
    def following(self) -> Following:
        return Following(self._undecided, self._record, self.ended.append, self._clock)

    def _undecided(self) -> list[str]:
        self.asked.append(len(self.runs))
        return [GATE] if len(self.asked) < self.decided_at else []

    def _record(self, made: Made) -> None:
        self.made.append((made.repeats, made.longest_s, None if made.undecided is None else list(made.undecided)))

    def _clock(self) -> float:
        return 1000.0 + (self.first_s + (len(self.runs) - 1) * self.repeat_s if self.runs else 0.0)


CANDIDATE, BASELINE = "http://127.0.0.1:8123", "http://127.0.0.1:8124"


@pytest.mark.parametrize(("looks", "asked_after"), [(1, [3]), (2, [3, 4]), (3, [3, 4, 5]), (9, [3, 4, 5])])
def test_repeats_go_on_until_nothing_is_undecided(tmp_path: Path, runs: Runs, looks: int, asked_after: list[int]) -> None:
    shown: list[tuple[int, int]] = []
    settings, follower = with_settings(repeats=3, most_repeats=5), Follower(runs, looks, first_s=30.0)
    commands = measure_load(driven(), settings, tmp_path, lambda *each: shown.append(each), follower.following)
    assert follower.asked == asked_after
    looked = [(after, 30.0, [GATE] if look < looks else []) for look, after in enumerate(asked_after, start=1)]
    assert follower.made == [(1, 30.0, None), (2, 30.0, None), *looked]
    assert not follower.ended
    assert not (tmp_path / ENDED).exists()
    assert runs == [(CANDIDATE, f"{tmp_path.name}/bench-{number}.json") for number in range(1, asked_after[-1] + 1)]
    assert len(commands) == len(runs)
    assert shown == [(20, 120), (60, 120), (100, 120), (140, 160), (180, 200)][: len(runs)]
    assert (tmp_path / "metrics-1-before.txt").read_text() == f"# page of {CANDIDATE}\n"
    assert (tmp_path / "processes-1.json").is_file()


def test_prompts_are_made_ahead_for_the_very_commands_that_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the repeats that are run in any case come first, also before another cell's further ones."""
    planned: list[list[str]] = []
    monkeypatch.setattr(benches, "prepare_commands", lambda _, commands: planned.extend(commands))
    monkeypatch.setattr(benches, "give_file", lambda _, file: f"/given/{file.name}")
    monkeypatch.setattr(benches, "give_text", lambda _, name, _text: f"/given/{name}")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "One"}\n')
    few, many = (with_settings(repeats=2, most_repeats=most, seed=most) for most in (2, 4))
    prepare_prompts(driven().bench, "reference", [(many, tmp_path / "many", None), (few, tmp_path / "few", file)])
    client = driven().bench.client
    expected = []
    for settings, repeat in ((many, 1), (many, 2), (few, 1), (few, 2), (many, 3), (many, 4)):
        prompts, warm_ups = ("/given/prompts.jsonl", "/given/warm-up-prompts.jsonl") if settings is few else (None, None)
        expected.append(warm_up_command(client, "reference", settings, repeat, warm_ups))
        expected.append(command_of(client, "reference", settings, BENCH.letter_box, repeat, prompts))
    assert planned == expected


def test_the_baseline_is_measured_in_turns(tmp_path: Path, runs: Runs, settled: list[str]) -> None:
    """So that a drift of the machine favours neither: the one that begins is the other each time."""
    shown: list[tuple[int, int]] = []
    settings, follower = with_settings(most_repeats=3), Follower(runs)
    commands = measure_load(
        driven(), settings, tmp_path, lambda *each: shown.append(each), follower.following, driven(BASELINE)
    )
    assert settled == [CANDIDATE, BASELINE], "no client makes prompts while another measures"
    assert [url for url, _ in runs] == [CANDIDATE, BASELINE, BASELINE, CANDIDATE, CANDIDATE, BASELINE]
    for server, place in ((BASELINE, "beside"), (CANDIDATE, tmp_path.name)):
        assert [file for url, file in runs if url == server] == [f"{place}/bench-{number}.json" for number in (1, 2, 3)]
    assert follower.asked == [4, 6]
    assert [longest_s for _, longest_s, _ in follower.made] == [20.0, 20.0, 20.0], "of both servers together"
    assert shown == [(20, 160), (60, 160), (100, 160), (140, 160), (180, 240), (220, 240)]
    assert [options(command)["--seed"] for command in commands] == ["0", "0", "1", "1", "2", "2"]
    assert (tmp_path / "beside" / "metrics-3-after.txt").read_text() == f"# page of {BASELINE}\n"


@pytest.mark.parametrize(
    ("budget_s", "repeat_s", "made"),
    [
        pytest.param(1.0, 10.0, 1, id="the first repeat is always run"),
        pytest.param(19.9, 10.0, 1, id="the second would not end in time"),
        pytest.param(20.0, 10.0, 2, id="the second just ends in time"),
        pytest.param(45.0, 10.0, 4, id="ended between looks"),
        pytest.param(50.0, 10.0, 5, id="enough for all"),
        pytest.param(45.0, 5.0, 5, id="by the longest so far: the first"),
    ],
)
def test_no_repeat_begins_that_would_not_end_within_the_budget(
    tmp_path: Path, runs: Runs, budget_s: float, repeat_s: float, made: int
) -> None:
    settings, follower = with_settings(repeats=3, most_repeats=5, time_budget_s=budget_s), Follower(runs, repeat_s=repeat_s)
    commands = measure_load(driven(), settings, tmp_path, lambda *_: None, follower.following)
    assert len(commands) == len(runs) == made
    if made == 5:
        assert not (tmp_path / ENDED).exists()
        return
    ended = Ended.model_validate_json((tmp_path / ENDED).read_bytes())
    assert ended == Ended(time_budget_s=budget_s, repeats=made, spent_s=10 + (made - 1) * repeat_s, longest_s=10.0)
    assert follower.ended == [ended.because]
    assert f"time_budget_s {budget_s:g}" in ended.because


def write_end(folder: Path, **changes: object) -> Ended:
    fields: dict[str, object] = {"time_budget_s": 100.0, "repeats": 2, "spent_s": 80.0, "longest_s": 45.0}
    ended = Ended.model_validate(fields | changes)
    (folder / ENDED).write_text(ended.model_dump_json())
    return ended


EARLY = with_settings(repeats=3, most_repeats=5, time_budget_s=100.0)


def test_a_load_that_ended_before_its_first_look_shows_values_and_decides_nothing(folder: Path) -> None:
    """The same end counts for the baseline in turns."""
    shutil.copytree(folder, folder / BESIDE)
    ended, whole = write_end(folder), by_metric(CAPTURED)
    for place in (folder, folder / BESIDE):
        for name, row in by_metric(place, EARLY).items():
            assert (row.value, row.repeats, row.interval) == (whole[name].value, whole[name].repeats, None)
            assert row.ended_because == (None if row.invalid_because else ended.because)


def test_a_load_that_ended_after_a_look_has_the_interval_of_that_look(folder: Path) -> None:
    settings = EARLY.model_copy(update={"repeats": 2})
    before = by_metric(folder, settings)["output_throughput_tok_s"]
    ended = write_end(folder)
    after = by_metric(folder, settings)["output_throughput_tok_s"]
    assert (before.ended_because, after.ended_because) == (None, ended.because)
    assert bounds_of(after) == bounds_of(before)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        pytest.param({"repeats": 1}, {}, id="of fewer repeats"),
        pytest.param({"repeats": 3}, {}, id="of more repeats"),
        pytest.param({"time_budget_s": 90.0}, {}, id="of another budget"),
        pytest.param({}, {"time_budget_s": None}, id="without a budget"),
        pytest.param({"spent_s": 50.0}, {}, id="another repeat had time"),
        pytest.param({}, {"repeats": 2, "most_repeats": 2}, id="nothing more was planned"),
    ],
)
def test_an_end_that_is_not_of_this_load_makes_it_invalid(
    folder: Path, changes: dict[str, object], settings: dict[str, object]
) -> None:
    write_end(folder, **changes)
    assert_nothing(folder, "ended.json is not of this load of 2 repeats", settings=EARLY.model_copy(update=settings))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"repeats": 2}', '{"time_budget_s": NaN, "repeats": 2, "spent_s": 1}'])
def test_an_end_that_cannot_be_read_makes_the_load_invalid(folder: Path, text: str) -> None:
    (folder / ENDED).write_text(text)
    assert_nothing(folder, "ended.json is not the end of a load", settings=EARLY)
    assert_nothing(folder, "ended.json is not the end of a load")


# --- Whole runs

WHOLE_RUN = with_settings(window="whole")


@pytest.mark.parametrize("metric", [name for name in REPEATS if name != "goodput_req_s"])
def test_over_a_whole_run_the_figures_are_benchs_own(metric: str) -> None:
    row = by_metric(CAPTURED, WHOLE_RUN)[metric]
    if row.invalid_because:
        assert "40 requests in a repeat's whole run, and" in row.invalid_because
        return
    key = {"req_s": "request", "tok_s": "output" if "output" in metric else "total_token"}.get("_".join(metric.split("_")[-2:]))
    latency, statistic, unit = metric.split("_")[:3]
    name = f"{key}_throughput" if key else f"{statistic}_{latency}_{unit}"
    wanted = [read_result(CAPTURED, repeat)[name] for repeat in (1, 2)]
    assert row.repeats == pytest.approx(wanted, rel=0.01)
    assert row.sample_count == 80
    assert row.source == "load/bench-*.json, over whole runs with their ramp-up and tail"


def test_a_whole_run_may_have_too_few_requests_for_a_steady_state() -> None:
    """With 16 clients its 40 requests are two waves and a half."""
    whole = Load.model_validate(WHOLE_RUN.model_dump() | {"max_concurrency": 16, "num_prompts": 40})
    assert steady_of(read_result(CAPTURED, 1), whole).requests == 40
    with pytest.raises(UnsteadyError, match="use more num_prompts"):
        steady_of(read_result(CAPTURED, 1), whole.model_copy(update={"window": "steady"}))


def test_the_first_wave_of_a_whole_run_may_wait_in_prefill(folder: Path, watched: Path) -> None:
    """Its last first token comes after nearly 0.5 s: until then they wait for each other."""
    result = read_result(folder)
    late = [2.0 * (number == 3) for number in range(40)]
    times = {name: [one + more for one, more in zip(result[name], late, strict=True)] for name in ("ttfts", "latencies")}
    starts = [start + sum(late[:number]) for number, start in enumerate(result["start_times"])]
    change(folder, 2, **times, start_times=starts, queue_times=[0.0] * 40, duration=result["duration"] + 2)
    # As long as it was, as what was watched has it.
    scale(folder, 2, result["duration"] / (result["duration"] + 2))
    queue(watched, 2, up_to=5, running=1.0)
    repeat = results.read_repeat(folder, "load", 2)
    steady, whole = (problems_of(repeat, settings, LOAD_SERVER, watched) for settings in (SETTINGS, WHOLE_RUN))
    assert ["of the requests in the server waited" in problem for problem in steady] == [True]
    assert whole == []


def test_after_its_ramp_up_a_whole_run_may_have_no_queue(folder: Path, watched: Path) -> None:
    queue(watched, 2)
    assert_nothing(folder, "repeat 2: on average 50% of the requests in the server waited", settings=WHOLE_RUN, watched=watched)


def test_a_later_look_does_not_examine_a_repeat_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder, 2, date="20000101-000000")
    before = by_metric(folder)
    examined: list[Document] = []
    monkeypatch.setattr(results, "steady_of", lambda repeat, *_: examined.append(repeat))
    monkeypatch.setattr(results.Repeat, "_without_long_lists", examined.append)
    assert by_metric(folder) == before
    assert examined == []


def test_a_repeat_that_was_changed_is_read_anew_whatever_its_size_and_time(folder: Path) -> None:
    path, before = folder / "bench-2.json", value_of(folder)
    text, about = path.read_text(), path.stat()
    changed = text.replace('"completed": 40', '"completed": 39')
    assert len(changed) == len(text)
    assert changed != text
    path.write_text(changed)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert_nothing(folder, "39 of 40 requests completed")
    path.write_text(text)
    assert value_of(folder) == before


def test_what_is_remembered_of_a_repeat_is_that_of_its_settings(folder: Path) -> None:
    before = by_metric(folder)
    assert_nothing(folder, "request_goodput", settings=with_settings(slo=Slo(ttft_ms=0.001)))
    assert value_of(folder, WHOLE_RUN) != before["output_throughput_tok_s"].value
    assert by_metric(folder) == before


def test_a_key_is_found_where_it_is_one_and_not_in_a_reply(folder: Path) -> None:
    quoting = {"errors": ["output_throughput"], "generated_texts": ['{"output_throughput": 1}']}
    text = json.dumps(quoting | read_result(folder), indent=1)
    (folder / "bench-2.json").write_text(text.replace('"output_throughput":', '"output_throughput"  :'))
    lines = (folder / "bench-2.json").read_text().splitlines()
    (place,) = [number for number, line in enumerate(lines, 1) if line.startswith(' "output_throughput"  :')]
    repeat = results.read_repeat(folder, "load", 2)
    assert repeat.line_of("output_throughput") == f"load/bench-2.json:{place}"
    assert repeat.line_of("no_such_key") == "load/bench-2.json"
