"""Prefect's server says what it likes, and others of this machine ask it: neither runs code here or changes a flow."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect._internal.result_records import ResultRecord, ResultRecordMetadata
from prefect.client.schemas.objects import State, StateType
from prefect.serializers import PickleSerializer

from flows import qualify
from tests.prefect_server import keep_empty_database, write_database
from vllm_qualify.errors import HostError, ReleaseError
from vllm_qualify.plan.choice import Choice
from vllm_qualify.runs.request import QualifyRelease

REQUEST = QualifyRelease(recipe="reference", choice=Choice(), store="file:///nowhere")
A_FLOW = "00000000-0000-4000-8000-000000000000"
# Prints where the server answers, and waits for the end of its input.
SERVE = """
import sys
from tasks.orchestrator import provide_server
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL
provide_server()
with get_client(sync_client=True) as client:
    print(PREFECT_API_URL.value(), len(client.read_flow_runs()), len(client.read_block_documents()), flush=True)
sys.stdin.read()
"""


class Marker:
    """Whoever reads its bytes as an object makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def answering(monkeypatch: pytest.MonkeyPatch, state: State[Any]) -> None:
    """Prefect gives this state for a flow that it does not run."""
    monkeypatch.setattr(qualify, "provide_server", lambda: None)
    monkeypatch.setattr(qualify, "qualify_release", lambda _, return_state: state if return_state else None)


@pytest.fixture
def planted(tmp_path: Path) -> tuple[State[Any], Path]:
    """A state whose result makes a folder when it is read."""
    file, made = tmp_path / "result", tmp_path / "made"
    metadata = ResultRecordMetadata(storage_key=str(file), serializer=PickleSerializer())
    file.write_bytes(ResultRecord(result=Marker(made), metadata=metadata).serialize())
    return State(type=StateType.FAILED, name="Failed", message="see the result", data=metadata), made


def test_a_state_whose_result_is_code_runs_none(planted: tuple[State[Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    state, made = planted
    answering(monkeypatch, state)
    with pytest.raises(HostError, match="Prefect did not run the flow to its end: Failed: see the result"):
        qualify.run_qualification(REQUEST)
    assert not made.exists()


def test_the_result_of_that_state_would_have_run(planted: tuple[State[Any], Path]) -> None:
    """Else the test above would show nothing."""
    state, made = planted
    state.result(raise_on_failure=False)
    assert made.is_dir()


def test_a_state_that_says_completed_is_no_qualification(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, State(type=StateType.COMPLETED, name="Approved", message="all passed", data=[]))
    with pytest.raises(HostError, match="did not run the flow to its end"):
        qualify.run_qualification(REQUEST)


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_the_error_that_stopped_a_flow_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = ReleaseError("the server ended", "see its log", "serve")

    def stop(*_: object) -> None:
        raise stopped

    monkeypatch.setattr(qualify, "qualify_anywhere", stop)
    with pytest.raises(ReleaseError) as told:
        qualify.run_qualification(REQUEST)
    assert told.value is stopped


def write_users_database(file: Path) -> None:
    """One of Prefect's with a flow run."""
    write_database(file)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("INSERT INTO flow (id, name) VALUES (?, 'theirs')", (A_FLOW,))
        database.execute(
            "INSERT INTO flow_run (name, flow_id, total_run_time) VALUES ('theirs', ?, '1970-01-01 00:00:00')", (A_FLOW,)
        )


@pytest.mark.prefect
def test_nobody_else_may_ask_the_server_of_a_run(tmp_path: Path) -> None:
    """Nor has it what somebody keeps in a database of Prefect's, and it opens none of theirs."""
    keep_empty_database(tmp_path)
    write_users_database(tmp_path / "prefect.db")
    before = (tmp_path / "prefect.db").read_bytes()
    mine = f"sqlite+aiosqlite:///{tmp_path}/prefect.db"
    environment = os.environ | {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_DATABASE_CONNECTION_URL": mine,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": mine,
        "PREFECT_API_AUTH_STRING": "",
    }
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        url, runs, blocks = process.stdout.readline().split()
        without = httpx.post(f"{url}/flow_runs/filter", json={})
        guessed = httpx.post(f"{url}/flow_runs/filter", json={}, auth=("vllm-qualify", ""))
        (state,) = tmp_path.glob("server-*/server.state")
        # Whoever opens a database of Prefect's has files beside it.
        opened = [file.name for file in tmp_path.glob("prefect.db?*")]
        process.communicate("", timeout=60)
    assert (without.status_code, guessed.status_code) == (401, 401)
    assert (runs, blocks, opened) == ("0", "0", [])
    assert (tmp_path / "prefect.db").read_bytes() == before
    assert not state.parent.exists()
