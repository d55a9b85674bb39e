"""Calls of tools: whether one is called, which one, and with which arguments."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from pydantic import ConfigDict, JsonValue

from vllm_qualify.evidence.contract.capabilities.chat import LONG, QUESTIONS, SHORT, check_growth
from vllm_qualify.evidence.contract.capabilities.json_schema import all_of_body
from vllm_qualify.evidence.contract.capabilities.probe import SHORT_TOK, Body, Probe, stream_body, user_body
from vllm_qualify.evidence.contract.content import check_content, find_written_call, has_markup
from vllm_qualify.evidence.contract.replies import Call, ChatChunk, Form, MissingError, Spoken, need, parse_form, shorten
from vllm_qualify.evidence.contract.transcript import Transcript


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


class SentText(Form):
    """Those of a tool that must be called and takes any text.

    Such a text may hold what the server's parser reads as markup: vLLM 0.32 then answers with the reason `tool_calls`, no
    call, and all that was written as content.
    """

    model_config = ConfigDict(extra="forbid")
    text: str


def _tool_body(name: str, description: str, arguments: type[Form], **keys: bool) -> dict[str, JsonValue]:
    schema: dict[str, JsonValue] = arguments.model_json_schema()
    function: dict[str, JsonValue] = {"name": name, "description": description, "parameters": schema, **keys}
    return {"type": "function", "function": function}


WEATHER, TIME, SEND = OFFERED = ("get_weather", "get_time", "send_message")
GET_WEATHER, GET_TIME = "Get the weather of a city.", "Get the time of a city."
FREE: list[JsonValue] = [_tool_body(WEATHER, GET_WEATHER, City)]
KNOWN: list[JsonValue] = [
    _tool_body(name, description, KnownCity, strict=True) for name, description in ((WEATHER, GET_WEATHER), (TIME, GET_TIME))
]
TEXT: list[JsonValue] = [_tool_body(SEND, "Send a message.", SentText, strict=True)]
NAMED: dict[str, JsonValue] = {"type": "function", "function": {"name": TIME}}
FREELY: Body = {"tools": FREE, "tool_choice": "auto"}
ONE = [f"What is the weather in {city}?" for city in ("Paris", "Rome", "Oslo")]
TWO = [f"What is the weather in {pair}?" for pair in ("Paris and in Rome", "Oslo and in Berlin", "London and in Madrid")]
FREE_ONE, FREE_TWO = ([user_body(text, **FREELY) for text in texts] for texts in (ONE, TWO))
# Mistral's templates take ids of nine letters and digits only.
CALL_ID = "weather01"
# Quotes and line breaks, which a call has to escape in one way or another.
MESSAGES = ('Ann wrote: "We meet at noon."\nBring the papers.', '"Yes," said Bob.\n"No," said Ann.', 'It is called "C:\\new".')


def _result_body(result: str) -> Body:
    function: dict[str, JsonValue] = {"name": WEATHER, "arguments": '{"city": "Paris"}'}
    call: dict[str, JsonValue] = {"id": CALL_ID, "type": "function", "function": function}
    messages: list[JsonValue] = [
        {"role": "user", "content": ONE[0]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": result},
    ]
    return {"messages": messages, **FREELY}


def _check_calls(
    replies: Transcript,
    attempt: str,
    tools: tuple[str, ...] = (WEATHER,),
    arguments: type[Form] = City,
    *,
    is_streamed: bool = False,
) -> list[Call]:
    """The calls of a reply: there is one, each is of these tools, its arguments fit, and none is left as text."""
    spoken = replies.streamed_chat(attempt) if is_streamed else replies.chat(attempt)
    _need_calls(attempt, spoken)
    for call in spoken.calls:
        need(call.name in tools, f"the reply to '{attempt}' calls {shorten(call.name)}")
        parse_form(f"{attempt}, arguments", call.arguments, arguments)
    ids = [call.id for call in spoken.calls]
    need(len(set(ids)) == len(ids), f"the calls of '{attempt}' share an id: {shorten(str(ids))}")
    # A plan beside a call may show the call as code.
    check_content(attempt, spoken.content, OFFERED, may_quote=True)
    return spoken.calls


def _need_calls(name: str, spoken: Spoken) -> None:
    said = f"{shorten(spoken.text)}, ended by {spoken.reason}{_hint_at_lost_call(spoken)}"
    need(spoken.calls, f"the reply to '{name}' calls no tool: {said}")


def _hint_at_lost_call(spoken: Spoken) -> str:
    is_written = has_markup(spoken.content) or find_written_call(spoken.content, OFFERED)
    return "; its content has what a parser should have taken for a call" if is_written else ""


def _check_auto(replies: Transcript, attempt: str) -> None:
    _check_calls(replies, attempt)
    _check_reason(attempt, replies.chat(attempt).reason)


def _check_reason(attempt: str, reason: str) -> None:
    need(reason == "tool_calls", f"the reply to '{attempt}' calls a tool, and ended by {reason}")


def _check_same_calls(replies: Transcript, attempt: str, plain: str) -> None:
    said = [_check_calls(replies, attempt, is_streamed=True), _check_calls(replies, _plain_attempt(attempt, plain))]
    came, wanted = ([(call.name, parse_form(attempt, call.arguments, City).city) for call in calls] for calls in said)
    need(came == wanted, f"the stream calls {shorten(str(came))}, and the plain reply {shorten(str(wanted))}")
    _check_reason(attempt, replies.streamed_chat(attempt).reason)
    replies.check_end(attempt, ChatChunk)


def _plain_attempt(attempt: str, plain: str) -> str:
    return f"{plain} {attempt.rpartition(' ')[2]}"


def _check_none(replies: Transcript, attempt: str) -> None:
    # A call that is written as text is no fault of the release: vLLM shows the tools to the model all the same, unless
    # exclude-tools-when-tool-choice-none is set.
    calls = replies.chat(attempt).calls
    need(not calls, f"no tool was to be called, and the reply calls {shorten(str(calls))}")


def _check_result(replies: Transcript, attempt: str) -> None:
    check_growth(replies, attempt, long="a tool's result")
    spoken = replies.chat(f"{attempt} short")
    need(spoken.text.strip() or spoken.calls, "the reply to a tool's result is empty")
    # vLLM gives a call that was cut as content.
    if spoken.reason != "length":
        check_content(f"{attempt} short", spoken.content, OFFERED)


def _check_two(replies: Transcript, attempt: str) -> None:
    calls = _check_calls(replies, attempt)
    need(len(calls) > 1, f"two calls were needed, and one came: {shorten(str(calls))}")


def _check_two_stream(replies: Transcript, attempt: str) -> None:
    _check_two(replies, _plain_attempt(attempt, "parallel_tools"))
    _check_same_calls(replies, attempt, "parallel_tools")


def _check_text(replies: Transcript, attempt: str) -> None:
    """Check a forced call, plain and streamed. A model may write a text without an end: then another attempt may be good.

    But a reply that ended and has no call is the server's fault, whatever comes after it.
    """
    for number in range(1, 1 + int(attempt.rpartition(" ")[2])):
        _check_not_lost(f"tools_text {number} plain", replies.chat)
        _check_not_lost(f"tools_text {number} stream", replies.streamed_chat)
    _check_forced(replies, attempt)


def _check_not_lost(name: str, read: Callable[[str], Spoken]) -> None:
    """Check that a reply has a call or was cut. Nothing follows from a reply that is not there."""
    try:
        spoken = read(name)
    except MissingError:
        return
    if spoken.reason != "length":
        _need_calls(name, spoken)


def _check_forced(replies: Transcript, attempt: str) -> None:
    for way in ("plain", "stream"):
        _check_calls(replies, f"{attempt} {way}", (SEND,), SentText, is_streamed=way == "stream")
    replies.check_end(f"{attempt} stream", ChatChunk)


def _text_bodies(message: str) -> dict[str, Body]:
    body = user_body(f"Send this message: {message}", tools=TEXT, tool_choice="required")
    return {"plain": body, "stream": stream_body(body)}


def _check_again(replies: Transcript, attempt: str) -> None:
    # Whether the schema itself is kept is not promised here.
    replies.exchange(f"{attempt} schema")
    _check_required(replies, f"{attempt} call")


def _again_bodies(question: str) -> dict[str, Body]:
    schema = {**all_of_body(question), "max_tokens": SHORT_TOK}
    return {"schema": schema, "call": user_body(question, tools=KNOWN, tool_choice="required")}


_check_stream = partial(_check_same_calls, plain="tools_auto")
_check_required = partial(_check_calls, tools=(WEATHER, TIME), arguments=KnownCity)
_check_named = partial(_check_calls, tools=(TIME,), arguments=KnownCity)
PROBES = (
    Probe("tools_auto", [{"": body} for body in FREE_ONE], _check_auto),
    Probe("tools_stream", [{"": stream_body(body)} for body in FREE_ONE], _check_stream, plain="tools_auto"),
    Probe("tools_none", [{"": user_body(ONE[0], tools=FREE, tool_choice="none")}], _check_none),
    Probe(
        "tools_required", [{"": user_body(each, tools=KNOWN, tool_choice="required")} for each in QUESTIONS], _check_required
    ),
    Probe("tools_named", [{"": user_body(text, tools=KNOWN, tool_choice=NAMED)} for text in ONE], _check_named),
    Probe("tools_text", [_text_bodies(message) for message in MESSAGES], _check_text),
    Probe("tools_again", [_again_bodies(question) for question in QUESTIONS], _check_again, is_last=True),
    Probe("tools_result", [{"short": _result_body(SHORT), "long": _result_body(LONG)}], _check_result, SHORT_TOK),
)
PARALLEL = (
    Probe("parallel_tools", [{"": body} for body in FREE_TWO], _check_two),
    Probe("parallel_tools_stream", [{"": stream_body(body)} for body in FREE_TWO], _check_two_stream, plain="parallel_tools"),
)
