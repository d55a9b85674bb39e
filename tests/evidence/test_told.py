"""Told tokens: replies that bring fewer tokens than their usage says, while the server's own counters agree with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.builders.loads import (
    ARGUMENTS,
    CAPTURED,
    SETTINGS,
    change,
    load_server,
    measure,
    read_result,
    restated,
    with_settings,
)
from vllm_qualify.engine.bench_worker import count_texts
from vllm_qualify.evidence.load.told import TextTokens, texts_sha256, tokens_path
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.serving import ServerArguments

# The captured replies have 8 tokens, but for a few.
COUNT = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As captured, with as many tokens in each text as the usage says."""
    folder = shutil.copytree(CAPTURED, tmp_path / "load")
    for repeat in (1, 2):
        change(folder, repeat, generated_texts=["x" * 40] * COUNT)
        told(folder, read_result(folder, repeat)["output_lens"], repeat)
    return folder


def told(folder: Path, tokens: list[int], repeat: int = 2, **others: Any) -> None:
    sha256 = texts_sha256(read_result(folder, repeat)["generated_texts"])
    counted = {"texts_sha256": sha256, "tokens": tokens} | others
    tokens_path(folder, repeat).write_text(TextTokens.model_validate(counted).model_dump_json())


def in_chunks(folder: Path, chunks: list[int], tokens: list[int] | None = None) -> None:
    """The second repeat's replies in so many chunks, which take as long as before; and so many tokens in their texts."""
    was = read_result(folder)["itls"]
    gaps = [[sum(each) / (wanted - 1)] * (wanted - 1) for each, wanted in zip(was, chunks, strict=True)]
    change(folder, **restated(read_result(folder) | {"itls": gaps}))
    if tokens is not None:
        told(folder, tokens)


def row_of(folder: Path, settings: Load = SETTINGS, arguments: ServerArguments = ARGUMENTS) -> Measurement:
    return measure(folder, settings, load_server(arguments))["output_throughput_tok_s"]


def problem(folder: Path, settings: Load = SETTINGS, arguments: ServerArguments = ARGUMENTS) -> str:
    return row_of(folder, settings, arguments).invalid_because or ""


def test_three_of_eight_tokens_are_not_eight_whatever_usage_and_counters_say(folder: Path) -> None:
    assert problem(folder) == ""
    assert "tokens of its texts" not in row_of(folder).source
    in_chunks(folder, [3] * COUNT, [3] * COUNT)
    for words in ("repeat 2: its replies have", "brought 120 at most", f"{COUNT} of {COUNT} brought less than half of theirs"):
        assert words in problem(folder)


@pytest.mark.parametrize(("cut", "message"), [(4, ""), (5, f"5 of {COUNT} brought less than half of theirs")])
def test_a_proxy_that_cuts_some_replies_is_seen(folder: Path, cut: int, message: str) -> None:
    shortened = [3] * cut + read_result(folder)["output_lens"][cut:]
    in_chunks(folder, shortened, shortened)
    assert message in problem(folder)
    assert bool(problem(folder)) is bool(message)


def test_a_proxy_that_cuts_most_of_less_than_half_is_seen_by_the_sum(folder: Path) -> None:
    lengths = read_result(folder)["output_lens"]
    shortened = [length // 2 for length in lengths[:19]] + lengths[19:]
    in_chunks(folder, shortened, shortened)
    assert "brought" in problem(folder)


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        pytest.param(5, 0, id="a busy server whose model says special tokens: 62 chunks for 100, and no text"),
        pytest.param(None, 0, id="special tokens have no text and come in chunks"),
        pytest.param(2, None, id="a busy server sends several tokens in a chunk"),
    ],
)
def test_a_reply_that_one_of_both_shows_is_honest(folder: Path, chunks: int | None, tokens: int | None) -> None:
    if chunks is not None:
        in_chunks(folder, [chunks] * COUNT)
    if tokens is not None:
        told(folder, [tokens] * COUNT)
    assert problem(folder) == ""


def test_a_text_of_single_bytes_makes_up_for_no_other_reply(folder: Path) -> None:
    lengths = read_result(folder)["output_lens"]
    shortened = [length - length // 2 for length in lengths[:30]] + lengths[30:]
    in_chunks(folder, shortened, [*shortened[:30], *[40] * 10])
    assert f"0 of {COUNT} brought less than half of theirs" in problem(folder)


@pytest.mark.parametrize(
    ("arguments", "is_seen"),
    [
        ({}, True),
        ({"stream-interval": 4}, False),
        ({"stream_interval": 4}, False),
        ({"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
    ],
)
def test_drafts_and_intervals_put_several_tokens_into_a_chunk(folder: Path, arguments: ServerArguments, is_seen: bool) -> None:
    in_chunks(folder, [2] * COUNT, [1] * COUNT)
    assert bool("brought" in problem(folder, arguments=ARGUMENTS | arguments)) is is_seen


@pytest.mark.parametrize(
    ("change_it", "arguments", "message"),
    [
        (lambda folder: told(folder, [], why_not="TypeError: no call"), {}, "its texts were not counted: TypeError: no call"),
        (lambda _: None, {"speculative-config": {"method": "own"}}, "it is not known how many tokens a chunk has"),
    ],
)
def test_where_tokens_cannot_be_counted_the_measurement_says_so(
    folder: Path, change_it: Callable[[Path], None], arguments: ServerArguments, message: str
) -> None:
    in_chunks(folder, [2] * COUNT, [1] * COUNT)
    change_it(folder)
    row = row_of(folder, arguments=ARGUMENTS | arguments)
    assert (row.invalid_because, message in row.source) == (None, True)


def test_an_older_run_is_judged_as_before(folder: Path) -> None:
    in_chunks(folder, [2] * COUNT)
    for repeat in (1, 2):
        tokens_path(folder, repeat).unlink()
    assert problem(folder) == ""


@pytest.mark.parametrize("tokens", [[8] * (COUNT - 1), [8] * (COUNT - 1) + [45], None])
def test_counts_that_cannot_be_of_the_texts_are_refused(folder: Path, tokens: list[int] | None) -> None:
    if tokens:
        told(folder, tokens)
    else:
        change(folder, 2, generated_texts=["y" * 40] * COUNT)
    assert "tokens-2.json is not of the texts of this repeat" in problem(folder)


@pytest.mark.parametrize(("chunks", "is_seen"), [(5, False), (3, True)])
def test_of_a_chat_that_reasons_half_must_come(folder: Path, chunks: int, is_seen: bool) -> None:
    """The parser splits off text that bench does not record, and keeps chunks back."""
    for repeat in (1, 2):
        change(folder, repeat, backend="openai-chat")
    in_chunks(folder, [chunks] * COUNT, [0] * COUNT)
    because = problem(folder, with_settings(api="chat"), ARGUMENTS | {"reasoning-parser": "qwen3"})
    assert ("at most, by their chunks" in because) is is_seen


# --- Counting, as the client does it


class Words:
    """A tokenizer with a token for each word."""

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        text.encode()
        return SimpleNamespace(input_ids=text.split())


def counted(folder: Path, tokenizer: object, texts: list[str]) -> TextTokens:
    (folder / "bench-7.json").write_text(json.dumps({"generated_texts": texts}))
    arguments = ["--save-detailed", "--result-dir", str(folder), "--result-filename", "bench-7.json"]
    count_texts(arguments, tokenizer)
    return TextTokens.model_validate_json((folder / "tokens-7.json").read_bytes())


def test_the_client_counts_each_text_also_one_that_is_none(tmp_path: Path) -> None:
    count_texts(["--num-prompts", "4"], Words())
    assert list(tmp_path.iterdir()) == [], "nothing without a detailed result"
    texts = ["one two", "", "half \ud800 of a pair"]
    found = counted(tmp_path, Words(), texts)
    assert (found.tokens, found.why_not) == ([2, 0, 5], "")
    assert found.texts_sha256 == texts_sha256(texts)
    uncounted = counted(tmp_path, None, ["one"])
    assert uncounted.tokens == []
    assert uncounted.why_not.startswith("TypeError: ")
