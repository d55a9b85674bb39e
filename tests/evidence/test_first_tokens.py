"""A chat's stream begins with a chunk that has a role and no token; what is shown is the time to the first token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.builders.loads import SETTINGS, load_server
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.evidence.load.result import steady_of
from vllm_qualify.evidence.load.steady import figures_of, requests_of, whole_window
from vllm_qualify.plan.workload import choose_first_chunk
from vllm_qualify.recipe.load import CountedFrom

REQUESTS, TOKENS, TTFT_S, STEP_S, TURNS = 40, 21, 0.5, 0.02, 2
CHAT = SETTINGS.model_copy(
    update={"api": "chat", "window": "whole", "num_prompts": REQUESTS, "max_concurrency": 1, "turns": TURNS, "slo": None}
    | {"counted_from": "second chunk"}
)


def bench_of_chats(role_s: float) -> dict[str, Any]:
    """What bench writes of chats, one after another, whose role comes after so many seconds."""
    later = np.repeat([0.0, 0.1], REQUESTS // TURNS)
    latencies = TTFT_S + later + (TOKENS - 1) * STEP_S
    starts = np.cumsum(latencies) - latencies
    result: dict[str, Any] = {
        "start_times": starts.tolist(),
        "ttfts": [role_s] * REQUESTS,
        "itls": [[TTFT_S + each - role_s, *[STEP_S] * (TOKENS - 1)] for each in later],
        "input_lens": [16] * REQUESTS,
        "output_lens": [TOKENS] * REQUESTS,
        "duration": float(latencies.sum()),
    }
    figures = figures_of(whole_window(requests_of(result, 1), result["duration"]), None, as_bench=True)
    own = {"request_throughput_req_s": "request_throughput", "output_throughput_tok_s": "output_throughput"}
    own |= {"total_throughput_tok_s": "total_token_throughput"}
    names = {name: own.get(name) or "{1}_{0}_{2}".format(*name.split("_")) for name in figures}
    return result | {names[name]: value for name, value in figures.items()}


@pytest.mark.parametrize("role_s", [0.002, TTFT_S - 1e-5])
def test_a_role_that_is_sent_at_once_is_no_token(role_s: float) -> None:
    result = bench_of_chats(role_s)
    values = steady_of(result, CHAT).values
    assert result["mean_ttft_ms"] == pytest.approx(1000 * role_s)
    assert values["ttft_mean_ms"] == pytest.approx(1000 * (TTFT_S + 0.05), rel=1e-3)
    assert values["tpot_mean_ms"] == pytest.approx(1000 * STEP_S, rel=1e-3)
    assert values["itl_p99_ms"] == pytest.approx(1000 * STEP_S, rel=1e-3)
    assert values["first_turn_ttft_p50_ms"] == pytest.approx(1000 * TTFT_S, rel=1e-3)
    assert values["later_turns_ttft_p50_ms"] == pytest.approx(1000 * (TTFT_S + 0.1), rel=1e-3)
    assert values["e2el_mean_ms"] == pytest.approx(result["mean_e2el_ms"])
    assert values["request_throughput_req_s"] == pytest.approx(result["request_throughput"])


@pytest.mark.parametrize("counted_from", ["first chunk", None])
def test_a_whole_run_counts_the_first_chunk_where_its_plan_does_not_skip_it(counted_from: CountedFrom | None) -> None:
    """A plan of before does not say it: it was counted so. And a server that opens with no role has a token there."""
    result = bench_of_chats(0.002)
    values = steady_of(result, CHAT.model_copy(update={"counted_from": counted_from})).values
    assert (values["ttft_mean_ms"], values["first_turn_ttft_p50_ms"]) == pytest.approx((2.0, 2.0))
    assert values["itl_mean_ms"] == pytest.approx(result["mean_itl_ms"])


@pytest.mark.parametrize(
    ("window", "counted_from", "skips"),
    [("steady", None, True), ("steady", "first chunk", False), ("whole", None, False), ("whole", "second chunk", True)],
)
def test_plans_of_before_skip_the_role_in_a_steady_state_alone(window: str, counted_from: str | None, *, skips: bool) -> None:
    load = CHAT.model_copy(update={"window": window, "counted_from": counted_from})
    assert load.skips_role is skips
    assert not load.model_copy(update={"api": "completions"}).skips_role


@pytest.mark.parametrize(
    ("api", "window", "opens", "expected"),
    [
        ("completions", "whole", True, None),
        ("chat", "steady", True, None),
        ("chat", "whole", True, "second chunk"),
        ("chat", "whole", False, "first chunk"),
        ("chat", "steady", False, "first chunk"),
    ],
)
def test_the_first_chunk_is_skipped_where_the_engine_is_known_to_open_with_a_role(
    monkeypatch: pytest.MonkeyPatch, api: str, window: str, expected: str | None, *, opens: bool
) -> None:
    server = load_server({})
    monkeypatch.setitem(KINDS, server.kind, replace(KINDS[server.kind], opens_with_role=opens))
    assert choose_first_chunk(CHAT.model_copy(update={"api": api, "window": window}), server) == expected


def test_completions_have_no_such_chunk() -> None:
    result = bench_of_chats(0.002)
    completions = CHAT.model_copy(update={"api": "completions", "turns": 1})
    assert steady_of(result, completions).values["ttft_mean_ms"] == pytest.approx(2.0)
