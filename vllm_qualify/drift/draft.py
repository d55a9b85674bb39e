"""A first recipe of a model, by its own files, its own template and an engine's own parsers."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.drift.candidate import Candidate
from vllm_qualify.drift.parsers import Answer, ask_parsers, choose_parser, make_question
from vllm_qualify.drift.templates import ask_template
from vllm_qualify.engine.hub import fetch_small
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.drafting.chats import Told
from vllm_qualify.recipe.drafting.document import write_recipe
from vllm_qualify.recipe.drafting.found import find_published
from vllm_qualify.recipe.drafting.model_files import MOST_TOKENIZER_BYTES, SMALL, TOKENIZERS, ModelFiles, read_model_files
from vllm_qualify.recipe.drafting.parts import Command, Host, Model, ParserLine
from vllm_qualify.recipe.drafting.shape import Shape, describe_shape
from vllm_qualify.recipe.drafting.traffic import Slo, Traffic
from vllm_qualify.recipe.values import expand_user

PLACE = "MODEL"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
MOST_NAMED = 4


class Located(NamedTuple):
    """A model's files, its name or path for a recipe, and its name on the hub, if it is known."""

    files: ModelFiles
    written: str
    hub_name: str | None


class Wish(NamedTuple):
    """What a recipe is drafted for. `output` is its file, from whose folder paths are; `command` is what was typed."""

    model: str
    hosts: Sequence[Host]
    traffic: Traffic
    slo: Slo
    published: Path | None
    output: Path | None
    command: str


class ReadModel(NamedTuple):
    """A model as its own files describe it. `told` is None for one without a chat template."""

    located: Located
    shape: Shape
    told: Told | None

    @property
    def question(self) -> dict[str, object] | None:
        """What the engine's parsers are asked; None if no server may promise calls or thoughts."""
        if self.told is None:
            return None
        asked = self.told._replace(calls=[] if _refuse_calls(self.told) else self.told.calls)
        files = self.located.files
        return make_question(asked, files.markup, files.pieces) if asked.calls or asked.thoughts else None


def draft_recipe(wish: Wish, candidate: Candidate | None, tell: Callable[[str], None]) -> str:
    """The recipe's YAML. `candidate` is the engine whose parsers are tried; None if there is none here.

    Raises CallerError if there is no such model, or it cannot be qualified, or its files or the traffic are not in order;
    HostError if the hub or this machine fails.
    """
    model = read_model(wish.model, wish.output)
    question = model.question
    if not any(name in model.located.files.names for name in TOKENIZERS):
        tell(f"warning: {wish.model} has no file of a tokenizer, without which no server starts")
    if question is None:
        return write_draft(wish, model, None, tell)
    if candidate is None or candidate.engine is None:
        tell("warning: no engine was asked which parsers read the model's replies. Name one by --python or --image")
        return write_draft(wish, model, None, tell)
    tell("asking vLLM's own parsers which of them read what the chat template writes")
    return write_draft(wish, model, ask_parsers(candidate, [question])[0], tell)


def read_model(name: str, output: Path | None) -> ReadModel:
    """Raises as `draft_recipe`."""
    located = locate_model(name, output)
    shape = describe_shape(located.files)
    return ReadModel(located, shape, ask_template(located.files) if located.files.templates else None)


def write_draft(wish: Wish, model: ReadModel, answer: Answer | None, tell: Callable[[str], None]) -> str:
    """The recipe of a model whose parsers are known: `answer` is what the engine says of them. Raises as `draft_recipe`."""
    files, hub_name = model.located.files, model.located.hub_name
    published = find_published(wish.published, hub_name) if wish.published and hub_name else None
    if wish.published and published is None:
        tell(f"{wish.published} has nothing for {hub_name or wish.model} that a recipe can express")
    tools, reasoning = decide_parsers(model, answer)
    parts = Model(
        written=model.located.written,
        shape=model.shape,
        told=model.told,
        template_file=files.template_file,
        weights_bytes=files.weights_bytes,
        weights_by=files.weights_by,
        tools=tools,
        reasoning=reasoning,
    )
    return write_recipe(parts, wish.hosts, wish.traffic, wish.slo, published, Command(wish.command, wish.output))


# --- the model


def locate_model(name: str, output: Path | None) -> Located:
    """A folder, also one that is named without `./`, or else a repository of the hub."""
    path = expand_user(name)
    if path.is_dir():
        files = read_model_files(path, name)
        known = files.config.get("_name_or_path")
        is_hub_name = isinstance(known, str) and bool(HUB_NAME.fullmatch(known))
        return Located(files, _path_from(path, output), known if is_hub_name else None)
    if not HUB_NAME.fullmatch(name):
        remedy = "name a folder with a config.json, or a repository of the hub like Qwen/Qwen3-0.6B"
        raise CallerError(f"there is no folder {name!r}", remedy, PLACE)
    folder, sizes = fetch_small(name, None, PLACE, SMALL, MOST_TOKENIZER_BYTES)
    return Located(read_model_files(folder, name, sizes), name, name)


def _path_from(folder: Path, output: Path | None) -> str:
    """The folder's path in a recipe: from the recipe's own folder if it lies in it, else from the root."""
    whole = Path(os.path.normpath(folder.absolute()))
    base = Path(os.path.normpath(output.absolute().parent)) if output else None
    if base and whole.is_relative_to(base) and whole != base:
        return f"./{whole.relative_to(base)}"
    return str(whole)


# --- its parsers


def decide_parsers(model: ReadModel, answer: Answer | None) -> tuple[ParserLine, ParserLine]:
    """The parsers for calls and for thoughts, each with its reason. Without an answer nothing is decided."""
    if model.told is None:
        return ParserLine(None, ""), ParserLine(None, "")
    return (
        _decide_parser(model.shape, answer, _refuse_calls(model.told), "call"),
        _decide_parser(model.shape, answer, _refuse_thoughts(model.told), "thoughts"),
    )


def _decide_parser(shape: Shape, answer: Answer | None, refusal: str, what: str) -> ParserLine:
    if refusal:
        return ParserLine(None, refusal, [])
    if answer is None:
        return ParserLine(None, "no engine was asked which parser reads it; --python or --image names one")
    readings = answer.tools if what == "call" else answer.reasoning
    chosen = choose_parser(readings, shape.model_type, shape.architecture)
    if chosen.untried:
        reason = chosen.untried.partition(": ")[2] or chosen.untried
        why = f"vLLM {answer.version} has it for {shape.architecture}, and could not try it: {reason[:120]}"
        return ParserLine(chosen.name, why, [chosen.name or ""])
    if chosen.name is None:
        return ParserLine(
            None, f"vLLM {answer.version} does not read the {what} that the chat template writes: {chosen.why}", []
        )
    why = f"tried: vLLM {answer.version} reads the chat template's own {what}"
    return ParserLine(chosen.name, f"{why}{_name_others(chosen.others)}", [chosen.name, *chosen.others])


def _refuse_calls(told: Told) -> str:
    """Why no server may promise calls of tools; empty if one may, where a parser reads them."""
    if not told.calls:
        return "the chat template renders no call of a tool"
    if told.hides_tools:
        return "the chat template shows the model no tools"
    if told.as_text:
        return (
            "the chat template takes the arguments of a call as text alone, and vLLM gives it a mapping, so that the turn after"
            " a call fails. Name another template by `chat-template`; vLLM's examples have some"
        )
    return ""


def _refuse_thoughts(told: Told) -> str:
    if told.closed:
        return "the chat template closes the thoughts before the reply, unless a request asks for them by chat_template_kwargs"
    return "" if told.thoughts else "the chat template has no thoughts"


def _name_others(others: Sequence[str]) -> str:
    if not others:
        return ""
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    return f", as by {', '.join(others[:MOST_NAMED])}{more}"
