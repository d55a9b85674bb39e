"""What the checks read: what was said by a server of a given name and kind."""

from collections.abc import Sequence

from vllm_qualify.engine.kinds.base import EngineKind
from vllm_qualify.evidence.contract.chats import Chat, ChatChunk, Spoken, said_at_once, said_in_pieces
from vllm_qualify.evidence.contract.replies import DONE, BrokenError, Completion, MissingError, Said, Usage, shown


def of_alias(alias: str) -> str:
    """The name of the request to an alias of the model."""
    return f"as {alias}"


class Asked:
    """What the checks read: what was said, by a server of this name and kind, with these aliases."""

    def __init__(self, said: Said, model: str, kind: EngineKind, aliases: Sequence[str] = ()) -> None:
        self.said, self.model, self.kind, self.aliases = said, model, kind, aliases

    def completion(self, name: str) -> Completion:
        """A completion of the served model. Raises BrokenError, MissingError."""
        reply = self.said.read(name, Completion)
        self.check_model(name, reply.model)
        check_usage(name, reply.usage)
        return reply

    def text(self, name: str) -> str:
        return self.completion(name).choices[0].text

    def chat(self, name: str) -> Spoken:
        """What the served model said in a chat. Raises BrokenError, MissingError."""
        reply = self.said.read(name, Chat)
        self.check_model(name, reply.model)
        check_usage(name, reply.usage)
        return said_at_once(reply)

    def streamed_chat(self, name: str) -> Spoken:
        """The same, of a stream."""
        return said_in_pieces(name, self.said.chunks(name, ChatChunk))

    def check_model(self, name: str, model: str) -> None:
        if model != self.model:
            raise BrokenError(f"the reply to '{name}' is of the model {shown(model)}")


def check_usage(name: str, usage: Usage) -> None:
    if usage.total_tokens != usage.prompt_tokens + usage.completion_tokens:
        raise BrokenError(f"the usage counts of '{name}' do not agree: {usage}")


def check_end(events: Sequence[str], reasons: Sequence[str | None]) -> None:
    """A stream's end: one finish reason, with the last piece, and then the last event."""
    need(events and events[-1] == DONE and events.count(DONE) == 1, f"the stream does not end with {DONE}")
    need(
        reasons and reasons[-1] is not None and reasons.count(None) == len(reasons) - 1,
        f"the chunks' finish reasons are {shown(str(reasons))}: the last one alone must have one",
    )


def number(said: Said, name: str, key: str) -> int:
    """A number of a request's body."""
    value = said.sent(name).get(key)
    if not isinstance(value, int):
        raise MissingError(f"the request '{name}' has no {key}")
    return value


def need(holds: object, sentence: str) -> None:
    """Raises BrokenError with the sentence if it does not hold."""
    if not holds:
        raise BrokenError(sentence)
