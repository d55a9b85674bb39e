"""Calls of tools: whether one is called, which one, and with which arguments."""

from typing import Literal

from pydantic import ConfigDict, JsonValue

from vllm_qualify.evidence.contract.asked import Asked, need
from vllm_qualify.evidence.contract.capabilities.chat import LONG, QUESTIONS, SHORT, grows
from vllm_qualify.evidence.contract.capabilities.probe import LONG_TOK, Body, Probe, streamed, user
from vllm_qualify.evidence.contract.chats import Call, Spoken
from vllm_qualify.evidence.contract.replies import Form, parsed, shown


class City(Form):
    """The arguments of the tool that the model may call."""

    model_config = ConfigDict(extra="forbid")
    city: str


class KnownCity(Form):
    """Those of the tools that it must call, also where none is needed.

    OpenAI's `strict` holds them to their schema. Without it vLLM 0.32 writes any arguments; and a free text could be endless.
    """

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome", "Oslo"]


def _tool(name: str, what: str, arguments: type[Form], **keys: bool) -> dict[str, JsonValue]:
    schema: dict[str, JsonValue] = arguments.model_json_schema()
    function: dict[str, JsonValue] = {"name": name, "description": f"Get the {what} of a city.", "parameters": schema, **keys}
    return {"type": "function", "function": function}


WEATHER, TIME = "get_weather", "get_time"
FREE: list[JsonValue] = [_tool(WEATHER, "weather", City)]
KNOWN: list[JsonValue] = [
    _tool(WEATHER, "weather", KnownCity, strict=True),
    _tool(TIME, "time", KnownCity, strict=True),
]
NAMED: dict[str, JsonValue] = {"type": "function", "function": {"name": TIME}}
FREELY: Body = {"tools": FREE, "tool_choice": "auto"}
ONE = [f"What is the weather in {city}?" for city in ("Paris", "Rome", "Oslo")]
TWO = [f"What is the weather in {pair}?" for pair in ("Paris and in Rome", "Oslo and in Berlin", "London and in Madrid")]
# Mistral's templates take ids of nine letters and digits only.
CALL_ID = "weather01"


def _fit(name: str, spoken: Spoken, tools: tuple[str, ...], arguments: type[Form]) -> list[Call]:
    """The calls of a reply: there is one, each is of these tools, and its arguments fit."""
    need(spoken.calls, f"the reply to '{name}' calls no tool: {shown(spoken.text)}, ended by {spoken.reason}")
    for call in spoken.calls:
        need(call.name in tools, f"the reply to '{name}' calls {shown(call.name)}")
        parsed(f"{name}, arguments", call.arguments, arguments)
    ids = [call.id for call in spoken.calls]
    need(len(set(ids)) == len(ids), f"the calls of '{name}' share an id: {shown(str(ids))}")
    return spoken.calls


def _auto(asked: Asked, attempt: str) -> None:
    spoken = asked.chat(attempt)
    _fit(attempt, spoken, (WEATHER,), City)
    need(spoken.reason == "tool_calls", f"the reply to '{attempt}' calls a tool, and ended by {spoken.reason}")


def _same(asked: Asked, attempt: str, plain: str) -> None:
    said = [_fit(attempt, asked.streamed_chat(attempt), (WEATHER,), City), _fit(plain, asked.chat(plain), (WEATHER,), City)]
    came, wanted = ([(call.name, parsed(attempt, call.arguments, City).city) for call in calls] for calls in said)
    need(came == wanted, f"the stream calls {shown(str(came))}, and the plain reply {shown(str(wanted))}")


def _stream(asked: Asked, attempt: str) -> None:
    _same(asked, attempt, attempt.replace("tools_stream", "tools_auto"))


def _none(asked: Asked, attempt: str) -> None:
    calls = asked.chat(attempt).calls
    need(not calls, f"no tool was to be called, and the reply calls {shown(str(calls))}")


def _required(asked: Asked, attempt: str) -> None:
    _fit(attempt, asked.chat(attempt), (WEATHER, TIME), KnownCity)


def _named(asked: Asked, attempt: str) -> None:
    _fit(attempt, asked.chat(attempt), (TIME,), KnownCity)


def _with_result(result: str) -> Body:
    function: dict[str, JsonValue] = {"name": WEATHER, "arguments": '{"city": "Paris"}'}
    call: dict[str, JsonValue] = {"id": CALL_ID, "type": "function", "function": function}
    messages: list[JsonValue] = [
        {"role": "user", "content": ONE[0]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": result},
    ]
    return {"messages": messages, **FREELY}


def _result(asked: Asked, attempt: str) -> None:
    grows(asked, attempt, "long", "a tool's result")
    spoken = asked.chat(f"{attempt} short")
    need(spoken.text.strip() or spoken.calls, "the reply to a tool's result is empty")


def _two(asked: Asked, attempt: str) -> None:
    calls = _fit(attempt, asked.chat(attempt), (WEATHER,), City)
    need(len(calls) > 1, f"two calls were needed, and one came: {shown(str(calls))}")


def _two_stream(asked: Asked, attempt: str) -> None:
    plain = attempt.replace("parallel_tools_stream", "parallel_tools")
    _two(asked, plain)
    _same(asked, attempt, plain)


PROBES = (
    Probe("tools_auto", [{"": user(text, **FREELY)} for text in ONE], _auto, tokens=LONG_TOK),
    Probe("tools_stream", [{"": streamed(user(text, **FREELY))} for text in ONE], _stream, tokens=LONG_TOK, plain="tools_auto"),
    Probe("tools_none", [{"": user(ONE[0], tools=FREE, tool_choice="none")}], _none, tokens=LONG_TOK),
    Probe(
        "tools_required",
        [{"": user(text, tools=KNOWN, tool_choice="required")} for text in QUESTIONS],
        _required,
        tokens=LONG_TOK,
    ),
    Probe("tools_named", [{"": user(text, tools=KNOWN, tool_choice=NAMED)} for text in ONE], _named, tokens=LONG_TOK),
    Probe("tools_result", [{"short": _with_result(SHORT), "long": _with_result(LONG)}], _result),
)
PARALLEL = (
    Probe("parallel_tools", [{"": user(text, **FREELY)} for text in TWO], _two, tokens=LONG_TOK),
    Probe(
        "parallel_tools_stream",
        [{"": streamed(user(text, **FREELY))} for text in TWO],
        _two_stream,
        tokens=LONG_TOK,
        plain="parallel_tools",
    ),
)
