"""A hostile model in a container: its code runs in the real server, looks for this machine's keys, and finds none."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.builders.hostile_models import SENTINEL, looked, make_hostile_model, victim
from tests.docker_engine import Engine
from vllm_qualify.engine.environment import EngineEnvironment

pytestmark = [pytest.mark.docker, pytest.mark.engine]

__all__ = ["victim"]


class _Secret(BaseHTTPRequestHandler):
    """A service as the orchestrator has some: it tells a secret to whoever is on this machine."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(SENTINEL.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name in the base class)
        """Nothing to log."""


@pytest.fixture
def on_loopback() -> Iterator[int]:
    """The port of a service with a secret, for this machine alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Secret) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_code_of_a_model_in_a_container_finds_no_key_and_reaches_no_service_of_the_machine(
    docker_engine: Engine, cpu_image: str, engine: EngineEnvironment, on_loopback: int, tmp_path: Path, victim: Path
) -> None:
    make_hostile_model(tmp_path, victim, on_loopback)
    assert looked("server", tmp_path, victim, engine, cpu_image) == []
    assert docker_engine.containers() == []
