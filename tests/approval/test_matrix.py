"""All cells with their approvals, read from the pointers."""

import threading

import pytest

from tests.approval.builder import CELL, RUN, TODAY, approved
from tests.approval.stores import pointer_of
from tests.builders.changed import changed
from tests.builders.wrapped_stores import Wrapped
from vllm_qualify.approval import matrix as module
from vllm_qualify.approval.layout import JSON, pointer_key
from vllm_qualify.approval.matrix import matrix
from vllm_qualify.approval.pointer import pointer_bytes
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.approval.signing import PrivateKey
from vllm_qualify.errors import StoreBusyError
from vllm_qualify.publish.store import Store


def add(store: Store, cell: str) -> None:
    """A pointer of another cell, with the approval of the first."""
    first = pointer_of(store)
    entries = [changed(entry, "approval", key=entry.approval.key.replace(CELL, cell)) for entry in first.entries]
    store.put_new(pointer_key(cell), pointer_bytes(changed(first, cell=cell, entries=entries)), JSON)


def test_every_cell_is_there_in_order(store: Store, run: PublishedRun, key: PrivateKey) -> None:
    approved(store, run, key)
    others = [f"model-{number}/bf16/h200/chat" for number in range(40)]
    for cell in others:
        add(store, cell)
    states = matrix(store, TODAY)
    assert [state.cell for state in states] == sorted([CELL, *others])
    assert {(state.state, state.last.run_id) for state in states} == {("approved", RUN)}


def test_a_store_that_takes_too_long_is_reported(
    store: Store, run: PublishedRun, key: PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    approved(store, run, key)
    never = threading.Event()
    slow = Wrapped(store)
    slow.read = lambda key: (never.wait(), store.read(key))[1]
    monkeypatch.setattr(module, "LIMIT_S", 0.05)
    try:
        with pytest.raises(StoreBusyError, match=r"its pointers were not read: no answer within 0\.05 s"):
            matrix(slow, TODAY)
    finally:
        never.set()
