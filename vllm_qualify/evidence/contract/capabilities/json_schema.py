"""Replies that must be JSON: any object, or what fits a schema."""

from functools import partial
from typing import Literal

from pydantic import ConfigDict, JsonValue

from vllm_qualify.evidence.contract.capabilities.probe import Body, Probe, user_body
from vllm_qualify.evidence.contract.replies import BrokenError, Form, MissingError, check_refusal, need, parse_form
from vllm_qualify.evidence.contract.transcript import Transcript


class AnyObject(Form):
    """Any JSON object."""


class Fruit(Form):
    """What the schema asks for: keys that the questions do not name. It has no free text, which could be endless."""

    model_config = ConfigDict(extra="forbid")
    number: int
    colour: Literal["red", "green"]


class Both(Form):
    """What a schema of two parts asks for. It may have more keys: a part that has none but its own could not be met."""

    number: int
    colour: Literal["red", "green"]


QUESTIONS = (
    "What is 12 + 30? Reply in JSON with the key answer.",
    "Reply in JSON with name Ann, age 30.",
    "Give me one person as JSON.",
)
SCHEMA: dict[str, JsonValue] = {"name": "fruit", "strict": True, "schema": Fruit.model_json_schema()}
PARTS: list[JsonValue] = [
    {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]},
]
ALL_OF: dict[str, JsonValue] = {"name": "both", "strict": True, "schema": {"allOf": PARTS}}
REMEDY = (
    "no backend keeps it: name another `backend` in `structured-outputs-config`, or take a vLLM that refuses it (xgrammar"
    " before 0.32 takes any JSON)"
)


def _check_form(replies: Transcript, attempt: str, form: type[Form]) -> None:
    spoken = replies.chat(attempt)
    need(spoken.content.strip(), f"the reply to '{attempt}' has no content; it ended by {spoken.reason}")
    parse_form(attempt, spoken.content, form)


def _check_all_of(replies: Transcript, attempt: str) -> None:
    if replies.refuses_form(attempt):
        check_refusal(attempt, replies.exchange(attempt).reply)
        return
    reason = replies.chat(attempt).reason
    if reason == "length":
        raise MissingError(f"the reply to '{attempt}' was cut before its end")
    try:
        _check_form(replies, attempt, Both)
    except BrokenError as error:
        raise BrokenError(f"{error}; {REMEDY}") from error


def all_of_body(text: str) -> Body:
    """A question whose answer must fit a schema of two parts. xgrammar of vLLM 0.32 refuses it, guidance keeps it."""
    return user_body(text, response_format={"type": "json_schema", "json_schema": ALL_OF})


def _probe_format(kind: str, form: type[Form], **keys: JsonValue) -> Probe:
    bodies = [{"": user_body(text, response_format={"type": kind, **keys})} for text in QUESTIONS]
    return Probe(kind, bodies, partial(_check_form, form=form))


PROBES = (
    _probe_format("json_object", AnyObject),
    _probe_format("json_schema", Fruit, json_schema=SCHEMA),
    Probe("json_schema_all_of", [{"": all_of_body(text)} for text in QUESTIONS], _check_all_of, is_last=True),
)
