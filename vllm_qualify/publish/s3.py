"""A store in S3, through boto3: the only module that imports it."""

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import boto3
from botocore import exceptions as e
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader, create_loader
from botocore.session import Session
from botocore.utils import parse_timestamp

from vllm_qualify.errors import CallerError, QualifyError, StoreBusyError, StoreError
from vllm_qualify.limits import within
from vllm_qualify.publish.store import (
    MOST_SKEW,
    PLACE,
    PROBE_BODY,
    PROBE_KEY,
    SWAP_PROBE_KEY,
    MissingObjectError,
    Stored,
    already_exists,
    changed,
    checked_key,
    checked_prefix,
    listed,
    missing,
    present,
    require_create_only,
    require_swap,
    wrong_clock,
)

if TYPE_CHECKING:
    from botocore.client import ClientMeta
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

# The permissions of each action. Without ListBucket S3 answers "forbidden" for a missing object. If-Match needs GetObject.
ACTIONS: Mapping[str, Sequence[str]] = {
    "write": ("s3:PutObject",),
    "change": ("s3:PutObject", "s3:GetObject"),
    "read": ("s3:GetObject", "s3:ListBucket"),
    "list": ("s3:ListBucket",),
    "delete": ("s3:DeleteObject",),
}
LOCK_ACTION = "s3:PutObjectRetention"
KMS_ACTIONS = ("kms:GenerateDataKey", "kms:Decrypt")
S3_ACTIONS = "s3:PutObject, s3:GetObject, s3:ListBucket"

# For one read, and for one call with all its retries.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, CALL_LIMIT_S = 10.0, 60.0, 900.0
# Connections that are kept: as many as calls are made at a time.
AT_ONCE = 32
_PAUSES_S = (0.1, 0.4, 1.5, 0)


# --- settings

SSE = "VLLM_QUALIFY_S3_SSE"
SSE_KMS_KEY_ID = "VLLM_QUALIFY_S3_SSE_KMS_KEY_ID"
OBJECT_LOCK = "VLLM_QUALIFY_S3_OBJECT_LOCK"
STORAGE_CLASS = "VLLM_QUALIFY_S3_STORAGE_CLASS"

_ENCRYPTIONS = ("AES256", "aws:kms")
# Without archive classes: a verifier must be able to read evidence at once.
_STORAGE_CLASSES = ("STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR")
_LOCK = re.compile(r"(governance|compliance):([1-9][0-9]{0,4})")
_LOCK_DAYS = 36_500  # the most that S3 accepts


class WriteSettings(NamedTuple):
    """Settings from the environment for the objects that are written to S3; each may be empty."""

    encryption: str
    kms_key: str
    storage_class: str
    lock_mode: str
    lock_days: int

    def arguments(self, once: bool) -> dict[str, Any]:
        """The arguments of boto3's `put_object`, for an object that is written once or for a changeable one."""
        every = {"ServerSideEncryption": self.encryption, "SSEKMSKeyId": self.kms_key}
        only_once = {"StorageClass": self.storage_class, **self._lock()} if once else {}
        return {name: value for name, value in (every | only_once).items() if value}

    def actions(self, action: str) -> list[str]:
        return [*ACTIONS[action], *([LOCK_ACTION] if action == "write" and self.lock_mode else [])]

    def probe_key(self) -> str:
        """The probe's key. It depends on the settings, so that a check shows whether the store accepts these."""
        once = (self.encryption, self.kms_key, self.storage_class, self.lock_mode)
        return f"{PROBE_KEY}-{hashlib.sha256(repr(once).encode()).hexdigest()[:12]}" if any(once) else PROBE_KEY

    def _lock(self) -> dict[str, Any]:
        until = datetime.now(UTC) + timedelta(days=self.lock_days)
        return {"ObjectLockMode": self.lock_mode, "ObjectLockRetainUntilDate": until} if self.lock_mode else {}


def settings_of(environment: Mapping[str, str]) -> WriteSettings:
    """The settings. Raises CallerError, which names the variable and its allowed values."""
    encryption = _one_of(environment, SSE, _ENCRYPTIONS)
    kms_key = environment.get(SSE_KMS_KEY_ID, "")
    if kms_key and encryption != "aws:kms":
        remedy = f"set {SSE}=aws:kms, or unset {SSE_KMS_KEY_ID}"
        raise CallerError("a key is set, but not its encryption", remedy, SSE_KMS_KEY_ID)
    lock_mode, lock_days = _lock_of(environment.get(OBJECT_LOCK, ""))
    return WriteSettings(encryption, kms_key, _one_of(environment, STORAGE_CLASS, _STORAGE_CLASSES), lock_mode, lock_days)


def _one_of(environment: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    value = environment.get(name, "")
    if value and value not in allowed:
        raise CallerError(f"{value!r} is not one of its values", f"set it to {' or '.join(allowed)}, or unset it", name)
    return value


def _lock_of(value: str) -> tuple[str, int]:
    match = _LOCK.fullmatch(value)
    if match and int(match[2]) <= _LOCK_DAYS:
        return match[1].upper(), int(match[2])
    if value:
        remedy = f"set it to governance:<days> or compliance:<days>, with 1 to {_LOCK_DAYS} days, or unset it"
        raise CallerError(f"{value!r} is not an object lock", remedy, OBJECT_LOCK)
    return "", 0


# --- the store


class S3Store:
    """Objects in a bucket, below a prefix, through boto3. See `Store` for the methods.

    An object is written by one PUT with `If-None-Match: *`, or with `If-Match` and the ETag of the object that it replaces. A
    tag is an ETag without its quotes: Ceph needs this form, and AWS accepts it. Each call has a random number, which its PUT
    carries as metadata (`write-id`). boto3 sends a PUT again if its answer was lost, and the server then refuses the
    condition. The number shows whether this call or another one wrote the object.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._settings = settings_of(os.environ)
        self._client = _s3_client(bucket)
        self._errors = _Errors(bucket, self._base, self._settings, self._client.meta)

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._base}".removesuffix("/")

    def locate(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._name(key)}"

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        self._create(self._name(key), body, content_type)

    def get(self, key: str) -> bytes:
        return self.read(key).body

    def read(self, key: str) -> Stored:
        return self._read(self._name(key))

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        self._swap(self._name(key), body, content_type, tag)

    def delete(self, key: str) -> None:
        name = self._name(key)
        self._asked("delete", lambda: self._client.delete_object(Bucket=self._bucket, Key=name), name)

    def exists(self, key: str) -> bool:
        # Not a list, which some services answer from an old copy. Not HEAD: its answer has no body, so a missing bucket looks
        # like a missing object.
        name = self._name(key)
        try:
            self._asked("read", lambda: self._has_first_byte(name), name)
        except MissingObjectError:
            return False
        return True

    def keys(self, prefix: str) -> Iterator[str]:
        start = self._base + checked_prefix(prefix)
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start))
        names: list[str] = []
        # Each page is a call of its own: how many there are depends on the store.
        while page := self._asked("list", lambda: next(pages, None)):
            names += [entry["Key"] for entry in page.get("Contents", [])]
        return listed((name.removeprefix(self._base) for name in names), prefix)

    def check(self) -> None:
        probe, swapped = self._base + self._settings.probe_key(), self._base + SWAP_PROBE_KEY
        require_create_only(lambda: self._create(probe, PROBE_BODY, "text/plain"), self.url)
        self._read(probe)
        require_swap(lambda: self._read(swapped), lambda body, tag: self._swap(swapped, body, "text/plain", tag), self.url)
        present(self)

    def now(self) -> datetime:
        answer = self._asked("list", lambda: self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._base, MaxKeys=1))
        return _date(answer) or datetime.now(UTC)

    def _name(self, key: str) -> str:
        return self._base + checked_key(key)

    def _read(self, name: str) -> Stored:
        def whole() -> Stored:
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
            return Stored(answer["Body"].read(), _unquoted(answer["ETag"]))

        return self._asked("read", lambda: _again_when_cut(whole), name)

    def _has_first_byte(self, name: str) -> bool:
        """Ask for an object's first byte: false if the object is empty. A missing object raises ClientError."""
        try:
            self._client.get_object(Bucket=self._bucket, Key=name, Range="bytes=0-0")["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] != "InvalidRange":
                raise
            return False
        return True

    def _create(self, name: str, body: bytes, content_type: str) -> None:
        if not self._write("write", name, body, content_type, None):
            raise already_exists(f"s3://{self._bucket}/{name}")

    def _swap(self, name: str, body: bytes, content_type: str, tag: str | None) -> None:
        # An empty If-Match would be no condition.
        if tag == "" or not self._write("change", name, body, content_type, tag):
            raise changed(f"s3://{self._bucket}/{name}")

    def _write(self, action: str, name: str, body: bytes, content_type: str, tag: str | None) -> bool:
        """Whether it was written. It is not if the object did not have `tag`, or if `tag` is None and it existed already."""
        write_id = uuid4().hex
        arguments = {
            "ContentType": content_type,
            "Metadata": {"write-id": write_id},
            **({"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}),
            **self._settings.arguments(once=action == "write"),
        }
        refusal: ClientError | None = None
        for pause_s in _PAUSES_S:
            refusal = self._put(action, name, body, arguments)
            if refusal is None:
                return True
            there = self._head(name)
            if there.write_id == write_id:
                return True
            if there.tag != tag:
                return False
            # The condition holds, but the server refused: another write is under way, and may still fail.
            time.sleep(pause_s)
        if refusal is not None and _status(refusal) == 500:
            with self._errors.by(action, name):
                raise refusal
        raise self._errors.busy(f"other writes of {name} keep getting in the way")

    def _put(self, action: str, name: str, body: bytes, arguments: Mapping[str, Any]) -> ClientError | None:
        """None if it was written, else the answer that refuses the condition or does not say what became of it."""
        # A bucket with object lock refuses an object without this checksum.
        md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()

        def put() -> ClientError | None:
            try:
                self._client.put_object(Bucket=self._bucket, Key=name, Body=body, ContentMD5=md5, **arguments)
            except ClientError as error:
                if not _leaves_open(error):
                    raise
                return error
            return None

        return self._asked(action, put, name)

    def _head(self, name: str) -> "_Head":
        try:
            answer = self._asked("read", lambda: self._client.head_object(Bucket=self._bucket, Key=name), name)
        except MissingObjectError:
            return _Head(None, None)
        return _Head(answer["Metadata"].get("write-id"), _unquoted(answer["ETag"]))

    def _asked(self, action: str, call: Callable[[], T], name: str = "") -> T:
        """What `call` returns, in time, with boto3's errors as ours."""
        with self._errors.by(action, name):
            return within(CALL_LIMIT_S, call)


class _Head(NamedTuple):
    """The id of the write that made an object, and the object's tag; both are None if there is no object."""

    write_id: str | None
    tag: str | None


def _unquoted(etag: str) -> str:
    return etag.strip('"')


def _again_when_cut(read: Callable[[], Stored]) -> Stored:
    """Read again if the connection broke inside the answer's body. boto3 does not retry in this case."""
    for pause_s in _PAUSES_S[:-1]:
        try:
            return read()
        except (e.ResponseStreamingError, e.IncompleteReadError):
            time.sleep(pause_s)
    return read()


def _leaves_open(error: ClientError) -> bool:
    """Whether only the object can tell what became of the write.

    The condition does not hold, or the object is about to change. With 500 a server says neither, and may have written it:
    radosgw does so where sixteen writers race.
    """
    return _status(error) in (409, 412, 500) or _code(error) == "NoSuchKey"


def _s3_client(bucket: str) -> "S3Client":
    # boto3 uses path-style addresses for a custom endpoint, unless the AWS settings say otherwise.
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=AT_ONCE,
        retries={"mode": "standard"},
        # Otherwise boto3 writes it anew for each request.
        user_agent=f"vllm-qualify boto3/{boto3.__version__}",
        # Newer SDKs send checksum trailers by default. Ceph and other gateways refuse them or store them wrongly.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.session.Session(botocore_session=_session()).client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise StoreError(
            f"the AWS settings for the bucket {bucket} cannot be used ({type(error).__name__})",
            "check AWS_PROFILE, AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the files in ~/.aws",
            PLACE,
        ) from None


def _session() -> Session:
    """A session that reads the dates of S3's headers by the standard library: boto3's own way took a tenth of each read."""
    session = Session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_moment)
    return session


@cache
def _loader(path: str | None) -> Loader:
    """What boto3 knows of its services. Each session would read it anew, which takes longer than all else of a session."""
    return create_loader(path)


def _moment(value: Any) -> datetime:
    try:
        return parsedate_to_datetime(value)
    except (AttributeError, TypeError, ValueError):
        return parse_timestamp(value)


def _without_user(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _date(answer: Mapping[str, Any]) -> datetime | None:
    """The server's time in the head of an answer; None if a server gives none."""
    try:
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).astimezone(UTC)
    except (KeyError, ValueError):
        return None


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: ClientError) -> str:
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


class _Errors:
    """Turns boto3's errors about one bucket into ours.

    They are not chained to the original error: its text can contain a session token (in a header that boto3 could not send).
    """

    def __init__(self, bucket: str, base: str, settings: WriteSettings, client: "ClientMeta") -> None:
        self._url = f"s3://{bucket}/{base}".removesuffix("/")
        self._where = f"the bucket {bucket} at {_without_user(client.endpoint_url)}"
        self._bucket_arn = f"arn:{client.partition}:s3:::{bucket}"
        self._objects_arn = f"{self._bucket_arn}/{base}*"
        self._settings = settings

    @contextmanager
    def by(self, action: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise self._refused(error, action, name) from None
        except BotoCoreError as error:
            raise self._not_answered(error) from None
        except TimeoutError as error:
            raise self.busy(f"{action} {name}".rstrip() + f": {error}") from None

    def busy(self, problem: str) -> StoreBusyError:
        return StoreBusyError(f"{self._where}: {problem}", "try again later", PLACE)

    def _refused(self, error: ClientError, action: str, name: str) -> QualifyError:
        code, status = _code(error), _status(error)
        ahead = datetime.now(UTC) - (_date(error.response) or datetime.now(UTC))
        if code == "RequestTimeTooSkewed" and abs(ahead) > MOST_SKEW:
            return wrong_clock(ahead, self._url)
        answer = f"{action} {name}".rstrip() + f" was answered {status} {code}"
        if code in _NO_OBJECT and name:
            return missing(f"{name} in {self._where}")
        if code in _FULL or status == 507:
            return self._error(f"is full: {answer}", "free space, raise the quota, or choose another store")
        if code in _THROTTLED or status in (408, 429) or (status >= 500 and status != 501):
            return self.busy(answer)
        return self._error(*self._final(error, action, answer))

    def _final(self, error: ClientError, action: str, answer: str) -> tuple[str, str]:
        code, status = _code(error), _status(error)
        if code == "NoSuchBucket":
            return "does not exist", "create it, or check the store's URL, AWS_ENDPOINT_URL and AWS_PROFILE"
        if code in _WRONG_REGION or status in (301, 307):
            region = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
            return f"is in another region: {answer}", f"set AWS_DEFAULT_REGION to the bucket's region {region}".rstrip()
        if code in _CREDENTIAL_REMEDIES:
            return f"does not accept the credentials: {answer}", _CREDENTIAL_REMEDIES[code]
        if status in (401, 403):
            return f"does not allow this: {answer}", self._permission(action)
        if status == 501:
            return f"lacks a needed function: {answer}", "use one with conditional writes (If-None-Match, If-Match)"
        settings = "the store's URL, AWS_ENDPOINT_URL, what VLLM_QUALIFY_S3_* ask for"
        return f"refuses: {answer}", f"check {settings}, and that the policy allows {S3_ACTIONS}"

    def _permission(self, action: str) -> str:
        actions = self._settings.actions(action)
        arns = {self._bucket_arn if name == "s3:ListBucket" else self._objects_arn for name in actions}
        statement = json.dumps({"Effect": "Allow", "Action": actions, "Resource": sorted(arns)})
        key = f"; for its key also {' and '.join(KMS_ACTIONS)}" if self._settings.encryption == "aws:kms" else ""
        return f"add to the policy of these credentials {statement}{key}; and see that no other statement denies it"

    def _not_answered(self, error: BotoCoreError) -> StoreError:
        broken = (e.ConnectionClosedError, e.ReadTimeoutError, e.ResponseStreamingError, e.IncompleteReadError)
        kind = type(error).__name__
        if isinstance(error, e.SSLError):
            return self._error(
                f"has no valid TLS certificate ({kind})", "check AWS_ENDPOINT_URL, and AWS_CA_BUNDLE for a private CA"
            )
        if isinstance(error, e.NoCredentialsError | e.PartialCredentialsError):
            remedy = f"set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, with the right to {S3_ACTIONS}"
            return self._error(f"needs credentials, and there are none ({kind})", remedy)
        if isinstance(error, (e.ConnectionError, *broken)):
            remedy = "check AWS_ENDPOINT_URL, the network and the server; then try again"
            return StoreBusyError(f"{self._where} does not answer ({kind})", remedy, PLACE)
        return self._error(f"could not be asked ({kind})", "check the AWS settings: credentials, AWS_ENDPOINT_URL, AWS_PROFILE")

    def _error(self, problem: str, remedy: str) -> StoreError:
        return StoreError(f"{self._where} {problem}", remedy, PLACE)
