"""Stores in which something happens between two calls, and what is in a store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.approval.builder import CELL
from tests.builders.wrapped_stores import Wrapped
from vllm_qualify.approval.pointer import Pointer, read_pointer
from vllm_qualify.publish.store import Store


class KilledError(Exception):
    """The process was killed."""


class Mortal(Wrapped):
    """Dies at the n-th write, or at one of a key with this end: before it is made, or after it was and before anybody knows."""

    def __init__(self, store: Store, dies_at: int | str, *, after: bool) -> None:
        super().__init__(store)
        self.dies_at, self.after, self.begun = dies_at, after, 0
        self.written: list[str] = []

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        with self._write(key):
            super().put_new(key, body, content_type)

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        with self._write(key):
            super().swap(key, body, content_type, tag)

    @contextmanager
    def _write(self, key: str) -> Iterator[None]:
        self.begun += 1
        is_last = key.endswith(self.dies_at) if isinstance(self.dies_at, str) else self.begun == self.dies_at
        if is_last and not self.after:
            raise KilledError
        yield
        self.written.append(key)
        if is_last:
            raise KilledError


class Interrupted(Wrapped):
    """Lets something happen before the first swap, or before the first one of a key, and counts these swaps."""

    def __init__(self, store: Store, meanwhile: Callable[[], object], key: str | None = None) -> None:
        super().__init__(store)
        self.once, self.key, self.swaps = [meanwhile], key, 0

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        if self.key in (None, key):
            self.swaps += 1
            if self.once:
                self.once.pop()()
        super().swap(key, body, content_type, tag)


def pointer_of(store: Store) -> Pointer:
    """The cell's pointer as it is in the store."""
    pointer = read_pointer(store, CELL)
    assert pointer
    return pointer


def rewrite(store: Store, key: str, body: bytes) -> None:
    """As only somebody can who has the store's files."""
    path = Path(store.locate(key))
    path.unlink()
    path.write_bytes(body)
