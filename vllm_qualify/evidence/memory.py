"""What files of evidence showed, for as long as their content is the same.

The same files are read for a stage's measurements, for each comparison and for the report, and at each look of a stage that
goes on. Big ones take seconds to read.
"""

import hashlib
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

Found = TypeVar("Found")


class Memory:
    """Of the last `files` contents, each known by its digest."""

    def __init__(self, files: int) -> None:
        self._of = lru_cache(maxsize=files)(_nothing_yet)

    def find(self, digest: bytes, what: Hashable, find: Callable[[], Found]) -> Found:
        """What was found of the same content before, or else is now. An error is not remembered."""
        known = self._of(digest)
        if what not in known:
            known[what] = find()
        found: Found = known[what]
        return found


def _nothing_yet(_digest: bytes) -> dict[Hashable, Any]:
    return {}


def digest_of(*contents: bytes) -> bytes:
    """Of several files together, each with its length, so that no two differ only in where one ends."""
    whole = hashlib.sha256()
    for content in contents:
        whole.update(len(content).to_bytes(8, "big"))
        whole.update(content)
    return whole.digest()
