"""Which parsers of an engine are a model's: those that read the texts which the model was trained to write."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from vllm_qualify.drift import parsers_probe
from vllm_qualify.drift.candidate import Candidate
from vllm_qualify.engine.launchers.base import Script
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.errors import HostError
from vllm_qualify.recipe.drafting.chats import ANSWER, ARGUMENTS, NAME, THOUGHT, TOOLS, Told
from vllm_qualify.recipe.values import Frozen

PROBE = Path(parsers_probe.__file__)
CHECK, ASKING, LIMIT_S = "check", "asking vLLM which parsers read the model's replies", 300.0
# For models without a parser of their own. vLLM's documentation names them so ("Tool calling", "Reasoning outputs").
GENERIC = ("hermes", "deepseek_r1")
# What an engine's stand-in says of itself.
_STUB = re.compile(r"NotImplementedError|HarmonyError|stub", re.IGNORECASE)
# Linux allows 128 KiB in an argument.
LONGEST_QUESTION = 120_000


class Reading(Frozen):
    reads: int | None
    made_by: str
    why: str


class Answer(Frozen):
    """What each registered parser made of the texts."""

    version: str
    tools: dict[str, Reading]
    reasoning: dict[str, Reading]


_ANSWERS = TypeAdapter(list[Answer])


class Chosen(NamedTuple):
    """A parser, or why there is none. `others` also read the text. `untried` says why the engine could not try it."""

    name: str | None
    others: list[str] = []
    why: str = ""
    untried: str = ""


def make_question(told: Told, markup: Sequence[str], pieces: Sequence[str]) -> dict[str, object]:
    about = {"markup": list(markup), "pieces": list(pieces), "tools": TOOLS, "name": NAME, "arguments": ARGUMENTS}
    return about | {"calls": told.calls, "thought": THOUGHT, "answer": ANSWER, "thoughts": told.thoughts}


def ask_parsers(candidate: Candidate, questions: Sequence[Mapping[str, object]]) -> list[Answer]:
    """What the engine's own parsers make of each model's texts. Raises HostError if the engine does not say it."""
    assert candidate.engine is not None  # noqa: S101  (a table alone is not asked)
    text = json.dumps(questions)
    if len(text) > LONGEST_QUESTION:
        raise HostError("the chat template makes texts that are too long to ask for", "name the parsers yourself", CHECK)
    said = launcher_of(candidate.engine).ask(candidate.engine, Script(PROBE, text, [], ASKING, CHECK, LIMIT_S), lambda: None)
    try:
        return _ANSWERS.validate_json(said)
    except ValidationError as error:
        raise HostError("the engine did not say which parsers read the texts", "see its log", CHECK) from error


def choose_parser(readings: Mapping[str, Reading], model_type: str, architecture: str) -> Chosen:
    """The model's parser: of those that read its text the one that is named as the model is, else a generic one."""
    words = [word for word in (model_type, re.sub(r"(For|LMHead|Model).*", "", architecture)) if word]
    reading = [name for name, each in readings.items() if each.reads is not None]
    if reading:
        first, *others = sorted(reading, key=lambda name: (-_rank(name, words), len(name), name))
        return Chosen(first, others)
    # Some only stand for a parser that the engine chooses by the kind of model.
    for name, each in readings.items():
        if _STUB.search(each.why) and any(_plain(word) in _plain(each.made_by) for word in words):
            return Chosen(name, untried=each.why)
    return Chosen(None, why=f"none of its {len(readings)} parsers reads it")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _rank(parser: str, words: Sequence[str]) -> int:
    """How well a parser's name is that of the model: its whole name, its family and generation, a generic name, its family."""
    name = _plain(parser)
    wholes = [_plain(word) for word in words if _plain(word) in name or name in _plain(word)]
    if wholes:
        return 1000 + max(min(len(each), len(name)) for each in wholes)
    kinship = max((_compare_families(parser, word) for word in words), default=0)
    return max(2 if parser in GENERIC else 0, {2: 3, 1: 1, 0: 0}[kinship])


def _compare_families(parser: str, word: str) -> int:
    """2 for one family and generation (`glm45` and `glm4_moe`), 1 for one family alone (`qwen3_json` and `qwen2`), else 0."""
    (ours, our_number), (its, its_number) = _family(parser), _family(word)
    if len(ours) < 3 or not (ours == its or (len(ours) > 4 and its.startswith(ours))):
        return 0
    known = our_number and its_number
    alike = our_number.startswith(its_number) or its_number.startswith(our_number)
    return 2 if not known or alike else 1


def _family(name: str) -> tuple[str, str]:
    """The letters at the begin of a name, and the number after them: `glm`, `45`."""
    match = re.match(r"([a-z]+)[_-]?(\d*)", name.lower())
    return (match[1], match[2]) if match else ("", "")
