"""A server of S3 behind a proxy: while it is away, every request is answered 503, as by a load balancer without a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from urllib.parse import urlsplit

BUSY = b"<Error><Code>ServiceUnavailable</Code><Message>Please reduce your request rate.</Message></Error>"
NOT_FORWARDED = {"transfer-encoding", "connection", "content-length", "date", "server"}


class Proxy:
    """Of the server at `url`. `away` says whether it answers 503, `refused` how often it did."""

    def __init__(self, url: str) -> None:
        self.away, self.refused = Event(), 0
        proxy, host = self, urlsplit(url).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if proxy.away.is_set():
                    proxy.refused += 1
                    self._send(503, [("Content-Type", "application/xml")], BUSY)
                    return
                connection = HTTPConnection(host, timeout=60)
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                answer = connection.getresponse()
                kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in NOT_FORWARDED]
                self._send(answer.status, kept, answer.read())
                connection.close()

            def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        for method in ("GET", "PUT", "HEAD", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler._answer)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator["Proxy"]:
        thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
