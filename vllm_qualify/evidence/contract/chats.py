"""What replies of chats must look like, and what was said in them, at once or in pieces."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from vllm_qualify.evidence.contract.replies import BrokenError, Form, Usage

Reason = Literal["stop", "length", "tool_calls"]


class Function(Form):
    name: str = Field(min_length=1)
    arguments: str


class ToolCall(Form):
    id: str = Field(min_length=1)
    type: Literal["function"]
    function: Function


class Message(Form):
    """vLLM had its thoughts as `reasoning_content` before they were `reasoning`; TensorRT-LLM still has."""

    role: Literal["assistant"]
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Form):
    index: int
    message: Message
    finish_reason: Reason


class Chat(Form):
    object: Literal["chat.completion"]
    model: str
    choices: list[ChatChoice] = Field(min_length=1)
    usage: Usage


class FunctionPiece(Form):
    name: str | None = None
    arguments: str | None = None


class CallPiece(Form):
    index: int
    id: str | None = None
    function: FunctionPiece | None = None


class Piece(Form):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] | None = None


class ChatChunkChoice(Form):
    index: int
    delta: Piece
    finish_reason: Reason | None = None


class ChatChunk(Form):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Call(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: str


class Spoken(NamedTuple):
    """A reply: its thoughts, its content and its calls, why it ended, and how many tokens there were, if that is known."""

    reasoning: str
    content: str
    calls: list[Call]
    reason: Reason
    usage: Usage | None

    @property
    def text(self) -> str:
        """All its text. A reply that is short can end within the thoughts."""
        return self.reasoning + self.content


def said_at_once(reply: Chat) -> Spoken:
    choice = reply.choices[0]
    message = choice.message
    calls = [Call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return Spoken(_thoughts(message), message.content or "", calls, choice.finish_reason, reply.usage)


def said_in_pieces(name: str, chunks: Sequence[ChatChunk]) -> Spoken:
    """The chunks of a stream as one reply. Raises BrokenError if it never says why it ends, or a call has no name."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    if not reasons:
        raise BrokenError(f"the stream '{name}' has no finish reason")
    pieces = [choice.delta for choice in choices]
    reasoning, content = "".join(map(_thoughts, pieces)), "".join(piece.content or "" for piece in pieces)
    return Spoken(reasoning, content, _calls(name, pieces), reasons[-1], chunks[-1].usage)


def _thoughts(message: Message | Piece) -> str:
    return message.reasoning or message.reasoning_content or ""


def _calls(name: str, pieces: Sequence[Piece]) -> list[Call]:
    ids, names, arguments = dict[int, str](), dict[int, str](), dict[int, str]()
    for call in (call for piece in pieces for call in piece.tool_calls or []):
        function = call.function or FunctionPiece()
        ids.setdefault(call.index, call.id or "")
        names[call.index] = names.get(call.index, "") + (function.name or "")
        arguments[call.index] = arguments.get(call.index, "") + (function.arguments or "")
    if not (all(ids.values()) and all(names.values())):
        raise BrokenError(f"the stream '{name}' has a call without an id or a name")
    return [Call(ids[index], names[index], arguments[index]) for index in sorted(ids)]
