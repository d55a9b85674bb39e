"""Services that all processes of a test run share: the process that starts the others has them."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from xdist.workermanage import WorkerController

# Runs a service in a folder, and yields where it is.
Running = Callable[[Path], AbstractContextManager[str]]
_SHARING = pytest.StashKey[dict[str, str]]()


def share(node: WorkerController, name: str, running: Running) -> None:
    """Give a process of pytest-xdist, before it starts, the socket that answers where the service is."""
    sockets = node.config.stash.setdefault(_SHARING, {})
    if name not in sockets:
        stack = ExitStack()
        node.config.add_cleanup(stack.close)
        sockets[name] = str(stack.enter_context(_on_demand(name, running)))
    node.workerinput[_key(name)] = sockets[name]


@contextmanager
def shared_or_own(
    config: pytest.Config, name: str, running: Running, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Where the service is: the shared one, or one of this process's own if it is the only process."""
    shared = getattr(config, "workerinput", {}).get(_key(name))
    if shared:
        yield _ask(shared, name)
        return
    with running(tmp_path_factory.mktemp(name)) as place:
        yield place


def _key(name: str) -> str:
    return f"vllm_qualify_{name}"


@contextmanager
def _on_demand(name: str, running: Running) -> Iterator[Path]:
    """A socket that answers where the service is. The first request starts it."""
    # A short name: a path of a socket has at most 107 letters.
    with (
        TemporaryDirectory(prefix=f"vq-{name}-") as folder,
        ExitStack() as stack,
        closing(socket.socket(socket.AF_UNIX)) as asked,
    ):
        asked.bind(f"{folder}/socket")
        asked.listen()

        def answer() -> None:
            place = ""
            while True:
                try:
                    line, _ = asked.accept()
                except OSError:
                    return
                with line:
                    place = place or stack.enter_context(running(Path(folder)))
                    line.sendall(place.encode())

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield Path(folder) / "socket"
        finally:
            asked.shutdown(socket.SHUT_RDWR)
            thread.join()


def _ask(address: str, name: str) -> str:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        place = line.recv(1024).decode()
    assert place, f"the shared {name} did not start"
    return place
