"""The people who may decide. Each has a key of their own, and the file of approvers has only its hash."""

import base64
import binascii
import hashlib
import hmac
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from vllm_qualify.approval.decision import RECIPE
from vllm_qualify.approval.layout import Line, in_plain_words, one_line
from vllm_qualify.errors import CallerError, writing

APPROVERS_FILE = "VLLM_QUALIFY_APPROVERS_FILE"
People = dict[Line, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


def read_people(file: Path) -> People:
    """Names, each with the SHA-256 of the person's key. A key is 32 random bytes, so a fast hash makes no guess easier.

    Raises CallerError if the file is not there or not valid, everybody may write it, or it names the recipe itself.
    """
    place = str(file)
    try:
        with file.expanduser().open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & stat.S_IWOTH:
                raise CallerError("every user of this machine may name approvers", f"chmod o-w {file}", place)
            people = TypeAdapter[People](People).validate_json(opened.read())
    except OSError as error:
        remedy = "make it with `vllm-qualify approver key NAME --file FILE`"
        raise CallerError(f"the approvers cannot be read: {error.strerror}", remedy, place) from error
    except ValidationError as error:
        raise CallerError("this is not a file of approvers", 'write {"NAME": "SHA-256 of the key"}', place) from error
    if RECIPE in people:
        raise CallerError(f"'{RECIPE}' decides automatically, and is not a person", "choose another name", place)
    return people


def add_person(file: Path, name: str) -> str:
    """Give a person a new key, in place of an older one. Returns the key, which is kept nowhere.

    Raises CallerError if the name cannot be kept or the file is not a file of approvers, HostError if it cannot be written.
    """
    with in_plain_words():
        name = TypeAdapter[str](Line).validate_python(one_line(name))
    if name == RECIPE or ":" in name:
        raise CallerError(f"'{name}' cannot log in: a login ends its name with a colon", "choose another name", "NAME")
    file = file.expanduser()
    key, people = secrets.token_urlsafe(32), read_people(file) if file.exists() else {}
    body = json.dumps(people | {name: _hash_key(key)}, indent=2, ensure_ascii=False) + "\n"
    with writing(str(file)):
        part = file.with_name(f"{file.name}.part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
            opened.write(body)
        part.replace(file)
    return key


def person(people: People, authorization: str) -> str | None:
    """Who logs in, by an `Authorization` header of HTTP's Basic scheme with a name and a key; None if nobody does."""
    scheme, _, encoded = authorization.partition(" ")
    try:
        name, _, key = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    known = people.get(name)
    is_theirs = hmac.compare_digest(_hash_key(key), known or _hash_key(""))
    return name if scheme.lower() == "basic" and known and is_theirs else None


def _hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
