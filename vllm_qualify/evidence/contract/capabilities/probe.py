"""A check of a capability: what is asked for it, and what must hold of the replies.

What a model says is its own affair. So a check that needs a certain kind of reply has several attempts, each with another
question, and one that holds is enough: a server that cannot do it fails all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from vllm_qualify.evidence.contract.exchange import CHATS
from vllm_qualify.evidence.contract.replies import BrokenError, MissingError
from vllm_qualify.evidence.contract.transcript import Transcript

Body = Mapping[str, JsonValue]
# A few tokens are enough where any reply will do. Thoughts on a simple question have some hundred.
SHORT_TOK, LONG_TOK = 16, 2048


@dataclass(frozen=True)
class Probe:
    """A check, by the name of its metric without `contract_`.

    Its `attempts` are sent in turn until one `holds`; it gets the attempt's name, and raises BrokenError or MissingError. An
    attempt is one or more requests, by a word that is added to its name. Their replies have up to `tokens` tokens. A stream
    is held to the check `plain`, attempt by attempt. What could change a server for all that follows `is_last`.
    """

    check: str
    attempts: Sequence[Mapping[str, Body]]
    holds: Callable[[Transcript, str], object]
    tokens: int = LONG_TOK
    path: str = CHATS
    plain: str | None = None
    is_last: bool = False

    @property
    def requests(self) -> dict[str, dict[str, Body]]:
        """The bodies of each attempt's requests, by the names of the attempt and of the request."""
        by_attempt = {f"{self.check} {number}": bodies for number, bodies in enumerate(self.attempts, 1)}
        return {name: {f"{name} {word}".strip(): body for word, body in bodies.items()} for name, bodies in by_attempt.items()}

    def judge(self, replies: Transcript) -> None:
        """Raises MissingError if no attempt holds and one has no reply to judge by, and BrokenError if all are broken."""
        broken, missing = list[BrokenError](), list[MissingError]()
        attempts = [attempt for attempt, names in self.requests.items() if any(name in replies for name in names)]
        if not attempts:
            raise MissingError(f"no request of '{self.check}' was kept")
        for attempt in attempts:
            try:
                self.holds(replies, attempt)
            except BrokenError as error:
                broken.append(error)
            except MissingError as error:
                missing.append(error)
            else:
                return
        raise [*missing, *broken][0]


def user_body(text: JsonValue, **keys: JsonValue) -> Body:
    return {"messages": [{"role": "user", "content": text}], **keys}


def stream_body(body: Body) -> Body:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}
