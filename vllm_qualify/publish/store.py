"""Where evidence, reports and approvals are kept: objects below a directory or in S3, nearly all of which are written once.

Both stores take the same keys and keep the same rules, so that what is said at `Store` holds for either.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from vllm_qualify.errors import AlreadyExistsError, CallerError, StoreError

PLACE = "store"
ALLOWED_URLS = "s3://bucket, s3://bucket/prefix or file:///absolute/directory"

# Names that S3, a URL and a file system all take as they are. A leading dot is kept for the store's own files.
_SEGMENT = re.compile(r"[A-Za-z0-9_@+=~][A-Za-z0-9_@+=~.,:-]*")
_SEGMENT_BYTES = 255  # of a file name
_KEY_BYTES = 900  # S3 takes 1024, the prefix included

PROBE_KEY = ".store"
PROBE_BODY = b"A vllm-qualify store. Objects here are written once.\n"
SWAP_PROBE_KEY = ".store.swap"
_NO_TAG = "0" * 32


class MissingObjectError(StoreError):
    """The store can be reached, and holds no object with this key."""


class ChangedError(StoreError):
    """A swap met another object than the one that the caller had read."""


class Stored(NamedTuple):
    """An object's content, and the tag by which `Store.swap` knows it again."""

    body: bytes
    tag: str


class Store(Protocol):
    """Objects under keys such as `cells/llama-h200/report.json`.

    Those of `put_new` are written once and then never change. Those of `swap` change, by compare-and-swap only; a key belongs
    to one of the two for good.

    A key's segments are letters, digits and `_@+=~.,:-`, and begin with none of `.,:-`. A key must not be another key's folder
    (`a` beside `a/b`): a directory cannot hold both. Every method raises

    - ValueError: the key is not such a name; a defect of the calling code.
    - StoreBusyError: no answer in time, a broken connection, throttling; already retried here, may be retried later.
    - StoreError: the store refuses (no right, no such bucket, disk full, …); the text says what its owner can do.

    No error text holds a credential. Methods may be called from several threads.
    """

    @property
    def url(self) -> str:
        """The store's address, without a slash at its end; `open_store` takes it."""

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        """Write an object that was not there; it becomes visible whole or not at all.

        Of several writers of one key exactly one returns. Only this call's own write counts: an earlier object with the same
        content is refused like any other. A write whose answer was lost, and that is then found in the store, is a success.

        Raises:
            AlreadyExistsError: the key is taken, with whatever content.
            StoreBusyError: as above; the object may nevertheless be there, and a second call then says AlreadyExistsError.
        """

    def get(self, key: str) -> bytes:
        """The object's content.

        Raises:
            MissingObjectError: there is no such object.
        """

    def read(self, key: str) -> Stored:
        """The object's content and the tag that belongs to this very content.

        Raises:
            MissingObjectError: there is no such object.
        """

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> str:
        """Write a changeable object if it still has `tag`, or with None if there is none; return its new tag.

        Readers see the old content or the new one. Of several that swap one tag exactly one returns. As in `put_new`, a write
        whose answer was lost, and that is then found in the store, is a success.

        An object must never get a content back that it once had: a tag can follow from the content alone, and would be taken
        for unchanged. A document that holds its own growing history never does.

        Raises:
            ChangedError: somebody else wrote or removed it meanwhile. In the rare case that this call's answer was lost and the
                object was then swapped once more, its write was made all the same, and the newer content was made from it.
            StoreBusyError: as above; the write may nevertheless have been made.
        """

    def exists(self, key: str) -> bool:
        """Whether there is such an object. A store that cannot tell raises; it never says no."""

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, sorted by code point; "" for all.

        The prefix is a string, not a folder: `a/b` also finds `a/bc`. A store that cannot list raises, at the call and not
        later: an empty answer means that there is nothing.
        """

    def check(self) -> None:
        """Prove that objects can be written once, swapped, read and listed, before hours of work rely on it.

        Leaves small objects `.store…`, which `keys` does not show. Only for those who will write: a reader needs no check.

        Raises:
            StoreError: also when the store takes a second write of one key, and so cannot keep evidence, or a swap with a wrong
                tag, and so cannot keep approvals.
        """

    def locate(self, key: str) -> str:
        """Where a person finds the object: an `s3://` address or a path."""


def open_store(url: str) -> Store:
    """The store at `s3://bucket[/prefix]` or `file:///absolute/directory`; nothing is asked of it yet.

    S3's endpoint, region and credentials come from the usual AWS settings (AWS_ENDPOINT_URL, AWS_PROFILE, …). What is written
    there follows these, all of which may be unset:

    - VLLM_QUALIFY_S3_SSE: AES256 or aws:kms, the encryption that is asked for; else the bucket's own.
    - VLLM_QUALIFY_S3_SSE_KMS_KEY_ID: the key for aws:kms; else the account's own.
    - VLLM_QUALIFY_S3_OBJECT_LOCK: governance:<days> or compliance:<days>, for objects that are written once.
    - VLLM_QUALIFY_S3_STORAGE_CLASS: one whose objects can be read at once, for objects that are written once.

    Raises:
        CallerError: the URL is of no such form, or one of these variables is.
        StoreError: the AWS settings cannot be used.
    """
    # Each imports this module; and boto3 takes 0.3 s and more, which every start of the command would pay.
    if url.startswith("s3://"):
        from vllm_qualify.publish.s3 import S3Store

        return S3Store(*_bucket_and_prefix(url))
    if url.startswith("file://"):
        from vllm_qualify.publish.directory import DirectoryStore

        return DirectoryStore(_directory(url))
    raise _bad_url("this is not the URL of a store", url)


def _bucket_and_prefix(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.removesuffix("/")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket):
        raise _bad_url("the bucket's name is missing or is not one", url)
    if prefix and _key_problem(prefix):
        raise _bad_url(f"the prefix {_key_problem(prefix)}", url)
    return bucket, prefix


def _directory(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/"):
        raise _bad_url("the directory must be absolute: file:// and then a path that begins with /", url)
    if parts.query or parts.fragment or "\0" in unquote(parts.path):
        raise _bad_url("the directory's path holds ?, # or a null; write them as %3F and %23", url)
    return Path(os.path.normpath(unquote(parts.path)))


def _bad_url(problem: str, url: str) -> CallerError:
    # What was typed may hold a password (scheme://key:secret@host), so then it is not repeated.
    shown = f" ({url})" if re.fullmatch(r"[\w./:-]{1,200}", url, re.ASCII) and url.count(":") <= 1 else ""
    remedy = f"write file://{url}" if shown and url.startswith("/") else f"use {ALLOWED_URLS}"
    return CallerError(f"{problem}{shown}", remedy, place="--store")


# --- what the stores share


def _key_problem(key: str) -> str:
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
    if problem := _key_problem(key):
        raise ValueError(f"the store key {key!r} {problem}")
    return key


def checked_prefix(prefix: str) -> str:
    if prefix:
        checked_key(prefix.removesuffix("/"))
    return prefix


def listed(keys: Iterable[str], prefix: str) -> Iterator[str]:
    """Of all names in the store the keys with this prefix, sorted."""
    return iter(sorted(key for key in keys if key.startswith(prefix) and not _key_problem(key)))


def require_create_only(write_probe: Callable[[], None], url: str) -> None:
    """Write one key until it is refused: at the first try when the probe is there from an earlier check, else at the second."""
    for _ in range(2):
        try:
            write_probe()
        except AlreadyExistsError:
            return
    raise StoreError(
        f"{url} replaced an object that a create-only write (If-None-Match: *) must leave alone",
        "use a store that supports conditional writes: AWS S3, Ceph 16 or newer (in a bucket without versions), a current "
        "MinIO, or a directory",
        PLACE,
    )


def require_swap(read: Callable[[], Stored], swap: Callable[[bytes, str | None], str], url: str) -> None:
    """Swap a probe by its tag, then by a tag that it never had, which must be refused."""
    body = f"{uuid4().hex}\n".encode()
    try:
        swap(body, _tag_or_none(read))
        swap(body, _NO_TAG)
    except ChangedError:
        # Also of the first swap, when another check runs now: then that one was refused as it must be.
        return
    raise StoreError(
        f"{url} cannot keep approvals: it replaced an object that had another tag than the write asked for (If-Match)",
        "use a store that supports conditional writes: AWS S3, Ceph 16 or newer, a current MinIO, or a directory",
        PLACE,
    )


def _tag_or_none(read: Callable[[], Stored]) -> str | None:
    try:
        return read().tag
    except MissingObjectError:
        return None


def already_exists(where: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"{where} exists already", "objects are never replaced: write under a new key", PLACE)


def changed(where: str) -> ChangedError:
    return ChangedError(f"{where} was changed by somebody else meanwhile", "read it again, and decide anew", PLACE)


def missing(where: str) -> MissingObjectError:
    return MissingObjectError(f"there is no object {where}", "check the key and the store's URL", PLACE)
