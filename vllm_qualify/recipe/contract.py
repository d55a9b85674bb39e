"""The checks of the API's contract."""

from collections.abc import Collection
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, JsonValue

from vllm_qualify.recipe.json_schemas import check_schema
from vllm_qualify.recipe.roles import EFFORT, WORK, Settings
from vllm_qualify.recipe.values import Name, Seconds, Text

Capability = Literal["chat", "tools", "parallel_tools", "reasoning", "json_schema", "vision", "responses"]
# What must be promised beside a capability: without it, its checks could not be understood.
NEEDS: dict[Capability, Capability] = {
    "tools": "chat",
    "parallel_tools": "tools",
    "reasoning": "chat",
    "json_schema": "chat",
    "vision": "chat",
    "responses": "chat",
}


def _check_promises(capabilities: list[Capability]) -> list[Capability]:
    twice = next((each for each in capabilities if capabilities.count(each) > 1), None)
    if twice:
        raise ValueError(f"{twice} is there more than once")
    for each in capabilities:
        if each in NEEDS and NEEDS[each] not in capabilities:
            raise ValueError(f"{each} needs {NEEDS[each]} beside it")
    return capabilities


Capabilities = Annotated[list[Capability], AfterValidator(_check_promises)]


class ContractCheck(NamedTuple):
    """A yes-or-no check. Its `name` is that of its metric. Without a `capability` it is a part of every contract."""

    name: str
    meaning: str
    capability: Capability | None = None


def _check(name: str, meaning: str, capability: Capability | None = None) -> ContractCheck:
    return ContractCheck(f"contract_{name}", meaning, capability)


CHECKS = (
    _check("models", "/v1/models lists the served model by all of its names, and each gets a reply"),
    _check("completion", "a completion has text, a finish reason and usage counts that agree"),
    _check("stream", "a stream at temperature 0 has the text of the plain reply"),
    _check("stream_usage", "a stream that is asked for usage ends with the plain reply's counts"),
    _check("stream_end", "a stream has one finish reason, and `[DONE]` is its end"),
    _check("max_tokens", "a reply of one token has one token, and ended by `length`"),
    _check("stop", "a stop string ends the text before it, by `stop`"),
    _check("n", "two choices were asked for, and two came"),
    _check("seed", "the same seed gives the same sampled texts again"),
    _check("logprobs", "each token has its log-probability, and those of the likeliest beside it"),
    _check("prompt_too_long", "a prompt that is too long gets an error of OpenAI's form, of a status 4xx"),
    _check("bad_body", "a body that is no JSON, or has a wrong type, gets such an error"),
    _check("unknown_model", "a model that is not served gets such an error"),
    _check("alive", "after these errors the server still gives the same text"),
    _check("hang_up", "a client that hangs up frees its place: the server stops its request"),
    _check("many", "64 requests at once all get their reply"),
    _check("chat", "a chat's reply has text without a role or markup, a finish reason and usage counts that agree", "chat"),
    _check("chat_stream", "a chat's stream at temperature 0 has the plain reply's text", "chat"),
    _check("chat_stream_usage", "a chat's stream that is asked for usage ends with the plain reply's counts", "chat"),
    _check("chat_stream_end", "a chat's stream has one finish reason, and `[DONE]` is its end", "chat"),
    _check("chat_turns", "what user and model said before is in the prompt: it grows with each", "chat"),
    _check("chat_system", "the system prompt is in the prompt: it grows with it", "chat"),
    _check("chat_end", "the reply to a short question ends by itself, by `stop`", "chat"),
    _check(
        "tools_auto",
        "a question for a tool gets a call of it, whose arguments fit its schema, and no markup of it as text",
        "tools",
    ),
    _check("tools_stream", "its stream has the same call, ends by `tool_calls`, and then with `[DONE]`", "tools"),
    _check("tools_none", "with `tool_choice: none` no tool is called", "tools"),
    _check("tools_required", "with `tool_choice: required` a tool is called also where none is needed", "tools"),
    _check("tools_named", "a tool that is named is called, also where another one fits better", "tools"),
    _check("tools_text", "a required call that takes any text, with quotes and lines, is there, also in a stream", "tools"),
    _check("tools_result", "a tool's result is in the prompt, and gets a reply", "tools"),
    _check("tools_again", "a required call is there also after a schema that another backend would keep", "tools"),
    _check("parallel_tools", "a question for two calls gets both in one reply", "parallel_tools"),
    _check("parallel_tools_stream", "its stream has the same calls and ends so, too", "parallel_tools"),
    _check("reasoning", "thoughts are apart from the content, and neither is empty", "reasoning"),
    _check("reasoning_stream", "the same in a stream", "reasoning"),
    _check("reasoning_tags", "no tag of thoughts is left in the content", "reasoning"),
    _check("json_object", "a reply that must be a JSON object is one", "json_schema"),
    _check(
        "json_schema",
        "a reply that must fit one JSON schema, of a number and two words, fits it, also if the question asks for another",
        "json_schema",
    ),
    _check(
        "json_schema_all_of",
        "a schema of two parts (`allOf`), asked last, is kept or refused by a status 400 or 422",
        "json_schema",
    ),
    _check("own_schemas", "the reply to each of the recipe's `json_schemas` fits it", "json_schema"),
    _check("vision", "the colour of a picture is named, for two pictures", "vision"),
    _check("vision_two", "the colours of two pictures in one question are named", "vision"),
    _check("vision_broken", "a picture that is broken gets an error of status 4xx, and the next one its colour", "vision"),
    _check("responses", "/v1/responses gives a whole reply with text, and usage counts that agree", "responses"),
    _check("responses_stream", "its stream at temperature 0 has the plain reply's text and counts, and ends", "responses"),
)
NAMES = tuple(check.name for check in CHECKS)


OWN_SCHEMAS, MOST_SCHEMAS = "contract_own_schemas", 8


class OwnSchema(Settings):
    """A schema of the recipe's own, as its clients ask for it."""

    name: Annotated[Name, WORK] = Field(description="its name in the request, and in findings")
    prompt: Annotated[Text, WORK] = Field(description="the question whose reply must fit it")
    json_schema: Annotated[dict[str, JsonValue], AfterValidator(check_schema), WORK] = Field(
        description="the schema itself, or the path of a JSON file that has it. It refers to nothing outside"
    )


def _check_names(schemas: list[OwnSchema]) -> list[OwnSchema]:
    names = [each.name for each in schemas]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is there more than once")
    return schemas


OwnSchemas = Annotated[list[OwnSchema], Field(max_length=MOST_SCHEMAS), AfterValidator(_check_names)]


def checks_of(capabilities: Collection[Capability]) -> list[ContractCheck]:
    """The checks of every contract, and those of these capabilities."""
    return [check for check in CHECKS if check.capability is None or check.capability in capabilities]


class Contract(Settings):
    """What of its contract a cell's server is asked: what everyone relies on, and what `capabilities` promise.

    `not_asked` has the checks among them that are left out, each with its reason. `aliases` are further names of the model,
    and `schemas` the recipe's own.
    """

    capabilities: Annotated[list[Capability], WORK] = []
    not_asked: Annotated[dict[str, str], WORK] = {}
    aliases: Annotated[list[str], WORK] = []
    schemas: Annotated[list[OwnSchema], WORK] = []
    time_limit_s: Annotated[Seconds, EFFORT] = 120.0

    @property
    def checks(self) -> list[ContractCheck]:
        left_out = [*self.not_asked, *([] if self.schemas else [OWN_SCHEMAS])]
        return [check for check in checks_of(self.capabilities) if check.name not in left_out]
