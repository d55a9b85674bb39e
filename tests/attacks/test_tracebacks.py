"""Input from outside that ended in a traceback: it is one clear error, or no hindrance."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.approval.builder import publish_report
from tests.approval.conftest import store
from tests.qualified import COMMAND
from tests.qualified import run as run_command
from vllm_qualify.approval.layout import JSON
from vllm_qualify.publish.store import Store
from vllm_qualify.runs.prune import Policy, plan_pruning

__all__ = ["store"]

LATER = datetime(2027, 1, 1, tzinfo=UTC)


# --- prune


@pytest.mark.parametrize("key", ["reports/manifest.json", "reports/x/manifest.json", "reports/a/b/c/d/e/f/manifest.json"])
def test_keys_that_are_of_no_run_hinder_no_pruning(store: Store, tmp_path: Path, key: str) -> None:
    """Whoever may publish can write them."""
    older, newer = (publish_report(store, tmp_path / "runs", f"2026030{day}T080000Z-abcdef") for day in (1, 2))
    store.put_new(key, b"{}", JSON)
    assert plan_pruning(store, Policy(keep=1, older_than_days=1), LATER).runs == [(older.cell, older.run_id)]
    assert newer.run_id != older.run_id


def test_a_policy_of_more_days_than_there_were_is_refused(home: Path) -> None:
    with pytest.raises(ValidationError, match="older_than_days"):
        Policy(keep=1, older_than_days=10**6)
    done = run_command(home, COMMAND, "prune", "--keep", "1", "--older-than-days", "9" * 30)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# --- a file that never ends


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("verify a/b/c/d --public-key /dev/zero", "longer than a key"),
        ("recipe import /dev/zero --exact-match-minimum 0.5 --exact-match-filter strict-match", "longer than 16,000,000 bytes"),
    ],
)
def test_a_file_that_never_ends_is_refused(home: Path, arguments: str, message: str) -> None:
    """It filled this machine's memory."""
    done = run_command(home, "sh", "-c", f"ulimit -v 6000000; exec {COMMAND} {arguments}")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
