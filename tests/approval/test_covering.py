"""Which approvals cover what is to be qualified, and why others do not."""

from datetime import timedelta
from pathlib import Path

import pytest

from tests.approval.builder import CELL, EXPIRES, NEWER, NOW, TODAY, approved, publish_report
from vllm_qualify.approval.actions import revoke
from vllm_qualify.approval.covering import find_covering
from vllm_qualify.approval.pointer import Entry, revocation
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.publish.store import Store


@pytest.fixture
def plan(run: PublishedRun) -> CellPlan:
    """The same cell with the same inputs, some time later."""
    return run.report.plan.model_copy(update={"run_id": NEWER})


def test_nothing_covers_what_was_never_approved(store: Store, plan: CellPlan) -> None:
    assert find_covering(store, plan, TODAY, 0) == "nothing is approved"


def test_an_approval_covers_the_same_inputs(store: Store, run: PublishedRun, plan: CellPlan, key: PrivateKey) -> None:
    approved(store, run, key)
    covered = find_covering(store, plan, TODAY, 14)
    assert isinstance(covered, Entry)
    assert covered.run_id == run.run_id


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
    revoke(store, CELL, None, revocation("Bob", "it loops", NOW))
    assert find_covering(store, plan, TODAY, 0) == "the last approval is revoked"


@pytest.mark.parametrize("part", ["engine", "revision", "driver", "server", "gates", "load", "questions"])
def test_what_changed_is_named(part: str, store: Store, run: PublishedRun, plan: CellPlan, key: PrivateKey) -> None:
    approved(store, run, key)
    covered = find_covering(store, changed(plan, part), TODAY, 0)
    assert covered == f"what was approved differs: {WORDS[part]}"


WORDS = {
    "engine": "the engine",
    "revision": "the model's revision",
    "driver": "the machine or its driver",
    "server": "the server's configuration",
    "gates": "the gates",
    "load": "the load",
    "questions": "the questions",
}


def changed(plan: CellPlan, part: str) -> CellPlan:
    release = plan.cell.release
    if part in ("engine", "revision"):
        engine = release.engine.model_copy(update={"digest": "sha256:" + "e" * 64})
        update = {"engine": engine} if part == "engine" else {"revision": "0" * 40}
        return plan.model_copy(update={"cell": plan.cell.model_copy(update={"release": release.model_copy(update=update)})})
    if part == "driver":
        return plan.model_copy(update={"fingerprint": plan.fingerprint.model_copy(update={"driver": "999.1"})})
    if part == "server":
        server = plan.server.model_copy(update={"arguments": plan.server.arguments | {"max-num-seqs": 3}})
        return plan.model_copy(update={"server": server})
    if part == "gates":
        return plan.model_copy(update={"gates": plan.gates[1:]})
    if part == "load":
        return plan.model_copy(update={"load": plan.load.model_copy(update={"seed": 99})})
    settings = [task.settings.model_copy(update={"num_fewshot": 3}) for task in plan.accuracy]
    tasks = [task.model_copy(update={"settings": each}) for task, each in zip(plan.accuracy, settings, strict=True)]
    return plan.model_copy(update={"accuracy": tasks})


def test_a_later_approval_is_the_one_that_counts(
    store: Store, run: PublishedRun, plan: CellPlan, key: PrivateKey, tmp_path: Path
) -> None:
    approved(store, run, key)
    approved(store, publish_report(store, tmp_path / "later", NEWER), key)
    covered = find_covering(store, plan, TODAY, 0)
    assert isinstance(covered, Entry)
    assert covered.run_id == NEWER
