"""What Prefect adds around the package: infrastructure is tried again, and nothing else is."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow
from prefect.testing.utilities import prefect_test_harness

import tasks.decide
from tests.report.builder import approved_report
from vllm_qualify.errors import StoreBusyError, StoreError
from vllm_qualify.qualification import Published, Run

CELL = SimpleNamespace(cell=SimpleNamespace(id="reference/bf16"))
RUN: Any = SimpleNamespace(id="run", report=approved_report, plan=CELL)
PUBLISHED = Published(outcome="approved", approved=True, run=Run(folder=Path("run")), page="https://store/page", manifest="m")


@pytest.fixture(scope="module", autouse=True)
def _prefect() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=180):
        yield


def publish_with(monkeypatch: pytest.MonkeyPatch, outcomes: list[Any], tmp_path_url: str) -> Any:
    def publish_run(*_: object) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(tasks.decide, "publish_run", publish_run)

    publish: Any = tasks.decide.publish.with_options(retry_delay_seconds=0)

    @flow
    def one() -> Any:
        return publish(RUN, tmp_path_url)

    return one()


def test_a_busy_store_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    outcomes = [StoreBusyError("slow down", "wait"), StoreBusyError("slow down", "wait"), PUBLISHED]
    assert publish_with(monkeypatch, outcomes, tmp_path_factory.mktemp("store").as_uri()) == PUBLISHED


def test_a_store_that_refuses_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outcomes = [StoreError("no permission", "ask"), PUBLISHED]
    with pytest.raises(StoreError, match="no permission"):
        publish_with(monkeypatch, outcomes, tmp_path_factory.mktemp("store").as_uri())
    assert outcomes == [PUBLISHED]
