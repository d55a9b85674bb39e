"""Prefect's server: the one that is named, or one of our own, which ends with this process.

Whoever may connect to this machine's ports could read and change a flow on our own server: other users, and a model's code. So
the server has a password that only this process knows, and a database of its own, without anybody's blocks.
"""

import atexit
import fcntl
import os
import secrets
import shutil
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import httpx
import prefect
from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_UI_URL,
    Settings,
    get_current_settings,
    temporary_settings,
)

from vllm_qualify.engine.process import RunningProcess, running_guarded, tail
from vllm_qualify.errors import HostError, writing
from vllm_qualify.limits import call_within

STAGE = "prefect"
# On a busy host it takes long to make its database.
START_LIMIT_S = 180.0
END_LIMIT_S = 5.0
ASK_EVERY_S = 0.1
# As Prefect starts its own temporary server: without its page, and without the services that are not needed here.
EPHEMERAL = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}

_until_exit = ExitStack()
atexit.register(_until_exit.close)
_own_urls: list[str] = []


def provide_server() -> None:
    """See that Prefect's server answers. If none is named, start one for all flows of this process.

    Prefect would start one too, but that outlives a process that is killed. Raises HostError if the server does not answer in
    time, or cannot be started.
    """
    if url := get_current_settings().api.url:
        _check_answer(url)
        return
    password = f"vllm-qualify:{secrets.token_urlsafe(32)}"
    own = _until_exit.enter_context(_run_server(password))
    # It has no page to link to.
    settings = {PREFECT_API_URL: own, PREFECT_API_AUTH_STRING: password, PREFECT_UI_URL: ""}
    _until_exit.enter_context(temporary_settings(settings))
    _own_urls.append(own)


def has_lasting_server() -> bool:
    """Whether Prefect's server outlives this process, and others may use it too."""
    url = get_current_settings().api.url
    return url is not None and url not in _own_urls


def _check_answer(url: str) -> None:
    client = get_client(sync_client=True)
    try:
        # As long as Prefect's client waits for any answer: a busy server on SQLite may stand still for most of a minute.
        problem = call_within(get_current_settings().api.request_timeout, client.api_healthcheck)
    except TimeoutError as error:
        problem = error
    if problem:
        remedy = "start it, or correct PREFECT_API_URL; without it, vllm-qualify starts a server of its own"
        raise HostError(f"the server at {url} is not healthy: {problem}", remedy, STAGE) from problem


@contextmanager
def _run_server(password: str) -> Iterator[str]:
    """A server that runs within the block; its URL."""
    settings = get_current_settings()
    with writing(STAGE):
        settings.home.mkdir(parents=True, exist_ok=True)
        # No TemporaryDirectory: at this process's end Python would remove it before the server has ended.
        folder = Path(mkdtemp(prefix="server-", dir=settings.home))
    _until_exit.callback(shutil.rmtree, folder, ignore_errors=True)
    database, empty = folder / "prefect.db", _empty_database(settings)
    own = {
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
    }
    inherited = os.environ | settings.to_environment_variables(exclude_unset=True)
    # What else is set of another database is not for this one.
    of_others = [name for name in inherited if name.startswith("PREFECT_") and "_DATABASE_" in name]
    environment = {name: value for name, value in inherited.items() if name not in of_others} | EPHEMERAL | own
    with ExitStack() as making:
        if not empty.is_file():
            # Of several first starts one makes it, and the others wait: each by itself would take as many times as long.
            making.enter_context(_alone(empty.with_suffix(".lock")))
        if empty.is_file():
            making.close()
            with writing(STAGE):
                shutil.copyfile(empty, database)
        command, url = _choose_place()
        with running_guarded(command, environment, folder / "server.log", END_LIMIT_S) as process:
            _await_health(f"{url}/health", process)
            if not empty.is_file():
                _keep_empty(database, empty)
            making.close()
            yield url


def _choose_place() -> tuple[list[str], str]:
    """The command of a server on a port that is free now, and its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    app = ["--app-dir", str(Path(prefect.__file__).parent.parent), "--factory", "prefect.server.api.server:create_app"]
    place = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    return [sys.executable, "-m", "uvicorn", *app, *place], f"http://127.0.0.1:{port}/api"


def _empty_database(settings: Settings) -> Path:
    """Where a database without any content is kept: to make one takes longer than all other work of a start."""
    return settings.home / f"empty-{prefect.__version__}.db"


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Alone among the processes that ask for this lock. Raises HostError if one of them has it longer than a start may take."""
    with writing(STAGE):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _await_lock(descriptor, lock)
        yield
    finally:
        os.close(descriptor)


def _await_lock(descriptor: int, lock: Path) -> None:
    # Whoever has it began earlier, and so gives up earlier.
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        with writing(STAGE), suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(ASK_EVERY_S)
    problem = f"another run has been making the database of Prefect's server for {START_LIMIT_S:g} s"
    raise HostError(problem, f"end it (`fuser {lock}` names it), and run this again", STAGE)


def _keep_empty(database: Path, empty: Path) -> None:
    """Keep what the server has made before any flow. Raises HostError."""
    part = database.with_name("empty.part")
    with writing(STAGE):
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(part)) as target:
            source.backup(target)
        part.replace(empty)


def _await_health(url: str, process: RunningProcess) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not _is_healthy(url):
        if process.exit_code() is not None or time.monotonic() > deadline:
            remedy = "see its last lines; or start a server of your own, and name it in PREFECT_API_URL"
            raise HostError("Prefect's server did not start", remedy, STAGE, tail(process.log))
        time.sleep(ASK_EVERY_S)


def _is_healthy(url: str) -> bool:
    try:
        # No proxy stands before this machine's own server, and it has no certificate: to read the trusted ones takes 25 ms.
        return httpx.get(url, timeout=5, trust_env=False, verify=False).is_success  # noqa: S501
    except httpx.HTTPError:
        return False
