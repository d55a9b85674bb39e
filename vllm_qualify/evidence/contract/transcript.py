"""The replies of a server in the forms that the checks read."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from vllm_qualify.engine.kinds.base import EngineKind
from vllm_qualify.evidence.contract.exchange import Exchange
from vllm_qualify.evidence.contract.replies import (
    BrokenError,
    Call,
    Chat,
    ChatChunk,
    Chunk,
    Completion,
    F,
    Message,
    MissingError,
    Piece,
    Refusal,
    Response,
    Spoken,
    Usage,
    need,
    parse_form,
    shorten,
)

# What vLLM and TensorRT-LLM answer to a form that they do not keep is 400, and 422 is that of FastAPI. The others say that the
# server had no time.
REFUSALS, NO_TIME = (400, 422), (408, 429)
EVENT, DONE = "data:", "[DONE]"
Reply = TypeVar("Reply", Completion, Chat, Response)
Streamed = TypeVar("Streamed", Chunk, ChatChunk)


class Transcript:
    """Requests and their replies, by the names of the requests, of a server with this name, kind and aliases.

    Each method raises MissingError if there is no whole reply, and BrokenError if the reply is not what was asked for.
    """

    def __init__(self, exchanges: Mapping[str, Exchange], model: str, kind: EngineKind, aliases: Sequence[str] = ()) -> None:
        self._exchanges, self.model, self.kind, self.aliases = exchanges, model, kind, aliases

    def __contains__(self, name: str) -> bool:
        return name in self._exchanges

    def exchange(self, name: str) -> Exchange:
        exchange = self._exchanges.get(name)
        if exchange is None:
            raise MissingError(f"the request '{name}' was not kept")
        if exchange.problem is not None or exchange.status is None:
            raise MissingError(f"the request '{name}' has no whole reply: {exchange.problem}")
        return exchange

    def refuses_form(self, name: str) -> bool:
        """Whether the server refused what was asked. Raises MissingError if it had no time for it."""
        status = self.exchange(name).status
        if status in NO_TIME:
            raise MissingError(f"the request '{name}' got HTTP {status}: the server had no time for it")
        return status in REFUSALS

    def sent_body(self, name: str) -> Mapping[str, object]:
        body = self.exchange(name).body
        if body is None:
            raise MissingError(f"the request '{name}' has no body")
        return body

    def sent_number(self, name: str, key: str) -> int:
        value = self.sent_body(name).get(key)
        if not isinstance(value, int):
            raise MissingError(f"the request '{name}' has no {key}")
        return value

    def accepted(self, name: str) -> Exchange:
        """An exchange that the server answered with 200."""
        exchange = self.exchange(name)
        need(exchange.status == 200, f"the request '{name}' got HTTP {exchange.status}: {shorten(exchange.reply)}")
        return exchange

    def read(self, name: str, form: type[F]) -> F:
        return parse_form(name, self.accepted(name).reply, form)

    def read_own(self, name: str, form: type[Reply]) -> Reply:
        """A reply of the served model, whose usage counts agree."""
        reply = self.read(name, form)
        need(reply.model == self.model, f"the reply to '{name}' is of the model {shorten(reply.model)}")
        *parts, total = reply.usage.model_dump().values()
        need(total == sum(parts), f"the usage counts of '{name}' do not agree: {reply.usage}")
        return reply

    def text(self, name: str) -> str:
        return self.read_own(name, Completion).choices[0].text

    def chat(self, name: str) -> Spoken:
        reply = self.read_own(name, Chat)
        choice = reply.choices[0]
        calls = [Call(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        return Spoken(_read_thoughts(choice.message), choice.message.content or "", calls, choice.finish_reason, reply.usage)

    def streamed_chat(self, name: str) -> Spoken:
        chunks = self.chunks(name, ChatChunk)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        reasons = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
        if not reasons:
            raise BrokenError(f"the stream '{name}' has no finish reason")
        pieces = [choice.delta for choice in choices]
        reasoning, content = "".join(map(_read_thoughts, pieces)), "".join(piece.content or "" for piece in pieces)
        return Spoken(reasoning, content, _join_calls(name, pieces), reasons[-1], chunks[-1].usage)

    def events(self, name: str) -> list[str]:
        """The data of each event of a stream."""
        exchange, stream = self.accepted(name), "text/event-stream"
        is_stream = exchange.content_type.startswith(stream)
        need(is_stream, f"the reply to '{name}' is no stream of events, but {exchange.content_type!r}")
        return [line.removeprefix(EVENT).strip() for line in exchange.reply.splitlines() if line.startswith(EVENT)]

    def chunks(self, name: str, form: type[F]) -> list[F]:
        """The events of a stream without its end; there is one at least."""
        found = [parse_form(name, event, form) for event in self.events(name) if event != DONE]
        need(found, f"the stream '{name}' has no event")
        return found

    def check_end(self, name: str, form: type[Streamed]) -> None:
        """Check a stream's end: one finish reason, with the last piece, and then the last event."""
        reasons = [choice.finish_reason for chunk in self.chunks(name, form) for choice in chunk.choices]
        events = self.events(name)
        need(events[-1] == DONE and events.count(DONE) == 1, f"the stream does not end with {DONE}")
        need(
            reasons and reasons[-1] is not None and reasons.count(None) == len(reasons) - 1,
            f"the chunks' finish reasons are {shorten(str(reasons))}: the last one alone must have one",
        )

    def check_length(self, name: str, text: str, usage: Usage | None) -> None:
        """Check that a reply has a text, and no more tokens than its request allowed."""
        need(text.strip(), "the reply has no text")
        most, tokens = self.sent_number(name, "max_tokens"), usage.completion_tokens if usage else 0
        need(0 < tokens <= most, f"the reply has {tokens} tokens of at most {most}")

    def check_refused(self, *names: str) -> None:
        """Check that each of these requests got an error of OpenAI's form and of a status 4xx."""
        for name in names:
            exchange = self.exchange(name)
            got = f"HTTP {exchange.status}, and not a status 4xx: {shorten(exchange.reply)}"
            need(exchange.is_refused, f"the request '{name}' got {got}")
            parse_form(name, exchange.reply, Refusal)


def check_stream_usage(usage: Usage | None, plain: Usage | None) -> None:
    """Check the usage counts of a stream against those of the plain reply."""
    need(usage is not None, "the stream's last chunk has no usage counts")
    need(usage == plain, f"the stream counts {usage}, and the plain reply {plain}")


def _read_thoughts(message: Message | Piece) -> str:
    return message.reasoning or message.reasoning_content or ""


def _join_calls(name: str, pieces: Sequence[Piece]) -> list[Call]:
    parts = sorted((call for piece in pieces for call in piece.tool_calls or []), key=attrgetter("index"))
    calls = []
    for _, parts_of_call in groupby(parts, key=attrgetter("index")):
        first, *others = parts_of_call
        functions = [part.function for part in (first, *others) if part.function]
        arguments = "".join(function.arguments or "" for function in functions)
        calls.append(Call(first.id or "", "".join(function.name or "" for function in functions), arguments))
    need(all(call.id and call.name for call in calls), f"the stream '{name}' has a call without an id or a name")
    return calls
