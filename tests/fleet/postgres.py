"""PostgreSQL, by the project's own script."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from tests.fleet.service import POLL_S, Ended, ServiceError, kill
from tests.s3 import Settings, settings_in

SCRIPT = Path(__file__).parents[2] / "infra" / "postgresql.sh"


class Postgres(Ended):
    """A server with one empty database of its own."""

    def __init__(self) -> None:
        # Not below the tests' own folder, which only this user may enter: as root the server runs as another.
        self.folder = Path(tempfile.mkdtemp(prefix="vllm-qualify-postgres-"))
        self.folder.chmod(0o755)

    @property
    def settings(self) -> Settings:
        """PREFECT_API_DATABASE_CONNECTION_URL and libpq's; they stay the same over a kill."""
        return settings_in(self.folder / "env")

    @property
    def database_url(self) -> str:
        return self.settings["PREFECT_API_DATABASE_CONNECTION_URL"]

    @property
    def log(self) -> Path:
        return self.folder / "postgresql" / "log"

    def start(self) -> None:
        started = subprocess.run([SCRIPT, "start", self.folder], capture_output=True, text=True, check=False)
        if started.returncode:
            raise ServiceError(started.stderr[-2000:])

    def kill(self) -> None:
        """With -9, the server and all that serve a connection."""
        assert self.processes(), "PostgreSQL does not run"
        while running := self.processes():
            for process in running:
                kill(process)
            time.sleep(POLL_S)  # the kernel takes a moment to end them

    def stop(self) -> None:
        """As an administrator does; open connections are ended."""
        subprocess.run([SCRIPT, "stop", self.folder], capture_output=True, check=True)

    def processes(self) -> list[psutil.Process]:
        """All of them: each works in the data folder."""
        data = str(self.folder / "postgresql" / "data")
        return [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == data]

    def end(self) -> None:
        """Leave nothing of it, neither process nor data."""
        self.stop()
        shutil.rmtree(self.folder)
