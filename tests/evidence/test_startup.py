"""Start-up: its parts and the KV cache from real logs of the CPU and a GPU, and from lines as vLLM's source words them."""

from datetime import UTC, datetime

import pytest

from tests.builders.startup_logs import CPU_LOG, CPU_STARTUP_S, H200_LAUNCHED, H200_LOG, H200_STARTUP_S, LAUNCHED
from vllm_qualify.evidence.startup import PARTS, KvCache, Startup, kv_cache, startup, startup_measurements
from vllm_qualify.recipe.metrics import METRICS

AT = datetime(2026, 3, 9, 12, 0, 0, tzinfo=UTC).timestamp()
GPU_STARTUP_S = 150.0

API, CORE = "(APIServer pid=1)", "(EngineCore_DP0 pid=94)"
CONFIG = "[core.py:96] Initializing a V1 LLM engine (v0.17.0) with config: model='m', enforce_eager=False, seed=0"
BEGIN = "[gpu_model_runner.py:4255] Starting to load model m..."
LOADED = "[gpu_model_runner.py:4354] Model loading took 15.27 GiB memory and 20.500000 seconds"
CAPTURED_GRAPHS = "[gpu_model_runner.py:5360] Graph capturing finished in 18 secs, took 0.96 GiB"
READY = "[api_server.py:1971] Starting vLLM API server 0 on http://0.0.0.0:8000"
ANEW = "[backends.py:312] Compiling a graph for compile range (1, 8192) takes 9.62 s"
FROM_CACHE = "[backends.py:283] Directly load the compiled graph(s) for compile range (1, 8192) from the cache, took 0.961 s"
FROM_AOT = "[decorators.py:311] Directly load AOT compilation from path /root/.cache/vllm/torch_aot_compile/6e/rank_0_0/model"
SAVED_AOT = "[decorators.py:580] saved AOT compiled function to /root/.cache/vllm/torch_aot_compile/6e/rank_0_0/model"
AOT_FAILED = "[decorators.py:333] Compiling model again due to a load failure from /root/.cache/vllm/model, reason: EOF"
TOOK = "[monitor.py:62] torch.compile took 30.25 s in total"


def log_of(*compiling: str, process: str = CORE, begin: str = "03-09 12:00:30") -> str:
    """A GPU server's log, its torch.compile in these words."""
    lines = [
        f"{API} INFO 03-09 12:00:12 [api_server.py:1278] vLLM API server version 0.17.0",
        f"{process} INFO 03-09 12:00:25 {CONFIG}",
        f"{process} INFO {begin} {BEGIN}",
        f"{process} INFO 03-09 12:00:50 {LOADED}",
        *(f"{process} INFO 03-09 12:01:30 {line}" for line in compiling),
        f"{process} INFO 03-09 12:02:10 {CAPTURED_GRAPHS}",
        f"{API} INFO 03-09 12:02:20 {READY}",
        "INFO:     Application startup complete.",
    ]
    return "\n".join(lines)


NO_IMAGE = {"image_s": "no image was pulled in one go"}
NO_GRAPHS = {"graphs_s": "the log does not mention a capture of CUDA graphs"}


def parts_of(times: Startup) -> list[float | None]:
    return [getattr(times, part) for part in PARTS]


def test_the_parts_of_a_real_start_on_the_cpu() -> None:
    times = startup(CPU_LOG, CPU_STARTUP_S, LAUNCHED)
    assert parts_of(times) == [None, about(57.77), 0.01, 51.0, None, about(114 - 57.77 - 0.01 - 51)]
    assert (times.warm, times.because) == (False, NO_IMAGE | NO_GRAPHS)


def test_the_parts_of_a_real_start_on_an_h200() -> None:
    """By vLLM's V2 model runner, which words the begin of the weights in its own way."""
    times = startup(H200_LOG, H200_STARTUP_S, H200_LAUNCHED)
    assert parts_of(times) == [None, 33.0, 2.65021, 11.74, 1.0, about(69 - 33 - 2.65 - 11.74 - 1)]
    assert (times.warm, times.because) == (False, NO_IMAGE)


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=0.01)


def test_the_parts_of_a_start_on_a_gpu() -> None:
    times = startup(log_of(ANEW, TOOK), GPU_STARTUP_S, AT, image_s=300.0)
    assert parts_of(times) == [300, 30, 20.5, 30.25, 18, 150 - 30 - 20.5 - 30.25 - 18]
    assert (times.warm, times.because) == (False, {})
    # Newer model runners capture some graphs before the rest, to see how much memory they take.
    profiled = CAPTURED_GRAPHS.replace("18 secs", "7 secs")
    assert startup(log_of(TOOK, profiled), GPU_STARTUP_S, AT).graphs_s == 25


@pytest.mark.parametrize(
    ("lines", "compile_s"),
    [
        # Every wording from 0.12 to 0.33; a draft model is compiled too.
        (["[monitor.py:34] torch.compile takes 25.11 s in total"], 25.11),
        (["[monitor.py:34] torch.compile takes 25.11 s in total", "[monitor.py:34] torch.compile takes 30.5 s in total"], 30.5),
        (["[monitor.py:35] torch.compile and initial profiling run took 29.93 s in total"], 29.93),
        (["[monitor.py:62] torch.compile and initial profiling/warmup run together took 8.5 s in total"], 8.5),
        (
            [
                "[monitor.py:62] [backbone] torch.compile took 4.0 s in total",
                "[monitor.py:62] [eagle_head] torch.compile took 1.5 s in total",
            ],
            5.5,
        ),
    ],
)
def test_compiling_in_the_words_of_each_version(lines: list[str], compile_s: float) -> None:
    assert startup(log_of(*lines), GPU_STARTUP_S, AT).compile_s == compile_s


def test_ranks_compile_at_the_same_time() -> None:
    others = "\n".join(
        f"(Worker_TP{rank} pid={90 + rank}) INFO 03-09 12:01:30 [monitor.py:62] torch.compile took {took} s in total"
        for rank, took in enumerate(("10.0", "12.5", "11.0"))
    )
    assert startup(f"{log_of()}\n{others}", GPU_STARTUP_S, AT).compile_s == 12.5


@pytest.mark.parametrize(
    ("lines", "warm", "why_not_warm"),
    [
        ([FROM_CACHE, TOOK], True, None),
        ([FROM_AOT, TOOK], True, None),
        ([FROM_CACHE, ANEW, TOOK], False, "the start was cold: it compiled"),
        ([SAVED_AOT], False, "the start was cold: it compiled"),
        ([AOT_FAILED, FROM_CACHE], False, "the start was cold: it compiled"),
        ([], None, "the log does not mention a cache of compiled graphs"),
    ],
)
def test_whether_a_start_was_warm(lines: list[str], warm: bool | None, why_not_warm: str | None) -> None:
    times = startup(log_of(*lines), GPU_STARTUP_S, AT)
    assert times.warm is warm
    assert ("warm" in times.because) == (warm is None)
    row = startup_measurements(times, "serve/server.log")[-1]
    assert (row.metric, row.value, row.invalid_because) == ("startup_warm_s", GPU_STARTUP_S if warm else None, why_not_warm)


@pytest.mark.parametrize("zone", ["03-09 12", "03-09 17", "03-10 00"])
def test_the_logs_clock_may_be_of_another_zone(zone: str) -> None:
    """A container's is UTC; this machine's need not be."""
    assert startup(log_of(TOOK).replace("03-09 12", zone), GPU_STARTUP_S, AT).process_s == 30
    half_an_hour_more = log_of(TOOK).replace("03-09 12:0", "03-09 17:3")
    assert startup(half_an_hour_more, GPU_STARTUP_S, AT).process_s == 30


def test_a_year_may_end_meanwhile() -> None:
    launched = datetime(2026, 12, 31, 23, 59, 50, tzinfo=UTC).timestamp()
    text = log_of(TOOK, begin="01-01 00:00:20").replace("03-09 12:00:12", "12-31 23:59:59")
    assert startup(text, GPU_STARTUP_S, launched).process_s == 30
    warm_up = "\n".join(
        f"(Worker pid=9) INFO {stamp} [cpu_model_runner.py:87] {message}"
        for stamp, message in (
            ("12-31 23:59:59", "Warming up model for the compilation..."),
            ("01-01 00:00:49", "Warming up done."),
        )
    )
    assert startup(warm_up, GPU_STARTUP_S, launched).compile_s == 50


def test_a_start_with_enforce_eager_neither_compiles_nor_captures() -> None:
    text = log_of().replace("enforce_eager=False", "enforce_eager=True").replace(CAPTURED_GRAPHS, "")
    times = startup(text, GPU_STARTUP_S, AT)
    assert (times.compile_s, times.graphs_s) == (None, None)
    assert times.because["compile_s"] == times.because["graphs_s"] == "there is none: the server runs with enforce-eager"
    assert times.ready_s == 150 - 30 - 20.5


def test_what_a_log_does_not_tell_is_none_with_the_reason() -> None:
    times = startup("", GPU_STARTUP_S, AT)
    assert parts_of(times) == [None] * len(PARTS)
    assert times.warm is None
    assert times.because.keys() == {*PARTS, "warm"}
    assert times.because["ready_s"] == "the rest is not known without process_s and weights_s"
    assert all(times.because.values())


def test_parts_that_do_not_fit_into_the_whole_are_reported() -> None:
    assert "more than the whole start" in startup(log_of(TOOK), 60.0, AT).because["ready_s"]
    assert "of a start of 20 s" in startup(log_of(TOOK), 20.0, AT).because["process_s"]


def test_a_rounded_clock_makes_no_time_below_zero() -> None:
    assert startup(log_of(TOOK), 30 + 20.5 + 30.25 + 18 - 0.5, AT).ready_s == 0
    # The log cuts its times to seconds, and the launch is known to the millisecond.
    assert startup(log_of(TOOK), GPU_STARTUP_S, AT + 30.9).process_s == 0
    assert startup(log_of(TOOK), GPU_STARTUP_S, AT + 31.1).process_s is None


def test_each_part_has_its_metric() -> None:
    rows = startup_measurements(startup(log_of(FROM_CACHE, TOOK), GPU_STARTUP_S, AT), "serve/server.log")
    assert {each.metric: each.value for each in rows} == {
        "startup_image_s": None,
        "startup_process_s": 30.0,
        "startup_weights_s": 20.5,
        "startup_compile_s": 30.25,
        "startup_graphs_s": 18.0,
        "startup_ready_s": 51.25,
        "startup_warm_s": 150.0,
    }
    assert rows[0].invalid_because == "no image was pulled in one go"
    assert {METRICS[each.metric].stage for each in rows} == {"serve"}
    assert {each.sample_count for each in rows if each.value is not None} == {1}


def test_the_kv_cache_of_real_servers() -> None:
    assert kv_cache(CPU_LOG) == KvCache(tokens=419_328, max_concurrency=204.75)
    assert kv_cache(H200_LOG) == KvCache(tokens=17_448_304, max_concurrency=8519.68)
    assert kv_cache(log_of(TOOK)) is None


def test_the_kv_cache_on_two_lines_and_of_several_engines() -> None:
    lines = [
        f"(EngineCore_DP{rank} pid={90 + rank}) INFO 03-09 12:01:40 [kv_cache_utils.py:{line}"
        for rank in (0, 1)
        for line in (
            "1286] GPU KV cache size: 686,320 tokens",
            "1291] Maximum concurrency for 100,000 tokens per request: 6.86x",
        )
    ]
    assert kv_cache("\n".join(lines[:2])) == KvCache(tokens=686_320, max_concurrency=6.86)
    assert kv_cache("\n".join(lines)) == KvCache(tokens=1_372_640, max_concurrency=13.72)
    assert kv_cache(lines[0]) == KvCache(tokens=686_320, max_concurrency=None)


@pytest.mark.parametrize(
    "line",
    [
        "Loading weights took 1.2.3 seconds",
        "Model loading took 1 GiB and . seconds",
        f"Graph capturing finished in {'9' * 5000} secs",
        "KV cache size: , tokens",
        f"KV cache size: {'9' * 5000} tokens",
    ],
)
def test_what_is_no_number_is_not_read(line: str) -> None:
    text = f"{CORE} INFO 03-09 12:01:30 [made.py:1] {line}"
    times = startup(text, GPU_STARTUP_S, AT)
    assert (times.weights_s, times.graphs_s, kv_cache(text)) == (None, None, None)


@pytest.mark.parametrize("piece", ["(pid=", "(a pid=1", "pid=1 ", "1", "INFO 03-09 12:00:00 [", "Model loading took 1 and "])
def test_a_hostile_log_is_read_in_seconds(piece: str) -> None:
    """Minutes, where the work grows with the square of the log."""
    text = f"{CORE} INFO 03-09 12:01:30 [made.py:1] (pid=" + piece * (200_000 // len(piece))
    assert startup(text, GPU_STARTUP_S, AT).weights_s is None
    assert kv_cache(text) is None
