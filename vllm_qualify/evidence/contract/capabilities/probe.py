"""A check of a capability: what is asked for it, and what must hold of the replies.

What a model says is its own affair. So a check that needs a certain kind of reply has several attempts, each with another
question, and one that holds is enough: a server that cannot do it fails all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from vllm_qualify.evidence.contract.asked import Asked
from vllm_qualify.evidence.contract.exchange import CHATS
from vllm_qualify.evidence.contract.replies import BrokenError, MissingError

Body = Mapping[str, JsonValue]
# A few tokens are enough where any reply will do.
SHORT_TOK = 16
# Thoughts on a simple question have some hundred tokens.
LONG_TOK = 2048


@dataclass(frozen=True)
class Probe:
    """A check, by the name of its metric without `contract_`.

    Its `attempts` are asked in turn until one `holds`; it gets the attempt's name, and raises BrokenError or MissingError. An
    attempt is one or more requests, by a word that is added to its name. Their replies have up to `tokens` tokens. A stream
    is held to the check `plain`, attempt by attempt.
    """

    check: str
    attempts: Sequence[Mapping[str, Body]]
    holds: Callable[[Asked, str], None]
    tokens: int = SHORT_TOK
    path: str = CHATS
    plain: str | None = None

    def names(self) -> Iterator[tuple[str, Mapping[str, Body]]]:
        """Each attempt with its name."""
        return ((f"{self.check} {number}", attempt) for number, attempt in enumerate(self.attempts, 1))

    def plain_name(self, attempt: str) -> str | None:
        """The name of the attempt that this one is held to."""
        return f"{self.plain} {attempt.rpartition(' ')[2]}" if self.plain else None

    def was_asked(self, asked: Asked, attempt: str) -> bool:
        """Whether any of its requests was kept."""
        words = dict(self.names())[attempt]
        return any(request_name(attempt, word) in asked.said for word in words)

    def judge(self, asked: Asked) -> None:
        """Raises MissingError if no attempt holds and one has no reply to judge by, and BrokenError if all are broken."""
        broken, missing = list[BrokenError](), list[MissingError]()
        attempts = [name for name, _ in self.names() if self.was_asked(asked, name)]
        if not attempts:
            raise MissingError(f"no request of '{self.check}' was kept")
        for name in attempts:
            try:
                self.holds(asked, name)
            except BrokenError as error:
                broken.append(error)
            except MissingError as error:
                missing.append(error)
            else:
                return
        raise [*missing, *broken][0]


def request_name(attempt: str, word: str) -> str:
    """The name of one request of an attempt."""
    return f"{attempt} {word}" if word else attempt


def user(text: JsonValue, **keys: JsonValue) -> Body:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": text}], **keys}


def streamed(body: Body) -> Body:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}
