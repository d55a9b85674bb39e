"""A server that leads each request to another one, which notes what it is asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def redirecting(status: int = 302, *, within: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and what the other one was asked. With `within`, it leads to its own address with a slash."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer()

        def answer(self) -> None:
            leads = self.server is here and not self.path.endswith("/")
            if not leads:
                asked.append(f"{self.command} {self.path}")
            body = b"" if leads else b'{"secret": "of another server"}'
            self.send_response(status if leads else 200)
            if leads:
                self.send_header("Location", f"{self.path}/" if within else f"http://127.0.0.1:{elsewhere.server_port}/secret")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    here, elsewhere = (ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2))
    servers: list[Any] = [here, elsewhere]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{here.server_port}", asked
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
