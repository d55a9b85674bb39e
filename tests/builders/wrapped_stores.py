"""A store whose writes a test may do something with."""

from datetime import datetime

from vllm_qualify.publish.store import Store


class Wrapped:
    def __init__(self, store: Store) -> None:
        self.url, self.locate, self.check = store.url, store.locate, store.check
        self.get, self.read, self.exists, self.keys = store.get, store.read, store.exists, store.keys
        self._store = store

    def now(self) -> datetime:
        return self._store.now()

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        self._store.put_new(key, body, content_type)

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        self._store.swap(key, body, content_type, tag)
