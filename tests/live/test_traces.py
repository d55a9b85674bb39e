"""A trace with shared prefixes, replayed by a real bench to a real server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.test_load_profiles import LOAD, Qualify, measured, qualify, runs_of
from tests.qualified import Qualified
from tests.recipes import Document
from vllm_qualify.evidence.load.replay import lateness_s, planned_trace
from vllm_qualify.report.model import load_report

__all__ = ["qualify"]

pytestmark = pytest.mark.engine

GATES = [{"metric": "request_throughput_req_s", "minimum": 0.1, "unit": "req/s"}]
# Tokens of the system prompt, and of each turn: whole blocks of the CPU engine's KV cache, which have 128.
SYSTEM_TOK, TURN_TOK, REPLY_TOK, CHATS, TURNS = 256, 128, 8, 4, 4


def chats() -> Iterator[Document]:
    """Chats whose turns come in a round: each prompt is the system's, and all of the chat so far."""
    for turn in range(1, TURNS + 1):
        for chat in range(CHATS):
            prefix = [["system", SYSTEM_TOK], [f"chat-{chat}", turn * TURN_TOK]]
            length = SYSTEM_TOK + turn * TURN_TOK
            yield {"arrival_s": (turn * CHATS + chat) * 0.25, "input_tok": length, "output_tok": REPLY_TOK, "prefix": prefix}


def of_a_trace(document: Document, folder: Path) -> None:
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()))
    others = {
        name: value for name, value in LOAD.items() if name in ("repeats", "most_repeats", "min_duration_s", "time_limit_s")
    }
    load = {"trace": str(folder / "chats.jsonl"), "window": "whole", "num_warmups": 0}
    serving = document["gpu_types"]["cpu"]
    serving["server"] = {name: value for name, value in serving["server"].items() if name != "no-enable-prefix-caching"}
    serving["profiles"] = {"balanced": {"server": {"max-num-seqs": 8}, "load": others | load, "gates": GATES}}


@pytest.fixture(scope="module")
def replayed(qualify: Qualify) -> Qualified:
    return qualify(of_a_trace)


def test_a_trace_is_replayed_as_it_is_and_its_prefixes_hit(replayed: Qualified) -> None:
    assert replayed.done.returncode == 0, replayed.done.stdout + replayed.done.stderr
    (run,) = runs_of(replayed)
    report = load_report(run)
    rows = measured(report, "load")
    assert rows["ttft_p50_ms"].invalid_because is None, rows["ttft_p50_ms"].invalid_because
    folder = run / "evidence" / "load"
    trace = planned_trace(folder, report.plan.load)
    assert trace is not None
    # Known are the system's prompt of all prompts but the first, and what each chat's turns before had.
    expected = 15 * SYSTEM_TOK + CHATS * sum(turn * TURN_TOK for turn in range(1, TURNS))
    assert trace.shared_tok == expected
    share = rows["prefix_hit_share"]
    assert share.value is not None, share.invalid_because
    assert share.value == pytest.approx(trace.shared_share, rel=0.1)
    for repeat in (1, 2):
        result = json.loads((folder / f"bench-{repeat}.json").read_text())
        assert result["input_lens"] == trace.input_toks == [row["input_tok"] for row in chats()]
        assert result["output_lens"] == [REPLY_TOK] * CHATS * TURNS
        assert max(lateness_s(result["start_times"], trace)) < 0.5
