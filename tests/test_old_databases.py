"""What an older Prefect left behind comes along: on a fleet's server, and in the home of somebody who has only the command."""

import gzip
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.fleet import Postgres, PrefectServer
from tests.fleet.old_prefect import DUMP, REVISION, SQLITE, VERSION, ask_postgres, check_content, revision_of, unpack_file
from tests.infra.files import GUIDE

# Says how many flows the command's own server has.
OWN_SERVER = """
from tasks.orchestrator import provide_server
from prefect.client.orchestration import get_client
provide_server()
with get_client(sync_client=True) as client:
    print(len(client.read_flow_runs()))
"""


EMPTY = "DROP SCHEMA public CASCADE; CREATE SCHEMA public"
TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public' ORDER BY 1"


@pytest.mark.fleet
def test_a_fleets_server_takes_over_all_of_an_older_one_and_the_backup_leads_back(postgres: Postgres, tmp_path: Path) -> None:
    """As `docs/operations.md` says: back up, start the newer server, which migrates; to go back, empty and restore."""

    def answer(command: str) -> bytes:
        return ask_postgres(postgres.settings, "psql", "--quiet", "--tuples-only", "--no-align", "--command", command)

    ask_postgres(postgres.settings, "psql", "--quiet", "--set", "ON_ERROR_STOP=1", stdin=gzip.decompress(DUMP.read_bytes()))
    before, tables = answer(REVISION), answer(TABLES)
    backup = ask_postgres(postgres.settings, "pg_dump", "--format", "custom", "prefect")
    with PrefectServer(tmp_path, postgres.database_url) as server:
        assert answer(REVISION) != before
        check_content(server.url)

    assert f"'{EMPTY}'" in GUIDE
    # Without it the newer server's tables stand in the way of the restored ones.
    assert answer(EMPTY) == b""
    ask_postgres(postgres.settings, "pg_restore", "--dbname", "prefect", "--clean", "--if-exists", stdin=backup)
    assert (answer(REVISION), answer(TABLES)) == (before, tables)


@pytest.mark.prefect
def test_a_homes_first_start_leaves_an_older_database_alone_and_a_server_takes_it_over(tmp_path: Path) -> None:
    # `prefect server start` made the one; the other is what a command kept for itself, were it not empty.
    database, kept = tmp_path / "prefect.db", tmp_path / f"empty-{VERSION}.db"
    for file in (database, kept):
        unpack_file(SQLITE, file)
    old = database.read_bytes()

    unset = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command, environment = [sys.executable, "-c", OWN_SERVER], unset | {"PREFECT_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "0\n", done.stderr
    assert [database.read_bytes() == old, kept.read_bytes() == old] == [True, True]
    made = tmp_path / f"empty-{metadata.version('prefect')}.db"
    assert revision_of(made) != revision_of(database)

    with PrefectServer(tmp_path / "served", f"sqlite+aiosqlite:///{database}") as server:
        check_content(server.url)
    assert revision_of(database) == revision_of(made)
