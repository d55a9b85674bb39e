"""YAML of others, read within bounds: what a short text refers to again and again can be a billion values."""

from typing import Any

from ruamel.yaml import YAML

MOST_VALUES = 200_000
MOST_CHARACTERS = 4_000_000


def load_yaml(text: str) -> Any:
    """The document of a YAML 1.2 text.

    Raises:
        YAMLError, or one of the errors that ruamel raises for documents that are not valid.
        ValueError: the text is too long, or written out it has too many values, or a value contains itself.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    # The pure loader reads YAML 1.2, as the tools that write recipes do; the C loader reads 1.1.
    document = YAML(typ="safe", pure=True).load(text)
    _size(document, {})
    return document


def _size(value: Any, known: dict[int, int | None]) -> int:
    """How many values it has, each counted as often as it is referred to. `known` has the sizes by identity."""
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    if not inner:
        return 1
    if id(value) not in known:
        known[id(value)] = None
        known[id(value)] = 1 + sum(_size(each, known) for each in inner)
    size = known[id(value)]
    if size is None:
        raise ValueError("a value contains itself")
    if size > MOST_VALUES:
        raise ValueError(f"written out, it has more than {MOST_VALUES:,} values")
    return size
