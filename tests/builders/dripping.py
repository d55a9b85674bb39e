"""A server whose answer never ends."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def dripping(start: bytes, drop: bytes) -> Iterator[str]:
    """A server on this machine that answers with `start`, and then with a drop, again and again. Its address."""
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        # The client may go before the drops end.
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(start)
            while not over.wait(0.1):
                connection.sendall(drop)

    def serve(listener: socket.socket) -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join()
