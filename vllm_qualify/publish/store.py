"""Where evidence, reports and approvals are kept: objects that are written once, in S3 or below a directory.

Both stores take the same keys and keep the same rules, so that what is said at `Store` holds for either.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from vllm_qualify.errors import AlreadyExistsError, CallerError, StoreBusyError, StoreError

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError
    from mypy_boto3_s3 import S3Client

PLACE = "store"
ALLOWED_URLS = "s3://bucket, s3://bucket/prefix or file:///absolute/directory"
S3_ACTIONS = "s3:PutObject, s3:GetObject, s3:ListBucket"

# Names that S3, a URL and a file system all take as they are. A leading dot is kept for the store's own files.
_SEGMENT = re.compile(r"[A-Za-z0-9_@+=~][A-Za-z0-9_@+=~.,:-]*")
_SEGMENT_BYTES = 255  # of a file name
_KEY_BYTES = 900  # S3 takes 1024, the prefix included

_PROBE_KEY = ".store"
_PROBE_BODY = b"A vllm-qualify store. Objects here are written once.\n"


class MissingObjectError(StoreError):
    """The store can be reached, and holds no object with this key."""


class Store(Protocol):
    """Objects under keys such as `cells/llama-h200/report.json`; each is written once and then never changes.

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

    def exists(self, key: str) -> bool:
        """Whether there is such an object. A store that cannot tell raises; it never says no."""

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, sorted by code point; "" for all.

        The prefix is a string, not a folder: `a/b` also finds `a/bc`. A store that cannot list raises, at the call and not
        later: an empty answer means that there is nothing.
        """

    def check(self) -> None:
        """Prove that objects can be written once, read and listed, before hours of work rely on it.

        Leaves one small object `.store`, which `keys` does not show. Only for those who will write: a reader needs no check.

        Raises:
            StoreError: also when the store takes a second write of one key, and so cannot keep evidence.
        """

    def locate(self, key: str) -> str:
        """Where a person finds the object: an `s3://` address or a path."""


def open_store(url: str) -> Store:
    """The store at `s3://bucket[/prefix]` or `file:///absolute/directory`; nothing is asked of it yet.

    S3's endpoint, region and credentials come from the usual AWS settings (AWS_ENDPOINT_URL, AWS_PROFILE, …).

    Raises:
        CallerError: the URL is of no such form.
        StoreError: the AWS settings cannot be used.
    """
    if url.startswith("s3://"):
        return S3Store(*_bucket_and_prefix(url))
    if url.startswith("file://"):
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


def _checked_key(key: str) -> str:
    if problem := _key_problem(key):
        raise ValueError(f"the store key {key!r} {problem}")
    return key


def _checked_prefix(prefix: str) -> str:
    if prefix:
        _checked_key(prefix.removesuffix("/"))
    return prefix


def _listed(keys: Iterable[str], prefix: str) -> Iterator[str]:
    return iter(sorted(key for key in keys if key.startswith(prefix) and not _key_problem(key)))


def _require_create_only(write_probe: Callable[[], None], url: str) -> None:
    """Write one key until it is refused: at the first try when the probe is there from an earlier check, else at the second."""
    for _ in range(2):
        try:
            write_probe()
        except AlreadyExistsError:
            return
    raise StoreError(
        f"{url} replaced an object that a create-only write (If-None-Match: *) must leave alone",
        "use a store that supports conditional writes: AWS S3, Ceph 16 or newer, a current MinIO, or a directory",
        PLACE,
    )


def _already_exists(where: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"{where} exists already", "objects are never replaced: write under a new key", PLACE)


def _missing(where: str) -> MissingObjectError:
    return MissingObjectError(f"there is no object {where}", "check the key and the store's URL", PLACE)


class DirectoryStore:
    """Files below a directory, which `check` and `put_new` make when it is not there. See `Store` for the methods.

    An object appears by a hard link from a finished temporary file in the same directory, so the file system must support
    hard links. A process that is killed may leave such a file (`.new-…`); it is never listed and may be deleted. Objects are
    files without write permission; the content type is not kept.
    """

    def __init__(self, directory: Path) -> None:
        self._root = directory

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def locate(self, key: str) -> str:
        return str(self._path(key))

    def put_new(self, key: str, body: bytes, content_type: str) -> None:  # noqa: ARG002
        self._create(self._path(key), body)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _told_by_directory(path):
            try:
                return path.read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._require_root()
                raise _missing(str(path)) from None

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with _told_by_directory(path):
            self._require_root()
            return path.is_file()

    def keys(self, prefix: str) -> Iterator[str]:
        folder = self._root / _checked_prefix(prefix).rpartition("/")[0]
        with _told_by_directory(folder):
            self._require_root()
            return _listed(self._files_below(folder), prefix)

    def check(self) -> None:
        probe = self._root / _PROBE_KEY
        _require_create_only(lambda: self._create(probe, _PROBE_BODY), self.url)
        with _told_by_directory(probe):
            probe.read_bytes()
            os.listdir(self._root)

    def _path(self, key: str) -> Path:
        return self._root / _checked_key(key)

    def _require_root(self) -> None:
        # A mistyped or unmounted directory must not look like an empty store.
        os.listdir(self._root)

    def _files_below(self, folder: Path) -> Iterator[str]:
        if not folder.is_dir():
            return
        for parent, _, names in os.walk(folder, onerror=_raise):
            for name in names:
                yield Path(parent, name).relative_to(self._root).as_posix()

    def _create(self, path: Path, body: bytes) -> None:
        temporary = path.parent / f".new-{uuid4().hex}"
        with _told_by_directory(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_through(temporary, body)
                _link(temporary, path)
                _sync_directory(path.parent)
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()


def _write_through(path: Path, body: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444), "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system repeats a request whose answer was lost, and then finds the link that it just made.
        if not os.path.samefile(temporary, path):
            raise _already_exists(str(path)) from None


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error


@contextmanager
def _told_by_directory(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _directory_error(error, path) from error


_DIRECTORY_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "free space on that disk, or choose another store",
    errno.EDQUOT: "raise the quota of this user, or choose another store",
    errno.EACCES: "give this user the right to read and write there, or choose another store",
    errno.EPERM: "give this user the right to write there; the file system must also support hard links",
    errno.ENOTSUP: "the file system must support hard links: choose another store",
    errno.EROFS: "mount the file system for writing, or choose another store",
    errno.ENOTDIR: "one of the names on this path is a file: choose another directory or key",
    errno.EEXIST: "one of the names on this path is a file: choose another directory or key",
    errno.ENOENT: "check the store's URL and that its file system is mounted",
}
_PASSING = frozenset({errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN})


def _directory_error(error: OSError, path: Path) -> StoreError:
    kind = StoreBusyError if error.errno in _PASSING else StoreError
    remedy = _DIRECTORY_REMEDIES.get(error.errno or 0, "look after that disk, or choose another store")
    return kind(f"{path} cannot be used: {error.strerror or type(error).__name__}", remedy, PLACE)


class S3Store:
    """Objects in a bucket, below a prefix, through boto3. See `Store` for the methods.

    An object is one PUT with `If-None-Match: *`. It carries a random number of its call as metadata (`write-id`): when the
    server says that the key is taken, that number tells whether it was taken by this very call, whose answer was lost and which
    boto3 then sent again, or by another one.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._client = _s3_client(bucket)
        self._told = _S3Errors(bucket, _without_user(self._client.meta.endpoint_url))

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._base}".removesuffix("/")

    def locate(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._name(key)}"

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        self._create(self._name(key), body, content_type)

    def get(self, key: str) -> bytes:
        return self._read(self._name(key))

    def exists(self, key: str) -> bool:
        # Not HEAD: it has no body, and so does not tell a missing bucket from a missing object.
        name = self._name(key)
        with self._told.by("list"):
            answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=name, MaxKeys=1)
        return any(entry["Key"] == name for entry in answer.get("Contents", []))

    def keys(self, prefix: str) -> Iterator[str]:
        start = self._base + _checked_prefix(prefix)
        with self._told.by("list"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start)
            names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return _listed((name.removeprefix(self._base) for name in names), prefix)

    def check(self) -> None:
        probe = self._base + _PROBE_KEY
        _require_create_only(lambda: self._create(probe, _PROBE_BODY, "text/plain"), self.url)
        self._read(probe)
        with self._told.by("list"):
            self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._base, MaxKeys=1)

    def _name(self, key: str) -> str:
        return self._base + _checked_key(key)

    def _read(self, name: str) -> bytes:
        with self._told.by("read", name):
            return self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()

    def _create(self, name: str, body: bytes, content_type: str) -> None:
        write_id = uuid4().hex
        for pause_s in (0.1, 0.4, 1.5, 0):
            if self._put_if_absent(name, body, content_type, write_id):
                return
            holder = self._write_id_of(name)
            if holder == write_id:
                return
            if holder is not None:
                raise _already_exists(f"s3://{self._bucket}/{name}")
            # Refused although nothing is there: another write is under way, and may still fail.
            time.sleep(pause_s)
        raise self._told.busy(f"other writes of {name} keep getting in the way")

    def _put_if_absent(self, name: str, body: bytes, content_type: str, write_id: str) -> bool:
        with self._told.by("write", name), _refused_by_condition() as refusal:
            self._client.put_object(
                Bucket=self._bucket,
                Key=name,
                Body=body,
                ContentType=content_type,
                IfNoneMatch="*",
                Metadata={"write-id": write_id},
            )
        return not refusal

    def _write_id_of(self, name: str) -> str | None:
        """The `write-id` of the object; "" when it has none; None when there is no object."""
        try:
            with self._told.by("read", name):
                answer = self._client.head_object(Bucket=self._bucket, Key=name)
        except MissingObjectError:
            return None
        return answer["Metadata"].get("write-id", "")


def _s3_client(bucket: str) -> "S3Client":
    # boto3 takes 0.3 s and more to import, which every start of the command would pay.
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    # A custom endpoint is addressed by path without being told, unless the AWS settings say otherwise.
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        retries={"mode": "standard"},
        # Ceph and other gateways refuse, or store wrongly, the checksum trailers that newer SDKs send unasked.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise StoreError(
            f"the AWS settings for the bucket {bucket} cannot be used ({type(error).__name__})",
            "check AWS_PROFILE, AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the files in ~/.aws",
            PLACE,
        ) from None


@contextmanager
def _refused_by_condition() -> Iterator[list[str]]:
    """Catch an answer that says that the key is taken, or about to be; its code is put in the list."""
    from botocore.exceptions import ClientError

    refusal: list[str] = []
    try:
        yield refusal
    except ClientError as error:
        if _status(error) not in (409, 412):
            raise
        refusal.append(_code(error))


def _without_user(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _status(error: "ClientError") -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: "ClientError") -> str:
    return error.response.get("Error", {}).get("Code", "")


_NO_OBJECT = frozenset({"NoSuchKey", "404"})
_THROTTLED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"})
_WRONG_REGION = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
_FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"})
_CREDENTIAL_REMEDIES: Mapping[str, str] = {
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID or the profile, and that they belong to this endpoint",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY or the profile; a proxy that rewrites requests also causes this",
    "ExpiredToken": "get new temporary credentials",
    "InvalidToken": "check AWS_SESSION_TOKEN: it must belong to the access key, and be unset for a permanent key",
    "RequestTimeTooSkewed": "set this machine's clock",
}


class _S3Errors:
    """boto3's errors about one bucket, in our words.

    They are not chained to the original: its text is not ours to answer for, and can hold a session token (a header that boto3
    could not send).
    """

    def __init__(self, bucket: str, endpoint: str) -> None:
        self._where = f"the bucket {bucket} at {endpoint}"

    @contextmanager
    def by(self, action: str, name: str = "") -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            raise self._refused(error, action, name) from None
        except BotoCoreError as error:
            raise self._not_answered(error) from None

    def busy(self, problem: str) -> StoreBusyError:
        return StoreBusyError(f"{self._where}: {problem}", "try again later", PLACE)

    def _refused(self, error: "ClientError", action: str, name: str) -> StoreError:
        code, status = _code(error), _status(error)
        answer = f"{action} {name}".rstrip() + f" was answered {status} {code}"
        if code in _NO_OBJECT and name:
            return _missing(f"{name} in {self._where}")
        if code in _FULL or status == 507:
            return self._error(f"is full: {answer}", "free space, raise the quota, or choose another store")
        if code in _THROTTLED or status in (408, 429) or (status >= 500 and status != 501):
            return self.busy(answer)
        return self._error(*self._final(code, status, answer, error))

    def _final(self, code: str, status: int, answer: str, error: "ClientError") -> tuple[str, str]:
        if code == "NoSuchBucket":
            return "does not exist", "create it, or check the store's URL, AWS_ENDPOINT_URL and AWS_PROFILE"
        if code in _WRONG_REGION or status in (301, 307):
            region = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
            return f"is in another region: {answer}", f"set AWS_DEFAULT_REGION to the bucket's region {region}".rstrip()
        if code in _CREDENTIAL_REMEDIES:
            return f"does not accept the credentials: {answer}", _CREDENTIAL_REMEDIES[code]
        if status in (401, 403):
            return f"does not allow this: {answer}", f"give these credentials {S3_ACTIONS} on the bucket and its objects"
        if status == 501:
            return f"lacks a needed function: {answer}", "use a store that supports conditional writes (If-None-Match)"
        return f"refuses: {answer}", f"check the store's URL, AWS_ENDPOINT_URL, and that the policy allows {S3_ACTIONS}"

    def _not_answered(self, error: "BotoCoreError") -> StoreError:
        from botocore import exceptions as e

        broken = (e.ConnectionClosedError, e.ReadTimeoutError, e.ResponseStreamingError, e.IncompleteReadError)
        kind = type(error).__name__
        if isinstance(error, e.SSLError):
            return self._error(
                f"has no valid TLS certificate ({kind})", "check AWS_ENDPOINT_URL, and AWS_CA_BUNDLE for a private CA"
            )
        if isinstance(error, e.NoCredentialsError | e.PartialCredentialsError):
            remedy = f"set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, with the right to {S3_ACTIONS}"
            return self._error(f"needs credentials, and none were found ({kind})", remedy)
        if isinstance(error, (e.ConnectionError, *broken)):
            remedy = "check AWS_ENDPOINT_URL, the network and the server; then try again"
            return StoreBusyError(f"{self._where} does not answer ({kind})", remedy, PLACE)
        return self._error(f"could not be asked ({kind})", "check the AWS settings: credentials, AWS_ENDPOINT_URL, AWS_PROFILE")

    def _error(self, problem: str, remedy: str) -> StoreError:
        return StoreError(f"{self._where} {problem}", remedy, PLACE)
