"""The pointer: it moves forward only, one mover at a time, and a revocation always comes through."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path
from threading import Barrier

import pytest

from tests.approval.builder import CELL, EXPIRES, NEWER, NOW, OLDER, RUN, TODAY
from tests.approval.stores import Interrupted, pointer_of
from tests.builders.boards import TAKEN_BACK
from vllm_qualify.approval.errors import DecidedError, OvertakenError, RevokedError, TamperedError
from vllm_qualify.approval.layout import JSON, approval_key, canonical, entry_key, pointer_key, readable, sha256
from vllm_qualify.approval.pointer import (
    ApprovalState,
    Entry,
    Pointer,
    Revocation,
    advance,
    mark_revoked,
    parse_pointer,
    read_pointer,
    revocation,
    state_of,
)
from vllm_qualify.errors import CallerError, StoreBusyError, StoreError
from vllm_qualify.publish.bundle import StoredObject
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.store import Store


def entry(run_id: str, by: str = "Ada", revoked: Revocation | None = None) -> Entry:
    approval = StoredObject(key=approval_key(CELL, run_id), sha256=sha256(run_id.encode()), size=1000)
    return Entry(run_id=run_id, sequence=1, approval=approval, by=by, at=NOW, expires=EXPIRES, revoked=revoked)


@pytest.mark.parametrize(
    ("entries", "today", "states"),
    [
        ([entry(RUN)], TODAY, ["approved"]),
        ([entry(RUN)], EXPIRES - timedelta(days=1), ["approved"]),
        ([entry(RUN)], EXPIRES, ["expired"]),
        ([entry(OLDER), entry(RUN)], EXPIRES, ["superseded", "expired"]),
        ([entry(OLDER, revoked=TAKEN_BACK), entry(RUN)], TODAY, ["revoked", "approved"]),
        ([entry(OLDER), entry(RUN, revoked=TAKEN_BACK)], EXPIRES, ["superseded", "revoked"]),
    ],
)
def test_states(entries: list[Entry], today: date, states: list[ApprovalState]) -> None:
    pointer = Pointer(cell=CELL, entries=entries)
    assert [state_of(entry, pointer, today) for entry in pointer.entries] == states


def test_it_keeps_the_whole_history(store: Store) -> None:
    assert read_pointer(store, CELL) is None
    for run_id in (OLDER, RUN, NEWER):
        assert advance(store, CELL, entry(run_id)).last == entry(run_id)
    assert pointer_of(store).entries == [entry(OLDER), entry(RUN), entry(NEWER)]
    # The same approval again changes nothing.
    before = store.read(pointer_key(CELL))
    assert advance(store, CELL, entry(OLDER)) == pointer_of(store)
    assert store.read(pointer_key(CELL)) == before


def test_an_older_report_and_another_approval_of_the_same_run_are_refused(store: Store) -> None:
    advance(store, CELL, entry(RUN, by="Bob"))
    before = store.read(pointer_key(CELL))
    with pytest.raises(OvertakenError, match=f"run {OLDER} is older than run {RUN} .* approved by Bob on 2026-03-14"):
        advance(store, CELL, entry(OLDER))
    with pytest.raises(StoreError, match="another approval of this run"):
        advance(store, CELL, entry(RUN, by="Eve"))
    assert store.read(pointer_key(CELL)) == before


def test_a_revoked_approval_does_not_come_back_and_a_newer_one_may_follow(store: Store) -> None:
    advance(store, CELL, entry(OLDER))
    advance(store, CELL, entry(RUN))
    mark_revoked(store, CELL, None, TAKEN_BACK)
    with pytest.raises(RevokedError, match="revoked by Grace on 2026-03-14: it answers in Latin"):
        advance(store, CELL, entry(RUN))
    assert [state_of(one, pointer_of(store), TODAY) for one in pointer_of(store).entries] == ["superseded", "revoked"]
    assert advance(store, CELL, entry(NEWER)).last == entry(NEWER)


def test_an_earlier_approval_can_be_revoked(store: Store) -> None:
    advance(store, CELL, entry(OLDER))
    advance(store, CELL, entry(RUN))
    pointer, taken_back = mark_revoked(store, CELL, OLDER, TAKEN_BACK)
    assert (taken_back.run_id, taken_back.revoked) == (OLDER, TAKEN_BACK)
    assert [state_of(one, pointer, TODAY) for one in pointer.entries] == ["revoked", "approved"]
    assert pointer_of(store) == pointer


def test_a_second_revocation_says_by_whom_the_first_was(store: Store) -> None:
    advance(store, CELL, entry(RUN))
    first = mark_revoked(store, CELL, RUN, TAKEN_BACK)
    with pytest.raises(DecidedError, match=f"run {RUN} was already revoked by Grace on 2026-03-14: it answers in Latin"):
        mark_revoked(store, CELL, None, revocation("Bob", "it is slow", NOW))
    assert mark_revoked(store, CELL, None, TAKEN_BACK.model_copy(update={"at": NOW + timedelta(days=1)})) == first


@pytest.mark.parametrize(("run_id", "message"), [(None, "nothing is approved in"), (NEWER, f"run {NEWER} has no approval")])
def test_what_is_not_approved_cannot_be_revoked(store: Store, run_id: str | None, message: str) -> None:
    if run_id:
        advance(store, CELL, entry(RUN))
    with pytest.raises(CallerError, match=message):
        mark_revoked(store, CELL, run_id, TAKEN_BACK)


@pytest.mark.parametrize("cell", ["", "llama", "a/b/c", "a/b/c/d/e", "../../etc/passwd/x", "A/b/c/d", "a/b/c/d\n"])
def test_what_is_no_cell_is_reported(store: Store, cell: str) -> None:
    with pytest.raises(CallerError, match="CELL: this is not a cell"):
        read_pointer(store, cell)
    with pytest.raises(CallerError, match="CELL: this is not a cell"):
        mark_revoked(store, cell, None, TAKEN_BACK)


def meddled(store: Store, change: Callable[[Store], object]) -> Store:
    """Somebody else changes the pointer before the first swap."""
    return Interrupted(store, lambda: change(store))


def test_the_loser_learns_by_whom(store: Store) -> None:
    with pytest.raises(OvertakenError, match=f"run {NEWER} lost: .* run {RUN} was approved by Bob on 2026-03-14"):
        advance(meddled(store, lambda store: advance(store, CELL, entry(RUN, by="Bob"))), CELL, entry(NEWER))
    assert pointer_of(store).entries == [entry(RUN, by="Bob")]
    assert advance(store, CELL, entry(NEWER)).entries == [entry(RUN, by="Bob"), entry(NEWER)]


def test_a_revocation_of_another_run_is_no_rival(store: Store) -> None:
    advance(store, CELL, entry(RUN))
    pointer = advance(meddled(store, lambda store: mark_revoked(store, CELL, RUN, TAKEN_BACK)), CELL, entry(NEWER))
    assert [state_of(one, pointer, TODAY) for one in pointer.entries] == ["revoked", "approved"]
    assert pointer_of(store) == pointer


def test_a_run_older_than_a_revoked_one_is_marked(store: Store) -> None:
    advance(store, CELL, entry(RUN))
    mark_revoked(store, CELL, RUN, TAKEN_BACK)
    with pytest.raises(OvertakenError, match=f"older than run {RUN} .* revoked by Grace") as raised:
        advance(store, CELL, entry(OLDER))
    assert "rejudge" in raised.value.remedy


def test_a_second_process_with_the_same_approval_is_no_rival(store: Store) -> None:
    both = meddled(store, lambda store: advance(store, CELL, entry(RUN)))
    assert advance(both, CELL, entry(RUN)).entries == [entry(RUN)]


def test_a_history_that_is_gone_is_never_begun_anew(store: Store) -> None:
    advance(store, CELL, entry(RUN))
    # else this alone would tell
    Path(store.locate(entry_key(CELL, RUN))).unlink()
    with pytest.raises(TamperedError, match="went from the pointer"):
        advance(meddled(store, lambda store: Path(store.locate(pointer_key(CELL))).unlink()), CELL, entry(NEWER))


def test_a_revocation_comes_through_and_hits_what_was_meant(store: Store) -> None:
    """Also when the pointer meanwhile moves to what nobody wanted to revoke."""
    advance(store, CELL, entry(OLDER))
    moving = meddled(store, lambda store: advance(store, CELL, entry(RUN)))
    pointer, taken_back = mark_revoked(moving, CELL, None, TAKEN_BACK)
    assert taken_back.run_id == OLDER
    assert [state_of(one, pointer, TODAY) for one in pointer.entries] == ["revoked", "approved"]
    assert parse_pointer(store.get(pointer_key(CELL)), CELL, "here") == pointer == pointer_of(store)


def test_a_pointer_that_never_rests_is_reported(tmp_path: Path) -> None:
    class Restless(DirectoryStore):
        def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
            super().swap(key, body, content_type, f"not {tag}")

    advance(DirectoryStore(tmp_path), CELL, entry(RUN))
    with pytest.raises(StoreBusyError, match="changes all the time"):
        mark_revoked(Restless(tmp_path), CELL, None, TAKEN_BACK)


def test_revocations_and_approvals_at_once_all_count(store: Store) -> None:
    run_ids, start = [f"20260301T00000{number}Z-aaaaaa" for number in range(8)], Barrier(8)
    for run_id in run_ids:
        advance(store, CELL, entry(run_id))

    def revoke(run_id: str) -> None:
        start.wait()
        mark_revoked(store, CELL, run_id, TAKEN_BACK)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(revoke, run_ids))
    assert [one.revoked for one in pointer_of(store).entries] == [TAKEN_BACK] * 8


def document(**changes: object) -> bytes:
    """A pointer that somebody wrote with its SHA-256 right."""
    made = Pointer(cell=CELL, entries=[entry(OLDER), entry(RUN)]).model_dump(mode="json") | changes
    return readable(made | {"sha256": sha256(canonical(made))})


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"\x00", b"{}", b'{"sha256": "1"}', b"[" * 100_000, document() + b" "])
def test_what_is_not_as_it_was_written_is_reported(body: bytes) -> None:
    with pytest.raises(TamperedError, match="here: the pointer is not as it was written"):
        parse_pointer(body, CELL, "here")
    assert parse_pointer(document(), CELL, "here").entries == [entry(OLDER), entry(RUN)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (document(entries=[]), "not a pointer"),
        (document(pointer_version=2), "not a pointer"),
        (document(entries=[entry(run_id).model_dump(mode="json") for run_id in (RUN, OLDER)]), "not in their order"),
        (document(entries=[entry(run_id).model_dump(mode="json") for run_id in (RUN, RUN)]), "not in their order"),
        (document(cell="a/b/c/d"), "not of this cell"),
    ],
)
def test_what_could_not_be_written_is_reported(body: bytes, message: str) -> None:
    with pytest.raises(StoreError, match=f"here: not a pointer.*{message}|{message}"):
        parse_pointer(body, CELL, "here")


def test_the_pointer_of_another_cell_is_reported(store: Store) -> None:
    advance(store, CELL, entry(RUN))
    store.swap(pointer_key("a/b/c/d"), store.get(pointer_key(CELL)), JSON, None)
    with pytest.raises(TamperedError, match="the pointer of another cell"):
        read_pointer(store, "a/b/c/d")
