"""Copies of frozen documents with a change somewhere inside."""

from typing import Any, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


def changed(document: M, part: str = "", /, **changes: Any) -> M:
    """A copy with other values of `part`'s fields, where `part` leads into the document, such as `plan.cell.release`."""
    name, _, rest = part.partition(".")
    return document.model_copy(update={name: changed(getattr(document, name), rest, **changes)} if name else changes)
