"""Whoever may write the store writes an old version of a pointer back, to bring a revoked or superseded approval in force."""

from datetime import timedelta
from pathlib import Path

import pytest

from tests.approval.builder import CELL, NEWER, NOW, RUN, TODAY, approved, publish_report
from tests.approval.conftest import key
from tests.builders.approval_commands import WHO, Command
from tests.builders.approval_commands import command as command
from tests.builders.approval_commands import store as cli_store
from vllm_qualify.approval.actions import revoke
from vllm_qualify.approval.covering import find_covering
from vllm_qualify.approval.errors import DecidedError, RevokedError, TamperedError
from vllm_qualify.approval.index import make_again, write_index
from vllm_qualify.approval.layout import JSON, approval_key, entry_key, pointer_key, revocation_key
from vllm_qualify.approval.matrix import matrix
from vllm_qualify.approval.pointer import read_pointer, revocation
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.approval.verify import export, verify
from vllm_qualify.errors import AlreadyExistsError, StoreBusyError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store

__all__ = ["key"]
in_store = cli_store
TAKEN_BACK = revocation("Grace", "it answers in Latin", NOW)
POINTER = pointer_key(CELL)


@pytest.fixture
def store(tmp_path: Path, key: PrivateKey) -> Store:
    """A store with an approved run."""
    store = open_store((tmp_path / "store").as_uri())
    approved(store, publish_report(store, tmp_path / "runs"), key)
    return store


@pytest.fixture
def run(store: Store) -> PublishedRun:
    return read_run(store, CELL, RUN)


def write_back(store: Store, body: bytes) -> None:
    """As an attacker does, or an administrator who restores an earlier version."""
    store.swap(POINTER, body, JSON, store.read(POINTER).tag)


# --- a revoked one


@pytest.fixture
def revoked(store: Store) -> Store:
    before = store.get(POINTER)
    revoke(store, CELL, None, TAKEN_BACK)
    write_back(store, before)
    return store


def test_a_revoked_approval_stays_revoked(revoked: Store, run: PublishedRun, tmp_path: Path, key: PrivateKey) -> None:
    """It is not approved again, and its revocation goes with an exported approval, and is written once."""
    with pytest.raises(RevokedError, match="revoked by Grace on 2026-03-14: it answers in Latin"):
        verify(revoked, CELL, [key.public_key], NOW)
    assert [cell.state for cell in matrix(revoked, TODAY)] == ["revoked"]
    assert find_covering(revoked, run.report.plan, TODAY, 1) == "the last approval is revoked"
    row = make_again(revoked, CELL)
    assert (row.reports[0].standing, row.last and row.last.revoked) == ("revoked", TAKEN_BACK)
    write_index(revoked)
    assert "revoked" in revoked.get("index.html").decode()
    with pytest.raises(RevokedError, match="revoked by Grace"):
        approved(revoked, run, key)
    export(revoked, CELL, tmp_path / "bundle")
    with pytest.raises(RevokedError, match="it answers in Latin"):
        verify(DirectoryStore(tmp_path / "bundle"), CELL, [key.public_key], NOW)
    with pytest.raises(AlreadyExistsError):
        revoked.put_new(revocation_key(CELL, RUN), b"{}", JSON)


def test_the_next_approval_writes_the_revocation_into_the_pointer(revoked: Store, tmp_path: Path, key: PrivateKey) -> None:
    approved(revoked, publish_report(revoked, tmp_path / "runs", NEWER), key)
    assert b"it answers in Latin" in revoked.get(POINTER)
    with pytest.raises(RevokedError):
        verify(revoked, approval_key(CELL, RUN), [key.public_key], NOW)


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b"\xff"])
def test_a_revocation_that_cannot_be_read_brings_nothing_back(store: Store, key: PrivateKey, body: bytes) -> None:
    store.put_new(revocation_key(CELL, RUN), body, JSON)
    with pytest.raises(TamperedError, match=r"revocation\.json: this is not the revocation"):
        verify(store, CELL, [key.public_key], NOW)


def test_a_revocation_of_another_run_is_reported(store: Store, tmp_path: Path, key: PrivateKey) -> None:
    approved(store, publish_report(store, tmp_path / "runs", NEWER), key)
    revoke(store, CELL, RUN, TAKEN_BACK)
    store.put_new(revocation_key(CELL, NEWER), store.get(revocation_key(CELL, RUN)), JSON)
    with pytest.raises(TamperedError, match=r"revocation\.json: this is not the revocation"):
        verify(store, CELL, [key.public_key], NOW)


# --- a superseded one


def test_a_superseded_approval_does_not_come_back(store: Store, tmp_path: Path, key: PrivateKey) -> None:
    before = store.get(POINTER)
    newer = publish_report(store, tmp_path / "runs", NEWER)
    approved(store, newer, key)
    write_back(store, before)
    for asked in (CELL, approval_key(CELL, RUN), approval_key(CELL, NEWER)):
        with pytest.raises(TamperedError, match=rf"pointer\.json: it lacks run {NEWER}, which was in force") as raised:
            verify(store, asked, [key.public_key], NOW)
        assert raised.value.exit_code == 10
    with pytest.raises(TamperedError):
        matrix(store, TODAY)
    with pytest.raises(TamperedError):
        find_covering(store, newer.report.plan, TODAY, 1)
    with pytest.raises(TamperedError):
        make_again(store, CELL)
    with pytest.raises(TamperedError):
        export(store, CELL, tmp_path / "bundle")


def test_a_pointer_that_was_deleted_is_not_begun_anew(store: Store, tmp_path: Path, key: PrivateKey) -> None:
    Path(store.locate(POINTER)).unlink()
    with pytest.raises(TamperedError, match=f"it lacks run {RUN}"):
        approved(store, publish_report(store, tmp_path / "runs", NEWER), key)


# --- a process that dies


class Dying(DirectoryStore):
    """Dies before it writes a key."""

    def __init__(self, root: Path, dies_at: str) -> None:
        super().__init__(root)
        self._dies_at = dies_at

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        self._live(key)
        super().put_new(key, body, content_type)

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        self._live(key)
        super().swap(key, body, content_type, tag)

    def _live(self, key: str) -> None:
        if key == self._dies_at:
            raise StoreBusyError("no answer", "try again later", key)


def revoke_broken_off(folder: Path) -> None:
    with pytest.raises(StoreBusyError):
        revoke(Dying(folder, POINTER), CELL, None, TAKEN_BACK)


def test_a_revocation_that_broke_off_holds_and_a_second_one_completes_it(store: Store, tmp_path: Path, key: PrivateKey) -> None:
    revoke_broken_off(tmp_path / "store")
    with pytest.raises(RevokedError):
        verify(store, CELL, [key.public_key], NOW)
    assert b"Latin" not in store.get(POINTER)
    later = TAKEN_BACK.model_copy(update={"at": NOW + timedelta(days=1)})
    assert revoke(store, CELL, None, later).entry.revoked == TAKEN_BACK
    assert b"Latin" in store.get(POINTER)


def test_another_persons_revocation_completes_it_and_is_shown_who_was_first(store: Store, tmp_path: Path) -> None:
    revoke_broken_off(tmp_path / "store")
    with pytest.raises(DecidedError, match="already revoked by Grace"):
        revoke(store, CELL, None, revocation("Bob", "it is slow", NOW))
    assert b"Latin" in store.get(POINTER)


def test_an_approval_that_broke_off_in_force_is_completed(store: Store, tmp_path: Path, key: PrivateKey) -> None:
    newer = publish_report(store, tmp_path / "runs", NEWER)
    with pytest.raises(StoreBusyError):
        approved(Dying(tmp_path / "store", entry_key(CELL, NEWER)), newer, key)
    assert verify(store, CELL, [key.public_key], NOW).run_id == NEWER
    approved(store, newer, key)
    assert store.exists(entry_key(CELL, NEWER))


# --- what is not there


def test_an_approval_that_lost_its_race_says_nothing_about_the_pointer(store: Store, tmp_path: Path, key: PrivateKey) -> None:
    """It was signed, and never in force."""
    publish_report(store, tmp_path / "runs", NEWER)
    store.put_new(approval_key(CELL, NEWER), store.get(approval_key(CELL, RUN)), JSON)
    assert verify(store, CELL, [key.public_key], NOW).run_id == RUN


def test_what_only_the_pointer_says_is_revoked_gets_its_object_by_a_second_revocation(store: Store) -> None:
    """Somebody removed it."""
    revoke(store, CELL, None, TAKEN_BACK)
    Path(store.locate(revocation_key(CELL, RUN))).unlink()
    pointer = read_pointer(store, CELL)
    assert pointer is not None
    assert pointer.last.revoked == TAKEN_BACK
    revoke(store, CELL, None, TAKEN_BACK)
    assert store.exists(revocation_key(CELL, RUN))


# --- on the command line


@pytest.mark.usefixtures("believed")
def test_the_command_gives_what_was_revoked_to_nobody(in_store: Store, command: Command) -> None:
    assert command("approve", RUN, *WHO)[0] == 0
    before = in_store.get(POINTER)
    assert command("revoke", CELL, "--by", "Eve", "--reason", "it crashes")[0] == 0
    write_back(in_store, before)
    for asked in (("verify", CELL), ("approved", "get", CELL)):
        code, _, err = command(*asked)
        assert (code, f"run {RUN} was revoked by Eve" in err) == (14, True)
    assert " revoked " in command("approved", "list")[1]
