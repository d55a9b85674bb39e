"""Load: what bench's captured files say, and that bad ones give no number."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.evidence.commands import CLIENT, SERVER, options
from vllm_qualify.evidence.load import _metrics as page_of
from vllm_qualify.evidence.load import command_of, parse
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.model import Load, ServerArguments

CAPTURED = Path(__file__).parent / "captured" / "load"
ABOUT = {"input_len": 8, "output_len": 4, "max_concurrency": 1, "num_prompts": 5, "num_warmups": 1}
SETTINGS = Load.model_validate({**ABOUT, "repeats": 2, "min_duration_s": 0.01})

# As bench-1.json and bench-2.json have them.
REPEATS = {
    "request_throughput_req_s": [55.02222815484378, 64.99803283444254],
    "output_throughput_tok_s": [220.08891261937512, 259.99213133777016],
    "total_throughput_tok_s": [671.2711834890941, 779.9763940133106],
    "ttft_mean_ms": [8.640643600119802, 7.103762400038249],
    "ttft_median_ms": [8.782568000242463, 6.852603999504936],
    "ttft_p90_ms": [9.996781200061378, 7.590204799998901],
    "ttft_p99_ms": [10.590960120025557, 7.700680879570427],
    "tpot_mean_ms": [2.9084331332948445, 2.6908698667587787],
    "tpot_median_ms": [2.805771333138788, 2.619170333370372],
    "tpot_p90_ms": [3.1732847999592195, 2.8369634668706567],
    "tpot_p99_ms": [3.3807712800626177, 2.9170339469055766],
    "itl_mean_ms": [2.9084331332948445, 2.690869866758779],
    "itl_median_ms": [2.8360340002109297, 2.6154649995078216],
    "itl_p90_ms": [3.180742599761288, 2.991706800457905],
    "itl_p99_ms": [3.870737720117176, 3.288910120609216],
    "e2el_mean_ms": [17.365943000004336, 15.176372000314586],
    "e2el_median_ms": [17.194095000377274, 15.178833000391023],
    "e2el_p90_ms": [19.490592399961315, 15.746254800069435],
    "e2el_p99_ms": [20.730669640215638, 15.815770079971117],
}
# Student's t of one-sided 95 % with 1 degree of freedom.
T_OF_2_REPEATS = 6.313752
PREEMPTIONS = "vllm:num_preemptions_total"

Document = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED, tmp_path / "load")


def change(folder: Path, repeat: int = 2, **fields: Any) -> None:
    """Set keys of a repeat's result; `...` removes one."""
    path = folder / f"bench-{repeat}.json"
    result = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in result.items() if value is not ...}))


def count(folder: Path, when: str, repeat: int = 2, **counters: Any) -> None:
    """Set counters of a /metrics page, by the names above without `vllm:` and `_total`; None removes one."""
    path = folder / f"metrics-{repeat}-{when}.txt"
    for short, number in counters.items():
        name = f"vllm:{short}_total"
        kept = [line for line in path.read_text().splitlines() if name not in line]
        new = [] if number is None else [f"# TYPE {name} counter", f'{name}{{engine="0",model_name="reference"}} {number}']
        path.write_text("\n".join([*kept, *new, ""]))


def by_metric(folder: Path, settings: Load = SETTINGS) -> dict[str, Measurement]:
    found = {measurement.metric: measurement for measurement in parse(folder, settings)}
    assert list(found) == list(REPEATS)
    return found


def assert_nothing(folder: Path, *told: str, settings: Load = SETTINGS) -> None:
    """A repeat that cannot be trusted leaves no number at all."""
    for measurement in by_metric(folder, settings).values():
        assert measurement.value is None
        assert measurement.interval is None
        assert measurement.sample_count == 0
        for words in told:
            assert words in (measurement.invalid_because or "")


def test_the_captured_files_give_every_metric_over_both_repeats() -> None:
    for metric, found in by_metric(CAPTURED).items():
        first, second = REPEATS[metric]
        assert found.repeats == [first, second]
        assert found.value == pytest.approx(math.sqrt(first * second))
        assert found.sample_count == 10
        assert found.source == "load/bench-*.json"
        assert found.unit == {"req_s": "req/s", "tok_s": "tok/s"}.get("_".join(metric.split("_")[-2:]), "ms")
        half = T_OF_2_REPEATS * abs(math.log(first / second)) / 2
        assert found.interval is not None
        assert found.interval.lower == pytest.approx(math.sqrt(first * second) * math.exp(-half), rel=1e-5)
        assert found.interval.upper == pytest.approx(math.sqrt(first * second) * math.exp(half), rel=1e-5)


def test_the_values_are_those_read_by_hand() -> None:
    found = by_metric(CAPTURED)
    values = {metric: found[metric].value for metric in ("output_throughput_tok_s", "ttft_median_ms", "e2el_p99_ms")}
    assert values == pytest.approx(
        {"output_throughput_tok_s": 239.20991926699787, "ttft_median_ms": 7.757799984814354, "e2el_p99_ms": 18.10722244391691}
    )
    interval = found["output_throughput_tok_s"].interval
    assert interval is not None
    assert [interval.lower, interval.upper] == pytest.approx([141.36478, 404.77824], rel=1e-5)


def test_one_repeat_shows_no_noise() -> None:
    found = by_metric(CAPTURED, SETTINGS.model_copy(update={"repeats": 1}))["output_throughput_tok_s"]
    assert found.value == pytest.approx(220.08891261937512)
    assert found.interval is None
    assert found.sample_count == 5


@pytest.mark.parametrize("repeat", [1, 2])
def test_a_repeat_with_every_request_failed_is_no_fast_one(folder: Path, repeat: int) -> None:
    """As bench leaves it, with exit code 0: zeros for what it could not measure."""
    zeros = {
        f"{name}_{latency}_ms": 0.0 for latency in ("ttft", "tpot", "itl", "e2el") for name in ("mean", "median", "p90", "p99")
    }
    rates = {"request_throughput": 0.0, "output_throughput": 0.0, "total_token_throughput": 0.0}
    change(folder, repeat, completed=0, failed=5, output_lens=[0] * 5, **zeros, **rates)
    assert_nothing(folder, f"repeat {repeat}: 0 of 5 requests completed, 5 failed", "5 replies do not have 4 tokens")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"completed": 4, "failed": 1, "output_lens": [4, 4, 0, 4, 4]}, "repeat 2: 4 of 5 requests completed, 1 failed"),
        ({"completed": 4}, "4 of 5 requests completed, 0 failed"),
        ({"failed": 1}, "5 of 5 requests completed, 1 failed"),
        ({"completed": 6}, "6 of 5 requests completed"),
        ({"completed": None}, "None of 5 requests completed"),
        ({"output_lens": [4, 4, 3, 4, 4]}, "1 replies do not have 4 tokens"),
        ({"output_lens": [4, 4, 5, 4, 0]}, "2 replies do not have 4 tokens"),
        ({"output_lens": [4, 4, 4, 4]}, "4 lengths of 5 replies"),
        ({"output_lens": []}, "0 lengths of 5 replies"),
        ({"duration": 0.009}, "it lasted 0.0 s, under min_duration_s 0.01"),
        ({"duration": math.nan}, "it lasted nan s"),
        ({"duration": math.inf}, "it lasted inf s"),
        ({"duration": -1.0}, "it lasted -1.0 s"),
    ],
    ids=lambda found: "" if isinstance(found, str) else str(found),
)
def test_a_repeat_with_bad_requests_leaves_no_number(folder: Path, fields: Document, told: str) -> None:
    change(folder, **fields)
    assert_nothing(folder, told)


@pytest.mark.parametrize("repeat", [1, 2])
def test_too_short_a_run_leaves_no_number(repeat: int, folder: Path) -> None:
    change(folder, 3 - repeat, duration=70.5)
    told = f"repeat {repeat}: it lasted 0.1 s, under min_duration_s 60"
    assert_nothing(folder, told, settings=SETTINGS.model_copy(update={"min_duration_s": 60.0}))


def test_another_load_than_the_asked_one_leaves_no_number() -> None:
    assert_nothing(CAPTURED, "5 of 20 requests completed", settings=SETTINGS.model_copy(update={"num_prompts": 20}))
    assert_nothing(CAPTURED, "5 replies do not have 8 tokens", settings=SETTINGS.model_copy(update={"output_len": 8}))


def test_every_problem_of_every_repeat_is_told(folder: Path) -> None:
    change(folder, 1, completed=4, failed=1)
    change(folder, 2, output_lens=[4, 4, 4, 4, 1])
    count(folder, "after", 2, num_preemptions=3.0)
    assert_nothing(
        folder,
        "repeat 1: 4 of 5 requests completed, 1 failed; repeat 2: 1 replies do not have 4 tokens; repeat 2: 3 preemptions",
    )


@pytest.mark.parametrize("name", sorted(path.name for path in CAPTURED.iterdir()))
def test_a_missing_file_leaves_no_number(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert_nothing(folder, f"No such file or directory: {name}")


def test_a_repeat_that_was_not_run_leaves_no_number() -> None:
    assert_nothing(CAPTURED, "No such file or directory: bench-3.json", settings=SETTINGS.model_copy(update={"repeats": 3}))


@pytest.mark.parametrize("name", ["bench-1.json", "bench-2.json"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_cut_result_leaves_no_number(folder: Path, name: str, share: float) -> None:
    text = (folder / name).read_text()
    (folder / name).write_text(text[: int(len(text) * share)])
    assert_nothing(folder, "JSONDecodeError")


@pytest.mark.parametrize("text", ["null", "[]", "{}", "7"])
def test_a_result_of_another_form_leaves_no_number(folder: Path, text: str) -> None:
    (folder / "bench-1.json").write_text(text)
    assert_nothing(folder, "bench left no usable result")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"completed": ...}, "KeyError('completed')"),
        ({"failed": ...}, "KeyError('failed')"),
        ({"output_lens": ...}, "KeyError('output_lens')"),
        ({"output_lens": 0}, "TypeError"),
        ({"duration": ...}, "KeyError('duration')"),
        ({"duration": None}, "TypeError"),
        ({"p99_ttft_ms": ...}, "KeyError('p99_ttft_ms')"),
        ({"output_throughput": ...}, "KeyError('output_throughput')"),
        ({"p99_ttft_ms": None}, "NoneType"),
        ({"p99_ttft_ms": "fast"}, "ValueError"),
        ({"p99_ttft_ms": 10**400}, "OverflowError"),
        ({"p99_ttft_ms": 1e308}, "OverflowError"),
    ],
    ids=str,
)
def test_a_result_without_what_is_read_leaves_no_number(folder: Path, fields: Document, told: str) -> None:
    change(folder, **fields)
    assert_nothing(folder, told)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
@pytest.mark.parametrize(
    ("key", "metric"), [("p99_ttft_ms", "ttft_p99_ms"), ("median_tpot_ms", "tpot_median_ms"), ("output_throughput", None)]
)
@pytest.mark.parametrize("repeat", [1, 2])
def test_what_is_no_time_or_rate_is_invalid(folder: Path, key: str, metric: str | None, value: float, repeat: int) -> None:
    metric = metric or "output_throughput_tok_s"
    change(folder, repeat, **{key: value})
    found = by_metric(folder)
    assert found[metric].value is None
    assert f"{value}" in (found[metric].invalid_because or "")
    assert "no measured time or rate" in (found[metric].invalid_because or "")
    assert [name for name in found if found[name].value is None] == [metric]


@pytest.mark.parametrize("repeat", [1, 2])
def test_preemptions_leave_no_number(folder: Path, repeat: int) -> None:
    count(folder, "after", repeat, num_preemptions=7.0)
    assert_nothing(folder, f"repeat {repeat}: 7 preemptions: the KV cache is too small")


def test_earlier_preemptions_are_not_the_repeats(folder: Path) -> None:
    count(folder, "before", num_preemptions=7.0)
    count(folder, "after", num_preemptions=7.0)
    assert by_metric(folder)["output_throughput_tok_s"].value is not None


def test_preemptions_of_every_engine_count(folder: Path) -> None:
    path = folder / "metrics-2-after.txt"
    line = f'{PREEMPTIONS}{{engine="0",model_name="reference"}} 0.0\n'
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, line.replace('engine="0"', 'engine="1"').replace("0.0", "2.0") + line))
    assert_nothing(folder, "2 preemptions")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_page_without_the_count_of_preemptions_leaves_no_number(folder: Path, when: str) -> None:
    count(folder, when, num_preemptions=None)
    assert_nothing(folder, f"repeat 2: the server's /metrics {when} it has no {PREEMPTIONS}")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("text", ["", "# no answer: ReadTimeout\n"])
def test_a_page_that_did_not_come_leaves_no_number(folder: Path, when: str, text: str) -> None:
    (folder / f"metrics-1-{when}.txt").write_text(text)
    assert_nothing(folder, f"/metrics {when} it has no {PREEMPTIONS}")


@pytest.mark.parametrize("text", ["<html>", '{"detail": "Not Found"}', "vllm:num_preemptions_total{engine="])
def test_a_page_that_is_no_metrics_page_leaves_no_number(folder: Path, text: str) -> None:
    (folder / "metrics-1-after.txt").write_text(text)
    assert_nothing(folder, "bench left no usable result")


@pytest.mark.parametrize(("hits", "is_invalid"), [(0.0, False), (10.0, False), (11.0, True), (1000.0, True), (math.nan, True)])
def test_prefix_cache_hits_over_1_percent_leave_no_number(folder: Path, hits: float, is_invalid: bool) -> None:
    """Of 1000 queries of the repeat; those before it were all hits, and are not the repeat's."""
    count(folder, "before", prefix_cache_queries=5000.0, prefix_cache_hits=5000.0)
    count(folder, "after", prefix_cache_queries=6000.0, prefix_cache_hits=5000.0 + hits)
    if is_invalid:
        assert_nothing(folder, f"repeat 2: {hits:.0f} of 1000 prefix-cache queries hit")
    else:
        assert by_metric(folder)["output_throughput_tok_s"].value is not None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("missing", ["prefix_cache_queries", "prefix_cache_hits"])
def test_a_prefix_cache_counted_only_in_part_leaves_no_number(folder: Path, when: str, missing: str) -> None:
    for page in ("before", "after"):
        count(folder, page, prefix_cache_queries=5000.0, prefix_cache_hits=10.0)
    removed: Document = {missing: None}
    count(folder, when, **removed)
    assert_nothing(folder, f"/metrics {when} it has no vllm:{missing}_total")


def test_hits_without_queries_leave_no_number(folder: Path) -> None:
    count(folder, "before", prefix_cache_hits=0.0)
    count(folder, "after", prefix_cache_hits=10.0)
    assert_nothing(folder, "10 of 0 prefix-cache queries hit")


def test_the_command_asks_for_what_is_parsed(tmp_path: Path) -> None:
    settings = Load(input_len=1024, output_len=128, max_concurrency=16, num_prompts=128, num_warmups=32, seed=40)
    command = command_of(CLIENT, "reference", settings, str(tmp_path), 2)
    assert command[:3] == ["/engine/bin/vllm", "bench", "serve"]
    found = options(command)
    assert found["--backend"] == "openai"
    assert found["--base-url"] + found["--endpoint"] == "http://127.0.0.1:8123/v1/completions"
    assert (found["--model"], found["--tokenizer"]) == ("reference", "org/model")
    assert found["--dataset-name"] == "random"
    lengths = ("--random-input-len", "--random-output-len", "--num-prompts", "--max-concurrency", "--num-warmups")
    assert [found[name] for name in lengths] == ["1024", "128", "128", "16", "32"]
    assert found["--percentile-metrics"] == "ttft,tpot,itl,e2el"
    assert found["--metric-percentiles"] == "50,90,99"
    assert {"--ignore-eos", "--save-result", "--save-detailed"} <= set(command)
    assert Path(found["--result-dir"], found["--result-filename"]) == tmp_path / "bench-2.json"


def test_every_repeat_has_its_own_prompts_and_its_own_file(tmp_path: Path) -> None:
    found = [options(command_of(CLIENT, "reference", SETTINGS, str(tmp_path), repeat)) for repeat in (1, 2, 3)]
    assert [each["--seed"] for each in found] == ["0", "1", "2"]
    assert [each["--result-filename"] for each in found] == ["bench-1.json", "bench-2.json", "bench-3.json"]


def test_a_tokenizer_with_code_of_its_own_is_trusted_as_by_the_server(tmp_path: Path) -> None:
    trusting = CLIENT.model_copy(update={"trust_remote_code": True})
    assert "--trust-remote-code" in command_of(trusting, "reference", SETTINGS, str(tmp_path), 1)
    assert "--trust-remote-code" not in command_of(CLIENT, "reference", SETTINGS, str(tmp_path), 1)


def test_no_secret_is_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "shhhhhhhh")
    assert "shhhhhhhh" not in " ".join(command_of(CLIENT, "reference", SETTINGS, str(tmp_path), 1))


# --- TensorRT-LLM: pages made here, in the form of its collector (tensorrt_llm/metrics/collector.py of NVIDIA/TensorRT-LLM)

NO_REUSE: ServerArguments = {"kv_cache_config": {"enable_block_reuse": False}}
COUNTED = {"request_success": (3, 9), "kv_cache_missed_blocks": (10, 110)}


def trtllm_page(folder: Path, repeat: int, when: str, counters: dict[str, float]) -> None:
    lines = []
    for short, number in counters.items():
        name = f"trtllm_{short}_total"
        label = 'finished_reason="length",' if short == "request_success" else ""
        lines += [f"# TYPE {name} counter", f'{name}{{{label}engine_type="pytorch",model_name="reference"}} {number}']
    (folder / f"metrics-{repeat}-{when}.txt").write_text("\n".join([*lines, ""]))


def on_trtllm(folder: Path, arguments: ServerArguments, **counters: tuple[float, float] | None) -> str:
    """Why the load is invalid; empty if it is valid."""
    given = {name: pair for name, pair in (COUNTED | counters).items() if pair is not None}
    for repeat in (1, 2):
        for place, when in enumerate(("before", "after")):
            trtllm_page(folder, repeat, when, {name: pair[place] for name, pair in given.items()})
    (reason,) = {found.invalid_because or "" for found in parse(folder, SETTINGS, "tensorrt-llm", arguments)}
    return reason


@pytest.mark.parametrize(
    ("arguments", "counters"),
    [
        ({}, {}),
        ({}, {"kv_cache_reused_blocks": (50, 51)}),
        (NO_REUSE, {"kv_cache_missed_blocks": None}),
        ({"scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}}, {}),
        ({"scheduler_config": {"enable_prefix_aware_scheduling": False}}, {}),
    ],
)
def test_what_tensorrt_llm_counts_or_rules_out_is_trusted(
    folder: Path, arguments: ServerArguments, counters: dict[str, tuple[float, float] | None]
) -> None:
    assert on_trtllm(folder, arguments, **counters) == ""


@pytest.mark.parametrize(
    ("arguments", "counters", "told"),
    [
        ({}, {"request_success": None}, "has no trtllm_request_success_total"),
        (NO_REUSE, {"request_success": None}, "has no trtllm_request_success_total"),
        ({}, {"request_success": (3, 7)}, "the server counts 4 requests of 5"),
        ({}, {"request_success": (3, math.nan)}, "the server counts nan requests of 5"),
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
    folder: Path, arguments: ServerArguments, counters: dict[str, tuple[float, float] | None], told: str
) -> None:
    assert told in on_trtllm(folder, arguments, **counters)


def test_vllms_counters_are_none_of_tensorrt_llms(folder: Path) -> None:
    (reason,) = {found.invalid_because for found in parse(folder, SETTINGS, "tensorrt-llm", NO_REUSE)}
    assert reason is not None
    assert "repeat 1: the server's /metrics before it has no trtllm_request_success_total" in reason
    on_trtllm(folder, {})
    assert_nothing(folder, "has no vllm:num_preemptions_total")


@pytest.mark.parametrize("path", ["/metrics", "/prometheus/metrics"])
def test_counters_are_read_where_the_server_has_them(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    asked: list[str] = []

    def get(url: str, **_: object) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, text="# page", request=httpx.Request("GET", url))

    monkeypatch.setattr("vllm_qualify.evidence.load.httpx.get", get)
    assert page_of(SERVER.model_copy(update={"metrics_path": path})) == "# page"
    assert asked == [f"{SERVER.url}{path}"]
