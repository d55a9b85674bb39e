"""A store that fails where a schedule says: it refuses, loses its answer, ends the process, or lets others act in between."""

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Literal, TypeVar

from vllm_qualify.errors import StoreBusyError
from vllm_qualify.publish.store import PrunableStore, Stored

T = TypeVar("T")
# `refused` and `lost` are what the network does: the store did not get the request, or its answer did not arrive. With
# `dies before` and `dies after` the process is killed around the request, without any cleaning up.
Fault = Literal["refused", "lost", "dies before", "dies after"]
KILLED = 137


class FaultyStore:
    """Passes calls on. The call with the number of a fault fails with it; before that of `meanwhile`, others act."""

    def __init__(self, store: PrunableStore, faults: Mapping[int, Fault], meanwhile: Mapping[int, Callable[[], None]]) -> None:
        self._store, self._faults, self._meanwhile, self._calls = store, faults, meanwhile, 0

    @property
    def url(self) -> str:
        return self._store.url

    def locate(self, key: str) -> str:
        return self._store.locate(key)

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        self._call(lambda: self._store.put_new(key, body, content_type))

    def get(self, key: str) -> bytes:
        return self._call(lambda: self._store.get(key))

    def read(self, key: str) -> Stored:
        return self._call(lambda: self._store.read(key))

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        return self._call(lambda: self._store.swap(key, body, content_type, tag))

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete(key))

    def exists(self, key: str) -> bool:
        return self._call(lambda: self._store.exists(key))

    def keys(self, prefix: str) -> Iterator[str]:
        return self._call(lambda: iter(list(self._store.keys(prefix))))

    def now(self) -> datetime:
        return self._call(self._store.now)

    def check(self) -> None:
        self._call(self._store.check)

    def _call(self, request: Callable[[], T]) -> T:
        number, self._calls = self._calls, self._calls + 1
        if others := self._meanwhile.get(number):
            others()
        fault = self._faults.get(number)
        if fault == "dies before":
            os._exit(KILLED)
        if fault == "refused":
            raise StoreBusyError("the store did not answer", "try again later", self.url)
        answer = request()
        if fault == "dies after":
            os._exit(KILLED)
        if fault == "lost":
            raise StoreBusyError("the store's answer was lost", "try again later", self.url)
        return answer
