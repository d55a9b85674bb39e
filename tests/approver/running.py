"""The approver as a fleet runs it: a process of its own, which alone has the key."""

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.approval.builder import made_key
from vllm_qualify.approval.signing import PRIVATE_KEY
from vllm_qualify.approver.people import APPROVERS_FILE, add_person
from vllm_qualify.engine.process import running_guarded, tail

LIMIT_S = 120.0


@dataclass(frozen=True)
class Approver:
    """Where it answers, its approvers, and the key to verify with."""

    url: str
    approvers: Path
    public_key: Path
    log: Path

    def newcomer(self, name: str) -> str:
        return add_person(self.approvers, name)

    def decide(self, cell: str, run_id: str, form: Mapping[str, str], name: str, key: str) -> httpx.Response:
        return httpx.post(f"{self.url}/runs/{run_id}/{cell}", data=dict(form), auth=(name, key), timeout=120)


@contextmanager
def approver_running(store: str, folder: Path, settings: Mapping[str, str], *options: str) -> Iterator[Approver]:
    folder.mkdir(exist_ok=True)
    key, approvers, log = folder / "approval.key", folder / "approvers.json", folder / "approver.log"
    made_key(key)
    add_person(approvers, "the first")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm_qualify", "approver", "serve", "--store", store, "--port", str(port), *options]
    environment = {**os.environ, **settings, f"{PRIVATE_KEY}_FILE": str(key), APPROVERS_FILE: str(approvers)}
    with running_guarded(command, environment, log) as process:
        approver = Approver(f"http://127.0.0.1:{port}", approvers, key.with_name("approval.key.pub"), log)
        deadline = time.monotonic() + LIMIT_S
        while not _answers(approver):
            assert process.exit_code() is None, tail(log)
            assert time.monotonic() < deadline, tail(log)
            time.sleep(0.2)  # another process is waited for, which tells nothing by itself
        yield approver


def _answers(approver: Approver) -> bool:
    try:
        return httpx.get(f"{approver.url}/health", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
