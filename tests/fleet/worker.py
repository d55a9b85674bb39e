"""A process worker of a Prefect work pool."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from tests.fleet.service import Service, kill


class Worker(Service):
    """`prefect worker start` of type process, which looks for work every five seconds. The pool must exist."""

    def __init__(self, folder: Path, api_url: str, pool: str, name: str = "worker", **environment: str) -> None:
        """`environment` is handed on to the flow runs."""
        super().__init__(folder, name)
        self._api_url = api_url
        self._pool = pool
        self.given = environment
        self._started = datetime.now(UTC)

    def arguments(self) -> Sequence[str]:
        command = ["worker", "start", "--pool", self._pool, "--name", self.name, "--type", "process"]
        return [*command, "--install-policy", "never", "--no-create-pool-if-not-found"]

    def settings(self) -> Mapping[str, str]:
        return {
            "PREFECT_API_URL": self._api_url,
            # Each look and each sign of life is work for the server, too.
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "5",
            "PREFECT_WORKER_QUERY_SECONDS": "5",
            **self.given,
        }

    def start(self) -> None:
        self._started = datetime.now(UTC)
        super().start()

    def is_ready(self) -> bool:
        """The server has heard of it since its start; a killed worker is called online for a while."""
        try:
            answer = httpx.post(f"{self._api_url}/work_pools/{self._pool}/workers/filter", json={}, timeout=10)
        except httpx.HTTPError:
            return False
        if answer.status_code != httpx.codes.OK:
            return False
        heard = {worker["name"]: datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in answer.json()}
        return self.name in heard and heard[self.name] > self._started

    def flow_runs(self) -> list[psutil.Process]:
        """The processes of its flow runs, also those that it left behind when it was killed."""
        assert self._process is not None, f"{self.name} was not started"
        return [process for process in self.processes() if process.pid != self._process.pid]

    def kill_flow_runs(self) -> None:
        """With -9; the worker, if it runs, lives on and sees it."""
        for process in self.flow_runs():
            kill(process)
