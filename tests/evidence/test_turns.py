"""A load of chats of several turns, judged from its evidence. tests/live/test_turns.py has it by the real bench."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.loads import measure
from tests.fakes.capacity import about, counts_of, page
from vllm_qualify.evidence.load import steady
from vllm_qualify.evidence.load.result import key_of
from vllm_qualify.judge.verdict import surely_misses
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.load import Load

TURNS, CHATS, INPUT, REPLY, SYSTEM, TEMPLATE = 3, 8, 20, 4, 30, 6
FIRST, LATER = "first_turn_ttft_p50_ms", "later_turns_ttft_p50_ms"
LOAD = Load.model_validate(
    {"input_len": INPUT, "output_len": REPLY, "shared_prefix_len": SYSTEM, "api": "chat", "turns": TURNS, "window": "whole"}
    | {"max_concurrency": 4, "num_prompts": TURNS * CHATS, "num_warmups": 0}
    | {"repeats": 2, "most_repeats": 2, "min_duration_s": 0.01, "counted_from": "second chunk"}
)
LENGTHS = [SYSTEM + TEMPLATE + turn * (INPUT + TEMPLATE) + (turn - 1) * REPLY for turn in (1, 2, 3) for _ in range(CHATS)]
HITS = 0.5


def write(folder: Path, *, slower: float = 1.0, hits: float = HITS, **changes: Any) -> Path:
    """What bench and the server leave: turns in rounds, four requests at a time, first turns slower than later ones."""
    folder.mkdir(parents=True)
    for repeat in (1, 2):
        trace = 1 + 1e-4 * repeat
        ttfts = [(0.040 if at < CHATS else 0.010 * slower) * trace + 1e-6 * at for at in range(TURNS * CHATS)]
        # The role's chunk comes with that of the first token.
        gaps = [[6e-5, *[0.005] * (REPLY - 1)]] * (TURNS * CHATS)
        latencies = [ttft + sum(each) for ttft, each in zip(ttfts, gaps, strict=True)]
        starts, free = list[float](), [100.0 * repeat] * 4
        for latency in latencies:
            starts.append(min(free))
            free[free.index(min(free))] += latency
        result: dict[str, Any] = {"ttfts": ttfts, "itls": gaps, "latencies": latencies, "start_times": starts}
        result |= {"duration": max(free) - 100.0 * repeat + 1e-6}
        result |= about(LOAD, None, LENGTHS, [REPLY] * len(LENGTHS)) | {"turns": str(TURNS), "backend": "openai-chat"}
        result |= changes
        result["total_input_tokens"] = sum(result["input_lens"])
        figures = steady.figures_of(steady.whole_window(steady.requests_of(result, 4), result["duration"]), None)
        result |= {key_of(name): value for name, value in figures.items()}
        (folder / f"bench-{repeat}.json").write_text(json.dumps(result))
        counted = {"prefix_cache_queries": sum(LENGTHS), "prefix_cache_hits": hits * sum(LENGTHS)}
        (folder / f"metrics-{repeat}-before.txt").write_text(page(**dict.fromkeys(counted, 0)))
        (folder / f"metrics-{repeat}-after.txt").write_text(page(0, *counts_of(result), **counted))
    return folder


def because(folder: Path, **changes: Any) -> str:
    return measure(write(folder, **changes), LOAD)[FIRST].invalid_because or ""


def test_the_time_to_the_first_token_is_told_for_first_and_for_later_turns(tmp_path: Path) -> None:
    rows = measure(write(tmp_path / "load"), LOAD)
    assert rows[FIRST].invalid_because is None, rows[FIRST].invalid_because
    assert (rows[FIRST].value, rows[LATER].value) == pytest.approx((40, 10), rel=0.01)
    assert rows[FIRST].traced_to == ["load/bench-1.json:1", "load/bench-2.json:1"]
    assert rows["prefix_hit_share"].value == pytest.approx(HITS)
    # Other loads have no turns.
    assert not {FIRST, LATER} & measure(tmp_path / "load", LOAD.model_copy(update={"turns": 1})).keys()


def test_later_turns_that_are_slower_fail_their_gate(tmp_path: Path) -> None:
    gate = gate_of(metric=LATER, maximum=11.0, unit="ms")
    rows = [measure(write(tmp_path / str(slower), slower=slower), LOAD)[LATER] for slower in (1.0, 1.2)]
    assert [surely_misses(gate, [row]) for row in rows] == [False, True]


def test_what_earlier_turns_had_may_hit_and_no_more(tmp_path: Path) -> None:
    """Each turn's own tokens are new: by hand 24 * 20 of all tokens."""
    most = 1 - TURNS * CHATS * INPUT / sum(LENGTHS)
    assert because(tmp_path / "most", hits=most) == ""
    assert "prefix-cache queries hit" in because(tmp_path / "more", hits=most + 0.05)


def test_a_turn_of_random_text_may_be_read_as_fewer_tokens(tmp_path: Path) -> None:
    """In a chat of the reference model a turn had 813 tokens and the one before 716, with 128 drawn and an empty reply."""
    assert because(tmp_path / "load", input_lens=[*LENGTHS[:-1], LENGTHS[-1 - CHATS] + 12]) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_lens": [*LENGTHS[:-1], LENGTHS[-1 - CHATS] + 2]}, "1 turns do not have the prompt of the one before in them"),
        ({"input_lens": [LENGTHS[0]] * len(LENGTHS)}, "16 turns do not have the prompt of the one before in them"),
        ({"start_times": [*np.linspace(100, 100.06, len(LENGTHS))]}, "turns began before the reply to the one before had come"),
        ({"turns": "1"}, "bench had turns 1, not 3"),
    ],
)
def test_what_was_no_chat_does_not_count(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in because(tmp_path / "load", **changes)
