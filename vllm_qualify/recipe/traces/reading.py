"""Traces from files. A file is hostile until it was read: each of its lines is bounded and checked, and an error names it.

Four forms are known by their first line:

- Mooncake's JSON lines (kvcache-ai/Mooncake, FAST25-release/traces): `timestamp` in ms, `input_length`, `output_length` and
  `hash_ids`, one for each 512 tokens of the prompt.
- Bailian's JSON lines (alibaba-edu/qwen-bailian-usagetraces-anon): the same names and `chat_id` and `turn`, with `timestamp` in
  s and one of `hash_ids` for each 16 tokens.
- The CSV of the Azure LLM inference traces (Azure/AzurePublicDataset): TIMESTAMP, ContextTokens and GeneratedTokens. It says
  nothing of prefixes, so prompts share none.
- JSON lines of this project: `arrival_s`, `input_tok`, `output_tok`, and with `prefix` the stretches that the prompt begins
  with, each a name and a number of tokens. Prompts with the same stretches begin with the same tokens.
"""

import csv
import json
import math
import re
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.traces.trace import Request, Trace

# Larger traces take more memory than a client should need, and longer than a load should last.
MOST_LINE_BYTES, MOST_BYTES, MOST_REQUESTS = 4 * 2**20, 512 * 2**20, 1_000_000
MOST_TOK, MOST_BLOCKS = 10_000_000, 20_000_000
MOONCAKE_BLOCK_TOK, BAILIAN_BLOCK_TOK, OWN_BLOCK_TOK = 512, 16, 16
AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
FORMS = (
    "its first line is a JSON object with timestamp, input_length and output_length (Mooncake; with chat_id and turn:"
    " Bailian), or with arrival_s, input_tok"
    f" and output_tok, or it is {','.join(AZURE)} (Azure)"
)


class Read(NamedTuple):
    """A trace of a file, the form of the file, and the number of the line of each request."""

    trace: Trace
    form: str
    lines: list[int]


class _Row(NamedTuple):
    """A request as a file has it: `prefix` are stretches of tokens, as pairs of a name and a length."""

    arrival_s: float
    input_tok: int
    output_tok: int
    prefix: list[tuple[Any, int]]


class Line(NamedTuple):
    number: int
    text: str
    path: Path

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        raise CallerError(f"line {self.number}: {problem}", remedy, str(self.path))


def read_trace(path: Path, *, most: int | None = None, speed: float = 1.0) -> Read:
    """Read the first `most` requests of a file, sent `speed` times as fast as in it. Later lines are not read.

    Raises HostError if there is no such file, CallerError if it is of no known form, too large, or a line is no request.
    """
    lines = lines_of(path)
    first = next(lines, None)
    form, block_tok, parsed = _detect_form(first, lines) if first else ("", MOST_TOK, iter(()))
    rows, numbers, blocks = list[_Row](), list[int](), 0
    for line, row in parsed:
        _check_row(line, row, rows[-1].arrival_s if rows else 0.0)
        blocks += math.ceil(row.input_tok / block_tok)
        if len(rows) == MOST_REQUESTS or blocks > MOST_BLOCKS:
            line.refuse(f"the trace has more than {MOST_REQUESTS:,} requests or {MOST_BLOCKS:,} blocks of prompts", CUT)
        rows.append(row)
        numbers.append(line.number)
        if len(rows) == most:
            break
    if not rows:
        raise CallerError("it has no request", "give a trace with one request or more", str(path))
    # Where no prompt shares anything, each is one block: an id for every 16 tokens would be much to send.
    ids = _Ids(block_tok if any(row.prefix for row in rows) else MOST_TOK)
    requests = [Request(row.arrival_s / speed, row.input_tok, row.output_tok, ids.block_ids(row)) for row in rows]
    return Read(Trace.from_requests(ids.block_tok, requests), form, numbers)


CUT = "cut the trace, or ask for its first requests only (num_prompts)"


def lines_of(path: Path) -> Iterator[Line]:
    """The lines that are not empty, as text."""
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise HostError(f"no trace at {path}: {error.strerror}", "restore the file, or mend its path", "check") from error
    if not is_file:
        raise CallerError("it is no plain file", "give a file", str(path))
    with path.open("rb") as file:
        read = number = 0
        while body := file.readline(MOST_LINE_BYTES + 1):
            number, read = number + 1, read + len(body)
            if number == 1 and (packed := [kind for begin, kind in COMPRESSED.items() if body.startswith(begin)]):
                raise CallerError(f"it is compressed ({packed[0]})", "unpack it first", str(path))
            line = Line(number, "", path)
            if len(body) > MOST_LINE_BYTES:
                line.refuse(f"it has more than {MOST_LINE_BYTES:,} bytes", "write one request in each line")
            if read > MOST_BYTES:
                line.refuse(f"the file has more than {MOST_BYTES:,} bytes up to here", CUT)
            try:
                text = body.decode().removeprefix("\ufeff" if number == 1 else "").strip()
            except UnicodeDecodeError:
                line.refuse("it is not UTF-8", "save the file as UTF-8")
            if text:
                yield line._replace(text=text)


def _detect_form(first: Line, others: Iterator[Line]) -> tuple[str, int, Iterator[tuple[Line, _Row]]]:
    """The name of a file's form, the tokens of its blocks, and its requests."""
    if [name.strip() for name in first.text.split(",")] == AZURE:
        return "azure", MOST_TOK, ((line, _parse_azure(line)) for line in others)
    row = object_of(first)
    lines = chain([first], others)
    if {"timestamp", "input_length", "output_length", "chat_id", "turn"} <= row.keys():
        return "bailian", BAILIAN_BLOCK_TOK, ((line, _parse_hashed(line, BAILIAN_BLOCK_TOK, 1)) for line in lines)
    if {"timestamp", "input_length", "output_length"} <= row.keys():
        return "mooncake", MOONCAKE_BLOCK_TOK, ((line, _parse_hashed(line, MOONCAKE_BLOCK_TOK, 1000)) for line in lines)
    if {"arrival_s", "input_tok", "output_tok"} <= row.keys():
        return "vllm-qualify", OWN_BLOCK_TOK, ((line, _parse_own(line)) for line in lines)
    first.refuse("the file is no trace of a known form", FORMS)


def object_of(line: Line) -> dict[str, Any]:
    try:
        row = json.loads(line.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        line.refuse("it is no JSON object", f"a trace has one request in each line: {FORMS}")
    return row


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(constant)


def _number_at(line: Line, row: dict[str, Any], name: str) -> float:
    value: Any = row.get(name)
    # A whole number can be too large for a float.
    if type(value) not in (int, float) or not abs(value) < 1e18:
        line.refuse(f"{name} is no number", f"give {name} of each request")
    return float(value)


def _whole_at(line: Line, row: dict[str, Any], name: str) -> int:
    value: Any = row.get(name)
    if type(value) is not int:
        line.refuse(f"{name} is no whole number", f"give {name} of each request, in tokens")
    return value


def _parse_hashed(line: Line, block_tok: int, ticks_per_s: int) -> _Row:
    row = object_of(line)
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or any(type(each) is not int for each in ids):
        remedy = f"give one id for each {block_tok} tokens of the prompt, or leave it out"
        line.refuse("hash_ids is no list of whole numbers", remedy)
    length = _whole_at(line, row, "input_length")
    most = math.ceil(length / block_tok) if 0 < length <= MOST_TOK else len(ids)
    if len(ids) > most:
        line.refuse(f"it has {len(ids)} hash_ids, and {length} tokens have {most} blocks of {block_tok}", "mend hash_ids")
    prefix = [(each, block_tok) for each in ids]
    return _Row(_number_at(line, row, "timestamp") / ticks_per_s, length, _whole_at(line, row, "output_length"), prefix)


def _parse_own(line: Line) -> _Row:
    row = object_of(line)
    if unknown := row.keys() - {"arrival_s", "input_tok", "output_tok", "prefix"}:
        line.refuse(f"it has the unknown key {min(unknown)}", "write arrival_s, input_tok, output_tok and prefix alone")
    stretches, length = row.get("prefix", []), _whole_at(line, row, "input_tok")
    remedy = 'write pairs of a name and a number of tokens, like [["system", 512], ["chat-7", 300]]'
    if not isinstance(stretches, list) or not all(_is_stretch(each) for each in stretches):
        line.refuse("prefix is no list of stretches", remedy)
    if (total := sum(each[1] for each in stretches)) > length:
        line.refuse(f"its prefix has {total} tokens, and its prompt {length}", "mend prefix or input_tok")
    prefix = [(name, tok) for name, tok in stretches]
    return _Row(_number_at(line, row, "arrival_s"), length, _whole_at(line, row, "output_tok"), prefix)


def _is_stretch(stretch: object) -> bool:
    if not isinstance(stretch, list) or len(stretch) != 2:
        return False
    name, tokens = stretch
    return isinstance(name, str) and type(tokens) is int and 0 < tokens <= MOST_TOK


def _parse_azure(line: Line) -> _Row:
    try:
        cells = [cell.strip() for cell in next(csv.reader([line.text], strict=True))]
    except (csv.Error, StopIteration):
        cells = []
    if len(cells) != len(AZURE):
        line.refuse(f"it does not have the {len(AZURE)} cells of the first line", "write a time and two numbers in each line")
    for name, cell in zip(AZURE[1:], cells[1:], strict=True):
        if not re.fullmatch(r"[0-9]{1,12}", cell):
            line.refuse(f"{name} is no whole number", f"give {name} of each request, in tokens")
    return _Row(_parse_time_s(line, cells[0]), int(cells[1]), int(cells[2]), [])


def _parse_time_s(line: Line, written: str) -> float:
    """A time like 2023-11-16 18:15:46.6805900, with more digits than Python reads, in s since 1970; UTC if it names no zone."""
    match = re.fullmatch(r"([-0-9]{10}[ T][:0-9]{8})(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:?[0-9]{2})?", written)
    try:
        if not match:
            raise ValueError(written)
        moment = datetime.fromisoformat(f"{match[1]}{match[3] or '+00:00'}")
    except ValueError:
        line.refuse("TIMESTAMP is no time", "write it like 2023-11-16 18:15:46.6805900")
    began = datetime(1970, 1, 1, tzinfo=UTC)
    return (moment - began).total_seconds() + float(match[2] or 0)


def _check_row(line: Line, row: _Row, before_s: float) -> None:
    """Refuse a request that no server could be sent, or that comes before the one before it."""
    if not 0 <= row.arrival_s < math.inf:
        line.refuse(f"its time is {row.arrival_s:g} s", "give times from 0 on")
    if row.arrival_s < before_s:
        line.refuse(f"its time is {row.arrival_s:g} s, before that of the request before it", "sort the lines by their time")
    for what, tokens in (("prompt", row.input_tok), ("reply", row.output_tok)):
        if not 1 <= tokens <= MOST_TOK:
            line.refuse(f"its {what} has {tokens:,} tokens", f"leave out requests that do not have 1 to {MOST_TOK:,}")


class _Ids:
    """Gives the blocks of prompts their ids.

    A stretch is cut to whole blocks, since a prefix cache keeps nothing smaller; the rest of a prompt is its own.
    """

    def __init__(self, block_tok: int) -> None:
        self.block_tok = block_tok
        self._alone = 0
        self._known: dict[tuple[Any, int], int] = {}

    def block_ids(self, row: _Row) -> tuple[int, ...]:
        blocks, left = list[int](), row.input_tok
        for name, tokens in row.prefix:
            # The last block of Mooncake's prompts may be shorter, and still has an id.
            whole = min(1, left) if tokens == self.block_tok else min(tokens, left) // self.block_tok
            for at in range(whole):
                blocks.append(self._known.setdefault((name, at), len(self._known)))
                left -= self.block_tok
        while left > 0:
            # No other block has this name.
            self._alone += 1
            blocks.append(self._known.setdefault((self, self._alone), len(self._known)))
            left -= self.block_tok
        return tuple(blocks)
