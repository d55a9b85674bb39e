"""The schemas that a recipe brings: each is asked once, with its own prompt, and its reply is held to it."""

import json
import math
import re
from collections.abc import Sequence

from pydantic import JsonValue

from vllm_qualify.evidence.contract.capabilities.probe import Body, user_body
from vllm_qualify.evidence.contract.fitting import find_fault_in_time
from vllm_qualify.evidence.contract.replies import BrokenError, MissingError, need, read_refusal, shorten
from vllm_qualify.evidence.contract.transcript import Transcript
from vllm_qualify.recipe.contract import OwnSchema
from vllm_qualify.recipe.json_schemas import MOST_LEVELS

# A text, to its end if it has none, or the begin or the end of a mapping or a list.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.S)


def own_bodies(schemas: Sequence[OwnSchema]) -> dict[str, Body]:
    """The requests' bodies, by their names."""
    return {_request_name(schema): _form_body(schema) for schema in schemas}


def check_own_schemas(replies: Transcript, schemas: Sequence[OwnSchema]) -> None:
    """Raises BrokenError with what the first reply says that does not fit, or with the server's words where it refuses one."""
    for schema in schemas:
        _check_kept(replies, schema)


def _request_name(schema: OwnSchema) -> str:
    return f"own_schemas {schema.name}"


def _form_body(schema: OwnSchema) -> Body:
    form: dict[str, JsonValue] = {"name": schema.name, "strict": True, "schema": schema.json_schema}
    return user_body(schema.prompt, response_format={"type": "json_schema", "json_schema": form})


def _check_kept(replies: Transcript, schema: OwnSchema) -> None:
    name = _request_name(schema)
    if replies.refuses_form(name):
        exchange = replies.exchange(name)
        words = read_refusal(exchange.reply)
        raise BrokenError(f"the server refuses the schema '{schema.name}', HTTP {exchange.status}: {shorten(words)}")
    spoken = replies.chat(name)
    ended = f"it ended by {spoken.reason}"
    if _is_deep(spoken.content):
        raise MissingError(f"the reply cannot be held to the schema '{schema.name}': it is nested too deeply")
    try:
        document = _read_json(spoken.content)
    except (ValueError, RecursionError) as error:
        raise BrokenError(f"the reply to the schema '{schema.name}' is no JSON: {shorten(spoken.content)}; {ended}") from error
    try:
        fault = find_fault_in_time(schema.json_schema, document)
    except ValueError as error:
        raise MissingError(f"the reply cannot be held to the schema '{schema.name}': {error}") from error
    need(not fault, f"the reply does not fit the schema '{schema.name}', {fault}: {shorten(spoken.content)}")


def _is_deep(text: str) -> bool:
    """Whether a text is nested too deeply and has an end: one that was cut is no JSON, however deep it is."""
    level = deepest = 0
    for token in _TOKEN.finditer(text):
        level += (token[0] in "[{") - (token[0] in "]}")
        deepest = max(deepest, level)
    return deepest > MOST_LEVELS and level == 0


def _read_json(text: str) -> JsonValue:
    """Raises ValueError for what is no JSON, also for NaN and infinities, or has a number beyond Python's; RecursionError."""
    document: JsonValue = json.loads(text, parse_constant=_read_finite, parse_float=_read_finite)
    return document


def _read_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number
