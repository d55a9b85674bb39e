"""Where approvals are in the store, and how their documents are written."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field, ValidationError

from vllm_qualify.errors import CallerError

JSON = "application/json"
INDEX_KEY = "index.json"
BOARD_KEY = "index.html"

_NAME = r"[a-z0-9][a-z0-9._-]*"
_CELL = re.compile(rf"{_NAME}(/{_NAME}){{3}}")
_APPROVAL = re.compile(rf"approvals/(?P<cell>{_CELL.pattern})/(?P<run_id>[A-Za-z0-9_-]+)/approval\.json")


def _is_one_line(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("write it in one line, without control characters")
    return text


Format = Literal["config", "docker", "compose", "kubernetes", "json"]
Line = Annotated[str, Field(strict=True, min_length=1, max_length=500), AfterValidator(_is_one_line)]
"""Text that a person wrote and that others see, also on a terminal."""
Moment = Annotated[AwareDatetime, AfterValidator(lambda at: at.astimezone(UTC))]


def one_line(text: str) -> str:
    """Text from a form field, with its line breaks as spaces."""
    return " ".join(text.split())


@contextmanager
def in_plain_words() -> Iterator[None]:
    """Within the block, a name or a reason that is missing or cannot be shown is a CallerError."""
    try:
        yield
    except ValidationError as error:
        raise CallerError(reason_of(error), "give a name and a reason in plain words") from error


def checked_cell(text: str) -> str:
    """A cell's id that a user gave. Raises CallerError if it cannot be one."""
    if not _CELL.fullmatch(text):
        raise CallerError("this is not a cell", "write it as RECIPE/VARIANT/GPU_TYPE/PROFILE", "CELL")
    return text


def approval_at(key: str) -> tuple[str, str] | None:
    """Cell and run of an approval's key; None if it is not such a key."""
    match = _APPROVAL.fullmatch(key)
    return (match["cell"], match["run_id"]) if match else None


def _key_of_run(name: str, cell: str, run_id: str) -> str:
    return f"approvals/{cell}/{run_id}/{name}.json"


approval_key = partial(_key_of_run, "approval")
decision_key = partial(_key_of_run, "decision")
entry_key = partial(_key_of_run, "entry")
revocation_key = partial(_key_of_run, "revocation")


def pointer_key(cell: str) -> str:
    return f"approvals/{cell}/pointer.json"


def approvals_folder(cell: str) -> str:
    return f"approvals/{cell}/"


def cell_index_key(cell: str) -> str:
    return f"cells/{cell}/index.json"


def cell_page_key(cell: str) -> str:
    return f"cells/{cell}/index.html"


def cell_of_index(key: str) -> str | None:
    """The cell of a cell's index; None if it is not such a key."""
    cell = key.removeprefix("cells/").removesuffix("/index.json")
    return cell if key == cell_index_key(cell) and _CELL.fullmatch(cell) else None


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def canonical(document: object) -> bytes:
    """The bytes to hash or sign: equal documents give equal bytes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def readable(document: object) -> bytes:
    """The same document for people and for diffs."""
    return json.dumps(document, sort_keys=True, indent=2).encode() + b"\n"


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises ValueError if it is not a JSON object, or if a key is given twice: parsers differ in which value they take."""
    try:
        document = json.loads(body, object_pairs_hook=_each_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key is given twice")
    return document


def reason_of(error: ValidationError) -> str:
    """The place and the reason of the first error, on one line and without text of the document."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")


def day(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d}"
