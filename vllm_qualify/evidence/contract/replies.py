"""What replies must look like: the parts of OpenAI's forms that the checks read. Other fields are not looked at."""

from contextlib import suppress
from typing import Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

# How much of a reply a sentence shows.
SHOWN = 120


class BrokenError(Exception):
    """The reply is not what the contract asks for; the text says what is wrong."""


class MissingError(Exception):
    """There is no reply to judge by; the text says why."""


def need(holds: object, sentence: str) -> None:
    """Raises BrokenError with the sentence if it does not hold."""
    if not holds:
        raise BrokenError(sentence)


def shorten(text: str) -> str:
    """The begin of a text, in quotes."""
    return repr(text[:SHOWN]) + ("…" if len(text) > SHOWN else "")


class Form(BaseModel):
    """A part of a reply. Nothing is converted: a number as text is wrong."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


F = TypeVar("F", bound=Form)


def parse_form(name: str, text: str, form: type[F]) -> F:
    """A text in a form. Raises BrokenError if it has another one."""
    try:
        return form.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise BrokenError(f"the reply to '{name}' has another form: {place}: {first['msg']}: {shorten(text)}") from error


class Card(Form):
    id: str
    max_model_len: int | None = None


class Models(Form):
    object: Literal["list"]
    data: list[Card]


class Fault(Form):
    message: str = Field(min_length=1)
    type: str


class Refusal(Form):
    error: Fault


def check_refusal(name: str, text: str) -> None:
    """Check that an error has a known form. Which one is the engine's choice."""
    need(_find_words(text), f"the error that the request '{name}' got has another form: {shorten(text)}")


def read_refusal(text: str) -> str:
    """The server's own words in an error; all of the text if its form is not known."""
    return _find_words(text) or text


def _find_words(text: str) -> str | None:
    """The words of an error of OpenAI's form, or of a flat one as TensorRT-LLM's."""
    with suppress(ValidationError):
        return Refusal.model_validate_json(text).error.message
    with suppress(ValidationError):
        return Fault.model_validate_json(text).message
    return None


class Usage(Form):
    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int


# --- completions


class Likelihoods(Form):
    tokens: list[str]
    token_logprobs: list[FiniteFloat | None]
    top_logprobs: list[dict[str, FiniteFloat] | None]


class Choice(Form):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: Likelihoods | None = None


class Completion(Form):
    object: Literal["text_completion"]
    model: str
    choices: list[Choice] = Field(min_length=1)
    usage: Usage


class StreamedChoice(Form):
    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None


class Chunk(Form):
    object: Literal["text_completion"]
    choices: list[StreamedChoice]
    usage: Usage | None = None


# --- chats

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
    id: str
    name: str
    arguments: str


class Spoken(NamedTuple):
    """A chat's reply, at once or in pieces: thoughts, content, calls, why it ended, and the tokens' counts if known."""

    reasoning: str
    content: str
    calls: list[Call]
    reason: Reason
    usage: Usage | None

    @property
    def text(self) -> str:
        """All its text. A reply that is short can end within the thoughts."""
        return self.reasoning + self.content


# --- responses


class ResponsePart(Form):
    type: str
    text: str = ""


class ResponseItem(Form):
    """A part of the output: thoughts or a message."""

    type: str
    content: list[ResponsePart] | None = None


class ResponseUsage(Form):
    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=0)
    total_tokens: int


class Response(Form):
    object: Literal["response"]
    status: Literal["completed", "incomplete"]
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage

    def text(self, *kinds: str) -> str:
        """The texts of the items of these kinds."""
        return "".join(part.text for item in self.output if item.type in kinds for part in item.content or [])
