"""Open a store by its URL."""

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vllm_qualify.errors import CallerError
from vllm_qualify.publish.directory import DirectoryStore
from vllm_qualify.publish.store import PrunableStore, key_problem

ALLOWED_URLS = "s3://bucket, s3://bucket/prefix or file:///absolute/directory"


def open_store(url: str) -> PrunableStore:
    """The store at `s3://bucket[/prefix]` or `file:///absolute/directory`. It is not contacted yet.

    S3's endpoint, region and credentials come from the usual AWS settings (AWS_ENDPOINT_URL, AWS_PROFILE, …). These optional
    variables hold settings for the objects that are written there:

    - VLLM_QUALIFY_S3_SSE: the encryption, AES256 or aws:kms; else the bucket's default.
    - VLLM_QUALIFY_S3_SSE_KMS_KEY_ID: the key for aws:kms; else the account's own key.
    - VLLM_QUALIFY_S3_OBJECT_LOCK: governance:<days> or compliance:<days>, for objects that are written once.
    - VLLM_QUALIFY_S3_STORAGE_CLASS: a class whose objects can be read at once, for objects that are written once.

    Raises CallerError if the URL or one of these variables has the wrong form, StoreError if the AWS settings cannot be used.
    """
    # Imported late: boto3 takes 0.3 s or more.
    if url.startswith("s3://"):
        from vllm_qualify.publish.s3 import S3Store

        return S3Store(*_bucket_and_prefix(url))
    if url.startswith("file://"):
        return DirectoryStore(_directory_of_url(url))
    raise _bad_url("this is not the URL of a store", url)


def _bucket_and_prefix(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.removesuffix("/")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket):
        raise _bad_url("the bucket's name is missing or is not one", url)
    if prefix and key_problem(prefix):
        raise _bad_url(f"the prefix {key_problem(prefix)}", url)
    return bucket, prefix


def _directory_of_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/"):
        raise _bad_url("the directory must be absolute: file:// and then a path that begins with /", url)
    if parts.query or parts.fragment or "\0" in unquote(parts.path):
        raise _bad_url("the directory's path holds ?, # or a null; write them as %3F and %23", url)
    return Path(os.path.normpath(unquote(parts.path)))


def _bad_url(problem: str, url: str) -> CallerError:
    # A URL that may contain a password (scheme://key:secret@host) is not shown.
    shown = f" ({url})" if re.fullmatch(r"[\w./:-]{1,200}", url, re.ASCII) and url.count(":") <= 1 else ""
    remedy = f"write file://{url}" if shown and url.startswith("/") else f"use {ALLOWED_URLS}"
    return CallerError(f"{problem}{shown}", remedy, place="--store")
