"""Replies that must be JSON: any object, or what fits a schema."""

from typing import Literal

from pydantic import ConfigDict, JsonValue

from vllm_qualify.evidence.contract.asked import Asked, need
from vllm_qualify.evidence.contract.capabilities.probe import LONG_TOK, Probe, user
from vllm_qualify.evidence.contract.replies import Form, parsed


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
FORMATS: dict[str, dict[str, JsonValue]] = {
    "json_object": {"type": "json_object"},
    "json_schema": {"type": "json_schema", "json_schema": SCHEMA},
}


def _fits(asked: Asked, attempt: str, form: type[Form]) -> None:
    spoken = asked.chat(attempt)
    need(spoken.content.strip(), f"the reply to '{attempt}' has no content; it ended by {spoken.reason}")
    parsed(attempt, spoken.content, form)


PROBES = (
    Probe(
        "json_object",
        [{"": user(text, response_format=FORMATS["json_object"])} for text in QUESTIONS],
        lambda asked, attempt: _fits(asked, attempt, AnyObject),
        tokens=LONG_TOK,
    ),
    Probe(
        "json_schema",
        [{"": user(text, response_format=FORMATS["json_schema"])} for text in QUESTIONS],
        lambda asked, attempt: _fits(asked, attempt, Fruit),
        tokens=LONG_TOK,
    ),
)
