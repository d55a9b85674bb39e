"""A store in S3, through boto3: the only module that imports it."""

import base64
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import boto3
from botocore import exceptions as e
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from vllm_qualify.errors import QualifyError, StoreBusyError, StoreError
from vllm_qualify.limits import call_within
from vllm_qualify.publish import store
from vllm_qualify.publish.s3_settings import KMS_ACTIONS, WriteSettings, settings_of
from vllm_qualify.publish.store import PLACE, MissingObjectError, Stored, checked_key

if TYPE_CHECKING:
    from botocore.client import ClientMeta
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

S3_ACTIONS = "s3:PutObject, s3:GetObject, s3:ListBucket"

# For one read, and for one call with all its retries.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, CALL_LIMIT_S = 10.0, 60.0, 900.0
# Connections that are kept: as many as calls are made at a time.
AT_ONCE = 32
_PAUSES_S = (0.1, 0.4, 1.5, 0)


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
        return f"s3://{self._bucket}/{self._object_name(key)}"

    def put_new(self, key: str, body: bytes, content_type: str) -> None:
        self._create_object(self._object_name(key), body, content_type)

    def get(self, key: str, most_bytes: int = store.MOST_DOCUMENT_BYTES) -> bytes:
        return self._read_object(self._object_name(key), most_bytes).body

    def read(self, key: str) -> Stored:
        return self._read_object(self._object_name(key))

    def swap(self, key: str, body: bytes, content_type: str, tag: str | None) -> None:
        self._swap_object(self._object_name(key), body, content_type, tag)

    def delete(self, key: str) -> None:
        name = self._object_name(key)
        self._ask("delete", lambda: self._client.delete_object(Bucket=self._bucket, Key=name), name)

    def exists(self, key: str) -> bool:
        # Not a list, which some services answer from an old copy. Not HEAD: its answer has no body, so a missing bucket looks
        # like a missing object.
        name = self._object_name(key)
        try:
            self._ask("read", lambda: self._has_first_byte(name), name)
        except MissingObjectError:
            return False
        return True

    def keys(self, prefix: str) -> Iterator[str]:
        start = self._base + store.checked_prefix(prefix)
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start))
        names: list[str] = []
        # Each page is a call of its own: how many there are depends on the store.
        while page := self._ask("list", lambda: next(pages, None)):
            names += [entry["Key"] for entry in page.get("Contents", [])]
        return store.sorted_keys((name.removeprefix(self._base) for name in names), prefix)

    def check(self) -> None:
        probe, swapped = self._base + self._settings.probe_key(), self._base + store.SWAP_PROBE_KEY
        store.require_create_only(lambda: self._create_object(probe, store.PROBE_BODY, "text/plain"), self.url)
        self._read_object(probe)
        store.require_swap(
            lambda: self._read_object(swapped), lambda body, tag: self._swap_object(swapped, body, "text/plain", tag), self.url
        )
        store.checked_now(self)

    def now(self) -> datetime:
        answer = self._ask("list", lambda: self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._base, MaxKeys=1))
        return _date_of_answer(answer) or datetime.now(UTC)

    def _object_name(self, key: str) -> str:
        return self._base + checked_key(key)

    def _read_object(self, name: str, most_bytes: int = store.MOST_DOCUMENT_BYTES) -> Stored:
        def whole() -> Stored:
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
            if answer["ContentLength"] > most_bytes:
                answer["Body"].close()
                raise store.too_long_error(f"s3://{self._bucket}/{name}", most_bytes)
            return Stored(answer["Body"].read(), answer["ETag"].strip('"'))

        return self._ask("read", lambda: _again_when_cut(whole), name)

    def _has_first_byte(self, name: str) -> bool:
        """Ask for an object's first byte: false if the object is empty. A missing object raises ClientError."""
        try:
            self._client.get_object(Bucket=self._bucket, Key=name, Range="bytes=0-0")["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] != "InvalidRange":
                raise
            return False
        return True

    def _create_object(self, name: str, body: bytes, content_type: str) -> None:
        if not self._write_object("write", name, body, content_type, None):
            raise store.already_exists(f"s3://{self._bucket}/{name}")

    def _swap_object(self, name: str, body: bytes, content_type: str, tag: str | None) -> None:
        # An empty If-Match would be no condition.
        if tag == "" or not self._write_object("change", name, body, content_type, tag):
            raise store.changed_error(f"s3://{self._bucket}/{name}")

    def _write_object(self, action: str, name: str, body: bytes, content_type: str, tag: str | None) -> bool:
        """Whether it was written. It is not if the object did not have `tag`, or if `tag` is None and it existed already."""
        write_id = uuid4().hex
        arguments = {"ContentType": content_type, "Metadata": {"write-id": write_id}}
        arguments |= {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        arguments |= self._settings.arguments(once=action == "write")
        refusal: ClientError | None = None
        for pause_s in _PAUSES_S:
            refusal = self._put_object(action, name, body, arguments)
            if refusal is None:
                return True
            written_by, tag_there = self._read_head(name)
            if written_by == write_id:
                return True
            if tag_there != tag:
                return False
            # The condition holds, but the server refused: another write is under way, and may still fail.
            time.sleep(pause_s)
        if refusal is not None and _status_code(refusal) == 500:
            with self._errors.translating(action, name):
                raise refusal
        raise self._errors.busy(f"other writes of {name} keep getting in the way")

    def _put_object(self, action: str, name: str, body: bytes, arguments: Mapping[str, Any]) -> ClientError | None:
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

        return self._ask(action, put, name)

    def _read_head(self, name: str) -> tuple[str | None, str | None]:
        """The id of the write that made an object, and the object's tag; both are None if there is no object."""
        try:
            answer = self._ask("read", lambda: self._client.head_object(Bucket=self._bucket, Key=name), name)
        except MissingObjectError:
            return None, None
        return answer["Metadata"].get("write-id"), answer["ETag"].strip('"')

    def _ask(self, action: str, call: Callable[[], T], name: str = "") -> T:
        """What `call` returns, in time, with boto3's errors as ours."""
        with self._errors.translating(action, name):
            return call_within(CALL_LIMIT_S, call)


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
    return _status_code(error) in (409, 412, 500) or _error_code(error) == "NoSuchKey"


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
        return boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        problem = f"the AWS settings for the bucket {bucket} cannot be used ({type(error).__name__})"
        remedy = "check AWS_PROFILE, AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the files in ~/.aws"
        raise StoreError(problem, remedy, PLACE) from None


def _date_of_answer(answer: Mapping[str, Any]) -> datetime | None:
    """The server's time in the head of an answer; None if a server gives none."""
    try:
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).astimezone(UTC)
    except (KeyError, ValueError):
        return None


def _status_code(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _error_code(error: ClientError) -> str:
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
    """Turns boto3's errors about one bucket into ours, unchained: their text can hold a session token, in a header."""

    def __init__(self, bucket: str, base: str, settings: WriteSettings, client: "ClientMeta") -> None:
        self._url = f"s3://{bucket}/{base}".removesuffix("/")
        endpoint = urlsplit(client.endpoint_url)
        # Without a user's name and password.
        self._where = f"the bucket {bucket} at {endpoint.scheme}://{endpoint.netloc.rpartition('@')[2]}"
        self._bucket_arn = f"arn:{client.partition}:s3:::{bucket}"
        self._objects_arn = f"{self._bucket_arn}/{base}*"
        self._settings = settings

    @contextmanager
    def translating(self, action: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise self._refused_error(error, action, name) from None
        except BotoCoreError as error:
            raise self._not_answered(error) from None
        except TimeoutError as error:
            raise self.busy(f"{action} {name}".rstrip() + f": {error}") from None

    def busy(self, problem: str) -> StoreBusyError:
        return StoreBusyError(f"{self._where}: {problem}", "try again later", PLACE)

    def _refused_error(self, error: ClientError, action: str, name: str) -> QualifyError:
        code, status = _error_code(error), _status_code(error)
        ahead = datetime.now(UTC) - (_date_of_answer(error.response) or datetime.now(UTC))
        if code == "RequestTimeTooSkewed" and abs(ahead) > store.MOST_SKEW:
            return store.wrong_clock(ahead, self._url)
        answer = f"{action} {name}".rstrip() + f" was answered {status} {code}"
        if code in _NO_OBJECT and name:
            return store.missing_error(f"{name} in {self._where}")
        if code in _FULL or status == 507:
            return self._store_error(f"is full: {answer}", "free space, raise the quota, or choose another store")
        if code in _THROTTLED or status in (408, 429) or (status >= 500 and status != 501):
            return self.busy(answer)
        return self._store_error(*self._final_problem(error, action, answer))

    def _final_problem(self, error: ClientError, action: str, answer: str) -> tuple[str, str]:
        code, status = _error_code(error), _status_code(error)
        if code == "NoSuchBucket":
            return "does not exist", "create it, or check the store's URL, AWS_ENDPOINT_URL and AWS_PROFILE"
        if code in _WRONG_REGION or status in (301, 307):
            region = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
            return f"is in another region: {answer}", f"set AWS_DEFAULT_REGION to the bucket's region {region}".rstrip()
        if code in _CREDENTIAL_REMEDIES:
            return f"does not accept the credentials: {answer}", _CREDENTIAL_REMEDIES[code]
        if status in (401, 403):
            return f"does not allow this: {answer}", self._permission_remedy(action)
        if status == 501:
            return f"lacks a needed function: {answer}", "use one with conditional writes (If-None-Match, If-Match)"
        settings = "the store's URL, AWS_ENDPOINT_URL, what VLLM_QUALIFY_S3_* ask for"
        return f"refuses: {answer}", f"check {settings}, and that the policy allows {S3_ACTIONS}"

    def _permission_remedy(self, action: str) -> str:
        actions = self._settings.actions(action)
        arns = {self._bucket_arn if name == "s3:ListBucket" else self._objects_arn for name in actions}
        statement = json.dumps({"Effect": "Allow", "Action": actions, "Resource": sorted(arns)})
        key = f"; for its key also {' and '.join(KMS_ACTIONS)}" if self._settings.encryption == "aws:kms" else ""
        return f"add to the policy of these credentials {statement}{key}; and see that no other statement denies it"

    def _not_answered(self, error: BotoCoreError) -> StoreError:
        broken = (e.ConnectionClosedError, e.ReadTimeoutError, e.ResponseStreamingError, e.IncompleteReadError)
        kind = type(error).__name__
        if isinstance(error, e.SSLError):
            remedy = "check AWS_ENDPOINT_URL, and AWS_CA_BUNDLE for a private CA"
            return self._store_error(f"has no valid TLS certificate ({kind})", remedy)
        if isinstance(error, e.NoCredentialsError | e.PartialCredentialsError):
            remedy = f"set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, with the right to {S3_ACTIONS}"
            return self._store_error(f"needs credentials, and there are none ({kind})", remedy)
        if isinstance(error, (e.ConnectionError, *broken)):
            remedy = "check AWS_ENDPOINT_URL, the network and the server; then try again"
            return StoreBusyError(f"{self._where} does not answer ({kind})", remedy, PLACE)
        remedy = "check the AWS settings: credentials, AWS_ENDPOINT_URL, AWS_PROFILE"
        return self._store_error(f"could not be asked ({kind})", remedy)

    def _store_error(self, problem: str, remedy: str) -> StoreError:
        return StoreError(f"{self._where} {problem}", remedy, PLACE)
