"""The pointer of a cell: all its approvals, the newest last. It decides which approval holds.

A pointer is changed, so an old version of it can be written back. Two objects that are written once tell that. Each run that
came into force has `entry.json`, so a pointer without that run was turned back. Each revoked run has `revocation.json`, and is
revoked whatever the pointer says.
"""

from collections.abc import Collection
from contextlib import suppress
from datetime import date, datetime
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from vllm_qualify.approval import layout
from vllm_qualify.approval.errors import DecidedError, OvertakenError, RevokedError, TamperedError
from vllm_qualify.approval.layout import JSON, Line, Moment, approvals_folder, pointer_key, readable, revocation_key
from vllm_qualify.errors import AlreadyExistsError, CallerError, StoreError
from vllm_qualify.publish.bundle import StoredObject
from vllm_qualify.publish.order import Ordered, is_newer, order
from vllm_qualify.publish.store import MissingObjectError, Store, retry_swap
from vllm_qualify.recipe.values import Count, Frozen

ApprovalState = Literal["approved", "expired", "superseded", "revoked"]
_RESTORE = "find out who changed the store, and restore the newest version of the pointer"


class Revocation(Frozen):
    by: Line
    at: Moment
    reason: Line

    @property
    def summary(self) -> str:
        return f"revoked by {self.by} on {layout.day(self.at)}: {self.reason}"


def revocation(by: str, reason: str, now: datetime) -> Revocation:
    """The revocation by a person. Raises CallerError if the name or the reason is missing or cannot be shown."""
    with layout.in_plain_words():
        return Revocation(by=layout.one_line(by), at=now, reason=layout.one_line(reason))


class Entry(Frozen):
    """One approval. `sequence` is that of its run's manifest. `expires` is the first UTC day on which it no longer holds."""

    run_id: str
    sequence: Count
    approval: StoredObject
    by: Line
    at: Moment
    expires: date
    revoked: Revocation | None = None

    @property
    def summary(self) -> str:
        return f"approved by {self.by} on {layout.day(self.at)}"


class Pointer(Frozen):
    pointer_version: Literal[1] = 1
    cell: str
    entries: Annotated[list[Entry], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_of_its_cell(self) -> Self:
        runs = [order(entry) for entry in self.entries]
        if runs != sorted(runs) or len({entry.run_id for entry in self.entries}) < len(runs):
            raise ValueError("the runs are not in their order")
        if any(entry.approval.key != layout.approval_key(self.cell, entry.run_id) for entry in self.entries):
            raise ValueError("an approval is not of this cell")
        return self

    @property
    def last(self) -> Entry:
        return self.entries[-1]

    def entry(self, run_id: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.run_id == run_id), None)


def state_of(entry: Entry, pointer: Pointer, today: date) -> ApprovalState:
    if entry.revoked:
        return "revoked"
    if entry.run_id != pointer.last.run_id:
        return "superseded"
    return "expired" if today >= entry.expires else "approved"


class RevocationObject(Revocation):
    """`revocation.json`: the revocation of one run's approval, written once."""

    revocation_version: Literal[1] = 1
    cell: str
    run_id: str


def read_pointer(store: Store, cell: str, listed: Collection[str] | None = None) -> Pointer | None:
    """The cell's pointer, with every revocation; None before its first approval.

    `listed` are the keys of the cell's approvals, if they were listed already. Raises CallerError if `cell` is not a cell's id,
    and TamperedError if the pointer or a revocation is not as it was written, or an old pointer was written back.
    """
    current = _read_current(store, layout.checked_cell(cell), listed)
    return current.pointer if current else None


def last_approved(store: Store, cell: str) -> int:
    """The number of the cell's last approved run, 0 before the first approval. Raises as `read_pointer`."""
    pointer = read_pointer(store, cell)
    return pointer.last.sequence if pointer else 0


def parse_pointer(body: bytes, cell: str, place: str) -> Pointer:
    """Raises TamperedError if it is not as it was written, StoreError if it is of another version."""
    try:
        document = layout.parse_object(body)
        stated = document.pop("sha256", None)
        text = layout.canonical(document)
        if stated != layout.sha256(text) or readable(document | {"sha256": stated}) != body:
            raise ValueError("it is not what its hash says")
    except ValueError as error:
        remedy = "restore it from an earlier version of the object"
        raise TamperedError("the pointer is not as it was written", remedy, place) from error
    try:
        pointer = Pointer.model_validate_json(text)
    except ValidationError as error:
        problem = f"not a pointer: {layout.reason_of(error)}"
        raise StoreError(problem, "read it with the version that wrote it", place) from error
    if pointer.cell != cell:
        raise TamperedError("this is the pointer of another cell", "restore it from an earlier version", place)
    return pointer


def pointer_bytes(pointer: Pointer) -> bytes:
    document = pointer.model_dump(mode="json")
    return readable(document | {"sha256": layout.sha256(layout.canonical(document))})


def advance(store: Store, cell: str, entry: Entry) -> Pointer:
    """Append the approval to the cell's pointer, unless the pointer has it already. Then write that it came into force.

    Raises OvertakenError if a newer report is approved or another approval moved the pointer meanwhile, RevokedError if this
    approval was revoked, and TamperedError if the pointer is not as it was written or an old one was written back.
    """
    key, seen = pointer_key(cell), list[list[str]]()

    def attempt() -> Pointer:
        current = _read_current(store, cell)
        before = current.pointer.entries if current else []
        if _is_in(before, entry):
            return Pointer(cell=cell, entries=before)
        if seen:
            # A revocation in the meantime does not matter for this approval; another approval does.
            _check_not_overtaken(seen[-1], before, entry, store.locate(key))
        seen.append([other.run_id for other in before])
        _check_newer(before, entry, cell)
        moved = Pointer(cell=cell, entries=[*before, entry])
        store.swap(key, pointer_bytes(moved), JSON, current.tag if current else None)
        return moved

    moved = retry_swap(attempt, "the pointer", "approve it again", store.locate(key))
    # Not before the pointer: an approval that loses a race never comes into force.
    _put_once(store, layout.entry_key(cell, entry.run_id), entry)
    return moved


def check_can_advance(store: Store, cell: str, run: Ordered) -> None:
    """Raises OvertakenError if the cell's pointer does not have this run and is at a newer report."""
    pointer = read_pointer(store, cell)
    if pointer and not pointer.entry(run.run_id):
        _check_newer(pointer.entries, run, cell)


def mark_revoked(store: Store, cell: str, run_id: str | None, by: Revocation) -> tuple[Pointer, Entry]:
    """Revoke an approval; if `run_id` is None, the last one. Return the pointer and the revoked entry.

    The revocation holds from its own object on. If the pointer could not be written after it, a second call does that. If the
    same person revokes it again for the same reason, nothing else changes. Raises CallerError if there is no such approval,
    DecidedError if another person or for another reason revoked it, and StoreBusyError if the pointer changes all the time.
    """
    current = _read_current(store, layout.checked_cell(cell))
    entry = current and (current.pointer.last if run_id is None else current.pointer.entry(run_id))
    if not entry:
        which = f"run {run_id} has no approval in force" if run_id else "nothing is approved"
        raise CallerError(f"{which} in {cell}", "see `vllm-qualify approved list`", "CELL")
    revoked = entry.revoked or by
    named = RevocationObject(cell=cell, run_id=entry.run_id, by=revoked.by, at=revoked.at, reason=revoked.reason)
    _put_once(store, revocation_key(cell, entry.run_id), named)
    first = _read_revocation(store, cell, entry.run_id)
    pointer = _write_revocations(store, cell, entry.run_id)
    if (first.by, first.reason) != (by.by, by.reason):
        raise DecidedError(f"run {entry.run_id} was already {first.summary}", "nothing is left to be done", "CELL")
    return pointer, entry.model_copy(update={"revoked": first})


def revocations(store: Store, cell: str) -> list[str]:
    return [key for key in store.keys(approvals_folder(cell)) if key.endswith("/revocation.json")]


class _Current(NamedTuple):
    """The pointer as it holds. `written` is what its object says, without the revocations that it lacks."""

    pointer: Pointer
    written: Pointer
    tag: str


def _read_current(store: Store, cell: str, listed: Collection[str] | None = None) -> _Current | None:
    key = pointer_key(cell)
    # Listed before the pointer is read: what is listed was in the pointer by then.
    listed = set(store.keys(approvals_folder(cell))) if listed is None else listed
    try:
        stored = store.read(key)
    except MissingObjectError:
        _check_not_turned_back(listed, cell, [], store.locate(key))
        return None
    written = parse_pointer(stored.body, cell, store.locate(key))
    _check_not_turned_back(listed, cell, written.entries, store.locate(key))
    entries = [
        entry.model_copy(update={"revoked": _read_revocation(store, cell, entry.run_id)})
        if revocation_key(cell, entry.run_id) in listed and not entry.revoked
        else entry
        for entry in written.entries
    ]
    return _Current(Pointer(cell=cell, entries=entries), written, stored.tag)


def _check_not_turned_back(listed: Collection[str], cell: str, entries: list[Entry], place: str) -> None:
    own = {key.removeprefix(f"approvals/{cell}/") for key in listed}
    in_force = {key.removesuffix("/entry.json") for key in own if key.count("/") == 1 and key.endswith("/entry.json")}
    if gone := in_force - {entry.run_id for entry in entries}:
        raise TamperedError(f"it lacks run {max(gone)}, which was in force", _RESTORE, place)


def _read_revocation(store: Store, cell: str, run_id: str) -> Revocation:
    key = revocation_key(cell, run_id)
    body = store.get(key)
    try:
        stored = RevocationObject.model_validate_json(body)
        if (stored.cell, stored.run_id) != (cell, run_id):
            raise ValueError("it is of another run")
    except ValueError as error:
        remedy = "do not deploy it; find out who wrote it"
        raise TamperedError("this is not the revocation of this run", remedy, store.locate(key)) from error
    return Revocation(by=stored.by, at=stored.at, reason=stored.reason)


def _put_once(store: Store, key: str, document: Frozen) -> None:
    with suppress(AlreadyExistsError):
        store.put_new(key, readable(document.model_dump(mode="json")), JSON)


def _write_revocations(store: Store, cell: str, run_id: str) -> Pointer:
    """Write into the pointer the revocations that it lacks. That of `run_id` is there, also if a list does not show it yet."""
    key = pointer_key(cell)

    def attempt() -> Pointer:
        current = _read_current(store, cell, {*store.keys(approvals_folder(cell)), revocation_key(cell, run_id)})
        if current is None:
            raise TamperedError("the pointer went meanwhile", _RESTORE, store.locate(key))
        if current.pointer != current.written:
            store.swap(key, pointer_bytes(current.pointer), JSON, current.tag)
        return current.pointer

    return retry_swap(attempt, "the pointer", "revoke it again", store.locate(key))


def _is_in(entries: list[Entry], entry: Entry) -> bool:
    known = next((known for known in entries if known.run_id == entry.run_id), None)
    if known and known.revoked:
        raise RevokedError(f"run {entry.run_id} was {known.revoked.summary}", "qualify the cell again", "REPORT")
    if known and known != entry:
        raise StoreError("the pointer has another approval of this run", "look who changed it", "REPORT")
    return known is not None


def _check_newer(entries: list[Entry], run: Ordered, cell: str) -> None:
    if entries and is_newer(entries[-1], run):
        last = entries[-1]
        if last.revoked:
            done, remedy = last.revoked.summary, "qualify the cell again, or judge the run again: vllm-qualify rejudge RUN"
        else:
            done, remedy = last.summary, "keep that one, or qualify the cell again"
        raise OvertakenError(f"run {run.run_id} is older than run {last.run_id} of {cell}, which was {done}", remedy, "REPORT")


def _check_not_overtaken(seen: list[str], now: list[Entry], entry: Entry, place: str) -> None:
    """Raises OvertakenError if a run was approved that is not in `seen`, TamperedError if a `seen` one is gone."""
    others = [other for other in now if other.run_id not in seen]
    if len(now) - len(others) < len(seen):
        raise TamperedError("approvals went from the pointer", "restore it from an earlier version of the object", place)
    if others:
        problem = f"run {entry.run_id} lost: the pointer was moved meanwhile, run {others[-1].run_id} was {others[-1].summary}"
        raise OvertakenError(problem, "look at it, and approve again if this report is to take its place", place)
