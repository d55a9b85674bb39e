"""Which approvals cover what is to be qualified, and why others do not."""

from datetime import timedelta
from pathlib import Path

import pytest

from tests.approval.builder import CELL, EXPIRES, NEWER, TODAY, approved, publish_report
from tests.builders.boards import TAKEN_BACK
from tests.builders.changed import changed
from tests.report.builder import passed_report
from vllm_qualify.approval.actions import revoke
from vllm_qualify.approval.covering import find_covering
from vllm_qualify.approval.pointer import Entry
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.publish.store import Store

PLAN = passed_report().plan


@pytest.fixture
def plan(run: PublishedRun) -> CellPlan:
    """The same cell with the same inputs, some time later."""
    return changed(run.report.plan, run_id=NEWER)


def test_an_approval_covers_the_same_inputs(store: Store, run: PublishedRun, plan: CellPlan, key: PrivateKey) -> None:
    assert find_covering(store, plan, TODAY, 0) == "nothing is approved"
    entry = approved(store, run, key).pointer.last
    assert find_covering(store, plan, TODAY, 14) == entry


@pytest.mark.parametrize(("days_left", "is_covered"), [(15, True), (14, False), (1, False), (0, False), (-3, False)])
def test_an_approval_is_renewed_before_its_end(
    days_left: int, is_covered: bool, store: Store, run: PublishedRun, plan: CellPlan, key: PrivateKey
) -> None:
    approved(store, run, key)
    covered = find_covering(store, plan, EXPIRES - timedelta(days=days_left), 14)
    assert isinstance(covered, Entry) is is_covered
    if not is_covered:
        assert covered == (f"the approval ends on {EXPIRES}" if days_left > 0 else "the last approval is expired")


def test_a_revoked_approval_covers_nothing(store: Store, run: PublishedRun, plan: CellPlan, key: PrivateKey) -> None:
    approved(store, run, key)
    revoke(store, CELL, None, TAKEN_BACK)
    assert find_covering(store, plan, TODAY, 0) == "the last approval is revoked"


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("cell.release.engine", {"digest": "sha256:" + "e" * 64}, "the engine"),
        ("cell.release", {"revision": "0" * 40}, "the model's revision"),
        ("fingerprint", {"driver": "999.1"}, "the machine or its driver"),
        ("server", {"arguments": PLAN.server.arguments | {"max-num-seqs": 3}}, "the server's configuration"),
        ("", {"gates": PLAN.gates[1:]}, "the gates"),
        ("load", {"seed": 99}, "the load"),
        ("", {"accuracy": [changed(task, "settings", num_fewshot=3) for task in PLAN.accuracy]}, "the questions"),
    ],
    ids=["engine", "revision", "driver", "server", "gates", "load", "questions"],
)
def test_what_changed_is_named(
    store: Store, run: PublishedRun, plan: CellPlan, key: PrivateKey, part: str, changes: dict[str, object], words: str
) -> None:
    approved(store, run, key)
    assert find_covering(store, changed(plan, part, **changes), TODAY, 0) == f"what was approved differs: {words}"


def test_a_later_approval_is_the_one_that_counts(
    store: Store, run: PublishedRun, plan: CellPlan, key: PrivateKey, tmp_path: Path
) -> None:
    approved(store, run, key)
    later = approved(store, publish_report(store, tmp_path / "later", NEWER), key)
    assert find_covering(store, plan, TODAY, 0) == later.pointer.last
