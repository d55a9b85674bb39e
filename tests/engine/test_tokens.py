"""Tokens counted in the engine's own Python."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_qualify.cli.commands import app
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.tokens import count_tokens
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.loading import catalog_folder

MODEL = catalog_folder() / "reference-chat" / "model"
CHAT = {"messages": [{"role": "user", "content": "What is 12 + 30?"}, {"role": "assistant", "content": "12 + 30 = 42."}]}


@pytest.mark.engine
def test_the_tokens_are_those_that_the_server_counts(engine: EngineEnvironment) -> None:
    """tests/evidence/captured/chat has its counts of two chats that are alike but for their first message: 119 and 32."""
    said = " ".join(["We talk about apples, pears, plums and nuts."] * 5)
    more, fewer, none, special = count_tokens(engine, MODEL, [said, "Be kind.", "", "<|im_end|>"])
    assert more - fewer == 119 - 32
    assert (none, special) == (0, 1)
    assert count_tokens(engine, MODEL / "tokenizer.json", []) == []


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "no tokenizer at"),
        ("tokenizer.json", "{}", "is no tokenizer"),
        ("tokenizer.json", "\x00", "is no tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(
    engine: EngineEnvironment, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CallerError, match=message):
        count_tokens(engine, tmp_path / name, ["a"])


@pytest.mark.engine
def test_the_command_makes_a_trace_of_conversations(
    engine: EngineEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(engine.python.parents[1]))
    (tmp_path / "chats.json").write_text(json.dumps([CHAT]))
    named = ["trace", "make", str(tmp_path / "chats.json"), "--out", str(tmp_path / "trace.jsonl")]
    done = CliRunner().invoke(app, [*named, "--tokenizer", str(MODEL), "--rate", "2"])
    assert done.exit_code == 0, done.output
    assert "1 requests; 0 conversations without a reply were left out" in done.output
    (row,) = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    asked, replied = count_tokens(engine, MODEL, [message["content"] for message in CHAT["messages"]])
    assert row == {"arrival_s": 0.0, "input_tok": asked, "output_tok": replied, "prefix": [["chat-1", asked]]}
