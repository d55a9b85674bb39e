"""What `prune` removes and what it never does, what shares evidence, who publishes meanwhile, and a prune that was stopped."""

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from tests.approval.builder import BOB_REJECTS, CELL, NOW, approved, made_key, publish_report, row_of
from tests.builders.changed import changed
from vllm_qualify.approval.actions import reject
from vllm_qualify.approval.index import announce
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approval.verify import verify
from vllm_qualify.errors import StoreBusyError, StoreError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.door import set_door
from vllm_qualify.publish.store import PrunableStore
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.prune import Policy, plan_pruning, prune_store
from vllm_qualify.runs.publishing import publish_run
from vllm_qualify.runs.stored import fetch_evidence, published_run

LATER = datetime(2026, 12, 1, tzinfo=UTC)
POLICY = Policy(keep=2, older_than_days=90)
RUNS = [f"202603{day:02}T080000Z-abcdef" for day in range(1, 9)]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> PrivateKey:
    return made_key(tmp_path_factory.mktemp("key") / "key.pem")


@pytest.fixture
def store(tmp_path: Path, key: PrivateKey) -> PrunableStore:
    """Eight runs of a cell: the first a baseline, the second approved, the third rejected."""
    store = DirectoryStore(tmp_path / "store")
    publish = partial(publish_report, store, tmp_path / "runs")
    runs = [publish(RUNS[0], lambda report: changed(report, "plan", establishes=True)), *map(publish, RUNS[1:])]
    approved(store, runs[1], key)
    reject(store, runs[2], BOB_REJECTS, NOW)
    return store


def pruned(store: PrunableStore, policy: Policy = POLICY, now: datetime = LATER) -> list[str]:
    """The runs that went."""
    return [run_id for _, run_id in prune_store(store, policy, now, lambda _: None, grace_s=0).runs]


def whole(store: PrunableStore, run_id: str, folder: Path) -> PublishedRun:
    """Raises StoreError if anything of the run is gone."""
    run = read_run(store, CELL, run_id)
    fetch_evidence(store, run.report, folder / run_id)
    return run


def everything(store: PrunableStore) -> dict[str, bytes]:
    return {name: store.get(name) for name in store.keys("") if name != "pruning.json"}


def test_what_is_old_and_nobody_needs_goes_whole(store: PrunableStore, key: PrivateKey, tmp_path: Path) -> None:
    assert pruned(store) == RUNS[3:6]
    for run_id in RUNS[3:6]:
        assert not [name for name in store.keys("") if run_id in name]
        with pytest.raises(StoreError, match="no whole run"):
            published_run(store, run_id)
    staying = [*RUNS[:3], *RUNS[6:]]
    named = {each.key for run_id in staying for each in whole(store, run_id, tmp_path / "got").manifest.objects}
    assert set(store.keys("evidence/")) == {name for name in named if name.startswith("evidence/")}
    assert [line.run_id for line in row_of(store).reports] == staying[::-1]
    baseline = row_of(store).baseline
    assert baseline
    assert baseline.run_id == RUNS[0]
    assert verify(store, CELL, [key.public_key], NOW).run_id == RUNS[1]
    assert not list(store.keys("pruned/"))


def test_a_plan_changes_nothing_and_tells_what_goes(store: PrunableStore) -> None:
    before = everything(store)
    pruning = plan_pruning(store, POLICY, LATER)
    assert [run_id for _, run_id in pruning.runs] == RUNS[3:6]
    assert len(pruning.objects) == 15
    assert pruning.size_bytes == sum(len(store.get(name)) for name in pruning.objects)
    assert everything(store) == before


@pytest.mark.parametrize(
    ("policy", "now"),
    [(POLICY, NOW), (Policy(keep=8, older_than_days=1), LATER), (Policy(keep=1, older_than_days=3650), LATER)],
    ids=["young", "few", "very young"],
)
def test_what_the_policy_keeps_stays(store: PrunableStore, policy: Policy, now: datetime) -> None:
    before = everything(store)
    assert pruned(store, policy, now) == []
    assert everything(store) == before


def test_evidence_that_another_report_shares_stays(store: PrunableStore, tmp_path: Path) -> None:
    shared, newest = read_run(store, CELL, RUNS[3]).report, "20260401T080000Z-abcdef"
    report = changed(changed(shared, "plan", run_id=newest), run_id=newest)
    publish_run(report, Run(folder=tmp_path / "runs" / RUNS[3]), store)
    assert RUNS[3] in pruned(store)
    whole(store, newest, tmp_path / "got")


class StoppedError(Exception):
    pass


class Stopping(DirectoryStore):
    """Is killed before its n-th removal."""

    def __init__(self, folder: Path, left: int) -> None:
        super().__init__(folder)
        self.left = left

    def delete(self, key: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise StoppedError
        super().delete(key)


@pytest.mark.thorough
def test_a_stopped_prune_goes_on_with_any_policy(store: PrunableStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_qualify.runs.prune.AT_ONCE", 1)
    for left in (2, 4, 9, 17, 24, 30):
        with pytest.raises(StoppedError):
            pruned(Stopping(tmp_path / "store", left))
        with pytest.raises(StoreBusyError, match="is being pruned"):
            publish_report(store, tmp_path / f"stopped-{left}", f"20260401T0800{left:02}Z-abcdef")
        pruned(store, Policy(keep=100, older_than_days=3650))
        assert not list(store.keys("pruned/"))
        named = {each.key for line in row_of(store).reports for each in read_run(store, CELL, line.run_id).manifest.objects}
        assert set(store.keys("evidence/")) == {name for name in named if name.startswith("evidence/")}
        for line in row_of(store).reports:
            whole(store, line.run_id, tmp_path / f"got-{left}")
        newer = [f"2026030{day}T08{left:02}00Z-abcdef" for day in range(4, 7)]
        for run_id in newer:
            publish_report(store, tmp_path / "more", run_id)


def test_while_a_run_is_being_published_nothing_goes(store: PrunableStore) -> None:
    announce(store, CELL, "20261130T080000Z-abcdef")
    before = everything(store)
    with pytest.raises(StoreBusyError, match=r"run 20261130T080000Z-abcdef of .* is being published"):
        pruned(store)
    assert everything(store) == before
    assert pruned(store, now=LATER + timedelta(days=100)) == RUNS[3:6]


class Meddled(DirectoryStore):
    """The door is closed just before the first write of a key with this end."""

    def __init__(self, folder: Path, end: str) -> None:
        super().__init__(folder)
        self.end = end

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        self._meddle(key)
        super().swap(key, body, content_type, tag)

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        self._meddle(key)
        super().put_new(key, body, content_type)

    def _meddle(self, key: str) -> None:
        if self.end and key.endswith(self.end):
            self.end = ""
            set_door(self, is_closed=True)


def test_a_publisher_whom_the_door_overtakes_writes_no_evidence_and_is_seen(store: PrunableStore, tmp_path: Path) -> None:
    late, before = "20261130T080000Z-abcdef", list(store.keys("evidence/"))
    with pytest.raises(StoreBusyError, match="is being pruned"):
        publish_report(Meddled(tmp_path / "store", f"{CELL}/index.json"), tmp_path / "late", late)
    assert list(store.keys("evidence/")) == before
    with pytest.raises(StoreBusyError, match="is being published"):
        pruned(store)
    publish_report(store, tmp_path / "later", late)
    assert pruned(store) == RUNS[3:7]


def test_what_is_approved_when_the_door_closes_stays(store: PrunableStore, tmp_path: Path, key: PrivateKey) -> None:
    """Its approval is refused, but its decision is there; the same approval goes on afterwards."""
    run = read_run(store, CELL, RUNS[4])
    with pytest.raises(StoreBusyError, match="is being pruned"):
        approved(Meddled(tmp_path / "store", f"{RUNS[4]}/decision.json"), run, key)
    assert pruned(store) == [RUNS[3], RUNS[5]]
    approved(store, run, key)
    assert verify(store, CELL, [key.public_key], NOW).run_id == RUNS[4]
