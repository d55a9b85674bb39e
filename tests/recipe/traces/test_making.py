"""Traces of production's logs and spans, and of conversations: times and lengths alone get into them, and no text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_qualify.cli.commands import app
from vllm_qualify.errors import CallerError, QualifyError
from vllm_qualify.recipe.traces.conversations import Pace, make_chats
from vllm_qualify.recipe.traces.making import Fields, Made, make_trace
from vllm_qualify.recipe.traces.reading import read_trace
from vllm_qualify.recipe.traces.trace import Trace

FIELDS = Fields("time", "usage.prompt_tokens", "usage.completion_tokens")
SECRET = "Alice asks about her illness"
TIMES: list[Any] = ["now", True, -5, 10**400, []]


def entry(time: Any, prompt: Any, reply: Any) -> dict[str, Any]:
    return {"time": time, "user": "alice", "text": SECRET, "usage": {"prompt_tokens": prompt, "completion_tokens": reply}}


def span(
    nanoseconds: Any, prompt: Any, reply: Any, names: tuple[str, str] = ("input_tokens", "output_tokens")
) -> dict[str, Any]:
    values = zip(names, (prompt, reply), strict=True)
    usage = [{"key": f"gen_ai.usage.{name}", "value": {"intValue": value}} for name, value in values]
    text = {"key": "gen_ai.input.messages", "value": {"stringValue": SECRET}}
    return {"name": "chat", "startTimeUnixNano": nanoseconds, "attributes": [text, *usage]}


def export(*spans: Any) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {"name": "vllm"}, "spans": [*spans]}]}]}


def requests_in(made: Made) -> list[dict[str, Any]]:
    return [json.loads(line) for line in made.body.splitlines()]


def written(folder: Path, rows: list[Any]) -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_log_becomes_a_trace_sorted_by_time_without_the_requests_that_failed(tmp_path: Path) -> None:
    rows = [entry("2026-11-25T07:00:01.500000001Z", 30, 3), entry("2026-11-25T08:00:00+01:00", 20, 2), entry(1795590002, 40, 4)]
    failures = [entry(1795590001, 20, 0), {"time": 1795590003, "status": 500}]
    made = make_trace(written(tmp_path, rows + failures), FIELDS)
    assert (made.requests, made.left_out) == (3, 2)
    assert requests_in(made) == [
        {"arrival_s": 0.0, "input_tok": 20, "output_tok": 2},
        {"arrival_s": 1.5, "input_tok": 30, "output_tok": 3},
        {"arrival_s": 2.0, "input_tok": 40, "output_tok": 4},
    ]


@pytest.mark.parametrize("names", [("input_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens")])
def test_spans_become_a_trace(tmp_path: Path, names: tuple[str, str]) -> None:
    later, first = span("1700000000500000000", "30", 3, names), span("1700000000000000000", 20, "2", names)
    other = {"name": "GET /health", "startTimeUnixNano": "1700000000100000000"}
    made = make_trace(written(tmp_path, [export(later), export(other, first)]))
    assert (made.requests, made.left_out) == (2, 1)
    assert [tuple(row.values()) for row in requests_in(made)] == [(0.0, 20, 2), (0.5, 30, 3)]


def test_the_command_writes_a_trace_that_can_be_read_and_has_no_text(tmp_path: Path) -> None:
    log, out = written(tmp_path, [entry(5, 20, 2), entry(6, 30, 3)]), tmp_path / "trace.jsonl"
    done = CliRunner().invoke(app, ["trace", "make", str(log), "--out", str(out), "--fields", ",".join(FIELDS)])
    assert done.exit_code == 0
    assert "2 requests; 0 lines" in done.stdout
    assert read_trace(out).trace.input_toks == [20, 30]
    assert not {"Alice", "alice", "illness"} & set(out.read_text().replace('"', " ").split())


@pytest.mark.parametrize(
    ("fields", "rows", "message"),
    [
        *((FIELDS, [entry(time, 20, 2)], "line 1: time is no time") for time in TIMES),
        (FIELDS, [entry(0, 20, 2), entry(0, "20", 2)], "line 2: usage.prompt_tokens is no number of tokens"),
        (FIELDS, [entry(0, 10**12, 2)], "line 1: usage.prompt_tokens is no number of tokens"),
        (FIELDS, [entry(0, 20, -2)], "line 1: usage.completion_tokens is no number of tokens"),
        (FIELDS, [[]], "line 1: it is no JSON object"),
        (FIELDS, [{"time": 1}], "no line is a request that was answered"),
        (None, [{"resourceSpans": {}}], "line 1: resourceSpans is no list"),
        (None, [{"resourceSpans": [7]}], "line 1: scopeSpans is no list"),
        (None, [export(7)], "line 1: attributes is no list"),
        *((None, [export(span(time, 20, 2))], "line 1: startTimeUnixNano of a span is no time") for time in ("soon", None)),
        (None, [export(span("1700000000000000000", 10**12, 2))], "line 1: a span has 1,000,000,000,000 tokens"),
        (None, [export(span("1700000000000000000", -5, 2))], "no span has both of a request's numbers of tokens"),
        (None, [{"spans": []}], "no span has both of a request's numbers of tokens"),
    ],
)
def test_a_hostile_log_or_export_ends_with_one_error(
    tmp_path: Path, fields: Fields | None, rows: list[Any], message: str
) -> None:
    with pytest.raises(CallerError) as raised:
        make_trace(written(tmp_path, rows), fields)
    assert raised.value.problem.startswith(message)


@pytest.mark.parametrize("fields", ["time", "a,b", "a,b,c,d", "a,,c", ""])
def test_fields_that_are_not_three_are_refused(tmp_path: Path, fields: str) -> None:
    log = written(tmp_path, [entry(5, 20, 2)])
    done = CliRunner().invoke(app, ["trace", "make", str(log), "--out", str(tmp_path / "out"), "--fields", fields])
    assert isinstance(done.exception, CallerError)
    assert done.exception.place == "--fields"


KEYS = st.sampled_from(["resourceSpans", "time", "usage", "conversations", "messages", "from", "role", "value", "content"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=JSON, of_log=st.booleans())
def test_no_line_ends_with_anything_but_a_trace_or_one_error(tmp_path: Path, row: Any, of_log: bool) -> None:
    path = written(tmp_path, [row])
    with pytest.raises(CallerError):
        make_trace(path, FIELDS if of_log else None)


# --- conversations: each reply of the model is a request

SYSTEM = "word " * 64


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def said(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"id": "alice", "conversations": [{"from": role, "value": text} for role, text in messages]}


def chat(*messages: tuple[str, str | None]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in messages]}


def make(folder: Path, content: Any, most: int | None = None) -> Made:
    path = folder / "chats.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return make_chats(path, words, Pace(2.0, 5.0), most)


GOOD = said(("human", "a"), ("gpt", "b"))


def read_back(folder: Path, made: Made) -> Trace:
    (folder / "trace.jsonl").write_text(made.body)
    return read_trace(folder / "trace.jsonl").trace


def test_each_reply_is_a_request_behind_all_that_was_said_before(tmp_path: Path) -> None:
    made = make(tmp_path, [said(("human", SECRET), ("gpt", "one two"), ("human", "three"), ("gpt", "four five six"))])
    assert requests_in(made) == [
        {"arrival_s": 0.0, "input_tok": 5, "output_tok": 2, "prefix": [["chat-1", 5]]},
        {"arrival_s": 5.0, "input_tok": 8, "output_tok": 3, "prefix": [["chat-1", 8]]},
    ]
    assert "alice" not in made.body.lower()


def test_conversations_with_the_same_system_prompt_share_it(tmp_path: Path) -> None:
    """By hand: the second chat's prompt has the 64 words of the system's, four whole blocks of 16."""
    both = [chat(("system", SYSTEM), ("user", "a b"), ("assistant", "c")) for _ in range(2)]
    made = make(tmp_path, [*both, chat(("system", "another"), ("user", "a b"), ("assistant", "c"))])
    firsts = [row["prefix"][0] for row in sorted(requests_in(made), key=lambda row: str(row["prefix"][1]))]
    assert firsts == [["system-0", 64], ["system-0", 64], ["system-1", 1]]
    assert read_back(tmp_path, made).shared_tok == 64


def test_a_chats_next_turn_begins_with_the_one_before(tmp_path: Path) -> None:
    long = "word " * 32
    trace = read_back(tmp_path, make(tmp_path, [said(("human", long), ("gpt", long), ("human", long), ("gpt", "end"))]))
    assert (trace.input_toks, trace.shared_tok) == ([32, 96], 32)


def test_conversations_begin_at_random_times_at_the_rate(tmp_path: Path) -> None:
    one = said(("human", "a"), ("gpt", "b"))
    first, again = (requests_in(make(tmp_path, [one] * 400)) for _ in range(2))
    assert first == again
    # 400 at 2 per second; the standard deviation is 10 s.
    assert 150 < first[-1]["arrival_s"] < 250
    assert [row["arrival_s"] for row in first] == sorted(row["arrival_s"] for row in first)


def test_json_lines_are_taken_too_and_only_the_first_conversations(tmp_path: Path) -> None:
    lines = [said(("human", "a\u2028b"), ("gpt", "c")), chat(("user", "d"), ("assistant", "e"))]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    assert make(tmp_path, text).requests == 2
    assert make(tmp_path, text, most=1).requests == 1


def test_what_has_no_reply_is_left_out_and_counted(tmp_path: Path) -> None:
    made = make(tmp_path, [said(("human", "a")), said(), said(("gpt", "b")), chat(("user", "a"), ("assistant", None)), GOOD])
    assert (made.requests, made.left_out) == (1, 4)


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
        make(tmp_path, content)


def test_so_does_one_that_is_not_there_or_no_text_or_has_a_message_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(b"\x1f\x8b\xff")
    (tmp_path / "long").write_text(json.dumps([GOOD]))
    unread = dict.fromkeys(("none", ""), "no conversations at") | {"packed": "not UTF-8"}
    for name, message in (unread | {"long": "entry 1: it has 10,000,001 tokens"}).items():
        with pytest.raises(QualifyError, match=message):
            make_chats(tmp_path / name, lambda texts: [10_000_001] * len(texts), Pace(1.0, 1.0))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(JSON)
def test_whatever_is_in_the_file_ends_in_a_trace_or_in_one_error(tmp_path: Path, content: Any) -> None:
    try:
        made = make(tmp_path, content)
    except QualifyError:
        return
    assert len(read_back(tmp_path, made).requests) == made.requests
