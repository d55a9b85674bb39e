"""A Prefect server on PostgreSQL."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from tests.fleet.service import Service

LEASE_STORAGE = "prefect.server.concurrency.lease_storage.filesystem"


class PrefectServer(Service):
    """`prefect server start` on one port, with the leases of its concurrency limits on the disk."""

    def __init__(self, folder: Path, database_url: str, **settings: str) -> None:
        """`settings` go before the ones that are set here."""
        super().__init__(folder, "server")
        self._port = free_port()
        self._settings = {
            "PREFECT_API_DATABASE_CONNECTION_URL": database_url,
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASE_STORAGE,
            "PREFECT_SERVER_UI_ENABLED": "false",
            # for the links in notifications
            "PREFECT_UI_URL": f"http://127.0.0.1:{self._port}",
            # 15 s otherwise: what a lease's end frees is seen only then
            "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "3",
            **settings,
        }

    @property
    def url(self) -> str:
        """What PREFECT_API_URL is for its clients; the same after a kill."""
        return f"http://127.0.0.1:{self._port}/api"

    @property
    def leases(self) -> Path:
        """Where its leases lie, one file each."""
        return self.folder / "server-home" / "concurrency_leases"

    def arguments(self) -> Sequence[str]:
        return ["server", "start", "--host", "127.0.0.1", "--port", str(self._port)]

    def settings(self) -> Mapping[str, str]:
        return self._settings

    def is_ready(self) -> bool:
        """It answers, and its database does."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=10).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
