"""Approving, rejecting and revoking as a whole: what a crash leaves, who wins a race, what the index shows."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest

from tests.approval.builder import (
    ADA,
    CELL,
    EXPIRES,
    NEWER,
    NOW,
    OLDER,
    RUN,
    VALID_DAYS,
    approved,
    of_variant,
    publish_report,
    row_of,
    with_gate,
)
from tests.approval.stores import Interrupted, KilledError, Mortal, pointer_of, rewrite
from tests.builders.boards import TAKEN_BACK
from tests.builders.wrapped_stores import Wrapped
from tests.publish.conftest import RADOSGW
from vllm_qualify.approval import layout
from vllm_qualify.approval.actions import Approved, approve, reject, revoke
from vllm_qualify.approval.decision import AUTOMATIC, Ruling, ruling
from vllm_qualify.approval.errors import OtherKeyError, OvertakenError, TamperedError
from vllm_qualify.approval.index import index_problem, make_again, read_index, read_row, write_index
from vllm_qualify.approval.layout import BOARD_KEY, INDEX_KEY, approval_key, cell_index_key, pointer_key
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.row import Index
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approval.verify import verify
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store

WRITES = [make_key(CELL, RUN) for make_key in (layout.decision_key, approval_key)]
WRITES += [pointer_key(CELL), layout.entry_key(CELL, RUN)]
WRITES += [cell_index_key(CELL), INDEX_KEY, layout.cell_page_key(CELL), BOARD_KEY]


def approvals(store: Store) -> dict[str, bytes]:
    keys = [*store.keys("approvals/"), *store.keys("cells/"), *store.keys(INDEX_KEY), *store.keys(BOARD_KEY)]
    return {key: store.get(key) for key in keys}


@pytest.fixture(scope="module")
def as_published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs, the older of them approved."""
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_QUALIFY_HOME", str(folder))
        two_published((folder / "store").as_uri(), folder)
        yield folder


@pytest.fixture
def two_runs(as_published: Path, tmp_path: Path) -> DirectoryStore:
    """A copy, which the test may change."""
    return copied(as_published, tmp_path / "store")


def copied(folder: Path, to: Path) -> DirectoryStore:
    return DirectoryStore(Path(shutil.copytree(folder / "store", to)))


def run_in(store: Store, run_id: str = RUN) -> PublishedRun:
    return read_run(store, CELL, run_id)


def killed(store: Store, key: PrivateKey, dies_at: int, *, after: bool = False, wanted: Ruling = ADA) -> Mortal:
    """The store, once an approver was killed at one of these writes."""
    mortal = Mortal(store, dies_at, after=after)
    with pytest.raises(KilledError):
        approve(mortal, run_in(mortal), wanted, VALID_DAYS, key, NOW)
    return mortal


def test_the_order_of_writes(two_runs: Store, key: PrivateKey) -> None:
    store = Mortal(two_runs, 0, after=False)
    approved(store, run_in(store), key)
    assert store.written == WRITES


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(1, len(WRITES) + 1))
def test_a_crash_leaves_the_old_state_or_the_new_one_and_a_rerun_completes_it(
    as_published: Path, tmp_path: Path, key: PrivateKey, dies_at: int, after: bool
) -> None:
    whole, store = (copied(as_published, tmp_path / name) for name in ("whole", "store"))
    check_a_crash(whole, store, key, dies_at, after=after)


@pytest.mark.s3
@pytest.mark.thorough
def test_a_crash_in_s3_is_completed_too(radosgw_url: str, tmp_path: Path, key: PrivateKey) -> None:
    """Before a write a store is as it was after the one before."""
    whole = two_published(f"{radosgw_url}/whole", tmp_path)
    for dies_at, after in [(1, False), *((number, True) for number in range(1, len(WRITES) + 1))]:
        store = two_published(f"{radosgw_url}/{dies_at}-{after}", tmp_path)
        check_a_crash(whole, store, key, dies_at, after=after)


def two_published(url: str, folder: Path) -> Store:
    store = open_store(url)
    for run_id in (OLDER, RUN):
        publish_report(store, folder / url.rpartition("/")[2], run_id)
    return store


def check_a_crash(whole: Store, store: Store, key: PrivateKey, dies_at: int, *, after: bool) -> None:
    for each in (whole, store):
        if not each.exists(pointer_key(CELL)):
            approved(each, run_in(each, OLDER), key)
    before = store.get(pointer_key(CELL))
    approved(whole, run_in(whole), key)

    mortal = killed(store, key, dies_at, after=after)
    assert mortal.get(pointer_key(CELL)) in (before, whole.get(pointer_key(CELL)))
    named = verify(mortal, CELL, [key.public_key], NOW)
    assert named.run_id == (RUN if (dies_at, after) >= (3, True) else OLDER)
    approved(mortal, run_in(mortal), key)
    assert approvals(mortal) == approvals(whole)
    assert verify(mortal, CELL, [key.public_key], NOW).run_id == RUN


def test_a_rerun_on_another_day_goes_on_with_the_decision(two_runs: Store, key: PrivateKey) -> None:
    store = killed(two_runs, key, 2)
    done = approved(store, run_in(store), key, NOW + timedelta(days=30))
    assert (done.decision.at, done.decision.expires) == (NOW, EXPIRES)
    assert (done.pointer.last.at, done.pointer.last.expires) == (NOW, EXPIRES)


def test_a_second_call_changes_nothing_and_another_key_is_reported(
    store: Store, run: PublishedRun, key: PrivateKey, other_key: PrivateKey
) -> None:
    first = approved(store, run, key)
    before = approvals(store)
    assert approved(store, run, key, NOW + timedelta(days=1)) == first
    with pytest.raises(OtherKeyError, match=f"signed by key {key.public_key.keyid[:16]}"):
        approved(store, run, other_key)
    assert approvals(store) == before


def test_an_approval_of_something_else_in_its_place_is_reported(as_published: Path, tmp_path: Path, key: PrivateKey) -> None:
    store, other = killed(copied(as_published, tmp_path / "copy"), key, 3), copied(as_published, tmp_path / "other")
    approved(other, run_in(other), key, NOW + timedelta(hours=1))
    rewrite(store, approval_key(CELL, RUN), other.get(approval_key(CELL, RUN)))
    with pytest.raises(TamperedError, match="states something else"):
        approved(store, run_in(store), key)
    assert read_pointer(store, CELL) is None


def test_an_older_report_leaves_nothing(two_runs: Store, key: PrivateKey) -> None:
    approved(two_runs, run_in(two_runs, RUN), key)
    before = approvals(two_runs)
    with pytest.raises(OvertakenError, match=f"run {OLDER} is older than run {RUN}"):
        approved(two_runs, run_in(two_runs, OLDER), key)
    assert approvals(two_runs) == before


def test_each_verdict_has_its_own_call(store: Store, run: PublishedRun, key: PrivateKey) -> None:
    with pytest.raises(ValueError, match="approves nothing"):
        approve(store, run, ruling("reject", "Bob", "it is slow"), VALID_DAYS, key, NOW)
    with pytest.raises(ValueError, match="rejects nothing"):
        reject(store, run, ADA, NOW)


def test_anybody_completes_what_the_recipe_began(two_runs: Store, key: PrivateKey) -> None:
    store = killed(two_runs, key, 2, wanted=AUTOMATIC)
    done = approved(store, run_in(store), key)
    assert (done.decision.by, done.pointer.last.by) == ("recipe", "recipe")
    assert verify(store, CELL, [key.public_key], NOW).run_id == RUN


def test_an_index_that_cannot_be_written_holds_up_nothing(two_runs: Store, key: PrivateKey) -> None:
    rewrite(two_runs, cell_index_key(CELL), b"no index")
    done = approved(two_runs, run_in(two_runs), key)
    assert "the index is not up to date" in (done.index_problem or "")
    assert verify(two_runs, CELL, [key.public_key], NOW).run_id == RUN
    assert "not up to date" in (revoke(two_runs, CELL, None, TAKEN_BACK).index_problem or "")
    Path(two_runs.locate(cell_index_key(CELL))).unlink()
    assert index_problem(two_runs, CELL) is None
    assert row_of(two_runs).last == done.pointer.last.model_copy(update={"revoked": TAKEN_BACK})


class Together(Wrapped):
    """Lets nobody move the pointer before all have read it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.all_read = Barrier(1)

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        if key == pointer_key(CELL):
            self.all_read.wait(timeout=60)
        super().swap(key, body, content_type, tag)


@pytest.fixture(params=["directory", RADOSGW])
def real_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Without moto, which looks and then writes, with nothing to keep two requests apart."""
    return (tmp_path / "store").as_uri() if request.param == "directory" else str(request.getfixturevalue("radosgw_url"))


def test_of_sixteen_approvers_one_wins_each_round_and_the_others_learn_by_whom(
    real_url: str, tmp_path: Path, key: PrivateKey
) -> None:
    store = Together(open_store(real_url))
    names = {f"20260314T0926{second:02}Z-abcdef": f"Approver {second}" for second in range(16)}
    contenders = [publish_report(store, tmp_path / "runs", run_id) for run_id in names]
    moves = 0
    while contenders:
        store.all_read = Barrier(len(contenders))
        with ThreadPoolExecutor(len(contenders)) as pool:
            results = list(pool.map(lambda run: attempt(store, run, names[run.run_id], key), contenders))
        (winner,) = [result for result in results if isinstance(result, Approved)]
        moves += 1
        assert read_pointer(store, CELL) == winner.pointer
        assert len(winner.pointer.entries) == moves
        won = winner.pointer.last.run_id
        for run, result in zip(contenders, results, strict=True):
            if isinstance(result, OvertakenError):
                assert f"run {run.run_id} lost" in result.problem
                assert f"run {won} was approved by {names[won]} on 2026-03-14" in result.problem
        for run in contenders:
            if run.run_id < won:
                again = attempt(store, run, names[run.run_id], key)
                assert isinstance(again, OvertakenError)
                assert f"is older than run {won}" in again.problem
        contenders = [run for run in contenders if run.run_id > won]
    assert verify(store, CELL, [key.public_key], NOW).run_id == max(names)
    before = approvals(store)
    make_again(store, CELL)
    write_index(store)
    assert approvals(store) == before


def attempt(store: Store, run: PublishedRun, by: str, key: PrivateKey) -> Approved | OvertakenError:
    try:
        return approve(store, run, ruling("approve", by, "it passed"), VALID_DAYS, key, NOW)
    except OvertakenError as error:
        return error


def test_the_index_shows_each_cells_last_approval_and_newest_reports(two_runs: Store, key: PrivateKey) -> None:
    row = row_of(two_runs)
    assert (row.cell, row.last) == (CELL, None)
    assert [(line.run_id, line.outcome) for line in row.reports] == [(RUN, "passed"), (OLDER, "passed")]
    assert row.reports[0].started_at == datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC)

    done = approved(two_runs, run_in(two_runs, OLDER), key)
    assert row_of(two_runs).last == done.pointer.last
    done = approved(two_runs, run_in(two_runs), key)
    revoke(two_runs, CELL, RUN, TAKEN_BACK)
    row = row_of(two_runs)
    assert row.last == done.pointer.last.model_copy(update={"revoked": TAKEN_BACK})


def test_the_indexes_can_be_made_again(two_runs: Store, tmp_path: Path, key: PrivateKey) -> None:
    publish_report(two_runs, tmp_path / "runs", NEWER, with_gate("fail"))
    approved(two_runs, run_in(two_runs), key)
    before, row = read_index(two_runs), row_of(two_runs)
    for name in (INDEX_KEY, cell_index_key(CELL)):
        Path(two_runs.locate(name)).unlink()
    made = make_again(two_runs, CELL)
    assert made.model_copy(update={"revision": row.revision}) == row
    assert made.revision > row.revision
    assert write_index(two_runs).cells == [before.cells[0].model_copy(update={"revision": made.revision})]
    assert [line.outcome for line in row.reports] == ["not passed", "passed", "passed"]


def test_only_what_changed_is_written(two_runs: Store, key: PrivateKey) -> None:
    before = approvals(two_runs)
    make_again(two_runs, CELL)
    write_index(two_runs)
    assert index_problem(two_runs, CELL) is None
    assert approvals(two_runs) == before
    revision = read_index(two_runs).revision
    approved(two_runs, run_in(two_runs), key)
    assert write_index(two_runs).revision == revision + 1


def test_an_index_of_nothing(store: Store) -> None:
    assert read_index(store) == Index()
    assert write_index(store) == Index(revision=1)
    assert store.exists(INDEX_KEY)


def test_a_row_is_added_beside_those_of_other_cells(two_runs: Store, tmp_path: Path) -> None:
    """Without reading what they are made of."""
    before = read_index(two_runs).cells
    for name in (f"reports/{CELL}/{RUN}/manifest.json", cell_index_key(CELL)):
        Path(two_runs.locate(name)).unlink()
    publish_report(two_runs, tmp_path / "runs", NEWER, of_variant("bf16"))
    bf16, fp8 = read_index(two_runs).cells
    assert ([fp8], bf16.cell) == (before, CELL.replace("fp8", "bf16"))
    assert [line.run_id for line in bf16.reports] == [NEWER]


def test_what_changes_while_an_index_is_made_is_in_it(two_runs: Store, key: PrivateKey) -> None:
    Path(two_runs.locate(cell_index_key(CELL))).unlink()
    row = make_again(Interrupted(two_runs, lambda: approved(two_runs, run_in(two_runs), key)), CELL)
    assert row.last == pointer_of(two_runs).last
    assert row_of(two_runs) == row


@pytest.mark.parametrize("body", [b"", b"[]", b'{"index_version": 2}'])
def test_what_is_no_index_is_reported(two_runs: Store, body: bytes) -> None:
    for name, read in ((INDEX_KEY, read_index), (cell_index_key(CELL), partial(read_row, cell=CELL))):
        two_runs.swap(name, body, "application/json", two_runs.read(name).tag)
        with pytest.raises(StoreError, match="not an index"):
            read(two_runs)


def test_an_approval_has_the_days_it_was_given(store: Store, run: PublishedRun, key: PrivateKey) -> None:
    done = approve(store, run, AUTOMATIC, 1, key, NOW)
    assert done.pointer.last.expires == date(2026, 3, 15)
    assert (done.pointer.last.by, done.decision.automatic) == ("recipe", True)
