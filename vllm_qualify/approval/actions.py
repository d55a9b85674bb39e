"""What a release manager or a recipe can do: approve, reject, revoke. A repeated step changes nothing."""

from datetime import datetime

from vllm_qualify.approval.decision import Decision, Ruling, StoredDecision, make_decision
from vllm_qualify.approval.errors import TamperedError
from vllm_qualify.approval.index import index_problem
from vllm_qualify.approval.layout import JSON, approval_key
from vllm_qualify.approval.pointer import Entry, Pointer, Revocation, advance, check_can_advance, last_approved, mark_revoked
from vllm_qualify.approval.published import PublishedRun, stored_object
from vllm_qualify.approval.signing import PrivateKey, open_envelope, sign
from vllm_qualify.approval.statement import statement
from vllm_qualify.errors import AlreadyExistsError, StoreError
from vllm_qualify.publish.bundle import StoredObject
from vllm_qualify.publish.door import check_open
from vllm_qualify.publish.layout import manifest_key
from vllm_qualify.publish.order import check_given
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.values import Frozen


class Approved(Frozen):
    decision: Decision
    approval: StoredObject
    pointer: Pointer
    index_problem: str | None = None


class Rejected(Frozen):
    decision: Decision
    index_problem: str | None = None


class Revoked(Frozen):
    entry: Entry
    pointer: Pointer
    index_problem: str | None = None


def approve(store: Store, run: PublishedRun, wanted: Ruling, valid_days: int, signer: PrivateKey, now: datetime) -> Approved:
    """Decide, sign, move the cell's pointer, and bring the index up to date.

    A second call uses the decision of the first one and continues where it stopped.

    Raises:
        CallerError: the run did not pass. DecidedError: there is another decision about it.
        OvertakenError: a newer report is approved, or another writer moved the pointer meanwhile.
        RevokedError: this approval was revoked. OtherKeyError: the run has an approval that another key signed.
        StoreBusyError: the store is being pruned. TamperedError, StoreError: its content cannot be trusted or read.
    """
    if wanted.verdict != "approve":
        raise ValueError("a rejection approves nothing")
    done = bring_into_force(store, run, wanted, valid_days, signer, now)
    return done.model_copy(update={"index_problem": index_problem(store, run.cell)})


def bring_into_force(
    store: Store, run: PublishedRun, wanted: Ruling, valid_days: int, signer: PrivateKey, now: datetime
) -> Approved:
    """What `approve` does, without the index."""
    check_given(store, run, run.cell, last_approved(store, run.cell))
    check_can_advance(store, run.cell, run)
    stored = make_decision(store, run, wanted, valid_days, now)
    # After the decision: `prune` closes the door before it looks for decisions, so it sees this one or is seen here.
    check_open(store)
    if not store.exists(key := manifest_key(run.cell, run.run_id)):
        raise StoreError("the run was pruned before it was decided", "qualify the cell again", store.locate(key))
    approval = _put_approval(store, run, stored, signer)
    pointer = advance(store, run.cell, entry_of(run, stored.decision, approval))
    return Approved(decision=stored.decision, approval=approval, pointer=pointer)


def reject(store: Store, run: PublishedRun, wanted: Ruling, now: datetime) -> Rejected:
    """Decide that the run must not be deployed, whatever its verdict is. Raises DecidedError, StoreError."""
    if wanted.verdict != "reject":
        raise ValueError("an approval rejects nothing")
    decision = make_decision(store, run, wanted, 0, now).decision
    return Rejected(decision=decision, index_problem=index_problem(store, run.cell))


def revoke(store: Store, cell: str, run_id: str | None, by: Revocation) -> Revoked:
    """Revoke an approval; if `run_id` is None, the cell's last one. It takes effect when the pointer says so.

    Raises CallerError if there is no such approval, DecidedError if it was revoked already, and StoreError.
    """
    pointer, entry = mark_revoked(store, cell, run_id, by)
    return Revoked(entry=entry, pointer=pointer, index_problem=index_problem(store, cell))


def entry_of(run: PublishedRun, decision: Decision, approval: StoredObject) -> Entry:
    """The pointer's entry for an approval of a run. Raises ValueError if the decision is a rejection."""
    if decision.expires is None:
        raise ValueError("a rejection is in no pointer")
    decided = decision.model_dump(include={"by", "at", "expires"})
    return Entry(run_id=run.run_id, sequence=run.sequence, approval=approval, **decided)


def _put_approval(store: Store, run: PublishedRun, stored: StoredDecision, signer: PrivateKey) -> StoredObject:
    key, payload = approval_key(run.cell, run.run_id), statement(run, stored)
    body = sign(payload, signer)
    try:
        store.put_new(key, body, JSON)
    except AlreadyExistsError:
        # Raises OtherKeyError if another key signed it.
        if open_envelope(store.get(key), [signer.public_key], store.locate(key)).payload != payload:
            problem = "the approval that is there states something else"
            raise TamperedError(problem, "do not trust this run", store.locate(key)) from None
    return stored_object(key, body)
