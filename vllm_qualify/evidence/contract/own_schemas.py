"""The schemas that a recipe brings: each is asked once, with its own prompt, and its reply is held to it."""

import json
from collections.abc import Sequence

from jsonschema import validators
from pydantic import JsonValue

from vllm_qualify.evidence.contract.capabilities.probe import Body, user_body
from vllm_qualify.evidence.contract.replies import BrokenError, Refusal, need, parse_form, shorten
from vllm_qualify.evidence.contract.transcript import Transcript
from vllm_qualify.recipe.contract import OwnSchema


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
    exchange = replies.exchange(name)
    if exchange.status is not None and 400 <= exchange.status < 500:
        words = parse_form(name, exchange.reply, Refusal).error.message
        raise BrokenError(f"the server refuses the schema '{schema.name}', HTTP {exchange.status}: {shorten(words)}")
    spoken = replies.chat(name)
    ended = f"it ended by {spoken.reason}"
    try:
        document = json.loads(spoken.content)
    except (ValueError, RecursionError) as error:
        raise BrokenError(f"the reply to the schema '{schema.name}' is no JSON: {shorten(spoken.content)}; {ended}") from error
    validator = validators.validator_for(schema.json_schema)(schema.json_schema)
    try:
        fault = next(validator.iter_errors(document), None)
    except RecursionError as error:
        deep = (
            f"the reply to the schema '{schema.name}' is nested too deeply to be held to it: {shorten(spoken.content)}; {ended}"
        )
        raise BrokenError(deep) from error
    why = f"{fault.json_path}: {fault.message[:300]}" if fault else ""
    need(not fault, f"the reply does not fit the schema '{schema.name}', {why}: {shorten(spoken.content)}")
