"""Traces from files: what the three forms give, what is told of them, and that a hostile file ends with one error."""

import gzip
import json
import os
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_qualify.cli.commands import app
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.traces import reading
from vllm_qualify.recipe.traces.reading import MOST_LINE_BYTES, MOST_TOK, read_trace
from vllm_qualify.recipe.traces.summary import summary_of
from vllm_qualify.recipe.traces.trace import Request, Trace

# The first lines of Mooncake's conversation_trace.jsonl and toolagent_trace.jsonl, as published.
MOONCAKE = [
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}',
    '{"timestamp": 0, "input_length": 2290, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}',
    '{"timestamp": 1500, "input_length": 3121, "output_length": 20, "hash_ids": [74, 75, 76, 77, 78, 79, 80]}',
    '{"timestamp": 3000, "input_length": 3137, "output_length": 19, "hash_ids": [74, 75, 76, 77, 78, 126, 127]}',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2024-05-10 00:00:00.009930+00:00,879,55",
]
OURS = [
    '{"arrival_s": 10.0, "input_tok": 100, "output_tok": 5, "prefix": [["system", 64], ["chat-1", 20]]}',
    '{"arrival_s": 10.5, "input_tok": 200, "output_tok": 6, "prefix": [["system", 64], ["chat-1", 100]]}',
    '{"arrival_s": 11.0, "input_tok": 100, "output_tok": 7, "prefix": [["system", 64], ["chat-2", 20]]}',
    '{"arrival_s": 11.0, "input_tok": 100, "output_tok": 8}',
]


BAILIAN = [
    json.dumps(
        {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132, "type": "text"}
        | {"turn": 2, "hash_ids": list(range(1, 34))}
    ),
    json.dumps(
        {"chat_id": 160, "parent_chat_id": -1, "timestamp": 62.364, "input_length": 48, "output_length": 9, "type": "text"}
        | {"turn": 1, "hash_ids": [1, 2, 90]}
    ),
]


def written(folder: Path, lines: list[str] | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(lines if isinstance(lines, bytes) else "\n".join([*lines, ""]).encode())
    return path


def requests(trace: Trace) -> list[tuple[float, int, int]]:
    return [(arrival_s, input_tok, output_tok) for arrival_s, input_tok, output_tok, _ in trace.requests]


def test_mooncakes_trace_is_read_as_published(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, MOONCAKE))
    assert (read.form, read.lines, read.trace.block_tok) == ("mooncake", [1, 2, 3, 4], 512)
    assert requests(read.trace) == [(0.0, 6758, 500), (0.0, 2290, 316), (1.5, 3121, 20), (3.0, 3137, 19)]
    assert read_trace(written(tmp_path, MOONCAKE), speed=2.0).trace.arrivals_s == [0.0, 0.0, 0.75, 1.5]
    # The second begins with one block of the first, the fourth with five of the third: 6 of 512 tokens.
    assert read.trace.shared_tok == 3072
    assert read.trace.shared_share == 3072 / (6758 + 2290 + 3121 + 3137)


def test_bailians_trace_is_read_in_seconds_and_with_its_own_blocks(tmp_path: Path) -> None:
    """alibaba-edu/qwen-bailian-usagetraces-anon: Mooncake's names, other units."""
    read = read_trace(written(tmp_path, BAILIAN))
    assert (read.form, read.trace.block_tok) == ("bailian", 16)
    assert requests(read.trace) == [(0.0, 521, 132), (pytest.approx(1.25), 48, 9)]
    # The second begins with two blocks of the first.
    assert read.trace.shared_tok == 32


def test_azures_trace_is_read_as_published(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, AZURE), most=2)
    assert (read.form, read.lines) == ("azure", [2, 3])
    assert requests(read.trace) == [(0.0, 374, 44), (pytest.approx(4.314579), 396, 109)]
    assert read.trace.shared_tok == 0
    # Its later trace has a zone.
    began = "2024-05-09 23:59:59+00:00,1,1"
    assert requests(read_trace(written(tmp_path, [AZURE[0], began, AZURE[3]])).trace)[1] == (1.00993, 879, 55)


def test_our_own_form_shares_whole_blocks_of_its_stretches(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, OURS))
    assert (read.form, read.trace.block_tok) == ("vllm-qualify", 16)
    assert requests(read.trace) == [(0.0, 100, 5), (0.5, 200, 6), (1.0, 100, 7), (1.0, 100, 8)]
    # The second has the first's 64 and 16 of its 20 tokens, the third has 64 in common with both, the last has none.
    assert read.trace.shared_tok == 80 + 64


def test_a_prompt_that_is_another_ones_beginning_is_not_all_remembered(tmp_path: Path) -> None:
    line = '{"arrival_s": 0, "input_tok": 64, "output_tok": 1, "prefix": [["a", 64]]}'
    assert read_trace(written(tmp_path, [line, line])).trace.shared_tok == 63


def test_a_trace_without_prefixes_has_one_block_for_each_prompt(tmp_path: Path) -> None:
    lines = ['{"arrival_s": 0, "input_tok": 131072, "output_tok": 1}'] * 3
    trace = read_trace(written(tmp_path, lines)).trace
    assert [len(blocks) for *_, blocks in trace.requests] == [1, 1, 1]
    assert trace.shared_tok == 0


def test_one_trace_in_two_forms_or_with_other_ids_is_one_trace(tmp_path: Path) -> None:
    azure = [AZURE[0], "2023-11-16 18:15:46.5,374,44", "2023-11-16 18:15:47.0,396,109"]
    ours = ['{"arrival_s": 7, "input_tok": 374, "output_tok": 44}', '{"arrival_s": 7.5, "input_tok": 396, "output_tok": 109}']
    renamed = [line.replace("[0,", "[900,").replace("[74,", "[7400,") for line in MOONCAKE]
    for pair in ((azure, ours), (MOONCAKE, renamed)):
        one, other = (read_trace(written(tmp_path, lines)).trace for lines in pair)
        assert one.digest == other.digest


def test_what_bench_gets_makes_prompts_of_just_these_lengths(tmp_path: Path) -> None:
    """Bench stops a prompt where its ids end, and makes a block of an id: as many ids as blocks, in every repeat others."""
    trace = read_trace(written(tmp_path, OURS)).trace
    one, other = ([json.loads(line) for line in trace.for_bench(number).splitlines()] for number in (3, 4))
    assert [row["timestamp"] for row in one] == [0.0, 0.5, 1.0, 1.0]
    assert [len(row["hash_ids"]) for row in one] == [7, 13, 7, 7]
    assert [(row["input_length"], row["output_length"]) for row in one] == [(100, 5), (200, 6), (100, 7), (100, 8)]
    ids, others = ({each for row in rows for each in row["hash_ids"]} for rows in (one, other))
    assert not ids & others


# --- What is no trace

GOOD = {"arrival_s": 1.0, "input_tok": 10, "output_tok": 5}


def ours(**changes: Any) -> str:
    return json.dumps(GOOD | changes)


def mooncake(**changes: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]} | changes)


HOSTILE: dict[str, tuple[list[str] | bytes, str]] = {
    "a time that is none": ([ours(), ours(arrival_s="now")], "line 2: arrival_s is no number"),
    "NaN": ([ours(), '{"arrival_s": NaN, "input_tok": 1, "output_tok": 1}'], "line 2: it is no JSON object"),
    "infinity": (['{"arrival_s": Infinity, "input_tok": 1, "output_tok": 1}'], "line 1: it is no JSON object"),
    "a time too large for a float": ([ours().replace("1.0", "1e999")], "line 1: arrival_s is no number"),
    "a whole number too large for a float": ([ours(arrival_s=10**400)], "line 1: arrival_s is no number"),
    "a number of 5,000 digits": (['{"arrival_s": ' + "9" * 5000 + "}"], "line 1: it is no JSON object"),
    "a negative time": ([ours(arrival_s=-1)], "line 1: its time is -1 s"),
    "a time that goes back": ([ours(), ours(), ours(arrival_s=0.5)], "line 3: its time is 0.5 s, before that of the request"),
    "true for a number": ([ours(input_tok=True)], "line 1: input_tok is no whole number"),
    "half a token": ([ours(input_tok=1.5)], "line 1: input_tok is no whole number"),
    "no prompt": ([ours(input_tok=0)], "line 1: its prompt has 0 tokens"),
    "no reply": ([ours(output_tok=0)], "line 1: its reply has 0 tokens"),
    "a negative length": ([ours(output_tok=-5)], "line 1: its reply has -5 tokens"),
    "a billion tokens": ([ours(), ours(input_tok=10**9)], "line 2: its prompt has 1,000,000,000 tokens"),
    "a billion tokens in an unused key": ([ours(text="x" * 2000)], "line 1: it has the unknown key text"),
    "a missing key": ([ours(), '{"arrival_s": 2}'], "line 2: input_tok is no whole number"),
    "a list": ([ours(), "[1, 2]"], "line 2: it is no JSON object"),
    "a cut line": ([ours(), ours()[:20]], "line 2: it is no JSON object"),
    "deep nesting": (['{"arrival_s": ' + "[" * 100_000], "line 1: it is no JSON object"),
    "another file": (["model: llama", "profiles:"], "line 1: it is no JSON object"),
    "another JSON": (['{"prompt": "Hello"}'], "line 1: the file is no trace of a known form"),
    "not UTF-8": (ours().encode() + b"\n" + '{"arrival_s": "é"}'.encode("latin-1") + b"\n", "line 2: it is not UTF-8"),
    "UTF-16": (ours().encode("utf-16"), "line 1: it is not UTF-8"),
    "zeros": (b"\0" * 4096, "line 1: it is no JSON object"),
    "nothing": (b"", "it has no request"),
    "empty lines": (b"\n\n\n", "it has no request"),
    "a header alone": ([AZURE[0]], "it has no request"),
    "a prefix longer than its prompt": ([ours(prefix=[["a", 11]])], "line 1: its prefix has 11 tokens, and its prompt 10"),
    "a prefix that is a name": ([ours(prefix="system")], "line 1: prefix is no list of stretches"),
    "a stretch without tokens": ([ours(prefix=[["a", 0]])], "line 1: prefix is no list of stretches"),
    "a stretch of a billion": ([ours(prefix=[["a", 10**9]])], "line 1: prefix is no list of stretches"),
    "a stretch without a name": ([ours(prefix=[[1, 5]])], "line 1: prefix is no list of stretches"),
    "hash_ids that are texts": ([mooncake(hash_ids=["a"])], "line 1: hash_ids is no list of whole numbers"),
    "too many hash_ids": ([mooncake(hash_ids=[1, 2])], "line 1: it has 2 hash_ids, and 10 tokens have 1 blocks of 512"),
    "hash_ids of a billion tokens": ([mooncake(input_length=10**9)], "line 1: its prompt has 1,000,000,000 tokens"),
    "a cell too many": ([AZURE[0], AZURE[1] + ",7"], "line 2: it does not have the 3 cells of the first line"),
    "an open quote": ([AZURE[0], '"2023-11-16 18:15:46,1,2'], "line 2: it does not have the 3 cells of the first line"),
    "a cell that is no number": ([AZURE[0], AZURE[1].replace("374", "3e2")], "line 2: ContextTokens is no whole number"),
    "digits of another script": ([AZURE[0], AZURE[1].replace("374", "٣٧٤")], "line 2: ContextTokens is no whole number"),
    "a day that is none": ([AZURE[0], AZURE[1].replace("11-16", "13-41")], "line 2: TIMESTAMP is no time"),
    "a time of another form": ([AZURE[0], "1700158546,1,2"], "line 2: TIMESTAMP is no time"),
    "days that go back": ([AZURE[0], AZURE[2], AZURE[1]], "line 3: its time is"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_with_one_error_that_names_its_line(tmp_path: Path, name: str) -> None:
    lines, message = HOSTILE[name]
    path = written(tmp_path, lines)
    with pytest.raises(CallerError) as raised:
        read_trace(path)
    assert raised.value.problem.startswith(message)
    assert (raised.value.place, bool(raised.value.remedy)) == (str(path), True)
    assert len(str(raised.value)) < 1000


def test_a_file_of_10_gb_is_read_as_far_as_it_is_asked_for_and_no_line_without_an_end(tmp_path: Path) -> None:
    path = written(tmp_path, ours().encode() + b'\n{"arrival_s": 2, "input_tok": 1')
    # 10 GB that are not on the disk.
    os.truncate(path, 10 * 2**30)
    assert len(read_trace(path, most=1).trace.requests) == 1
    with pytest.raises(CallerError, match=f"line 2: it has more than {MOST_LINE_BYTES:,} bytes"):
        read_trace(path)


@pytest.mark.parametrize(
    ("limit", "message"),
    [("MOST_BYTES", "the file has more than 100 bytes up to here"), ("MOST_REQUESTS", "more than 100 req")],
)
def test_a_trace_that_is_too_large_is_refused_where_it_becomes_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, message: str
) -> None:
    monkeypatch.setattr(reading, limit, 100)
    with pytest.raises(CallerError, match=message) as raised:
        read_trace(written(tmp_path, [ours()] * 101))
    assert raised.value.problem.startswith("line 2:" if limit == "MOST_BYTES" else "line 101:")
    assert "num_prompts" in raised.value.remedy


def test_more_blocks_than_a_client_should_hold_are_refused(tmp_path: Path) -> None:
    line = ours(input_tok=MOST_TOK, prefix=[["a", 16]])
    with pytest.raises(CallerError, match=r"line 33: the trace has more than .* 20,000,000 blocks of prompts"):
        read_trace(written(tmp_path, [line] * 40))


@pytest.mark.parametrize("kind", ["gzip", "zip"])
def test_a_compressed_file_is_not_unpacked(tmp_path: Path, kind: str) -> None:
    """A few bytes of it can be as many zeros as fill any memory."""
    path = written(tmp_path, gzip.compress(b"0" * 10_000_000))
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("trace.jsonl", b"0" * 10_000_000)
    with pytest.raises(CallerError, match=f"it is compressed \\({kind}\\)"):
        read_trace(path)


def test_a_pipe_is_not_waited_for_and_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no trace at"):
        read_trace(tmp_path / "trace")
    os.mkfifo(tmp_path / "trace")
    with pytest.raises(CallerError, match="it is no plain file"):
        read_trace(tmp_path / "trace")


@pytest.mark.thorough
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)), first=st.sampled_from(["", "azure", "ours"])
)
def test_no_bytes_end_with_anything_but_a_trace_or_one_error(tmp_path: Path, body: bytes, first: str) -> None:
    begin = {"": b"", "azure": AZURE[0].encode() + b"\n", "ours": ours().encode() + b"\n"}[first]
    path = written(tmp_path, begin + body)
    with suppress(CallerError):
        assert read_trace(path).trace.requests


# --- what `trace check` tells, counted by hand

# Two bursts of five requests, 20 s apart; each prompt but the first begins with the same 16 tokens.
ARRIVALS_S = [0.0, 0.0, 0.0, 0.0, 0.0, 20.0, 20.0, 20.0, 20.0, 20.0]
TRACE = Trace.from_requests(
    16, [Request(at, 20 + number, 10 - number, (0, number + 1)) for number, at in enumerate(ARRIVALS_S)]
)


def test_arrivals_and_lengths_are_counted() -> None:
    summary = summary_of(TRACE, "mooncake")
    assert (summary.requests, summary.lasts_s, summary.mean_req_s, summary.peak_req_s) == (10, 20.0, 9 / 20, 0.5)
    # Nine times between requests, one of 20 s: the mean is 20/9 s, the variance 20²/9 s².
    assert summary.burstiness == pytest.approx((20 / 9) ** 2 / (20**2 / 9))
    assert [*summary.prompts.model_dump().values()] == [24, 28, 29, 29, 245]
    assert [*summary.replies.model_dump().values()] == [5, 9, 10, 10, 55]
    assert summary.longest_tok == 30
    assert (summary.shared_tok, summary.shared_share) == (9 * 16, 9 * 16 / 245)


def test_requests_all_at_once_have_no_rate() -> None:
    summary = summary_of(Trace.from_requests(16, [Request(0.0, 5, 5, (at,)) for at in range(3)]), "mooncake")
    assert (summary.mean_req_s, summary.burstiness) == (None, None)
    assert "all at once" in "\n".join(summary.lines)


def test_the_command_shows_it_or_names_the_line_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival_s": 0, "input_tok": 30, "output_tok": 4}\n{"arrival_s": 2, "input_tok": 50, "output_tok": 6}\n')
    shown = CliRunner().invoke(app, ["trace", "check", str(file)])
    assert shown.exit_code == 0
    assert "requests    2 in 2.0 s" in shown.stdout
    assert "prompts     median 30, p90 50, p99 50, most 50 tokens, 80 in all" in shown.stdout
    as_json = CliRunner().invoke(app, ["trace", "check", str(file), "--json", "--num-prompts", "1"])
    assert json.loads(as_json.stdout)["requests"] == 1
    file.write_text('{"arrival_s": 0, "input_tok": 30, "output_tok": 4}\n{"arrival_s": -2}\n')
    failed = CliRunner().invoke(app, ["trace", "check", str(file)])
    assert isinstance(failed.exception, CallerError)
    assert failed.exception.problem.startswith("line 2: ")


@pytest.mark.parametrize(("apart_s", "told"), [(1.0, False), (4.0, True)])
def test_the_busiest_stretch_is_told_where_the_trace_lasts_so_long(apart_s: float, told: bool) -> None:
    trace = Trace.from_requests(16, [Request(number * apart_s, 16, 1, (number,)) for number in range(5)])
    (arrivals,) = (line for line in summary_of(trace, "vllm-qualify").lines if line.startswith("arrivals"))
    assert ("busiest 10 s" in arrivals) == told
