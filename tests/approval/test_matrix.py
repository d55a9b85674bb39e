"""All cells with their approvals, read from the pointers."""

import threading
from pathlib import Path

import pytest

from tests.approval.builder import CELL, RUN, TODAY, approved, made_key, publish_report
from tests.builders.wrapped_stores import Wrapped
from vllm_qualify.approval import matrix as module
from vllm_qualify.approval.layout import JSON, pointer_key
from vllm_qualify.approval.matrix import matrix
from vllm_qualify.approval.pointer import pointer_bytes, read_pointer
from vllm_qualify.errors import StoreBusyError
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = open_store((tmp_path / "store").as_uri())
    approved(opened, publish_report(opened, tmp_path / "runs"), made_key(tmp_path / "key.pem"))
    return opened


def add(store: Store, cell: str) -> None:
    """A pointer of another cell, with the approval of the first."""
    first = read_pointer(store, CELL)
    assert first
    entries = [
        entry.model_copy(update={"approval": entry.approval.model_copy(update={"key": entry.approval.key.replace(CELL, cell)})})
        for entry in first.entries
    ]
    store.put_new(pointer_key(cell), pointer_bytes(first.model_copy(update={"cell": cell, "entries": entries})), JSON)


def test_every_cell_is_there_in_order(store: Store) -> None:
    others = [f"model-{number}/bf16/h200/chat" for number in range(40)]
    for cell in others:
        add(store, cell)
    states = matrix(store, TODAY)
    assert [state.cell for state in states] == sorted([CELL, *others])
    assert {(state.state, state.last.run_id) for state in states} == {("approved", RUN)}


def test_a_store_that_takes_too_long_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    slow = Wrapped(store)
    slow.read = lambda key: (never.wait(), store.read(key))[1]
    monkeypatch.setattr(module, "LIMIT_S", 0.05)
    try:
        with pytest.raises(StoreBusyError, match=r"its pointers were not read: no answer within 0\.05 s"):
            matrix(slow, TODAY)
    finally:
        never.set()
