"""What replies must look like: the parts of OpenAI's forms that the checks read. Other fields are not looked at."""

from collections.abc import Mapping
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from vllm_qualify.evidence.contract.exchange import Exchange

# How much of a reply a sentence shows.
SHOWN = 120
EVENT, DONE = "data:", "[DONE]"


class BrokenError(Exception):
    """The reply is not what the contract asks for; the text says what is wrong."""


class MissingError(Exception):
    """There is no reply to judge by; the text says why."""


class Form(BaseModel):
    """A part of a reply. Nothing is converted: a number as text is wrong."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Usage(Form):
    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int


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


F = TypeVar("F", bound=Form)


class Said:
    """What was asked and answered, by the names of the requests."""

    def __init__(self, exchanges: Mapping[str, Exchange]) -> None:
        self._exchanges = exchanges

    def __contains__(self, name: str) -> bool:
        return name in self._exchanges

    def exchange(self, name: str) -> Exchange:
        """Raises MissingError if there is no whole reply."""
        exchange = self._exchanges.get(name)
        if exchange is None:
            raise MissingError(f"the request '{name}' was not kept")
        if exchange.problem is not None or exchange.status is None:
            raise MissingError(f"the request '{name}' has no whole reply: {exchange.problem}")
        return exchange

    def answered(self, name: str) -> Exchange:
        """An exchange that the server answered with 200. Raises BrokenError if it refused."""
        exchange = self.exchange(name)
        if exchange.status != 200:
            raise BrokenError(f"the request '{name}' got HTTP {exchange.status}: {shown(exchange.reply)}")
        return exchange

    def read(self, name: str, form: type[F]) -> F:
        """The reply in a form. Raises BrokenError if it has another one."""
        return parsed(name, self.answered(name).reply, form)

    def events(self, name: str) -> list[str]:
        """The data of each event of a stream. Raises BrokenError if the reply is none."""
        exchange = self.answered(name)
        if not exchange.content_type.startswith("text/event-stream"):
            raise BrokenError(f"the reply to '{name}' is no stream of events, but {exchange.content_type!r}")
        lines = [line for line in exchange.reply.splitlines() if line.startswith(EVENT)]
        return [line.removeprefix(EVENT).strip() for line in lines]

    def chunks(self, name: str, form: type[F]) -> list[F]:
        """The events of a stream without its end. Raises BrokenError if there are none, or one has another form."""
        found = [parsed(name, event, form) for event in self.events(name) if event != DONE]
        if not found:
            raise BrokenError(f"the stream '{name}' has no event")
        return found

    def sent(self, name: str) -> Mapping[str, object]:
        """The body of a request that was sent. Raises MissingError if there was none."""
        body = self.exchange(name).body
        if body is None:
            raise MissingError(f"the request '{name}' has no body")
        return body


def parsed(name: str, text: str, form: type[F]) -> F:
    try:
        return form.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise BrokenError(f"the reply to '{name}' has another form: {place}: {first['msg']}: {shown(text)}") from error


def shown(text: str) -> str:
    """The begin of a text, in quotes."""
    return repr(text[:SHOWN]) + ("…" if len(text) > SHOWN else "")


def check_refused(said: Said, name: str) -> None:
    """Raises BrokenError unless the request got an error of OpenAI's form and of a status 4xx."""
    exchange = said.exchange(name)
    if exchange.status is None or not 400 <= exchange.status < 500:
        got = f"HTTP {exchange.status}, and not a status 4xx"
        raise BrokenError(f"the request '{name}' got {got}: {shown(exchange.reply)}")
    parsed(name, exchange.reply, Refusal)
