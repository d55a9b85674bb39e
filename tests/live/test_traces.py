"""Traces with shared prefixes, traffic of several kinds and bursts, by a real bench on a real server, which they share."""

import json
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.builders.load_profiles import LOAD, Qualify, counted, measured, runs_of
from tests.qualified import undisturbed
from tests.recipes import Document
from vllm_qualify.evidence.load.replay import lateness_s, planned_trace
from vllm_qualify.report.model import load_report

pytestmark = pytest.mark.engine

GATES = [{"metric": "request_throughput_req_s", "minimum": 0.1, "unit": "req/s"}]
# Tokens of the system prompt, and of each turn: whole blocks of the CPU engine's KV cache, which have 128.
SYSTEM_TOK, TURN_TOK, REPLY_TOK, CHATS, TURNS = 256, 128, 8, 4, 4
RATE_REQ_S = 12.0
BURSTS: Document = {
    "input_len": 16,
    "output_len": REPLY_TOK,
    "request_rate": RATE_REQ_S,
    "burstiness": 0.25,
    "num_prompts": 80,
    "num_warmups": 2,
    "window": "whole",
}


def chats() -> Iterator[Document]:
    """Chats whose turns come in a round: each prompt is the system's, and all of the chat so far."""
    for turn in range(1, TURNS + 1):
        for chat in range(CHATS):
            prefix = [["system", SYSTEM_TOK], [f"chat-{chat}", turn * TURN_TOK]]
            length = SYSTEM_TOK + turn * TURN_TOK
            yield {"arrival_s": (turn * CHATS + chat) * 0.25, "input_tok": length, "output_tok": REPLY_TOK, "prefix": prefix}


def mixed() -> Iterator[Document]:
    """Requests of two kinds: two together with a system's prompt, then a long one that shares nothing."""
    for number in range(8):
        for kind in ("assistant", "assistant", "document"):
            alone = kind == "document"
            others: Document = {} if alone else {"prefix": [[kind, SYSTEM_TOK]]}
            yield {"arrival_s": number * 0.5, "input_tok": 600 if alone else SYSTEM_TOK + 40, "output_tok": REPLY_TOK} | others


def of_traces(document: Document, folder: Path) -> None:
    kept = {name: LOAD[name] for name in ("repeats", "most_repeats", "min_duration_s", "time_limit_s")}
    for name, rows in (("chats", chats), ("mixed", mixed)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    loads = {name: {"trace": str(folder / f"{name}.jsonl"), "window": "whole", "num_warmups": 0} for name in ("chats", "mixed")}
    loads["bursts"] = BURSTS
    serving = document["gpu_types"]["cpu"]
    serving["server"] = {name: value for name, value in serving["server"].items() if name != "no-enable-prefix-caching"}
    serving["profiles"] = {
        name: {"server": {"max-num-seqs": 8}, "load": kept | load, "paths": False, "gates": GATES}
        for name, load in loads.items()
    }


@pytest.fixture(scope="module")
def runs(qualify: Qualify) -> dict[str, Path]:
    """The folder of each profile's run; they are served by one server."""
    replayed = qualify(of_traces)
    found = {load_report(run).plan.cell.profile: run for run in runs_of(replayed)}
    assert sorted(found) == ["bursts", "chats", "mixed"], replayed.done.stdout + replayed.done.stderr
    for report in map(load_report, found.values()):
        loads = measured(report, "load")
        not_passed = [gate.gate.metric for gate in report.judgement.gates if gate.verdict != "pass"]
        assert not any(undisturbed(loads[metric]) for metric in not_passed), replayed.done.stdout
    assert len({(run / "evidence/serve/server.log").read_bytes() for run in found.values()}) == 1
    return found


def results(run: Path) -> list[Document]:
    return [json.loads((run / f"evidence/load/bench-{repeat}.json").read_text()) for repeat in (1, 2)]


def hit_share(run: Path) -> float:
    """The share of the prompts' tokens that the server had in its prefix cache, by its own counters."""
    folder = run / "evidence" / "load"
    pages = [[folder / f"metrics-{repeat}-{when}.txt" for when in ("before", "after")] for repeat in (1, 2)]
    hits, asked = (sum(counted(each, f"vllm:prefix_cache_{what}_total") for each in pages) for what in ("hits", "queries"))
    return hits / asked


def test_traffic_of_two_kinds_is_one_load_and_only_one_kind_hits(runs: dict[str, Path]) -> None:
    """By hand: of 16 prompts with a system's prompt all but the first have it in the cache, or the first two at once."""
    share = measured(load_report(runs["mixed"]), "load")["prefix_hit_share"]
    asked = 16 * (SYSTEM_TOK + 40) + 8 * 600
    assert 14 * SYSTEM_TOK / asked <= hit_share(runs["mixed"]) <= 15 * SYSTEM_TOK / asked * 1.001
    if undisturbed(share):
        assert share.value == pytest.approx(hit_share(runs["mixed"]))
    for result in results(runs["mixed"]):
        assert result["input_lens"] == [SYSTEM_TOK + 40, SYSTEM_TOK + 40, 600] * 8


def test_requests_come_in_bursts_at_the_rate(runs: dict[str, Path]) -> None:
    """The gaps of a Poisson process scatter as much as their mean, and those of such bursts 1 / sqrt(0.25) times as much."""
    undisturbed(measured(load_report(runs["bursts"]), "load")["ttft_p50_ms"])
    gaps = [gap for result in results(runs["bursts"]) for gap in gaps_of(result)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) > 1.4
    assert 1 / statistics.fmean(gaps) == pytest.approx(RATE_REQ_S, rel=0.15)


def gaps_of(result: Document) -> list[float]:
    return [after - before for before, after in pairwise(sorted(result["start_times"]))]


def test_a_trace_is_replayed_as_it_is_and_its_prefixes_hit(runs: dict[str, Path]) -> None:
    run = runs["chats"]
    report = load_report(run)
    rows = measured(report, "load")
    is_in_time = undisturbed(rows["ttft_p50_ms"])
    folder = run / "evidence" / "load"
    trace = planned_trace(folder, report.plan.load)
    assert trace is not None
    # Known are the system's prompt of all prompts but the first, and what each chat's turns before had.
    expected = 15 * SYSTEM_TOK + CHATS * sum(turn * TURN_TOK for turn in range(1, TURNS))
    assert trace.shared_tok == expected
    assert hit_share(run) == pytest.approx(trace.shared_share, rel=0.1)
    if undisturbed(rows["prefix_hit_share"]):
        assert rows["prefix_hit_share"].value == pytest.approx(hit_share(run))
    for result in results(run):
        assert result["input_lens"] == trace.input_toks == [row["input_tok"] for row in chats()]
        assert result["output_lens"] == [REPLY_TOK] * CHATS * TURNS
        assert not is_in_time or max(lateness_s(result["start_times"], trace)) < 0.5
