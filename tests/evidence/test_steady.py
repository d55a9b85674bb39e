"""Steady state: on servers whose true rate is known, the window gives it, where bench's own figures are off."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.builders.closed_loop import CLIENTS, PREFILL_S, STEP_S, TOKENS, Document, Slowness, at_once, bench_of
from vllm_qualify.evidence.load import steady
from vllm_qualify.evidence.load.steady import Requests, figures_of, requests_of, whole_window
from vllm_qualify.recipe.load import Slo
from vllm_qualify.recipe.metrics import GOODPUT

TRUE_RATE = CLIENTS * TOKENS / (TOKENS * STEP_S + CLIENTS * PREFILL_S)


def slow(slowness: float, first: int) -> Slowness:
    """So many requests are slow at first."""
    return lambda begun: slowness if begun <= first else 1.0


def window_of(result: Document, clients: int = CLIENTS) -> steady.Window:
    return steady.find_window(requests_of(result, clients), clients)


def rates_of(result: Document, clients: int = CLIENTS) -> dict[str, float]:
    return figures_of(window_of(result, clients), None)


def rate_of_bench(result: Document) -> float:
    return float(sum(result["output_lens"]) / result["duration"])


@pytest.mark.parametrize(
    ("count", "slowness", "admitted", "bench_is_off"),
    [
        pytest.param(128, at_once, 10**9, 0.0, id="in step"),
        pytest.param(136, at_once, 10**9, 0.04, id="a last wave that is not full"),
        pytest.param(128, slow(3.0, CLIENTS), 10**9, 0.15, id="slow first wave"),
        pytest.param(128, slow(2.0, 2 * CLIENTS), 10**9, 0.15, id="two slow waves"),
        pytest.param(128, lambda begun: 3.0 if begun >= 128 else 1.0, 10**9, 0.15, id="slow tail"),
        pytest.param(128, at_once, 1, 0.02, id="one taken in after another"),
        pytest.param(128, slow(2.0, 2 * CLIENTS), 1, 0.15, id="one after another, and slow at first"),
    ],
)
def test_the_steady_rate_is_found(count: int, slowness: Slowness, admitted: int, bench_is_off: float) -> None:
    for seed in range(5):
        result = bench_of([TOKENS] * count, slowness=slowness, admitted=admitted, seed=seed)
        figures = rates_of(result)
        assert figures["output_throughput_tok_s"] == pytest.approx(TRUE_RATE, rel=0.015)
        assert figures["request_throughput_req_s"] == pytest.approx(TRUE_RATE / TOKENS, rel=0.015)
        assert figures["total_throughput_tok_s"] == pytest.approx(TRUE_RATE * (1 + 10 / TOKENS), rel=0.015)
        assert rate_of_bench(result) <= TRUE_RATE * (1.01 - bench_is_off)


def test_the_rate_of_tokens_is_found_where_replies_are_not_equally_long() -> None:
    rates, bench = [], []
    for seed in range(10):
        lengths = [int(length) for length in np.random.default_rng(seed).integers(16, 113, 256)]
        result = bench_of(lengths, seed=seed)
        rates.append(rates_of(result)["output_throughput_tok_s"])
        bench.append(rate_of_bench(result))
    # By renewals: a request holds its client for its steps, each with its share of the others' prefills.
    assert np.mean(rates) == pytest.approx(TRUE_RATE, rel=0.01)
    assert np.mean(bench) < 0.97 * TRUE_RATE


def test_the_smallest_load_and_a_single_stream_have_a_window() -> None:
    result = bench_of([8] * 20, clients=4)
    window = window_of(result, 4)
    assert (window.first, window.last) == (4, 16)
    assert rates_of(result, 4)["output_throughput_tok_s"] == pytest.approx(4 * 8 / (8 * STEP_S + 4 * PREFILL_S))

    figures = rates_of(bench_of([8] * 20, clients=1, slowness=slow(4.0, 5)), 1)
    assert figures["output_throughput_tok_s"] == pytest.approx(8 / (8 * STEP_S + PREFILL_S))
    assert figures["ttft_mean_ms"] == pytest.approx(1000 * (STEP_S + PREFILL_S))
    assert figures["tpot_p99_ms"] == pytest.approx(1000 * STEP_S)


@pytest.mark.parametrize("count", [80, 81, 95, 96, 100, 128, 1000])
def test_a_window_lies_between_the_first_and_the_last_wave_and_has_half_of_the_requests(count: int) -> None:
    for seed in range(5):
        window = window_of(bench_of([TOKENS] * count, seed=seed))
        assert CLIENTS <= window.first < window.last <= count - CLIENTS
        assert window.count % CLIENTS == 0
        assert window.count >= count / 2
        # All of its requests ended before the last one began, so under full load.
        requests = window.requests
        ended = requests.starts[: window.last] + requests.latencies[: window.last]
        assert max(ended) <= requests.starts[-1] + 2 * TOKENS * STEP_S


MORE = "use more num_prompts"


@pytest.mark.parametrize(
    ("count", "slowness", "message"),
    [
        pytest.param(48, at_once, f"16 of 48 requests lie between the first and the last wave of 16: {MORE}", id="few"),
        pytest.param(20, at_once, "0 of 20 requests", id="fewer than two waves"),
        pytest.param(160, lambda begun: 4 - begun / 50, f"took ever shorter, in its second half .*: {MORE}", id="shorter"),
        pytest.param(160, lambda begun: 1 + begun / 50, f"took ever longer, in its second half .*: {MORE}", id="longer"),
    ],
)
def test_too_few_requests_and_a_server_that_never_settles_have_no_steady_state(
    count: int, slowness: Slowness, message: str
) -> None:
    with pytest.raises(steady.UnsteadyError, match=message):
        window_of(bench_of([TOKENS] * count, slowness=slowness))


def test_noise_is_no_drift() -> None:
    """Waves up to twice as slow as others, without a trend: as on a machine that others use too."""
    for seed in range(100):
        waves = np.random.default_rng(seed).uniform(1, 2, 100)

        def slowness(begun: int, waves: np.ndarray = waves) -> float:
            return float(waves[begun // 4])

        window_of(bench_of([8] * 80, 4, slowness), 4)


@pytest.mark.parametrize("clients", [20, 10])
def test_another_number_under_way_is_no_steady_state(clients: int) -> None:
    # As many as 14 of 16 can be bench's own delays on a busy machine, 10 cannot.
    window_of(bench_of([TOKENS] * 160, clients=14))
    with pytest.raises(steady.UnsteadyError, match="of 16 requests were under way"):
        window_of(bench_of([TOKENS] * 160, clients=clients))


@pytest.mark.parametrize("start", [math.nan, math.inf, -math.inf])
def test_starts_that_are_no_times_are_no_steady_state(start: float) -> None:
    result = bench_of([TOKENS] * 128) | {"start_times": [start] * 128}
    with pytest.raises(steady.UnsteadyError, match="requests were under way"), np.errstate(invalid="ignore"):
        window_of(result)


def test_lists_that_are_not_equally_long_are_no_result() -> None:
    result = bench_of([8] * 20, clients=4)
    for name in ("start_times", "ttfts", "itls", "input_lens", "output_lens"):
        with pytest.raises(ValueError, match=r"equally long|shorter|longer"):
            requests_of(result | {name: result[name][1:]}, 4)


def test_the_whole_is_as_bench_counts() -> None:
    result = bench_of([TOKENS] * 128, seed=1)
    figures = figures_of(whole_window(requests_of(result, CLIENTS), result["duration"]), None)
    assert figures["output_throughput_tok_s"] == pytest.approx(rate_of_bench(result))
    assert figures["request_throughput_req_s"] == pytest.approx(128 / result["duration"])
    assert figures["total_throughput_tok_s"] == pytest.approx(128 * (TOKENS + 10) / result["duration"])
    assert figures["ttft_p90_ms"] == pytest.approx(1000 * np.percentile(result["ttfts"], 90))
    assert figures["itl_p50_ms"] == pytest.approx(1000 * np.median(np.concatenate(result["itls"])))


@pytest.mark.parametrize("admitted", [1, 10**9])
def test_starts_that_bench_did_not_tell_follow_from_the_latencies(admitted: int) -> None:
    """As bench of vLLM 0.12 to 0.14 leaves it, with a millisecond between two requests, and as much before and after."""
    result = bench_of([TOKENS] * 128, admitted=admitted, seed=3)
    without = result | {"duration": result["duration"] * 1.002}
    del without["start_times"]
    recorded, rebuilt = requests_of(result, CLIENTS), requests_of(without, CLIENTS)
    assert (recorded.rebuilt, rebuilt.rebuilt) == (False, True)
    assert rebuilt.starts == pytest.approx(recorded.starts, rel=0.003, abs=1e-9)
    assert rates_of(without) == pytest.approx(rates_of(result), rel=0.01)


@pytest.mark.parametrize("stretched", [0.98, 1.06, math.nan])
def test_starts_do_not_follow_from_latencies_that_do_not_fill_the_duration(stretched: float) -> None:
    result = bench_of([TOKENS] * 128)
    del result["start_times"]
    with pytest.raises(steady.UnsteadyError, match="does not record when each started"):
        requests_of(result | {"duration": result["duration"] * stretched}, CLIENTS)


def test_several_tokens_in_a_chunk_are_all_counted() -> None:
    """With a draft model a chunk brings several: here two each, the first excepted."""
    result = bench_of([33] * 80, clients=4)
    rate = rates_of(result, 4)["output_throughput_tok_s"]
    paired = rates_of(result | {"output_lens": [65] * 80}, 4)
    assert paired["output_throughput_tok_s"] == pytest.approx(65 / 33 * rate)
    ends = [ttft + sum(gaps) for ttft, gaps in zip(result["ttfts"], result["itls"], strict=True)]
    at_end = rates_of(result | {"itls": [[]] * 80, "ttfts": ends}, 4)
    assert at_end["output_throughput_tok_s"] == pytest.approx(rate)
    assert at_end["itl_mean_ms"] == 0.0


def test_goodput_counts_what_meets_every_limit() -> None:
    count, numbers = 40, np.arange(40)
    gaps = [np.array([0.3, 0.3, 0.3 if number % 4 else 0.1]) for number in numbers]
    requests = Requests(numbers * 1.0, np.where(numbers % 2, 0.2, 0.1), gaps, np.full(count, 8.0), np.full(count, 4.0))
    over = whole_window(requests, float(count))
    every = {"ttft_ms": 200.0, "tpot_ms": 301.0, "e2el_ms": 1101.0}
    alone = {"ttft_ms": None, "tpot_ms": 299.0, "e2el_ms": None}
    for changed, share in (({}, 1.0), ({"ttft_ms": 199.0}, 0.5), (alone, 0.25), ({"e2el_ms": 601.0}, 0.0)):
        assert figures_of(over, Slo.model_validate(every | changed))[GOODPUT] == pytest.approx(share)
    assert GOODPUT not in figures_of(over, None)


def test_a_warm_up_is_cut_in_batches_of_5() -> None:
    series = np.where(np.arange(100) < 12, 3, 1) + np.random.default_rng(0).normal(0, 0.03, 100)
    assert steady.truncation(series, 50) in (15, 20)
    assert [steady.truncation(series, most) for most in (10, 0)] == [10, 0]
    assert [steady.truncation(np.ones(count), most) for count, most in ((100, 50), (4, 4), (0, 4))] == [0, 0, 0]


# --- Chunks that were read at once


SHORT = 1e-6
E2EL_SLO, TPOT_SLO = Slo(e2el_ms=10_000.0), Slo(tpot_ms=1000 * STEP_S * 1.1)


def replies(at_once: list[int], chunks: int = 32, tokens_in_chunk: int = 1) -> Requests:
    """One after another, each of so many chunks; of each reply this many are read with the first, as the last of them comes."""
    gaps = [np.array([SHORT] * first + [STEP_S] * (chunks - 1 - first)) for first in at_once]
    ttfts = np.array([PREFILL_S + STEP_S * (1 + first) for first in at_once])
    latencies = [float(ttft + each.sum()) for ttft, each in zip(ttfts, gaps, strict=True)]
    starts = np.cumsum([0.0, *latencies[:-1]])
    outputs = np.full(len(at_once), 1 + (chunks - 1) * tokens_in_chunk, dtype=float)
    return Requests(starts, ttfts, gaps, np.full(len(at_once), 10.0), outputs)


def shown(requests: Requests, slo: Slo | None = None, *, as_bench: bool = False) -> dict[str, float]:
    return figures_of(whole_window(requests, float(requests.latencies.sum())), slo, as_bench=as_bench)


def refused(requests: Requests, slo: Slo | None = None) -> dict[str, str]:
    return steady.distrusted_metrics(whole_window(requests, 1.0), slo)


def test_where_each_chunk_is_read_alone_times_are_those_of_bench() -> None:
    for requests in (replies([0] * 40), requests_of(bench_of([TOKENS] * 128, seed=1), CLIENTS)):
        assert shown(requests, TPOT_SLO) == pytest.approx(shown(requests, TPOT_SLO, as_bench=True))
        assert refused(requests, TPOT_SLO) == {}


@pytest.mark.parametrize("first", [1, 8, 16, 30])
def test_a_first_chunk_that_is_read_late_makes_no_reply_fast(first: int) -> None:
    requests = replies([first] * 40)
    for name in ("tpot_mean_ms", "tpot_p50_ms", "tpot_p99_ms"):
        assert shown(requests)[name] == pytest.approx(1000 * STEP_S)
        assert shown(requests, as_bench=True)[name] == pytest.approx(1000 * STEP_S * (31 - first) / 31, rel=0.01)
    assert not [name for name in refused(requests) if not name.startswith("itl")]


def test_bursts_after_the_first_chunk_change_no_time_per_token() -> None:
    """Every other chunk is read with the one after it."""
    gaps = [np.array([STEP_S, *[2 * STEP_S - SHORT, SHORT] * 15]) for _ in range(40)]
    burst = replace(replies([0] * 40), gaps=gaps)
    assert shown(burst)["tpot_p50_ms"] == pytest.approx(1000 * STEP_S)
    assert sorted(refused(burst)) == ["itl_mean_ms", "itl_p50_ms", "itl_p90_ms", "itl_p99_ms"]


@pytest.mark.parametrize(("bursts", "is_refused"), [(12, False), (13, True)])
def test_one_gap_in_a_hundred_may_be_none(bursts: int, is_refused: bool) -> None:
    """Of 40 times 31."""
    requests = replies([1] * bursts + [0] * (40 - bursts))
    because = refused(requests).get("itl_p50_ms", "")
    told = "13 of 1240 gaps between chunks are under 50 µs: they were read at once, give"
    assert because.startswith(told) if is_refused else not because
    # One is none below 50 µs.
    for gap, is_none in ((steady.AT_ONCE_S, False), (0.99 * steady.AT_ONCE_S, True)):
        assert bool(refused(replace(requests, gaps=[np.array([gap, *each[1:]]) for each in requests.gaps]))) == is_none


@pytest.mark.parametrize(("whole_ones", "is_refused"), [(30, False), (31, True)])
def test_replies_that_came_in_one_read_show_no_time_per_token(whole_ones: int, is_refused: bool) -> None:
    requests = replies([31] * whole_ones + [0] * (40 - whole_ones))
    names = {name for name in refused(requests, TPOT_SLO) if not name.startswith("itl")}
    # 40 are enough for a p50 and too few for others, which `load` tells by their number.
    of_few = {"tpot_p90_ms", "tpot_p99_ms"}
    assert names == ({"tpot_mean_ms", "tpot_p50_ms", GOODPUT} | of_few if is_refused else of_few)
    assert GOODPUT not in refused(requests, E2EL_SLO)
    figures = shown(requests, TPOT_SLO)
    assert figures["tpot_p50_ms"] == pytest.approx(1000 * STEP_S)
    assert figures[GOODPUT] == pytest.approx(figures["request_throughput_req_s"])


def test_the_tokens_of_a_draft_come_in_one_chunk_and_are_no_burst() -> None:
    drafted = replies([0] * 40, tokens_in_chunk=3)
    figures = shown(drafted)
    assert refused(drafted) == {}
    assert [figures["itl_p50_ms"], figures["tpot_p50_ms"]] == pytest.approx([1000 * STEP_S, 1000 * STEP_S / 3])
    assert shown(replies([15] * 40, tokens_in_chunk=3))["tpot_p50_ms"] == pytest.approx(1000 * STEP_S / 3)


def test_a_chats_first_chunk_is_no_token() -> None:
    """It comes with the first token's."""
    plain = replies([0] * 40)
    chat = replace(plain, gaps=[np.array([SHORT, *each]) for each in plain.gaps])
    assert "itl_p50_ms" in refused(chat)
    assert refused(chat.without_openings()) == {}
    assert shown(chat.without_openings()) == pytest.approx(shown(plain), rel=1e-3)
