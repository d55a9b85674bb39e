"""Prefect's server for tests: on a database that was made once, since that takes longer than most of these tests."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

CACHE = Path(__file__).parents[1] / ".cache"


def write_database(file: Path) -> None:
    """Write a database of the installed Prefect's, without any content."""
    CACHE.mkdir(exist_ok=True)
    kept = CACHE / f"prefect-{metadata.version('prefect')}.db"
    with (CACHE / "prefect.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            _make(kept)
    shutil.copy(kept, file)


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
