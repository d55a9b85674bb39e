"""/v1/responses: plain and as a stream."""

from typing import Literal

from pydantic import Field

from vllm_qualify.evidence.contract.asked import Asked, need
from vllm_qualify.evidence.contract.capabilities.chat import QUESTIONS
from vllm_qualify.evidence.contract.capabilities.probe import LONG_TOK, Body, Probe
from vllm_qualify.evidence.contract.exchange import RESPONSES
from vllm_qualify.evidence.contract.replies import BrokenError, Form, parsed, shown

TEXT_PIECES = ("response.reasoning_text.delta", "response.output_text.delta")
ENDS = ("response.completed", "response.incomplete")


class Part(Form):
    type: str
    text: str = ""


class Item(Form):
    """A part of the output: thoughts or a message."""

    type: str
    content: list[Part] | None = None


class Counts(Form):
    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=0)
    total_tokens: int


class Response(Form):
    object: Literal["response"]
    status: Literal["completed", "incomplete"]
    model: str
    output: list[Item]
    usage: Counts

    def text(self, *kinds: str) -> str:
        """The texts of the items of these kinds."""
        items = [item for item in self.output if item.type in kinds]
        return "".join(part.text for item in items for part in item.content or [])

    @property
    def all_text(self) -> str:
        """Thoughts included."""
        return self.text("reasoning", "message")


class Event(Form):
    type: str


class PieceEvent(Form):
    delta: str


class EndEvent(Form):
    response: Response


def _response(asked: Asked, name: str) -> Response:
    reply = asked.said.read(name, Response)
    asked.check_model(name, reply.model)
    usage = reply.usage
    need(
        usage.total_tokens == usage.input_tokens + usage.output_tokens,
        f"the usage counts of '{name}' do not agree: {usage}",
    )
    return reply


def _plain(asked: Asked, attempt: str) -> None:
    reply = _response(asked, attempt)
    need(
        reply.status == "completed" and reply.text("message").strip(),
        f"the reply to '{attempt}' is {reply.status}, and its message {shown(reply.text('message'))}",
    )


def _stream(asked: Asked, attempt: str) -> None:
    name = f"{attempt} stream"
    events = asked.said.events(name)
    kinds = [parsed(name, event, Event).type for event in events]
    if not kinds or kinds[-1] not in ENDS:
        raise BrokenError(f"the stream '{name}' does not end with {' or '.join(ENDS)}, but with {shown(str(kinds[-1:]))}")
    pieces = [parsed(name, event, PieceEvent).delta for kind, event in zip(kinds, events, strict=True) if kind in TEXT_PIECES]
    plain, ended = _response(asked, f"{attempt} plain"), parsed(name, events[-1], EndEvent).response
    came = "".join(pieces)
    need(came == plain.all_text, f"the stream has {shown(came)}, and the plain reply {shown(plain.all_text)}")
    need(ended.usage == plain.usage, f"the stream counts {ended.usage}, and the plain reply {plain.usage}")


def _asks(question: str, **keys: bool) -> Body:
    return {"input": question, "store": False, **keys}


PROBES = (
    Probe("responses", [{"": _asks(question)} for question in QUESTIONS], _plain, tokens=LONG_TOK, path=RESPONSES),
    Probe(
        "responses_stream",
        [{"plain": _asks(QUESTIONS[0]), "stream": _asks(QUESTIONS[0], stream=True)}],
        _stream,
        path=RESPONSES,
    ),
)
