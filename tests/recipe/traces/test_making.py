"""Traces of production's logs and spans: times and lengths alone get into them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_qualify.cli.commands import app
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.traces.making import Fields, make_trace
from vllm_qualify.recipe.traces.reading import read_trace

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


def written(folder: Path, rows: list[Any]) -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_log_becomes_a_trace_sorted_by_time(tmp_path: Path) -> None:
    rows = [entry("2026-11-25T07:00:01.500000001Z", 30, 3), entry("2026-11-25T08:00:00+01:00", 20, 2), entry(1795590002, 40, 4)]
    made = make_trace(written(tmp_path, rows), FIELDS)
    assert [json.loads(line) for line in made.body.splitlines()] == [
        {"arrival_s": 0.0, "input_tok": 20, "output_tok": 2},
        {"arrival_s": 1.5, "input_tok": 30, "output_tok": 3},
        {"arrival_s": 2.0, "input_tok": 40, "output_tok": 4},
    ]


def test_requests_that_failed_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [entry(0, 20, 2), entry(1, 20, 0), {"time": 2, "status": 500}]
    made = make_trace(written(tmp_path, rows), FIELDS)
    assert (made.requests, made.left_out) == (1, 2)


@pytest.mark.parametrize("names", [("input_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens")])
def test_spans_become_a_trace(tmp_path: Path, names: tuple[str, str]) -> None:
    later, first = span("1700000000500000000", "30", 3, names), span("1700000000000000000", 20, "2", names)
    other = {"name": "GET /health", "startTimeUnixNano": "1700000000100000000"}
    made = make_trace(written(tmp_path, [export(later), export(other, first)]))
    assert (made.requests, made.left_out) == (2, 1)
    rows = [json.loads(line) for line in made.body.splitlines()]
    assert [(row["arrival_s"], row["input_tok"], row["output_tok"]) for row in rows] == [(0.0, 20, 2), (0.5, 30, 3)]


def test_the_command_writes_a_trace_that_can_be_read_and_has_no_text(tmp_path: Path) -> None:
    log, out = written(tmp_path, [entry(5, 20, 2), entry(6, 30, 3)]), tmp_path / "trace.jsonl"
    done = CliRunner().invoke(app, ["trace", "make", str(log), "--out", str(out), "--fields", ",".join(FIELDS)])
    assert done.exit_code == 0
    assert "2 requests; 0 lines" in done.stdout
    assert read_trace(out).trace.input_toks == [20, 30]
    assert not {"Alice", "alice", "illness"} & set(out.read_text().replace('"', " ").split())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        *(([entry(time, 20, 2)], "line 1: time is no time") for time in TIMES),
        ([entry(0, 20, 2), entry(0, "20", 2)], "line 2: usage.prompt_tokens is no number of tokens"),
        ([entry(0, 10**12, 2)], "line 1: usage.prompt_tokens is no number of tokens"),
        ([entry(0, 20, -2)], "line 1: usage.completion_tokens is no number of tokens"),
        ([[]], "line 1: it is no JSON object"),
        ([{"time": 1}], "no line is a request that was answered"),
    ],
)
def test_a_hostile_log_ends_with_one_error(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(CallerError) as raised:
        make_trace(written(tmp_path, rows), FIELDS)
    assert raised.value.problem.startswith(message)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"resourceSpans": {}}], "line 1: resourceSpans is no list"),
        ([{"resourceSpans": [7]}], "line 1: scopeSpans is no list"),
        ([export(7)], "line 1: attributes is no list"),
        *(([export(span(time, 20, 2))], "line 1: startTimeUnixNano of a span is no time") for time in ("soon", None)),
        ([export(span("1700000000000000000", 10**12, 2))], "line 1: a span has 1,000,000,000,000 tokens"),
        ([export(span("1700000000000000000", -5, 2))], "no span has both of a request's numbers of tokens"),
        ([{"spans": []}], "no span has both of a request's numbers of tokens"),
    ],
)
def test_hostile_spans_end_with_one_error(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(CallerError) as raised:
        make_trace(written(tmp_path, rows))
    assert raised.value.problem.startswith(message)


@pytest.mark.parametrize("fields", ["time", "a,b", "a,b,c,d", "a,,c", ""])
def test_fields_that_are_not_three_are_refused(tmp_path: Path, fields: str) -> None:
    log = written(tmp_path, [entry(5, 20, 2)])
    done = CliRunner().invoke(app, ["trace", "make", str(log), "--out", str(tmp_path / "out"), "--fields", fields])
    assert isinstance(done.exception, CallerError)
    assert done.exception.place == "--fields"


KEYS = st.sampled_from(["resourceSpans", "time", "usage"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=JSON, of_log=st.booleans())
def test_no_line_ends_with_anything_but_a_trace_or_one_error(tmp_path: Path, row: Any, of_log: bool) -> None:
    path = written(tmp_path, [row])
    with pytest.raises(CallerError):
        make_trace(path, FIELDS if of_log else None)
