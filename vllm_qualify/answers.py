"""Answers over HTTP that end in time and are not endless. httpx's own limit is for one read."""

import ssl
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx

from vllm_qualify.limits import call_within

# A page of metrics has some hundred kilobytes, a long reply some megabytes with its likelihoods.
MOST_BYTES = 64 * 2**20
# A server may lead from /metrics to /metrics/. No more is needed.
MOST_REDIRECTS = 2
PLAIN = "identity"
# Bench and lm-eval send it too, so that no request says which tool it is of. Gateways that are written in Python have it.
AGENT = f"python-httpx/{httpx.__version__}"


def ask_within(
    method: str, url: str, limit_s: float, most_bytes: int = MOST_BYTES, *, most_redirects: int = MOST_REDIRECTS, **named: Any
) -> httpx.Response:
    """The answer to one request, whole within `limit_s`. `named` goes to httpx.

    Raises httpx.HTTPError if there is none in time, it has more than `most_bytes`, or it is compressed without being asked to.
    Also if the answer leads to another server: this machine may reach addresses that the one who answers may not.
    """

    def ask() -> httpx.Response:
        with open_client(limit_s, most_bytes) as client:
            answer = client.request(method, url, **named)
            for _ in range(most_redirects):
                if answer.next_request is None:
                    break
                if _read_origin(answer.next_request.url) != _read_origin(answer.url):
                    raise httpx.RemoteProtocolError("the answer leads to another server, which is not asked")
                answer = client.send(answer.next_request)
            return answer

    try:
        return call_within(limit_s, ask)
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error


def _read_origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def open_client(limit_s: float, most_bytes: int = MOST_BYTES, **named: Any) -> httpx.Client:
    """A client. `bounded` limits the time and the size of each of its answers. `named` goes to httpx."""
    hooks = {"response": [bounded(limit_s, most_bytes)]}
    options: dict[str, Any] = {
        "timeout": limit_s,
        "headers": {"Accept-Encoding": PLAIN, "User-Agent": AGENT},
        "verify": _trusted_certificates(),
    } | named
    return httpx.Client(event_hooks=hooks, **options)


@cache
def _trusted_certificates() -> ssl.SSLContext:
    """Those that are trusted, read once: each time takes 25 ms, as long as a short question to a server itself."""
    return httpx.create_ssl_context()


def bounded(limit_s: float, most_bytes: int) -> Callable[[httpx.Response], None]:
    """A hook for httpx's answers: one that is too long, too late or compressed raises httpx.ReadError or ReadTimeout.

    Ask for PLAIN answers: of a compressed one, a few kilobytes can become gigabytes.
    """

    def hook(answer: httpx.Response) -> None:
        if answer.headers.get("Content-Encoding", PLAIN) != PLAIN:
            raise httpx.ReadError("an answer is compressed, and none was asked to be")
        if isinstance(answer.stream, httpx.SyncByteStream):
            answer.stream = _Bounded(answer.stream, limit_s, most_bytes)

    return hook


class _Bounded(httpx.SyncByteStream):
    """An answer's body, which ends in time and is not endless."""

    def __init__(self, body: httpx.SyncByteStream, limit_s: float, most_bytes: int) -> None:
        self._body, self._limit_s, self._most_bytes = body, limit_s, most_bytes
        self._until_s = time.monotonic() + limit_s

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for chunk in self._body:
            size += len(chunk)
            if size > self._most_bytes:
                raise httpx.ReadError(f"an answer is longer than {self._most_bytes / 2**20:g} MiB")
            if time.monotonic() > self._until_s:
                raise httpx.ReadTimeout(f"an answer was not complete after {self._limit_s:g} s")
            yield chunk

    def close(self) -> None:
        self._body.close()
