"""Verification: from the signature to the statement, the decision, the manifest, the report, the evidence and the pointer."""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from vllm_qualify.approval import layout
from vllm_qualify.approval.actions import entry_of
from vllm_qualify.approval.decision import parse_decision
from vllm_qualify.approval.errors import (
    ExpiredError,
    FutureError,
    NotInForceError,
    RevokedError,
    SupersededError,
    TamperedError,
)
from vllm_qualify.approval.layout import JSON, approval_key, decision_key, pointer_key
from vllm_qualify.approval.pointer import Entry, Pointer, pointer_bytes, read_pointer, revocations, state_of
from vllm_qualify.approval.published import PublishedRun, check_published, parse_manifest, stored_object
from vllm_qualify.approval.signing import Opened, PublicKey, open_envelope, short_id
from vllm_qualify.approval.statement import Qualification, read_statement, statement
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.plan.cell import Release
from vllm_qualify.publish.bundle import StoredObject
from vllm_qualify.publish.directory import read_file
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.store import (
    MOST_DOCUMENT_BYTES,
    MOST_EVIDENCE_BYTES,
    MOST_SKEW,
    MissingObjectError,
    Store,
    TooLongError,
)
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.values import Frozen

_OWN_OBJECTS = 4  # decision, approval, manifest and pointer
_MISSING = "it is missing"
_DEPTH = 7  # of approvals/<recipe>/<variant>/<GPU type>/<profile>/<run id>/approval.json


class Verified(Frozen):
    """An approval that holds. `statement` is what was signed.

    If `is_whole` is false, only the approval's file was checked: the evidence and the pointer were not there, so it may have
    been superseded or revoked. An exported folder has the pointer of the time of its export.
    """

    cell: str
    run_id: str
    by: str
    at: datetime
    expires: date
    key_id: str
    is_whole: bool
    objects_checked: int
    statement: dict[str, Any]

    @property
    def server(self) -> ServerPlan:
        return ServerPlan.model_validate(self.statement["predicate"]["qualification"]["server"])

    @property
    def qualified_release(self) -> Release:
        return Release.model_validate(self.statement["predicate"]["qualification"]["cell"]["release"])

    @property
    def summary(self) -> str:
        checked = f"{self.objects_checked} objects checked" if self.is_whole else "evidence and revocation not checked"
        name = f"{self.cell}, run {self.run_id}"
        return f"{name}: approved by {self.by}, until {self.expires}, key {short_id(self.key_id)}; {checked}"


def verify(store: Store, name: str, trusted: Sequence[PublicKey], now: datetime) -> Verified:
    """Check an approval and all objects that it depends on.

    `name` is a cell, for its last approval, or a key like `approvals/<cell>/<run id>/approval.json`.

    Raises:
        CallerError: `name` is neither of the two, or nothing is approved there.
        TamperedError: an object is missing, or is not what was approved.
        OtherKeyError: no trusted key signed it.
        RevokedError, SupersededError, ExpiredError: it no longer holds. NotInForceError: it never held.
        FutureError: it is dated more than MOST_SKEW after `now`.
        StoreError: the store cannot be read, or another version wrote an object.
    """
    cell, run_id = layout.approval_at(name) or (layout.checked_cell(name), last_run(store, name))
    key = approval_key(cell, run_id)
    place = store.locate(key)
    approval = _read_object(store, key)
    opened = open_envelope(approval, trusted, place)
    stated = _read_stated(opened, cell, run_id, place)
    run = _read_whole_run(store, stated)
    body = _read_intact(store, stated.decision.object)
    decided = parse_decision(body, store.locate(stated.decision.object.key))
    try:
        restated = statement(run, decided)
    except (CallerError, ValueError) as error:
        raise _tampered_error("what was signed could not be approved", place) from error
    if restated != opened.payload:
        raise _tampered_error("the report does not say what was signed", place)
    pointer = _require_pointer(store, cell)
    entry = pointer.entry(run_id)
    if entry is None:
        problem = f"run {run_id} was signed, and the pointer of {cell} does not name it"
        raise NotInForceError(problem, "approve it again, which goes on from there", place)
    if entry.model_copy(update={"revoked": None}) != entry_of(run, decided.decision, stored_object(key, approval)):
        raise _tampered_error("the pointer does not say what was signed", store.locate(pointer_key(cell)))
    _check_date(stated, now, place)
    _check_state(entry, pointer, now, place)
    return _make_verified(opened, stated, is_whole=True, objects=len(run.manifest.objects) + _OWN_OBJECTS)


def check_signed(store: Store, cell: str, run_id: str, trusted: Sequence[PublicKey]) -> None:
    """Check that a trusted key signed the approval of a run, and that manifest and report are what was signed.

    It may have expired, and another may be in force. Raises TamperedError, OtherKeyError, StoreError.
    """
    key = approval_key(cell, run_id)
    opened = open_envelope(_read_object(store, key), trusted, store.locate(key))
    stated = _read_stated(opened, cell, run_id, store.locate(key))
    for named in (stated.manifest, stated.report):
        _read_intact(store, named)


def verify_file(path: Path, trusted: Sequence[PublicKey], now: datetime) -> Verified:
    """Check the file of an approval; in a store or an exported folder, also all objects that it depends on.

    Raises CallerError if there is no such file, else NotApprovedError as `verify`.
    """
    path = path.expanduser().resolve()
    if _is_in_store(path):
        return verify(store_of_file(path), _key_of(path), trusted, now)
    try:
        body = read_file(path)
    except OSError as error:
        raise CallerError(f"the approval cannot be read: {error.strerror}", "give its file or its cell", str(path)) from error
    opened = open_envelope(body, trusted, str(path))
    stated = read_statement(opened.payload, str(path))
    _check_date(stated, now, str(path))
    if now.astimezone(UTC).date() >= stated.expires:
        raise _expired_error(stated.run_id, stated.expires, str(path))
    return _make_verified(opened, stated, is_whole=False, objects=0)


def store_of_file(path: Path) -> Store:
    """The store or exported folder that an approval's file is in. Raises CallerError if it is in neither."""
    path = path.expanduser().resolve()
    if not _is_in_store(path):
        raise CallerError("there is no evidence beside it", "name an approval in a store or an exported folder", str(path))
    return open_store(path.parents[_DEPTH - 1].as_uri())


def _is_in_store(path: Path) -> bool:
    return layout.approval_at(_key_of(path)) is not None and path.is_file()


def _key_of(path: Path) -> str:
    return "/".join(path.parts[-_DEPTH:])


def export(store: Store, cell: str, folder: Path, run_id: str | None = None) -> StoredObject:
    """Copy an approval, by default the cell's last one, into a new folder that is itself a store.

    All objects that `verify` reads are copied, and the cell's revocations. The pointer is written last: an export without it
    is incomplete. Nothing is verified. Raises CallerError if there is no such approval or the folder is not empty, HostError if
    the folder cannot be read, and TamperedError, StoreError if an object is missing or not as it was written.
    """
    run_id = run_id or last_run(store, layout.checked_cell(cell))
    pointer = _require_pointer(store, cell)
    entry = pointer.entry(run_id)
    if entry is None:
        raise CallerError(f"run {run_id} has no approval in force in {cell}", "see `vllm-qualify approved list`", "RUN")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise CallerError("the folder is not empty", "name a new one", str(folder))
    except OSError as error:
        raise HostError(f"the folder cannot be read: {error.strerror}", "name a new one", str(folder)) from error
    target, key = open_store(folder.absolute().as_uri()), manifest_key(cell, run_id)
    manifest_body = _read_object(store, key)
    for named in [*parse_manifest(manifest_body, store.locate(key)).objects, entry.approval]:
        target.put_new(named.key, _read_intact(store, named), "")
    target.put_new(key, manifest_body, JSON)
    for key in [decision_key(cell, run_id), *revocations(store, cell)]:
        target.put_new(key, _read_object(store, key), JSON)
    target.put_new(pointer_key(cell), pointer_bytes(pointer), JSON)
    return entry.approval


def last_run(store: Store, cell: str) -> str:
    """The run of a cell's last approval, whatever its state is. Raises CallerError if nothing is approved."""
    pointer = read_pointer(store, cell)
    if pointer:
        return pointer.last.run_id
    if any(True for _ in store.keys(f"approvals/{cell}/")):
        raise _tampered_error(_MISSING, store.locate(pointer_key(cell)))
    raise CallerError(f"nothing is approved in {cell}", "see `vllm-qualify approved list`", "CELL")


def _read_stated(opened: Opened, cell: str, run_id: str, place: str) -> Qualification:
    stated = read_statement(opened.payload, place)
    keys = (stated.manifest.key, stated.decision.object.key)
    if (stated.cell_id, stated.run_id, *keys) != (cell, run_id, manifest_key(cell, run_id), decision_key(cell, run_id)):
        raise _tampered_error("this is the approval of another run", place)
    return stated


def _read_whole_run(store: Store, stated: Qualification) -> PublishedRun:
    """The run, after a check of every object of its manifest."""
    place = store.locate(stated.manifest.key)
    manifest = parse_manifest(_read_intact(store, stated.manifest), place)
    report = b""
    for named in manifest.objects:
        body = _read_intact(store, named)
        report = body if named.key == stated.report.key else report
    return check_published(stated.manifest, manifest, report, store.locate(stated.report.key))


def _read_intact(store: Store, named: StoredObject) -> bytes:
    body = _read_object(store, named.key, named.size)
    if stored_object(named.key, body) != named:
        raise _tampered_error("it is not what was approved", store.locate(named.key))
    return body


def _read_object(store: Store, key: str, most_bytes: int = MOST_DOCUMENT_BYTES) -> bytes:
    try:
        return store.get(key, min(most_bytes, MOST_EVIDENCE_BYTES))
    except MissingObjectError as error:
        raise _tampered_error(_MISSING, store.locate(key)) from error
    except TooLongError as error:
        raise _tampered_error("it is longer than it should be", store.locate(key)) from error


def _require_pointer(store: Store, cell: str) -> Pointer:
    pointer = read_pointer(store, cell)
    if pointer is None:
        raise _tampered_error(_MISSING, store.locate(pointer_key(cell)))
    return pointer


def _check_date(stated: Qualification, now: datetime, place: str) -> None:
    if (at := stated.decision.at) > now + MOST_SKEW:
        problem = f"it is dated {at:%Y-%m-%d %H:%M:%S} UTC, {round((at - now).total_seconds())} s from now"
        remedy = "compare this machine's clock with others; if it is right, the signer's clock was wrong: revoke the approval"
        raise FutureError(problem, f"{remedy}, and qualify the cell again or judge the run again", place)


def _check_state(entry: Entry, pointer: Pointer, now: datetime, place: str) -> None:
    last, state = pointer.last, state_of(entry, pointer, now.astimezone(UTC).date())
    if entry.revoked:
        raise RevokedError(f"run {entry.run_id} was {entry.revoked.summary}", "qualify the cell again", place)
    if state == "superseded":
        remedy = f"use the last one, of run {last.run_id}, or qualify the cell again"
        raise SupersededError(f"run {entry.run_id} was superseded by run {last.run_id}, {last.summary}", remedy, place)
    if state == "expired":
        raise _expired_error(entry.run_id, entry.expires, place)


def _expired_error(run_id: str, expires: date, place: str) -> ExpiredError:
    return ExpiredError(f"the approval of run {run_id} expired on {expires}", "qualify the cell again", place)


def _tampered_error(problem: str, place: str) -> TamperedError:
    return TamperedError(problem, "do not deploy it; find out who changed the store", place)


def _make_verified(opened: Opened, stated: Qualification, *, is_whole: bool, objects: int) -> Verified:
    return Verified(
        cell=stated.cell_id,
        run_id=stated.run_id,
        by=stated.decision.by,
        at=stated.decision.at,
        expires=stated.expires,
        key_id=opened.key_id,
        is_whole=is_whole,
        objects_checked=objects,
        statement=layout.parse_object(opened.payload),
    )
