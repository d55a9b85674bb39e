"""Replies that must fit a JSON schema or call a tool, by a busy server: plain and streamed, many at once.

A grammar holds each reply to its form, whatever the question. So every whole reply has to fit. One that has as many tokens as
were allowed was cut: the model thought on, or wrote blanks between two words, which JSON allows without end. It tells nothing
if it could have become a reply of the form.
"""

import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from jsonschema import Draft202012Validator
from pydantic import Field, JsonValue

from vllm_qualify.engine.kinds.base import EngineKind
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.server import Server
from vllm_qualify.evidence.contract.exchange import CHATS, Exchange, Request, send_request
from vllm_qualify.evidence.contract.replies import BrokenError, ChatChunk, MissingError, Spoken, need, shorten
from vllm_qualify.evidence.contract.transcript import Transcript
from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.paths import FORMS, MOST_FORM_TOK
from vllm_qualify.recipe.values import Flag, Frozen, NotNegative

EXCHANGES = "exchanges.jsonl"
# A reply without thoughts may have so many tokens more than the longest form.
BESIDE_FORM_TOK = 16
# So many tokens show whether a model thinks unasked.
PROBE_TOK = 16
# How many broken replies a finding names.
NAMED = 5
# The share of the replies that must not have been cut.
LEAST_WHOLE = 0.5
# How a server refuses a request: as one that it does not take.
REFUSALS = range(400, 500)
# In one request of so many the model may think. The last requests are none of these: all would wait for their long replies.
# The number has no factor in common with those of the forms, which come by turns: so each form has some with thoughts.
THINKS_ONCE_IN, LAST_ONES = 7, 1 / 8

# What is left of a value that was cut: nothing, the beginning of a word, or what stands behind the digits of a number.
CUT_VALUE = re.compile(r"(t(r(ue?)?)?|f(a(l(se?)?)?)?|n(u(ll?)?)?|-|\.|[eE][+-]?)?")
ESCAPE_LETTERS = len(r"\u0000")

Schema = Mapping[str, JsonValue]


def _object_schema(**properties: JsonValue) -> dict[str, JsonValue]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_COLOUR: dict[str, JsonValue] = {"enum": ["red", "green", "blue"]}
_SIZE: dict[str, JsonValue] = {"enum": [1, 2, 3, 4]}
# No text is free, since it could be endless, and no keyword is here that xgrammar drops (seen in vLLM 0.32: anyOf beside
# properties, not, if).
SCHEMAS: Sequence[Schema] = (
    _object_schema(colour=_COLOUR, size=_SIZE),
    _object_schema(
        parts={
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": _object_schema(colour=_COLOUR, is_new={"type": "boolean"}),
        }
    ),
    _object_schema(answer={"anyOf": [_object_schema(size=_SIZE), {"type": "null"}]}, unit={"const": "m"}),
)
TOOLS: Mapping[str, Schema] = {
    "get_weather": _object_schema(city={"enum": ["Paris", "Rome", "Oslo"]}),
    "get_time": _object_schema(city={"enum": ["Paris", "Rome", "Oslo"]}, format={"enum": ["12", "24"]}),
}


_PART: JsonValue = {"colour": "green", "is_new": False}
# The longest reply that fits a schema, with as many blanks as a model usually writes.
LONGEST_FORM = json.dumps({"parts": [_PART, _PART, _PART]}, indent=2)


class FormAsking(Frozen):
    """How replies with a form are asked for: the most tokens of one with thoughts, and of one without."""

    thinking_tok: Annotated[int, Field(strict=True, ge=1, le=MOST_FORM_TOK)] = MOST_FORM_TOK
    brief_tok: Annotated[int, Field(strict=True, ge=1, le=MOST_FORM_TOK)] = MOST_FORM_TOK
    told: Flag = True
    """whether the template is told when not to think; some servers refuse a request that says so"""
    thinks: Flag = False
    """whether the model thinks all the same"""


class Form(NamedTuple):
    """What a reply must be: it fits `schema`, or calls one of `tools`. A stream has the same in pieces."""

    schema: Schema | None = None
    tools: tuple[str, ...] = ()
    is_streamed: bool = False

    @property
    def words(self) -> str:
        return f"{'streamed ' if self.is_streamed else ''}{'JSON' if self.schema is not None else 'call of a tool'}"

    def body(self) -> dict[str, JsonValue]:
        stream: dict[str, JsonValue] = {"stream": True, "stream_options": {"include_usage": True}} if self.is_streamed else {}
        if self.schema is not None:
            asked: dict[str, JsonValue] = {"name": "form", "strict": True, "schema": dict(self.schema)}
            return stream | {"response_format": {"type": "json_schema", "json_schema": asked}}
        named: JsonValue = {"type": "function", "function": {"name": self.tools[0]}} if len(self.tools) == 1 else "required"
        return stream | {"tools": [_tool_body(name, arguments) for name, arguments in TOOLS.items()], "tool_choice": named}

    def check(self, spoken: Spoken) -> None:
        """Raises BrokenError if the reply is another one."""
        if self.schema is not None:
            _check_fits(spoken.content, self.schema)
            return
        need(spoken.calls, f"no tool is called: {shorten(spoken.text)}")
        for call in spoken.calls:
            need(call.name in self.tools, f"{shorten(call.name)} is called, and it should be {' or '.join(self.tools)}")
            _check_fits(call.arguments, TOOLS[call.name])

    def fits(self, spoken: Spoken) -> bool:
        try:
            self.check(spoken)
        except BrokenError:
            return False
        return True

    def check_cut(self, spoken: Spoken) -> None:
        """Raises BrokenError if a reply that was cut could not have gone on to be one of this form."""
        for text in [spoken.content] if self.schema is not None else [call.arguments for call in spoken.calls]:
            need(_is_beginning(text), f"no beginning of JSON: {shorten(text)}")


def _tool_body(name: str, arguments: Schema) -> dict[str, JsonValue]:
    function: dict[str, JsonValue] = {"name": name, "description": "Tells it of a city.", "parameters": dict(arguments)}
    return {"type": "function", "function": function | {"strict": True}}


def _is_beginning(text: str) -> bool:
    """Whether it is JSON, or becomes JSON if more is written.

    A parser of partial documents would not tell: pydantic_core's drops what is wrong, with all that follows.
    """
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].strip()
        is_cut_escape = "uXXXX" in error.msg and len(rest) < ESCAPE_LETTERS
        return is_cut_escape or error.msg.startswith("Unterminated string") or bool(CUT_VALUE.fullmatch(rest))
    except (ValueError, RecursionError):
        return False
    return True


def _check_fits(text: str, schema: Schema) -> None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenError(f"no JSON: {shorten(text)}") from error
    problem = next((each.message for each in Draft202012Validator(schema).iter_errors(document)), "")
    need(not problem, f"not of the schema: {shorten(problem)}")


ALL_TOOLS = tuple(TOOLS)
# Streams of calls are most, since a call is most often lost there.
OF_SCHEMAS = [Form(schema, is_streamed=is_streamed) for schema in SCHEMAS for is_streamed in (False, True)]
OF_TOOLS = [
    Form(tools=tools, is_streamed=is_streamed)
    for tools in (ALL_TOOLS, ALL_TOOLS[:1], ALL_TOOLS)
    for is_streamed in (True, True, True, True, False)
]


def forms_of(capabilities: Collection[Capability], count: int) -> list[Form]:
    """What so many replies must be: of four, one fits a schema and three call a tool, where both are promised."""
    schemas, tools = cycle(OF_SCHEMAS), cycle(OF_TOOLS)

    def drawn() -> Iterator[Form]:
        while True:
            if "json_schema" in capabilities:
                yield next(schemas)
            if "tools" in capabilities:
                yield from islice(tools, 3)

    return [] if FORMS.isdisjoint(capabilities) else list(islice(drawn(), count))


class Timed(Frozen):
    """An exchange, and when it was under way, in s since the path's first request."""

    began_s: NotNegative
    ended_s: NotNegative
    exchange: Exchange


def requests_of(forms: Sequence[Form], model: str, asking: FormAsking) -> list[Request]:
    fixed: dict[str, JsonValue] = {"model": model, "temperature": 0}
    return [
        Request(name=f"reply {number}", path=CHATS, body=fixed | _make_question(number, len(forms), asking) | form.body())
        for number, form in enumerate(forms, 1)
    ]


def _make_question(number: int, count: int, asking: FormAsking) -> dict[str, JsonValue]:
    text = f"What is the weather in Rome, and what is {number} + {number % 7}?"
    body: dict[str, JsonValue] = {"messages": [{"role": "user", "content": text}]}
    if _may_think(number, count):
        return body | {"max_tokens": asking.thinking_tok}
    # Templates have one of two words for it, and take no notice of the other.
    quiet: dict[str, JsonValue] = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
    return body | (quiet if asking.told else {}) | {"max_tokens": asking.brief_tok}


def _may_think(number: int, count: int) -> bool:
    return number % THINKS_ONCE_IN == 0 and number <= (1 - LAST_ONES) * count


def probe_thinking(server: Server, limit_s: float) -> tuple[bool, bool]:
    """Whether the template can be told not to think, and whether the model thinks all the same.

    Some parsers give thoughts that were cut as content: text before any JSON. A reply that cannot be read tells nothing.
    """
    model, form = server.served_model_name, Form(SCHEMAS[0])
    for told in (True, False):
        (request,) = requests_of([form], model, FormAsking(brief_tok=PROBE_TOK, told=told))
        exchange = send_request(server.url, request, limit_s)
        if told and (exchange.status or 0) in REFUSALS:
            continue
        try:
            spoken = Transcript({request.name: exchange}, model, KINDS[server.kind]).chat(request.name)
        except (BrokenError, MissingError):
            return told, False
        return told, bool(spoken.reasoning) or not _is_beginning(spoken.content)
    return False, False


def ask_all(server: Server, requests: Sequence[Request], at_once: int, limit_s: float, since: float, path: Path) -> None:
    """Ask them, and write a line for each. Raises ReleaseError if the server has ended."""

    def ask(request: Request) -> Timed:
        began = time.monotonic()
        exchange = send_request(server.url, request, limit_s)
        return Timed(began_s=began - since, ended_s=time.monotonic() - since, exchange=exchange)

    with ThreadPoolExecutor(at_once) as pool, path.open("w", encoding="utf-8") as file:
        for timed in pool.map(ask, requests):
            file.write(f"{timed.model_dump_json(exclude_defaults=True)}\n")
    server.check_alive()


class Judged(NamedTuple):
    """A reply to a form, by its line: what is wrong with it, or that it was cut."""

    line: int
    form: Form
    problem: str = ""
    is_cut: bool = False


def judge_replies(
    path: Path, forms: Sequence[Form], requests: Sequence[Request], kind: EngineKind, asking: FormAsking
) -> list[Judged]:
    """Each reply, in the order of the requests. Raises ValueError if they are not those to these requests, and MissingError."""
    timed = read_timed(path)
    asked = [Request.model_validate(each.exchange.model_dump(include=set(Request.model_fields))) for each in timed]
    if asked != list(requests):
        raise ValueError(f"{path.name} has {len(timed)} replies, which are not those to the {len(requests)} requests")
    replies = Transcript({each.exchange.name: each.exchange for each in timed}, _model_of(requests), kind)
    return [
        _judge_reply(line, form, request, replies, may_think=asking.thinks or _may_think(line, len(forms)))
        for line, (form, request) in enumerate(zip(forms, requests, strict=True), 1)
    ]


def read_timed(path: Path) -> list[Timed]:
    return [Timed.model_validate_json(line) for line in path.read_bytes().split(b"\n") if line]


def _model_of(requests: Sequence[Request]) -> str:
    return str((requests[0].body or {}).get("model")) if requests else ""


def _judge_reply(line: int, form: Form, request: Request, replies: Transcript, *, may_think: bool) -> Judged:
    try:
        spoken = replies.streamed_chat(request.name) if form.is_streamed else replies.chat(request.name)
        if _is_cut(spoken, request.body or {}) and not form.fits(spoken):
            if not (may_think and _is_before_form(spoken)):
                form.check_cut(spoken)
            return Judged(line, form, is_cut=True)
        if form.is_streamed:
            replies.check_end(request.name, ChatChunk)
        form.check(spoken)
    except BrokenError as error:
        return Judged(line, form, str(error))
    return Judged(line, form)


def doubt_cuts(judged: Sequence[Judged], asking: FormAsking) -> Iterator[str]:
    """Why too few of the replies tell something."""
    cut = sum(reply.is_cut for reply in judged)
    if len(judged) - cut < LEAST_WHOLE * len(judged):
        yield f"{cut} of {len(judged)} replies were cut, {say_cut(asking)}"


def say_cut(asking: FormAsking) -> str:
    return f"with thoughts at {asking.thinking_tok} tokens, others at {asking.brief_tok}"


def describe_broken(judged: Sequence[Judged]) -> str:
    """Which whole replies do not have their form; empty if all have."""
    whole = [reply for reply in judged if not reply.is_cut]
    broken = [reply for reply in whole if reply.problem]
    if not broken:
        return ""
    named = "; ".join(f"line {reply.line}, {reply.form.words}: {reply.problem}" for reply in broken[:NAMED])
    more = f"; and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
    return f"{len(broken)} of {len(whole)} replies do not have their form: {named}{more}"


def _is_before_form(spoken: Spoken) -> bool:
    """Whether a form has not begun. Some parsers give thoughts that were cut as content."""
    return not spoken.calls and "{" not in spoken.content


def _is_cut(spoken: Spoken, body: Mapping[str, Any]) -> bool:
    """Whether the reply has as many tokens as were allowed.

    The count decides. vLLM 0.26 says `tool_calls` of a streamed call that was cut.
    """
    tokens = spoken.usage.completion_tokens if spoken.usage else 0
    return bool(tokens >= body["max_tokens"])
