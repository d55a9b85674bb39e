"""Flow runs on a real server: started, waited for, killed with the host they are on."""

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterExpectedStartTime
from prefect.client.schemas.objects import FlowRun, State

from tests.fleet.server import PrefectServer

LIMIT_S = 1200.0
# With a client of its own a question takes a tenth of a second of a core, and the server answers as long.
POLL_S = 2.0
LOG_BYTES = 3000
# A crash is reported by a worker a second time, some seconds later; by then a run that was started again has been heard.
TEND = {"silent_s": 45, "confirm_s": 1, "settled_s": 45}


class Runs:
    """Of one server. `logs` are of the workers, for what was waited for in vain."""

    def __init__(self, server: PrefectServer, *logs: Path, limit_s: float = LIMIT_S) -> None:
        self._server, self._logs, self._limit_s = server, logs, limit_s

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(self._server.url)

    def start(self, deployment: str, request: Mapping[str, Any]) -> UUID:
        """A run of FLOW/DEPLOYMENT, as its form would start it."""
        with self.client() as client:
            deployed = client.read_deployment_by_name(deployment)
            tags = deployed.tags or ["vllm-qualify"]
            return client.create_flow_run_from_deployment(deployed.id, parameters={"request": dict(request)}, tags=tags).id

    def run(self, deployment: str, request: Mapping[str, Any]) -> State[Any]:
        """From its start to its end."""
        return self.ended(self.start(deployment, request))

    def ended(self, run: UUID) -> State[Any]:
        with self.client() as client:
            self.wait_until(lambda: _state(client, run).is_final(), f"the end of {run}")
            return _state(client, run)

    def completed(self, run: UUID) -> State[Any]:
        """A worker that is late calls a run crashed that was started again: that is no end."""
        with self.client() as client:
            try:
                self.wait_until(lambda: _state(client, run).is_completed(), f"{run} to be completed")
            except AssertionError as error:
                error.add_note(f"it is {_state(client, run)!r}")
                raise
            return _state(client, run)

    def tend_until(self, is_done: Callable[[], bool]) -> None:
        """As its schedule would. It first looks when there may be something to see: each look is a flow run."""
        time.sleep(TEND["settled_s"])  # nothing is to be seen before

        def tended() -> bool:
            self.run("tend-fleet/tend", TEND)
            return is_done()

        self.wait_until(tended, "lost runs to be started again")

    def state(self, run: UUID) -> State[Any]:
        with self.client() as client:
            return _state(client, run)

    def of_flow(self, name: str, since: datetime) -> list[FlowRun]:
        """Those that were made since then."""
        flow = FlowFilter(name=FlowFilterName(any_=[name]))
        made = FlowRunFilter(expected_start_time=FlowRunFilterExpectedStartTime(after_=since))
        with self.client() as client:
            return client.read_flow_runs(flow_filter=flow, flow_run_filter=made)

    def wait_until(self, check: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + self._limit_s
        while not check():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.last_lines()}"
            time.sleep(POLL_S)  # processes are waited for, which tell nothing by themselves

    def last_lines(self) -> str:
        return "\n".join(f"{log}:\n{log.read_text()[-LOG_BYTES:]}" for log in self._logs)


def _state(client: SyncPrefectClient, run: UUID) -> State[Any]:
    state = client.read_flow_run(run).state
    assert state is not None
    return state
