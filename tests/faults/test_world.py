"""What the world around a command does to it: each fault ends as one error with its remedy, soon and before work is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.bench.passing import write_engine
from tests.builders.captured_runs import judged, run
from tests.builders.processes import until
from tests.ci import IN_CI
from tests.prefect_server import keep_empty_database
from tests.qualified import COMMAND
from tests.recipes import small, write
from vllm_qualify.engine.confinement import _home_folders
from vllm_qualify.runs import home as homes
from vllm_qualify.runs.folder import Run

__all__ = ["judged", "run"]

LATIN = r"""
import sys
from vllm_qualify.cli import commands

commands.app = lambda: print(sys.flags.utf8_mode, sys.argv[1], "\u2265")
commands.main()
"""
SERVE = """
import time
from prefect.utilities.urls import url_for
from tasks.orchestrator import has_lasting_server, provide_server

provide_server()
print(has_lasting_server(), url_for("flow-run", obj_id="7"), flush=True)
time.sleep(600)
"""

# Whoever hangs is stopped here.
HANGS_S = 120
# How long a fault may take to be seen on a busy machine, beside the command's start. Prefect itself waits for 180 s.
SEEN_WITHIN_S = 60.0
NO_SERVER = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}


def ended(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=HANGS_S, check=False)


def assert_one_error(done: subprocess.CompletedProcess[str], message: str, remedy: str) -> None:
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.count("error (the operator must act)") == 1
    assert "Traceback" not in done.stderr
    assert message in done.stderr
    assert f"remedy: {remedy}" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b'{"run_id": 7}'])
@pytest.mark.parametrize("file", ["plan.json", "stages/load.json"])
def test_a_damaged_file_of_a_run_is_reported(file: str, damage: bytes, run: Run) -> None:
    (run.folder / file).write_bytes(damage)
    assert_one_error(ended(COMMAND, "rejudge", run.id), f"{run.folder / file}: damaged", "delete the run's folder")


@pytest.mark.thorough
def test_a_report_is_shown_whatever_became_of_its_plans_file(run: Run) -> None:
    (run.folder / "plan.json").write_bytes(b"{")
    assert ended(COMMAND, "report", "show", run.id).returncode == 0


def test_an_empty_home_is_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_QUALIFY_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    usual = tmp_path / "user" / ".vllm-qualify"
    assert homes.home() == usual
    assert _home_folders()[1] == usual
    assert homes.default_store_url() == f"file://{usual}/store"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run that passes all early checks."""
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(write_engine(tmp_path / "engine")))
    return [COMMAND, "run", str(write(small(tmp_path), tmp_path / "mine.yaml"))]


_STARTED: list[float] = []


def starting_s(command: list[str]) -> float:
    """How long a command takes that sees at once that Prefect's server is not there. It is run for the first test alone."""
    if not _STARTED:
        began = time.monotonic()
        message = f"prefect: the server at {NO_SERVER['PREFECT_API_URL']} is not healthy: "
        assert_one_error(ended(*command, **NO_SERVER), message, "start it, or correct PREFECT_API_URL")
        _STARTED.append(time.monotonic() - began)
    return _STARTED[0]


def in_time(command: list[str], starts_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, which sees its fault in time."""
    began = time.monotonic()
    done = ended(*command, **environment)
    assert time.monotonic() - began < starts_s + SEEN_WITHIN_S
    return done


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.prefect
def test_a_prefect_server_that_never_answers_is_reported(command: list[str], silent: int) -> None:
    url = f"http://127.0.0.1:{silent}/api"
    message = f"prefect: the server at {url} is not healthy: no answer within 10 s"
    done = in_time(command, starting_s(command), PREFECT_API_URL=url, PREFECT_API_REQUEST_TIMEOUT="10")
    assert_one_error(done, message, "start it, or correct PREFECT_API_URL")


@pytest.mark.prefect
def test_a_prefect_server_that_is_not_there_is_reported(command: list[str]) -> None:
    assert starting_s(command) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("folder", ["/proc", "/no/such/folder"])
def test_a_folder_of_temporary_files_that_cannot_be_written_is_reported(folder: str, command: list[str]) -> None:
    message = f"check: no temporary file can be written in {folder}: No such file or directory"
    assert_one_error(ended(*command, TMPDIR=folder), message, "free space there and check its permissions, or set TMPDIR")


def in_namespace(kind: str, first: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a namespace of its own, after a shell command."""
    if ended("unshare", "--user", "--map-root-user", kind, "sh", "-c", first).returncode:
        (pytest.fail if IN_CI else pytest.skip)("this user may make no namespace")
    shell = f'{first} && exec "$@"'
    return ended("unshare", "--user", "--map-root-user", kind, "sh", "-c", shell, "sh", *command, **environment)


@pytest.mark.thorough
def test_a_full_folder_of_temporary_files_is_reported(command: list[str], tmp_path: Path) -> None:
    small_disk = tmp_path / "small"
    small_disk.mkdir()
    done = in_namespace("--mount", f"mount -t tmpfs -o size=64k small {small_disk}", *command, TMPDIR=str(small_disk))
    message = f"check: no temporary file can be written in {small_disk}: No space left on device"
    assert_one_error(done, message, "free space there and check its permissions, or set TMPDIR")


@pytest.mark.thorough
def test_a_loopback_that_is_down_is_reported(command: list[str]) -> None:
    done = in_namespace("--net", "true", *command)
    assert_one_error(done, "check: no connection within this machine, by 127.0.0.1: ", "bring the loopback interface up")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_prefects_own_server_ends_with_the_command(number: signal.Signals, tmp_path: Path) -> None:
    environment = os.environ | {"PREFECT_HOME": str(tmp_path)}
    keep_empty_database(tmp_path)
    with subprocess.Popen([sys.executable, "-c", SERVE], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline().split() == ["False", "None"]
        (state,) = tmp_path.glob("server-*/server.state")
        server = json.loads(state.read_text())["pid"]
        assert b"uvicorn" in Path(f"/proc/{server}/cmdline").read_bytes()
        process.send_signal(number)
        process.wait(timeout=60)
    assert until(lambda: not Path(f"/proc/{server}").exists(), 60)


def test_text_is_utf8_in_a_locale_without_it() -> None:
    done = ended(sys.executable, "-c", LATIN, "\u00e9", LC_ALL="C", PYTHONUTF8="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 \u00e9 \u2265\n", "")
