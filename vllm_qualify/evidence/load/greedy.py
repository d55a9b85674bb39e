"""Prompts that two servers get at temperature 0, and where the two texts of a prompt begin to differ."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx

from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.smoke import send_request
from vllm_qualify.recipe.values import Count, Frozen, Seconds, Text

DRAFTED, UNDRAFTED = "drafted", "undrafted"
SIDES = (DRAFTED, UNDRAFTED)
GREEDY = "greedy.json"
# For each reply.
ANSWER_LIMIT_S = 300.0


class Greedy(Frozen):
    """The prompts that both servers get at temperature 0, one after another, and the most tokens of a reply."""

    prompts: list[Text]
    max_tokens: Count
    time_limit_s: Seconds = ANSWER_LIMIT_S


class SameText(Frozen):
    """For each prompt the character at which the two texts begin to differ, None where they are the same."""

    parts_at: list[int | None]

    @property
    def same_count(self) -> int:
        return self.parts_at.count(None)

    @property
    def share(self) -> float:
        return self.same_count / len(self.parts_at)


def ask_prompt(side: str, server: Server, prompt: str, greedy: Greedy, folder: Path) -> None:
    request = greedy_request(prompt, greedy, server.served_model_name)
    answer = send_request("POST", f"{server.url}/v1/completions", greedy.time_limit_s, json=request)
    if answer["status"] is None:
        server.check_alive()
    with (folder / f"{side}.jsonl").open("a") as file:
        file.write(json.dumps({"request": request, **answer}) + "\n")


def greedy_request(prompt: str, greedy: Greedy, model: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": greedy.max_tokens, "temperature": 0, "seed": 0}


def compare_texts(folder: Path) -> SameText:
    """Compare the texts of both servers. Raises one of UNUSABLE."""
    greedy = Greedy.model_validate_json((folder / GREEDY).read_bytes())
    ours, theirs = (_read_texts(folder / f"{side}.jsonl", greedy) for side in SIDES)
    return same_text(ours, theirs)


def _read_texts(path: Path, greedy: Greedy) -> list[str]:
    """All texts of one server. Raises one of UNUSABLE."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    if [answer["request"]["prompt"] for answer in answers] != greedy.prompts:
        raise ValueError(f"{path.name} has {len(answers)} replies, and not one to each of {len(greedy.prompts)} prompts")
    return [_checked_text(answer, greedy) for answer in answers]


def _checked_text(answer: dict[str, Any], greedy: Greedy) -> str:
    if answer["status"] != httpx.codes.OK:
        raise ValueError(answer.get("error") or f"HTTP {answer['status']}: {answer['body'][:200]}")
    body = json.loads(answer["body"])
    text, reason = body["choices"][0]["text"], body["choices"][0]["finish_reason"]
    if not (isinstance(text, str) and text):
        raise ValueError("a reply is empty")
    if reason not in ("stop", "length"):
        raise ValueError(f"a reply ended by {reason!r}")
    if reason == "length" and (tokens := body["usage"]["completion_tokens"]) != greedy.max_tokens:
        raise ValueError(f"a reply was cut after {tokens} of {greedy.max_tokens} tokens")
    return text


def same_text(ours: Sequence[str], theirs: Sequence[str]) -> SameText:
    """Where the texts of two servers begin to differ, prompt by prompt.

    Raises ValueError if there are no texts, or one server has more than the other.
    """
    if not ours:
        raise ValueError("no prompt was asked")
    return SameText(parts_at=[_find_difference(*pair) for pair in zip(ours, theirs, strict=True)])


def _find_difference(one: str, other: str) -> int | None:
    return next((at for at, (mine, their) in enumerate(zip_longest(one, other)) if mine != their), None)
