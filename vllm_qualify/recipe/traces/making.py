"""Traces from what production keeps: JSON lines of an access log, or OpenTelemetry's spans as OTLP's JSON, an export in a line.

Only times and numbers of tokens are read. No text gets into a trace, and no name of a user or of a session.
"""

import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.traces.reading import MOST_TOK, Line, lines_of, object_of

# OpenTelemetry's semantic conventions for generative AI have renamed them; vLLM's own spans have the older names.
INPUT_NAMES = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT_NAMES = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")


class Fields(NamedTuple):
    """The keys of an access log's lines. A key within an object is written with a dot, like `usage.prompt_tokens`."""

    time: str
    input_tok: str
    output_tok: str


class Made(NamedTuple):
    """A trace's lines, sorted by time, and how many lines or spans were left out because they generated nothing."""

    body: str
    requests: int
    left_out: int


class _Sent(NamedTuple):
    time_s: float
    input_tok: int
    output_tok: int


def make_trace(file: Path, fields: Fields | None = None) -> Made:
    """Make a trace of a log with these `fields`, or else of spans.

    Raises HostError if there is no such file, CallerError if a line is not of this form, or no request is left.
    """
    rows = [row for line in lines_of(file) for row in (_parse_log(line, fields) if fields else _parse_spans(line))]
    sent = sorted(row for row in rows if row is not None)
    if not sent:
        if fields:
            raise CallerError("no line is a request that was answered", "name its keys with --fields", str(file))
        remedy = f"it needs {INPUT_NAMES[0]} and {OUTPUT_NAMES[0]}; of a log, name --fields"
        raise CallerError("no span has both of a request's numbers of tokens", remedy, str(file))
    began_s = sent[0].time_s
    lines = [
        {"arrival_s": round(time_s - began_s, 6), "input_tok": input_tok, "output_tok": output_tok}
        for time_s, input_tok, output_tok in sent
    ]
    return Made("".join(f"{json.dumps(line)}\n" for line in lines), len(sent), len(rows) - len(sent))


def _parse_log(line: Line, fields: Fields) -> Iterator[_Sent | None]:
    row = object_of(line)
    time, *lengths = (_value_at(row, name) for name in fields)
    if any(length in (None, 0) for length in lengths):
        # A request that failed, or one of another kind.
        yield None
        return
    for name, length in zip(fields[1:], lengths, strict=True):
        if type(length) is not int or not 0 < length <= MOST_TOK:
            line.refuse(f"{name} is no number of tokens", "name the right key with --fields, or leave the line out")
    yield _Sent(_time_s(line, fields.time, time), *lengths)


def _value_at(row: Any, name: str) -> Any:
    """What is at a name, also at one with dots of its own; None if there is nothing."""
    if isinstance(row, dict) and name in row:
        return row[name]
    first, _, rest = name.partition(".")
    return _value_at(row[first], rest) if rest and isinstance(row, dict) and first in row else None


def _time_s(line: Line, name: str, value: Any) -> float:
    """Seconds since 1970, from a number of them or from a time as ISO 8601 writes it; UTC if that names no zone."""
    try:
        # Python reads six digits of a second; logs have up to nine.
        text = re.sub(r"(\.\d{6})\d{1,3}", r"\1", value) if isinstance(value, str) else ""
        moment = datetime.fromisoformat(text) if text else None
        time_s = float(value) if moment is None else (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError):
        time_s = math.nan
    if isinstance(value, bool) or not 0 <= time_s < 1e11:
        line.refuse(f"{name} is no time", "give seconds since 1970, or a time like 2026-11-25T07:00:00.5Z")
    return time_s


def _parse_spans(line: Line) -> Iterator[_Sent | None]:
    export = object_of(line)
    for resource in _list_at(line, export, "resourceSpans"):
        for scope in _list_at(line, resource, "scopeSpans"):
            for span in _list_at(line, scope, "spans"):
                yield _parse_span(line, span)


def _list_at(line: Line, of: Any, name: str) -> list[Any]:
    values = of.get(name, []) if isinstance(of, dict) else None
    if not isinstance(values, list):
        line.refuse(f"{name} is no list", "give spans as an OTLP exporter writes them as JSON, one export in each line")
    return values


def _parse_span(line: Line, span: Any) -> _Sent | None:
    given = {each.get("key"): each.get("value") for each in _list_at(line, span, "attributes") if isinstance(each, dict)}
    lengths = [_count_tokens(given, names) for names in (INPUT_NAMES, OUTPUT_NAMES)]
    if not all(lengths):
        return None
    started = _parse_whole(span.get("startTimeUnixNano"))
    if started is None or not 0 < started < 10**20:
        line.refuse("startTimeUnixNano of a span is no time", "export the spans anew")
    input_tok, output_tok = (length or 0 for length in lengths)
    if max(input_tok, output_tok) > MOST_TOK:
        line.refuse(f"a span has {max(input_tok, output_tok):,} tokens", f"leave out requests of more than {MOST_TOK:,}")
    return _Sent(started / 1e9, input_tok, output_tok)


def _count_tokens(given: dict[Any, Any], names: tuple[str, ...]) -> int | None:
    """A span's number of tokens; OTLP's JSON has whole numbers as texts."""
    values = [value for name in names if isinstance(value := given.get(name), dict)]
    return _parse_whole(values[0].get("intValue")) if values else None


def _parse_whole(value: Any) -> int | None:
    return int(value) if isinstance(value, str | int) and re.fullmatch(r"[0-9]{1,25}", str(value)) else None
