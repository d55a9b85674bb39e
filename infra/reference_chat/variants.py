"""Copies of the chat model, each with one defect that a check of the contract must find. Made by code: none is kept."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
END, THINK_END, CALL, SPARE = "<|im_end|>", "</think>", "<tool_call>", "<|spare|>"


def copied(model: Path, folder: Path) -> Path:
    """The model in a folder of its own."""
    shutil.copytree(model, folder)
    return folder


def broken_template(model: Path) -> None:
    """What is said is not in the prompt, only who says something."""
    _change_template(model, '{{ message.content or "" }}', '{{ message.text or "" }}')


def lost_turns(model: Path) -> None:
    """Only the last turn is in the prompt."""
    _change_template(model, "in turns -%}", "in turns[-1:] -%}")


def wrong_end_token(model: Path) -> None:
    """The server waits for a token that the model never writes."""
    for name in ("config.json", "generation_config.json"):
        _change(model / name, lambda document: document | {"eos_token_id": _ids(model)[SPARE]})
    _change(model / "tokenizer_config.json", lambda document: document | {"eos_token": SPARE})


def answer_in_thinking(model: Path) -> None:
    """The thoughts end with another token than the parser knows, so that the answer is a part of them."""
    swapped = {THINK_END: SPARE, SPARE: THINK_END}

    def change(document: dict[str, Any]) -> dict[str, Any]:
        for token in document["added_tokens"]:
            token["content"] = swapped.get(token["content"], token["content"])
        vocabulary = document["model"]["vocab"]
        document["model"]["vocab"] = {swapped.get(name, name): number for name, number in vocabulary.items()}
        return document

    _change(model / "tokenizer.json", change)


def endless_thinking(model: Path) -> None:
    """It writes neither the end of its thoughts nor that of its reply: no token has less weight.

    For vLLM's parser a call ends the thoughts too.
    """
    ids = _ids(model)
    file = model / "model.safetensors"
    body = bytearray(file.read_bytes())
    # The file's form: the length of a header in JSON, the header, then the values. It is that of safetensors.
    header_bytes = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + header_bytes])
    embeddings = header["model.embed_tokens.weight"]
    row_bytes = 2 * embeddings["shape"][1]
    for token in (THINK_END, CALL, END):
        first = 8 + header_bytes + embeddings["data_offsets"][0] + ids[token] * row_bytes
        body[first : first + row_bytes] = bytes(row_bytes)
    file.write_bytes(body)


def _ids(model: Path) -> dict[str, int]:
    tokens = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in tokens}


def _change_template(model: Path, old: str, new: str) -> None:
    file = model / "chat_template.jinja"
    text = file.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{file} has {old!r} {text.count(old)} times, and not once")
    file.write_text(text.replace(old, new))


def _change(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text())), ensure_ascii=False))
