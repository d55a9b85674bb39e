"""Traces of conversations: each reply of the model is a request, and no text gets into it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_qualify.errors import QualifyError
from vllm_qualify.recipe.traces.conversations import Pace, make_chats
from vllm_qualify.recipe.traces.making import Made
from vllm_qualify.recipe.traces.reading import read_trace

SECRET = "Alice asks about her illness"
SYSTEM = "word " * 64


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def said(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"id": "alice", "conversations": [{"from": role, "value": text} for role, text in messages]}


def chat(*messages: tuple[str, str | None]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in messages]}


def made(folder: Path, content: Any, most: int | None = None) -> Made:
    path = folder / "chats.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return make_chats(path, words, Pace(2.0, 5.0), most)


def rows(of: Made) -> list[dict[str, Any]]:
    return [json.loads(line) for line in of.body.splitlines()]


def test_each_reply_is_a_request_behind_all_that_was_said_before(tmp_path: Path) -> None:
    of = made(tmp_path, [said(("human", SECRET), ("gpt", "one two"), ("human", "three"), ("gpt", "four five six"))])
    assert rows(of) == [
        {"arrival_s": 0.0, "input_tok": 5, "output_tok": 2, "prefix": [["chat-1", 5]]},
        {"arrival_s": 5.0, "input_tok": 8, "output_tok": 3, "prefix": [["chat-1", 8]]},
    ]
    assert "Alice" not in of.body
    assert "alice" not in of.body


def test_conversations_with_the_same_system_prompt_share_it(tmp_path: Path) -> None:
    """By hand: the second chat's prompt has the 64 words of the system's, four whole blocks of 16."""
    both = [chat(("system", SYSTEM), ("user", "a b"), ("assistant", "c")) for _ in range(2)]
    of = made(tmp_path, [*both, chat(("system", "another"), ("user", "a b"), ("assistant", "c"))])
    firsts = [row["prefix"][0] for row in sorted(rows(of), key=lambda row: str(row["prefix"][1]))]
    assert firsts == [["system-0", 64], ["system-0", 64], ["system-1", 1]]
    (tmp_path / "trace.jsonl").write_text(of.body)
    assert read_trace(tmp_path / "trace.jsonl").trace.shared_tok == 64


def test_a_chats_next_turn_begins_with_the_one_before(tmp_path: Path) -> None:
    long = "word " * 32
    of = made(tmp_path, [said(("human", long), ("gpt", long), ("human", long), ("gpt", "end"))])
    (tmp_path / "trace.jsonl").write_text(of.body)
    trace = read_trace(tmp_path / "trace.jsonl").trace
    assert (trace.input_toks, trace.shared_tok) == ([32, 96], 32)


def test_conversations_begin_at_random_times_at_the_rate(tmp_path: Path) -> None:
    one = said(("human", "a"), ("gpt", "b"))
    first, again = (rows(made(tmp_path, [one] * 400)) for _ in range(2))
    assert first == again
    # 400 at 2 per second; the standard deviation is 10 s.
    assert 150 < first[-1]["arrival_s"] < 250
    assert [row["arrival_s"] for row in first] == sorted(row["arrival_s"] for row in first)


def test_json_lines_are_taken_too_and_only_the_first_conversations(tmp_path: Path) -> None:
    lines = [said(("human", "a\u2028b"), ("gpt", "c")), chat(("user", "d"), ("assistant", "e"))]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    assert made(tmp_path, text).requests == 2
    assert made(tmp_path, text, most=1).requests == 1


def test_what_has_no_reply_is_left_out_and_counted(tmp_path: Path) -> None:
    of = made(tmp_path, [said(("human", "a")), said(), said(("gpt", "b")), chat(("user", "a"), ("assistant", None)), GOOD])
    assert (of.requests, of.left_out) == (1, 4)


GOOD = said(("human", "a"), ("gpt", "b"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no conversation has a reply"),
        ([said(("human", "a"))], "no conversation has a reply"),
        ("", "no conversation has a reply"),
        ("[" * 100_000, "it is no JSON"),
        ("[1, 2", "it is no JSON"),
        (json.dumps(GOOD) + "\nnothing\n", "line 2 is no JSON"),
        ([GOOD, 7], "entry 2: it is no conversation"),
        ([GOOD, {"text": "a"}], "entry 2: it is no conversation"),
        ([{"conversations": "a"}], "entry 1: its conversations are no list"),
        ([{"messages": {"role": "user"}}], "entry 1: its messages are no list"),
        ([{"messages": ["a"]}], "entry 1: nobody known says message 1"),
        ([GOOD, said(("human", "a"), ("narrator", "b"))], "entry 2: nobody known says message 2"),
        ([{"conversations": [{"from": ["gpt"], "value": "a"}]}], "entry 1: nobody known says message 1"),
        ([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}], "entry 1: message 1 is no text"),
        ([{"messages": [{"role": "user", "content": 7}]}], "entry 1: message 1 is no text"),
        ('[{"messages": [{"role": "user", "content": "\\ud800"}]}]', "entry 1: message 1 is no text"),
    ],
)
def test_a_hostile_file_ends_in_one_error_that_names_the_entry(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(QualifyError, match=message):
        made(tmp_path, content)


def test_so_does_one_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.json", "no conversations at"), (tmp_path, "no conversations at")):
        with pytest.raises(QualifyError, match=message):
            make_chats(path, words, Pace(1.0, 1.0))
    (tmp_path / "packed").write_bytes(b"\x1f\x8b\xff")
    with pytest.raises(QualifyError, match="not UTF-8"):
        make_chats(tmp_path / "packed", words, Pace(1.0, 1.0))


def test_a_message_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([GOOD]))
    with pytest.raises(QualifyError, match="entry 1: it has 10,000,001 tokens"):
        make_chats(path, lambda texts: [10_000_001] * len(texts), Pace(1.0, 1.0))


KEYS = st.sampled_from(["conversations", "messages", "from", "role", "value", "content", "x"])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(ANY)
def test_whatever_is_in_the_file_ends_in_a_trace_or_in_one_error(tmp_path: Path, content: Any) -> None:
    try:
        of = made(tmp_path, content)
    except QualifyError:
        return
    (tmp_path / "trace.jsonl").write_text(of.body)
    assert len(read_trace(tmp_path / "trace.jsonl").trace.requests) == of.requests
