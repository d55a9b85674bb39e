"""Databases of an older Prefect, as a fleet and as a home has them: made by that Prefect itself, kept in `old/`.

    OLD/bin/python -m tests.fleet.old_prefect

writes them again, where OLD is an environment with that version. `check_content` then says what was in them.
"""

import gzip
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Mapping
from contextlib import closing
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import State
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Scheduled

from deployments.setup import qualifying
from tests.fleet.postgres import Postgres
from tests.fleet.server import PrefectServer
from tests.fleet.service import POLL_S
from vllm_qualify.engine.confinement import NO_STATISTICS

FOLDER = Path(__file__).with_name("old")
VERSION = "3.8.8"
SQLITE, DUMP = FOLDER / f"prefect-{VERSION}.db.gz", FOLDER / f"prefect-{VERSION}.sql.gz"

POOL, QUEUE, DEPLOYMENT = "gpu-h100", "release", "gpu-h100"
LIMIT, ARTIFACT, BLOCK, SECRET = "vllm-qualify-machine-host-1", "report", "releases", "where people are told"
# The types of blocks that Prefect knows are most of a database's size; those of the version that starts are added anyway.
WITHOUT_BLOCKS = {"PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}
REVISION = "SELECT version_num FROM alembic_version"
PARAMETERS = {"request": {"recipe": "reference"}}
APPROVED, MESSAGE = "Approved", "reference/cpu/balanced: approved"


@task(name="publish")
def publish_report() -> None:
    create_markdown_artifact("passed", key=ARTIFACT)


@flow(name="qualify-host", flow_run_name="finished", persist_result=False)
def qualify_host() -> State[Any]:
    publish_report()
    return Completed(name=APPROVED, message=MESSAGE)


def make_content(url: str) -> None:
    """A run that ended and one that waits for a worker, and all that a fleet has beside."""
    with temporary_settings({PREFECT_API_URL: url}), SyncPrefectClient(url) as client:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        client.create_work_queue(name=QUEUE, work_pool_name=POOL, priority=1)
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=LIMIT, limit=1))
        qualify_host(return_state=True)
        deployed = client.create_deployment(
            client.create_flow_from_name("qualify-host"),
            DEPLOYMENT,
            entrypoint="flows.qualify.qualify_host",
            parameters=PARAMETERS,
            work_pool_name=POOL,
            work_queue_name=QUEUE,
        )
        client.create_flow_run_from_deployment(deployed, name="waiting", state=Scheduled())
        client.create_automation(qualifying(deployed))
        Secret(value=SECRET).save(BLOCK)
        # A server learns of a task from its events.
        EventsWorker.drain_all()
        while not client.read_task_runs() or not client.read_artifacts():
            time.sleep(POLL_S)


def check_content(url: str) -> None:
    """All that was made is there, and means what it meant: what waits is handed out, what is deployed can be started."""
    with temporary_settings({PREFECT_API_URL: url}), SyncPrefectClient(url) as client:
        runs = {run.name: run for run in client.read_flow_runs()}
        finished, waiting = runs["finished"].state, runs["waiting"].state
        assert finished
        assert (finished.name, finished.message, finished.is_completed()) == (APPROVED, MESSAGE, True)
        assert waiting
        assert waiting.is_scheduled()
        assert [run.state_name for run in client.read_task_runs()] == ["Completed"]
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[ARTIFACT])))
        assert [artifact.data for artifact in artifacts] == ["passed"]
        assert client.read_global_concurrency_limit_by_name(LIMIT).limit == 1
        assert client.read_block_document_by_name(BLOCK, "secret").data == {"value": SECRET}

        deployed = client.read_deployment_by_name(f"qualify-host/{DEPLOYMENT}")
        assert (deployed.parameters, deployed.work_pool_name, deployed.work_queue_name) == (PARAMETERS, POOL, QUEUE)
        wanted = qualifying(deployed.id)
        (automation,) = client.read_automations_by_name(wanted.name)
        assert [vars(action) for action in automation.actions] == [vars(action) for action in wanted.actions]
        started = client.create_flow_run_from_deployment(deployed.id)
        handed_out = client.get_scheduled_flow_runs_for_work_pool(POOL, [QUEUE])
        assert {each.flow_run.id for each in handed_out} == {runs["waiting"].id, started.id}
        # Whoever sends events would look for the server long after its end.
        EventsWorker.drain_all()


def unpack_file(packed: Path, file: Path) -> None:
    with gzip.open(packed) as source, file.open("wb") as target:
        shutil.copyfileobj(source, target)


def revision_of(file: Path) -> str:
    """Up to which of Prefect's migrations a database has come."""
    with closing(sqlite3.connect(file)) as database:
        (revision,) = database.execute(REVISION).fetchone()
    return str(revision)


def ask_postgres(settings: Mapping[str, str], program: str, *arguments: str, stdin: bytes | None = None) -> bytes:
    """What a program of PostgreSQL's says; its server is in the settings."""
    done = subprocess.run([program, *arguments], input=stdin, capture_output=True, env=os.environ | dict(settings), check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def _make_all() -> None:
    assert metadata.version("prefect") == VERSION, metadata.version("prefect")
    os.environ.update(NO_STATISTICS)
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        database = Path(folder, "prefect.db")
        with PrefectServer(Path(folder, "home"), f"sqlite+aiosqlite:///{database}", **WITHOUT_BLOCKS) as server:
            make_content(server.url)
            server.stop()
        with closing(sqlite3.connect(database)) as made:
            made.execute("VACUUM")
        _pack(database.read_bytes(), SQLITE)
        with Postgres() as postgres, PrefectServer(Path(folder, "fleet"), postgres.database_url, **WITHOUT_BLOCKS) as server:
            make_content(server.url)
            server.stop()
            _pack(
                ask_postgres(postgres.settings, "pg_dump", "--no-owner", "--no-privileges", postgres.settings["PGDATABASE"]),
                DUMP,
            )


def _pack(content: bytes, file: Path) -> None:
    # Without a time, so that the same content gives the same file.
    file.write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    _make_all()
