"""Anybody who may publish writes what the approver reads: nothing of it ends the automatic approvals of others."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.approval.builder import CELL, NEWER, RUN, publish_report
from tests.approval.conftest import key, run, store
from vllm_qualify.approval.layout import INDEX_KEY
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approver.decisions import Desk
from vllm_qualify.approver.service import Watch, approve_new, make_app
from vllm_qualify.publish.store import Store

__all__ = ["key", "run", "store"]

pytestmark = pytest.mark.usefixtures("believed")
NAMES = ["a b", "../../x", "a" * 300, f"{RUN}/", "\x00", "\ud800", "-", "..", ""]


def rename(store: Store, name: str) -> None:
    """The index has another name for the run, as a publisher may write it."""
    path = Path(store.locate(INDEX_KEY))
    path.chmod(0o644)
    path.write_text(path.read_text().replace(json.dumps(RUN), json.dumps(name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_breaks_a_parser_keeps_no_other_run_waiting(
    store: Store, key: PrivateKey, run: PublishedRun, tmp_path: Path, name: str
) -> None:
    assert run.report.run_id == RUN
    publish_report(store, tmp_path / "others", NEWER)
    rename(store, name)
    desk = Desk(store, key, {})
    if name == "\ud800":
        # No index any more: its remedy is in the log, and /health tells of it.
        assert_goes_on(desk)
        return
    waiting = desk.waiting()
    assert (CELL, NEWER) in approve_new(desk, set())
    assert approve_new(desk, set(waiting)) == set()


def assert_goes_on(desk: Desk) -> None:
    watch = Watch(desk, 0.01)
    with watch.running():
        assert until(lambda: watch.problem == "the store could not be looked at")


def until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)  # the watch has a thread of its own
    return holds()


class Breaking(Desk):
    """Whose reports cannot be listed at first."""

    looks = 0

    def waiting(self) -> list[tuple[str, str]]:
        type(self).looks += 1
        if self.looks < 3:
            raise RecursionError("the index is too deep")
        return []


def test_the_watch_goes_on_after_any_error_and_health_tells_of_it(store: Store, key: PrivateKey, tmp_path: Path) -> None:
    Breaking.looks = 0
    said: list[int] = []

    def look() -> list[int]:
        said.append(client.get("/health").status_code)
        return said

    with TestClient(make_app(Breaking(store, key, {}), tmp_path / "approvers.json", look_every_s=0.2)) as client:
        assert until(lambda: 503 in look())
        assert until(lambda: look()[-1] == 200)
        assert Breaking.looks >= 3


def test_health_tells_that_the_thread_has_ended(store: Store, key: PrivateKey) -> None:
    watch = Watch(Desk(store, key, {}), 60)
    with watch.running():
        assert watch.problem == ""
        watch._ended.set()
        assert watch._thread
        watch._thread.join()
        watch._ended.clear()
        assert "has ended" in watch.problem
