"""The command `prune`, as the owner of a store types it."""

import time
from pathlib import Path

import pytest

from tests.approval.builder import CELL, publish_report
from tests.builders.approval_commands import Command, command
from vllm_qualify.publish.store import PrunableStore
from vllm_qualify.publish.stores import open_store

__all__ = ["command"]

OLD, OLDER = "20240302T080000Z-abcdef", "20240301T080000Z-abcdef"
PRUNE = ("prune", "--keep", "1", "--older-than-days", "30", "--store")


@pytest.fixture
def store(tmp_path: Path) -> PrunableStore:
    """Two old runs of a cell."""
    opened = open_store((tmp_path / "store").as_uri())
    for run_id in (OLDER, OLD):
        publish_report(opened, tmp_path / "runs", run_id)
    return opened


def test_what_would_go_is_reported_and_goes_with_delete(
    store: PrunableStore, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {*store.keys("")}
    code, out, _ = command(*PRUNE, store.url)
    assert code == 0
    assert out.splitlines()[0] == f"{CELL}: run {OLDER}"
    assert "would go: 1 reports" in out
    assert {*store.keys("")} == before
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    code, out, _ = command(*PRUNE, store.url, "--delete")
    assert (code, "removed: 1 reports" in out, waited) == (0, True, [60.0])
    assert not [key for key in store.keys("") if OLDER in key and key.startswith(("reports/", "runs/"))]
    assert [key for key in store.keys("reports/") if OLD in key]


@pytest.mark.parametrize("arguments", [PRUNE, (*PRUNE[:-1], "--delete", "--store")])
def test_a_store_that_is_not_there_is_named_and_not_made(arguments: tuple[str, ...], command: Command, tmp_path: Path) -> None:
    code, _, message = command(*arguments, (tmp_path / "mistyped").as_uri())
    assert code == 3
    assert "mistyped cannot be used: No such file or directory" in message
    assert not (tmp_path / "mistyped").exists()


def test_a_policy_that_keeps_nothing_is_refused(store: PrunableStore, command: Command) -> None:
    code, _, message = command("prune", "--keep", "0", "--older-than-days", "30", "--store", store.url)
    assert (code, "greater than or equal to 1" in message) == (2, True)
