"""What the environment's settings make S3 keep: asked of the server, as it answers about the object."""

import base64
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from tests.s3 import client_of_environment
from vllm_qualify.errors import CallerError, StoreError
from vllm_qualify.publish.stores import open_store

ONCE, CHANGEABLE = "evidence/0/load.json", "index.json"


@pytest.fixture
def bucket(moto_url: str) -> str:
    """The name of a bucket that can lock objects."""
    assert moto_url
    name = uuid4().hex
    client_of_environment().create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    return name


def written(bucket: str, settings: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the server says of an object that was written once, and of one that was swapped twice, under these settings."""
    for name, value in settings.items():
        monkeypatch.setenv(f"VLLM_QUALIFY_S3_{name}", value)
    store = open_store(f"s3://{bucket}")
    store.check()
    store.put_new(ONCE, b"once", "application/json")
    store.swap(CHANGEABLE, b"1", "application/json", None)
    store.swap(CHANGEABLE, b"12", "application/json", store.read(CHANGEABLE).tag)
    assert (store.get(ONCE), store.get(CHANGEABLE)) == (b"once", b"12")
    client = client_of_environment()
    once, changeable = (dict(client.head_object(Bucket=bucket, Key=key)) for key in (ONCE, CHANGEABLE))
    return once, changeable


def test_without_settings_nothing_is_asked_for(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for head in written(bucket, {}, monkeypatch):
        for name in ("ServerSideEncryption", "SSEKMSKeyId", "StorageClass", "ObjectLockMode", "ObjectLockRetainUntilDate"):
            assert name not in head
        assert head["ContentType"] == "application/json"


@pytest.mark.parametrize(
    ("algorithm", "key"), [("AES256", ""), ("aws:kms", ""), ("aws:kms", "arn:aws:kms:us-east-1:111122223333:key/of-the-store")]
)
def test_encryption_holds_for_all_objects(bucket: str, monkeypatch: pytest.MonkeyPatch, algorithm: str, key: str) -> None:
    for head in written(bucket, {"SSE": algorithm, "SSE_KMS_KEY_ID": key}, monkeypatch):
        assert (head["ServerSideEncryption"], head.get("SSEKMSKeyId", "")) == (algorithm, key)


@pytest.mark.parametrize("name", ["STANDARD_IA", "INTELLIGENT_TIERING"])
def test_the_storage_class_is_that_of_what_is_written_once(bucket: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    once, changeable = written(bucket, {"STORAGE_CLASS": name}, monkeypatch)
    assert once["StorageClass"] == name
    assert "StorageClass" not in changeable


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["governance", "compliance"])
def test_what_is_written_once_is_locked(bucket: str, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    once, changeable = written(bucket, {"OBJECT_LOCK": f"{mode}:30"}, monkeypatch)
    assert once["ObjectLockMode"] == mode.upper()
    remaining = once["ObjectLockRetainUntilDate"] - datetime.now(UTC)
    assert timedelta(days=30, minutes=-10) < remaining <= timedelta(days=30)
    assert "ObjectLockMode" not in changeable


def test_every_write_has_the_sum_that_a_bucket_with_lock_demands(bucket: str) -> None:
    store, seen = open_store(f"s3://{bucket}"), []
    store._client.meta.events.register(  # type: ignore[attr-defined]  # boto3's own hook: what is about to be sent
        "before-send.s3.PutObject", lambda request, **_: seen.append(request.headers["Content-MD5"].decode())
    )
    store.put_new(ONCE, b"once", "application/json")
    store.swap(CHANGEABLE, b"1", "application/json", None)
    assert seen == [base64.b64encode(hashlib.md5(body).digest()).decode() for body in (b"once", b"1")]  # noqa: S324  # S3's choice


def test_check_writes_with_the_settings_even_after_one_without(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(f"s3://{bucket}").check()
    monkeypatch.setenv("VLLM_QUALIFY_S3_OBJECT_LOCK", "governance:30")
    open_store(f"s3://{bucket}").check()
    client = client_of_environment()
    probes = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]]
    modes = [client.head_object(Bucket=bucket, Key=key).get("ObjectLockMode") for key in probes]
    assert modes.count("GOVERNANCE") == 1


def test_check_finds_out_that_a_bucket_cannot_lock(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_QUALIFY_S3_OBJECT_LOCK", "governance:30")
    with pytest.raises(StoreError, match="VLLM_QUALIFY_S3_"):
        open_store(moto_url).check()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("SSE", "aes256", "AES256 or aws:kms"),
        ("SSE", "aws:kms:dsse", "AES256 or aws:kms"),
        ("SSE_KMS_KEY_ID", "a-key", "VLLM_QUALIFY_S3_SSE=aws:kms"),
        ("STORAGE_CLASS", "DEEP_ARCHIVE", "STANDARD_IA or ONEZONE_IA or INTELLIGENT_TIERING"),
        ("OBJECT_LOCK", "governance", "governance:<days> or compliance:<days>"),
        ("OBJECT_LOCK", "governance:0", "1 to 36500 days"),
        ("OBJECT_LOCK", "governance:-3", "1 to 36500 days"),
        ("OBJECT_LOCK", "compliance:36501", "1 to 36500 days"),
        ("OBJECT_LOCK", "Compliance:30", "compliance:<days>"),
        ("OBJECT_LOCK", "compliance:30d", "compliance:<days>"),
        ("OBJECT_LOCK", "compliance:٣", "compliance:<days>"),
    ],
)
def test_a_bad_value_is_the_callers_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str) -> None:
    monkeypatch.setenv(f"VLLM_QUALIFY_S3_{name}", value)
    with pytest.raises(CallerError) as raised:
        open_store("s3://bucket")
    assert raised.value.place == f"VLLM_QUALIFY_S3_{name}"
    assert allowed in raised.value.remedy
    assert "unset" in raised.value.remedy
    assert open_store("file:///store").url == "file:///store", "a directory has no such settings"
