"""One request and its reply, as they are kept. A reply ends in time and is not endless; a redirect is not followed."""

import json

import httpx
from pydantic import JsonValue

from vllm_qualify.answers import ask_within, open_client
from vllm_qualify.limits import call_within
from vllm_qualify.recipe.values import CountOrZero, Frozen

EXCHANGES = "exchanges.jsonl"
# The longest reply that is asked for has some kilobytes; a page of metrics some hundred.
MOST_BYTES = 2**20
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
JSON_BODY = {"Content-Type": "application/json"}


class Request(Frozen):
    """A request. Its `prompt`, a list of tokens, is sent `times` times over; `raw` is a body that is no JSON."""

    name: str
    path: str
    method: str = "POST"
    body: dict[str, JsonValue] | None = None
    raw: str | None = None
    times: CountOrZero = 1

    @property
    def content(self) -> bytes:
        if self.raw is not None:
            return self.raw.encode()
        if self.body is None:
            return b""
        prompt = self.body.get("prompt")
        return json.dumps(self.body | ({"prompt": prompt * self.times} if isinstance(prompt, list) else {})).encode()


class Exchange(Request):
    """A request with its reply. `problem` says why there is no whole reply; then nothing follows from it."""

    status: int | None = None
    content_type: str = ""
    reply: str = ""
    problem: str | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the server answered with a status 4xx."""
        return self.status is not None and 400 <= self.status < 500


def send_request(url: str, request: Request, limit_s: float, *, hang_up: bool = False) -> Exchange:
    """Ask, and keep the reply. To `hang_up` is to leave a stream after its first piece: the reply is what had come by then."""
    try:
        answer, content = (_ask_first_piece if hang_up else _ask_whole)(url, request, limit_s)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        return Exchange(**request.model_dump(), problem=f"{type(error).__name__}: {error}")
    # The server's own word on its encoding is not taken: JSON and streams of events are UTF-8.
    reply, content_type = content.decode("utf-8", "replace"), answer.headers.get("Content-Type", "")
    return Exchange(**request.model_dump(), status=answer.status_code, content_type=content_type, reply=reply)


def _ask_whole(url: str, request: Request, limit_s: float) -> tuple[httpx.Response, bytes]:
    named = {"content": request.content, "headers": JSON_BODY}
    answer = ask_within(request.method, url + request.path, limit_s, MOST_BYTES, most_redirects=0, **named)
    return answer, answer.content


def _ask_first_piece(url: str, request: Request, limit_s: float) -> tuple[httpx.Response, bytes]:
    def stream() -> tuple[httpx.Response, bytes]:
        with (
            open_client(limit_s, MOST_BYTES) as client,
            client.stream(request.method, url + request.path, content=request.content, headers=JSON_BODY) as answer,
        ):
            return answer, next(answer.iter_raw(), b"")

    return call_within(limit_s, stream)
