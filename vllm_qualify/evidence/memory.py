"""Remembers the results of reading evidence files, for as long as their content is the same.

The same files are read for a stage's measurements, for each comparison, for the report, and at each look while a stage runs.
Big files take seconds to read.
"""

import hashlib
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

Cached = TypeVar("Cached")


class Memory:
    """Results for the last `files` contents, each identified by its digest."""

    def __init__(self, files: int) -> None:
        self._known_of = lru_cache(maxsize=files)(lambda _digest: dict[Hashable, Any]())

    def find(self, digest: bytes, what: Hashable, find: Callable[[], Cached]) -> Cached:
        """The remembered result for this content; or else that of `find`, which is remembered unless it raises an error."""
        known = self._known_of(digest)
        if what not in known:
            known[what] = find()
        remembered: Cached = known[what]
        return remembered


def digest_together(*contents: bytes) -> bytes:
    """The digest of several files together. It includes their lengths: text moved from one file to the next changes it."""
    whole = hashlib.sha256()
    for content in contents:
        whole.update(len(content).to_bytes(8, "big"))
        whole.update(content)
    return whole.digest()
