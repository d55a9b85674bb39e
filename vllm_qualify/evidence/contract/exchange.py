"""One request and its reply, as they are kept. A reply ends in time and is not endless; a redirect is not followed."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import httpx
from pydantic import JsonValue

from vllm_qualify.answers import PLAIN, asked, bounded
from vllm_qualify.limits import within
from vllm_qualify.recipe.values import CountOrNone, Frozen

EXCHANGES = "exchanges.jsonl"
# The longest reply that is asked for has some kilobytes; a page of metrics some hundred.
MOST_BYTES = 2**20
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


class Request(Frozen):
    """A request. Its `prompt`, a list of tokens, is sent `times` times over; `raw` is a body that is no JSON."""

    name: str
    path: str
    method: str = "POST"
    body: dict[str, JsonValue] | None = None
    raw: str | None = None
    times: CountOrNone = 1

    @property
    def content(self) -> bytes:
        """The body that is sent."""
        if self.raw is not None:
            return self.raw.encode()
        prompt = self.body.get("prompt") if self.body else None
        long = {"prompt": prompt * self.times} if isinstance(prompt, list) else {}
        return json.dumps({**self.body, **long}).encode() if self.body is not None else b""


class Exchange(Request):
    """A request with its reply. `problem` says why there is no whole reply; then nothing follows from it."""

    status: int | None = None
    content_type: str = ""
    reply: str = ""
    problem: str | None = None


def exchanged(url: str, request: Request, limit_s: float) -> Exchange:
    """Ask, and keep the reply."""
    try:
        answer = asked(
            request.method,
            url + request.path,
            limit_s,
            MOST_BYTES,
            content=request.content,
            headers={"Content-Type": "application/json"},
            follow_redirects=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _without_reply(request, error)
    return _with_reply(request, answer, answer.content)


def hung_up(url: str, request: Request, limit_s: float) -> Exchange:
    """Ask for a stream, and hang up after its first piece. The reply is what had come by then."""

    def ask() -> Exchange:
        headers = {"Content-Type": "application/json", "Accept-Encoding": PLAIN}
        hooks = {"response": [bounded(limit_s, MOST_BYTES)]}
        with (
            httpx.Client(timeout=limit_s, event_hooks=hooks) as client,
            client.stream(request.method, url + request.path, content=request.content, headers=headers) as answer,
        ):
            return _with_reply(request, answer, next(answer.iter_raw(), b""))

    try:
        return within(limit_s, ask)
    except (httpx.HTTPError, TimeoutError) as error:
        return _without_reply(request, error)


def _with_reply(request: Request, answer: httpx.Response, content: bytes) -> Exchange:
    # The server's own word on its encoding is not taken: JSON and streams of events are UTF-8.
    reply = content.decode("utf-8", "replace")
    content_type = answer.headers.get("Content-Type", "")
    return Exchange(**request.model_dump(), status=answer.status_code, content_type=content_type, reply=reply)


def _without_reply(request: Request, error: Exception) -> Exchange:
    return Exchange(**request.model_dump(), problem=f"{type(error).__name__}: {error}")


class Book:
    """The exchanges of a contract stage in its folder, written one after another."""

    def __init__(self, folder: Path) -> None:
        self._file, self._lock = folder / EXCHANGES, threading.Lock()
        self._by_name: dict[str, Exchange] = {}

    def keep(self, exchange: Exchange) -> Exchange:
        with self._lock, self._file.open("a") as file:
            file.write(f"{exchange.model_dump_json(exclude_defaults=True)}\n")
            self._by_name[exchange.name] = exchange
        return exchange

    @property
    def exchanges(self) -> Mapping[str, Exchange]:
        """Those so far, by name."""
        return self._by_name

    @property
    def silent(self) -> int:
        """How many of them have no whole reply."""
        return sum(exchange.problem is not None for exchange in self._by_name.values())


def read_exchanges(folder: Path) -> dict[str, Exchange]:
    """All exchanges that were kept, by name. Raises one of UNUSABLE."""
    lines = (folder / EXCHANGES).read_text().splitlines()
    exchanges = [Exchange.model_validate_json(line) for line in lines]
    return {exchange.name: exchange for exchange in exchanges}
