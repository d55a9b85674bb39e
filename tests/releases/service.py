"""A small HTTP server on this machine that answers as a test says, and keeps what it was asked."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Asked(NamedTuple):
    """A request; the names of its headers in small letters."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = {}


@dataclass
class Service:
    answer: Callable[[Asked], Answer]
    asked: list[Asked] = field(default_factory=list)
    address: str = ""


@contextmanager
def serving(answer: Callable[[Asked], Answer]) -> Iterator[Service]:
    service = Service(answer)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = Asked(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            service.asked.append(asked)
            status, body, headers = service.answer(asked)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = do_CONNECT = _answer  # noqa: N815  # the names that the base class calls

        def log_message(self, *_: object) -> None:
            """Nothing is written between the tests' lines."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
