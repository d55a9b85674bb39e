"""A network that fails: an HTTP proxy in front of a real service. Each request takes the next fault of a list."""

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

# `reset`: the service got the request, and its answer is gone. `cut`: half of the answer arrives. `slow`: after two seconds.
# `stale`: a list as it was when it was last asked for without this fault, or else for the first time.
NetworkFault = Literal["none", "503", "reset", "cut", "slow", "stale"]
# Of S3, and of a registry.
LISTS = ("?list-type=2", "/tags/list")
SLOW_S = 2.0
AT_ONCE = struct.pack("ii", 1, 0)


class _Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    content: bytes


class Network(ThreadingHTTPServer):
    """Passes requests on to the service at `behind`. A request whose path has `part` gets the next fault, if one is left.

    While `away` is set, the service does not answer, and a load balancer before it says 503; `refused` says how often it did.
    """

    daemon_threads = True

    def __init__(self, behind: str, faults: Sequence[NetworkFault], part: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self._part = part
        self.behind, self._faults, self._lock = str(urlsplit(behind).netloc), list(faults), threading.Lock()
        self._lists: dict[str, _Answer] = {}
        self.away, self.refused = threading.Event(), 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def is_faulty(self) -> bool:
        """Whether faults are left."""
        return bool(self._faults)

    def next_fault(self, path: str) -> NetworkFault:
        with self._lock:
            if self.away.is_set():
                self.refused += 1
                return "503"
            return self._faults.pop(0) if self._faults and self._part in path else "none"

    def as_seen(self, path: str, answer: _Answer, *, is_stale: bool) -> _Answer:
        """The answer, or what is remembered of the same list."""
        with self._lock:
            if not is_stale:
                self._lists[path] = answer
            return self._lists.setdefault(path, answer)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error here."""


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Network

    def __getattr__(self, name: str) -> Callable[[], None]:
        """`do_GET` and its like: all methods are passed on alike."""
        if not name.startswith("do_"):
            raise AttributeError(name)
        return self._pass_on

    def _pass_on(self) -> None:
        fault = self.server.next_fault(self.path)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if fault == "503":
            self._answer(503, {"content-length": "0"}, b"")
            return
        connection = http.client.HTTPConnection(self.server.behind, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
        # http.client leaves a Host alone that it is given, and the signature covers it.
        connection.request(self.command, self.path, body, headers)
        got = connection.getresponse()
        content = got.read()
        fields = {name: value for name, value in got.getheaders() if name.lower() not in ("connection", "transfer-encoding")}
        connection.close()
        answer = _Answer(got.status, fields, content)
        if self.command == "GET" and any(part in self.path for part in LISTS):
            answer = self.server.as_seen(self.path, answer, is_stale=fault == "stale")
        if fault == "slow":
            time.sleep(SLOW_S)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self.close_connection = True
            return
        status, fields, content = answer
        length = fields.get("Content-Length", str(len(content))) if self.command == "HEAD" else str(len(content))
        self._answer(status, fields | {"Content-Length": length}, content[: len(content) // 2] if fault == "cut" else content)
        self.close_connection = fault == "cut"

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing to log."""


@contextmanager
def network(behind: str, faults: Sequence[NetworkFault], part: str = "") -> Iterator[Network]:
    """A network with faults in front of a service, for the length of the block."""
    with Network(behind, faults, part) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()
