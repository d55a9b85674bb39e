"""The first starts of Prefect's own server in a new home, as a loop over recipes with `&` begins them."""

import fcntl
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.prefect_server import keep_empty_database
from vllm_qualify.errors import HostError

AT_ONCE = 4
EMPTY = f"empty-{metadata.version('prefect')}.db"
# Says that the server answers, and how many flows it has.
START = """
from tasks.orchestrator import provide_server
from prefect.client.orchestration import get_client
provide_server()
with get_client(sync_client=True) as client:
    print(len(client.read_flow_runs()), flush=True)
"""
# The same, where the server may start for a moment only, while somebody else makes its database.
WAIT = "from tasks import orchestrator; orchestrator.START_LIMIT_S = 0.3; orchestrator.provide_server()"


def begun(script: str, home: Path) -> subprocess.Popen[str]:
    unset = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command, environment = [sys.executable, "-c", script], unset | {"PREFECT_HOME": str(home)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.prefect
def test_several_first_starts_at_once_all_get_a_server(tmp_path: Path) -> None:
    home = tmp_path / "new" / "prefect"
    starts = [begun(START, home) for _ in range(AT_ONCE)]
    ended = [(*start.communicate(timeout=600), start.returncode) for start in starts]
    assert [(out, code) for out, _, code in ended] == [("0\n", 0)] * AT_ONCE, ended
    # Made once and whole, and nothing of it is left lying about.
    assert sorted(path.name for path in home.glob("*empty*")) == [EMPTY, EMPTY.replace(".db", ".lock")]
    assert not list(home.glob("server-*"))


@pytest.mark.prefect
def test_a_start_waits_for_the_database_no_longer_than_it_takes_to_make_one(tmp_path: Path) -> None:
    with (tmp_path / EMPTY).with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _, told = begun(WAIT, tmp_path).communicate(timeout=120)
        assert f"{HostError.__name__}: prefect: another run has been making the database" in told
        assert not list(tmp_path.glob("server-*/server.log"))


@pytest.mark.prefect
def test_a_later_start_waits_for_nobody(tmp_path: Path) -> None:
    keep_empty_database(tmp_path)
    with (tmp_path / EMPTY).with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        out, told = begun(START, tmp_path).communicate(timeout=300)
        assert out == "0\n", told
