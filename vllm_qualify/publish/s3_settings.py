"""Settings from the environment for the objects that are written to S3, and the permissions that each action needs."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from vllm_qualify.errors import CallerError
from vllm_qualify.publish.store import PROBE_KEY

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
        only_once = {"StorageClass": self.storage_class, **self._lock_arguments()} if once else {}
        return {name: value for name, value in (every | only_once).items() if value}

    def actions(self, action: str) -> list[str]:
        return [*ACTIONS[action], *([LOCK_ACTION] if action == "write" and self.lock_mode else [])]

    def probe_key(self) -> str:
        """The probe's key. It depends on the settings, so that a check shows whether the store accepts these."""
        once = (self.encryption, self.kms_key, self.storage_class, self.lock_mode)
        return f"{PROBE_KEY}-{hashlib.sha256(repr(once).encode()).hexdigest()[:12]}" if any(once) else PROBE_KEY

    def _lock_arguments(self) -> dict[str, Any]:
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
