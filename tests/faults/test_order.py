"""Which of two runs is newer is said by the store, whatever the clocks of the hosts that named them said."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.approval.builder import CELL, approved, publish_report
from tests.approval.conftest import key
from tests.builders.captured_runs import store
from tests.builders.told_by_hosts import change_of
from tests.publish.conftest import directory_url, no_outer_settings, radosgw_url, real_store
from vllm_qualify.approval.errors import OvertakenError
from vllm_qualify.approval.index import read_index, read_row
from vllm_qualify.approval.pointer import read_pointer
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.order import is_newer, next_number, sequence_key
from vllm_qualify.publish.store import Store
from vllm_qualify.runs.baseline import newest_baseline

__all__ = ["directory_url", "key", "no_outer_settings", "radosgw_url", "real_store", "store"]

# The host that made AHEAD was two hours ahead: its run is named as if it were made after the next one.
AHEAD, AFTER_IT = "20260314T112653Z-5f3d19", "20260314T093000Z-000001"


def test_the_baseline_that_was_published_last_is_the_newest(store: Store, tmp_path: Path) -> None:
    for run_id in (AHEAD, AFTER_IT):
        publish_report(store, tmp_path / "runs", run_id, change_of("plan", establishes=True))
    newest = newest_baseline(store, CELL)
    assert newest is not None
    assert newest.run_id == AFTER_IT


def test_the_later_runs_approval_is_not_refused_and_the_earlier_ones_is(store: Store, key: PrivateKey, tmp_path: Path) -> None:
    ahead = publish_report(store, tmp_path / "runs", AHEAD)
    after_it = publish_report(store, tmp_path / "runs", AFTER_IT)
    third = publish_report(store, tmp_path / "runs", "20260314T094000Z-000002")
    approved(store, ahead, key)
    approved(store, third, key)
    with pytest.raises(OvertakenError, match=f"run {AFTER_IT} is older than run {third.run_id}"):
        approved(store, after_it, key)
    pointer = read_pointer(store, CELL)
    assert pointer is not None
    assert [entry.run_id for entry in pointer.entries] == [AHEAD, third.run_id]


def test_the_board_shows_the_later_run_first_and_waiting(store: Store, key: PrivateKey, tmp_path: Path) -> None:
    approved(store, publish_report(store, tmp_path / "runs", AHEAD), key)
    publish_report(store, tmp_path / "runs", AFTER_IT)
    (shown,) = read_index(store).cells
    assert (shown.reports[0].run_id, shown.reports[0].standing) == (AFTER_IT, "waiting for a decision")
    assert [(line.run_id, line.standing) for line in read_row(store, CELL).reports] == [
        (AFTER_IT, "waiting for a decision"),
        (AHEAD, "approved"),
    ]


def test_a_run_that_is_published_again_keeps_its_place(store: Store, tmp_path: Path) -> None:
    first = publish_report(store, tmp_path / "runs", AHEAD)
    later = publish_report(store, tmp_path / "runs", AFTER_IT)
    again = publish_report(store, tmp_path / "again", AHEAD)
    assert again.manifest_object == first.manifest_object
    assert is_newer(later, again)


def test_no_two_of_sixteen_publishers_get_one_number(real_store: Store) -> None:
    with ThreadPoolExecutor(16) as publishers:
        numbers = list(publishers.map(lambda _: next_number(real_store, CELL), range(16)))
    assert sorted(numbers) == list(range(1, 17))


def test_a_counter_that_was_changed_by_hand_is_reported(store: Store) -> None:
    assert [next_number(store, CELL) for _ in range(3)] == [1, 2, 3]
    store.swap(sequence_key(CELL), b"many", "application/json", store.read(sequence_key(CELL)).tag)
    with pytest.raises(StoreError, match="not a counter") as raised:
        next_number(store, CELL)
    assert "restore it" in raised.value.remedy
