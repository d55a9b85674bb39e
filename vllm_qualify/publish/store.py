"""The store of evidence, reports and approvals: objects below a directory or in S3. Nearly all are written only once.

Both kinds of store accept the same keys and follow the same rules, which `Store` describes.
"""

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol, TypeVar
from uuid import uuid4

from vllm_qualify.errors import AlreadyExistsError, HostError, StoreBusyError, StoreError

PLACE = "store"
MOST_SWAPS = 50
# The longest pause after a lost swap, for each swap that was lost, up to ten: writers who started together come apart.
PAUSE_S = 0.005
# How far a clock may be from the store's. Hosts that keep time by NTP are nearer by far.
MOST_SKEW = timedelta(minutes=1)
T = TypeVar("T")

# S3, URLs and file systems accept these names unchanged. Names with a leading dot are reserved for the store's own files.
_SEGMENT = re.compile(r"[A-Za-z0-9_@+=~][A-Za-z0-9_@+=~.,:-]*")
_SEGMENT_BYTES = 255  # of a file name
_KEY_BYTES = 900  # S3 allows 1024, including the prefix

# The longest document: the report of a cell with all questions has some megabytes, an index of 10,000 cells some thirty.
MOST_DOCUMENT_BYTES = 2**27
# The longest file of evidence: a load's scrapes have some hundred megabytes.
MOST_EVIDENCE_BYTES = 2**32

PROBE_KEY = ".store"
PROBE_BODY = b"A vllm-qualify store. Objects here are written once.\n"
SWAP_PROBE_KEY = ".store.swap"
_NO_TAG = "0" * 32
CONDITIONAL = "use a store that supports conditional writes: AWS S3, Ceph 16 or newer{}, a current MinIO, or a directory"


class MissingObjectError(StoreError):
    """The store can be reached, but has no object with this key."""


class TooLongError(StoreError):
    """An object is longer than its reader takes: whoever publishes decides how long objects are."""


class ChangedError(StoreError):
    """A swap failed because the object is not the one that the caller had read."""


class Stored(NamedTuple):
    """An object's content, and the tag by which `Store.swap` recognizes it."""

    body: bytes
    tag: str


class Store(Protocol):
    """Objects under keys such as `cells/llama-h200/report.json`.

    Objects of `put_new` are written once and never change. Objects of `swap` change, but only by compare-and-swap. Each key
    is used with only one of these two methods.

    A key's segments consist of letters, digits and `_@+=~.,:-`, and do not begin with one of `.,:-`. A key must not be the
    folder of another key (`a` beside `a/b`): a directory cannot hold both. Every method raises

    - ValueError: the key is not valid; a defect of the calling code.
    - StoreBusyError: no answer in time, a broken connection, or throttling. The call was already retried; try again later.
    - StoreError: the store refuses (no permission, no such bucket, disk full, …). The text says what its owner can do.

    No error text contains a credential. Methods may be called from several threads.
    """

    @property
    def url(self) -> str:
        """The store's address, without a slash at its end; `open_store` accepts it."""

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        """Write a new object. Readers see all of it or nothing. Of several writers of one key exactly one succeeds.

        If the answer to this call's own write was lost and the object is then in the store, the call succeeds.

        Raises:
            AlreadyExistsError: there is already an object with this key, with the same or other content.
            StoreBusyError: as above. The object may still have been written; a second call then raises AlreadyExistsError.
        """

    def get(self, key: str, most_bytes: int = MOST_DOCUMENT_BYTES) -> bytes:
        """The object's content. Raises MissingObjectError, or TooLongError, which has read no more than `most_bytes`."""

    def read(self, key: str) -> Stored:
        """The object's content and the tag of exactly this content. Raises as `get`."""

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        """Write a changeable object if it still has `tag`; with None, only if it does not exist.

        Readers see the old content or the new one. Of several writers who swap the same tag exactly one succeeds. As in
        `put_new`, a write whose answer was lost, but that is then in the store, is a success. An object must never return to an
        earlier content: a tag can depend on the content alone, and the object would then look unchanged.

        Raises:
            ChangedError: another writer changed or removed it meanwhile. In a rare case this call's write was still made:
                its answer was lost, and another writer then swapped the object, starting from this call's content.
            StoreBusyError: as above. The write may still have been made.
        """

    def exists(self, key: str) -> bool:
        """Whether there is such an object. If the store cannot answer, the call raises; it never returns false."""

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, sorted by code point; "" for all. `a/b` also finds `a/bc`.

        If the store cannot list, the call itself raises, not the iteration. An empty answer means that there are no such keys.
        """

    def check(self) -> None:
        """Prove that objects can be written once, swapped, read and listed, before hours of work rely on it.

        Leaves small objects `.store…`, which `keys` does not show. Only writers need this check, not readers. The clock is
        checked too: what is published is dated by it.

        Raises:
            HostError: this machine's clock is not the store's, as in `checked_now`.
            StoreError: also if the store accepts a second write of one key, so that it cannot keep evidence, or a swap with a
                wrong tag, so that it cannot keep approvals.
        """

    def now(self) -> datetime:
        """The time by the store's clock: to a second, and as old as its answer. A directory's is that of its file system."""

    def locate(self, key: str) -> str:
        """The place of the object for people: an `s3://` address or a path."""


class PrunableStore(Store, Protocol):
    """A store whose objects can be removed. Only `prune` does that; publishing and approving need no such right."""

    def delete(self, key: str) -> None:
        """Remove an object. If there is none, nothing happens."""


def key_problem(key: str) -> str:
    if not key:
        return "is empty"
    if len(key) > _KEY_BYTES:
        return f"is longer than {_KEY_BYTES} bytes"
    for segment in key.split("/"):
        if not _SEGMENT.fullmatch(segment):
            return f"has a segment {segment!r}, which is not made of A-Z a-z 0-9 _@+=~.,:- or begins with one of .,:-"
        if len(segment) > _SEGMENT_BYTES:
            return f"has a segment longer than {_SEGMENT_BYTES} bytes"
    return ""


def checked_key(key: str) -> str:
    if problem := key_problem(key):
        raise ValueError(f"the store key {key!r} {problem}")
    return key


def checked_prefix(prefix: str) -> str:
    if prefix:
        checked_key(prefix.removesuffix("/"))
    return prefix


def sorted_keys(keys: Iterable[str], prefix: str) -> Iterator[str]:
    """The keys with this prefix among all names in the store, sorted."""
    return iter(sorted(key for key in keys if key.startswith(prefix) and not key_problem(key)))


def require_create_only(write_probe: Callable[[], None], url: str) -> None:
    """Check that the store refuses a second write of a key. If an earlier check left the probe, it refuses the first one."""
    for _ in range(2):
        try:
            write_probe()
        except AlreadyExistsError:
            return
    problem = f"{url} replaced an object that a create-only write (If-None-Match: *) must leave alone"
    raise StoreError(problem, CONDITIONAL.format(" (in a bucket without versions)"), PLACE)


def retry_swap(attempt: Callable[[], T], what: str, remedy: str, place: str) -> T:
    """The result of `attempt`, called again while other writers change `what` first. Raises StoreBusyError in the end."""
    for lost in range(1, MOST_SWAPS + 1):
        try:
            return attempt()
        except ChangedError:
            time.sleep(random.uniform(0, PAUSE_S * min(lost, 10)))
    raise StoreBusyError(f"{what} changes all the time", remedy, place)


def checked_now(store: Store) -> datetime:
    """The UTC time by this machine's clock. Raises HostError if it is more than MOST_SKEW off the store's, or StoreError."""
    before = datetime.now(UTC)
    there = store.now()
    after = datetime.now(UTC)
    # The store answered between the two.
    ahead, behind = before - there, there - after
    if max(ahead, behind) > MOST_SKEW:
        raise wrong_clock(ahead if ahead > behind else -behind, store.url)
    return after


def wrong_clock(ahead: timedelta, url: str) -> HostError:
    """The error about this machine's clock, which is `ahead` of the store's."""
    which = "ahead of" if ahead > timedelta() else "behind"
    problem = f"this machine's clock is {round(abs(ahead).total_seconds())} s {which} that of the store {url}"
    shown = "`timedatectl timesync-status` shows by how much it is off"
    remedy = f"set the clock of this machine (`timedatectl set-ntp true`; {shown}); if this clock is right, set the store's"
    return HostError(problem, remedy, "clock")


def require_swap(read: Callable[[], Stored], swap: Callable[[bytes, str | None], None], url: str) -> None:
    """Check swaps: swap a probe by its tag, then by a tag that it never had. The store must refuse the second swap."""
    body, tag = f"{uuid4().hex}\n".encode(), None
    with suppress(MissingObjectError):
        tag = read().tag
    try:
        swap(body, tag)
        swap(body, _NO_TAG)
    except ChangedError:
        # The first swap can raise this too, if another check runs now. Then the store refused a wrong tag, as it must.
        return
    problem = "cannot keep approvals: it replaced an object that had another tag than the write asked for (If-Match)"
    raise StoreError(f"{url} {problem}", CONDITIONAL.format(""), PLACE)


def already_exists(where: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"{where} exists already", "objects are never replaced: write under a new key", PLACE)


def changed_error(where: str) -> ChangedError:
    return ChangedError(f"{where} was changed by somebody else meanwhile", "read it again, and decide anew", PLACE)


def too_long_error(where: str, most_bytes: int) -> TooLongError:
    problem = f"{where} is longer than the {most_bytes:,} bytes that it may have"
    return TooLongError(problem, "find out who wrote it, and delete it", PLACE)


def missing_error(where: str) -> MissingObjectError:
    return MissingObjectError(f"there is no object {where}", "check the key and the store's URL", PLACE)
