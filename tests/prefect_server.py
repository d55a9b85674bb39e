"""Prefect's servers for tests: on a database that was made once, since that takes longer than most of these tests.

One server is shared by all processes of a test run, for tests that start many flows. The demo has one of its own, as people do.
"""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import httpx
import pytest
from xdist.workermanage import WorkerController

from tests.sharing import share, shared_or_own
from vllm_qualify.engine.confinement import NO_STATISTICS
from vllm_qualify.engine.process import running_guarded, tail

CACHE = Path(__file__).parents[1] / ".cache"
# What serves no test on the shared server: without them it takes a third less when it is idle.
UNUSED_SERVICES = (
    *("EVENT_PERSISTER", "EVENT_LOGGER", "TRIGGERS", "SCHEDULER", "LATE_RUNS", "FOREMAN", "CANCELLATION_CLEANUP"),
    "PAUSE_EXPIRATIONS",
)
# Prefect opens one connection to such a database, and several to a file. With several, a busy server may stand still for a
# minute: one connection waits for a lock, Python waits to free a cursor of that connection, and the lock's owner waits for
# Python.
IN_MEMORY = {
    "PREFECT_SERVER_DATABASE_CONNECTION_URL": "sqlite+aiosqlite:///file::memory:?cache=shared&uri=true&check_same_thread=false"
}
SHARED = "prefect"


@pytest.fixture(scope="session")
def _prefect_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the shared server answers."""
    with shared_or_own(request.config, SHARED, _running, tmp_path_factory) as url:
        yield url


@pytest.fixture
def prefect_server(_prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", _prefect_server)


@pytest.fixture(scope="module")
def on_prefect(_prefect_server: str) -> Iterator[None]:
    """The flows of a file's tests run on the shared server."""
    # Their import takes seconds, and workers that run no such test need none of it.
    from prefect.context import _temporary_global_settings_context, get_settings_context
    from prefect.events.worker import EventsWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    # Prefect's own threads have no context of the test's.
    with temporary_settings({PREFECT_API_URL: _prefect_server}), _temporary_global_settings_context(get_settings_context()):
        yield
        # What sends events keeps its connection, and so would send those of the next file's flows to this server, too.
        EventsWorker.drain_all()


@pytest.fixture(scope="module")
def on_own_prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server for the flows of a file's tests, with all services, which sees none of other files' flows."""
    with serving(tmp_path_factory.mktemp("on-prefect")):
        yield


def pytest_configure_node(node: WorkerController) -> None:
    share(node, SHARED, _running)


@contextmanager
def _running(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    settings = {f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in UNUSED_SERVICES}
    environment = os.environ | NO_STATISTICS | settings | IN_MEMORY | {"PREFECT_HOME": str(folder)}
    with running_guarded(command, environment, folder / "server.log") as process:
        url = f"http://127.0.0.1:{port}/api"
        deadline = time.monotonic() + 120
        while not _answers(f"{url}/health"):
            assert process.exit_code() is None, tail(process.log)
            assert time.monotonic() < deadline, tail(process.log)
            time.sleep(0.2)  # another process is waited for, which tells nothing by itself
        yield url


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def write_database(file: Path) -> None:
    """Write a database of the installed Prefect's, without any content."""
    CACHE.mkdir(exist_ok=True)
    kept = CACHE / f"prefect-{metadata.version('prefect')}.db"
    with (CACHE / "prefect.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            _make(kept)
    shutil.copy(kept, file)


def keep_empty_database(prefect_home: Path) -> None:
    """As the first server of a command leaves it: the next one need not make it, which takes seconds."""
    write_database(prefect_home / f"empty-{metadata.version('prefect')}.db")


def _make(kept: Path) -> None:
    command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
    with TemporaryDirectory(dir=CACHE) as home:
        environment = os.environ | {"PREFECT_HOME": home}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        Path(home, "prefect.db").rename(kept)


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Flows of this process run on a server of Prefect's own for tests, whose database is in `folder`."""
    # Its import takes seconds, and workers that run no such test need none of it.
    from prefect.testing import utilities

    write_database(folder / "prefect-test.db")
    with patch.object(utilities, "mkdtemp", lambda: str(folder)), utilities.prefect_test_harness(server_startup_timeout=180):
        yield
