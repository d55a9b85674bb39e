"""Replies that must be JSON: any object, or what fits a schema."""

from functools import partial
from typing import Literal

from pydantic import ConfigDict, JsonValue

from vllm_qualify.evidence.contract.capabilities.probe import Probe, user_body
from vllm_qualify.evidence.contract.replies import Form, need, parse_form
from vllm_qualify.evidence.contract.transcript import Transcript


class AnyObject(Form):
    """Any JSON object."""


class Fruit(Form):
    """What the schema asks for: keys that the questions do not name. It has no free text, which could be endless."""

    model_config = ConfigDict(extra="forbid")
    number: int
    colour: Literal["red", "green"]


QUESTIONS = (
    "What is 12 + 30? Reply in JSON with the key answer.",
    "Reply in JSON with name Ann, age 30.",
    "Give me one person as JSON.",
)
SCHEMA: dict[str, JsonValue] = {"name": "fruit", "strict": True, "schema": Fruit.model_json_schema()}


def _check_form(replies: Transcript, attempt: str, form: type[Form]) -> None:
    spoken = replies.chat(attempt)
    need(spoken.content.strip(), f"the reply to '{attempt}' has no content; it ended by {spoken.reason}")
    parse_form(attempt, spoken.content, form)


def _probe_format(kind: str, form: type[Form], **keys: JsonValue) -> Probe:
    bodies = [{"": user_body(text, response_format={"type": kind, **keys})} for text in QUESTIONS]
    return Probe(kind, bodies, partial(_check_form, form=form))


PROBES = (_probe_format("json_object", AnyObject), _probe_format("json_schema", Fruit, json_schema=SCHEMA))
