"""Reads the source's documents. A value of a wrong type is an error that names the file and the key."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.loading import load_yaml, short
from vllm_qualify.recipe.serving import Environment


class InexpressibleError(CallerError):
    """The source is valid, but no recipe of ours can express it."""


@dataclass(frozen=True)
class Node:
    """A part of a document, and its place in it. For a missing key of a mapping, the value is None."""

    value: Any
    file: Path
    keys: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.file}: {'.'.join(self.keys) or '(top level)'}"

    def __getitem__(self, key: str) -> "Node":
        return Node(self.mapping().get(key), self.file, (*self.keys, key))

    def __bool__(self) -> bool:
        """Whether it has a value; 0 and empty values count."""
        return self.value is not None

    def wrong(self, wanted: str) -> CallerError:
        there = f"is {short(self.value)}" if self else "is missing"
        return CallerError(f"{wanted} is needed here, and it {there}", "take the file as recipes publishes it", self.place)

    def refusal(self, what: str, remedy: str = "import another strategy or GPU type of this model") -> InexpressibleError:
        return InexpressibleError(f"a recipe cannot express {what}", remedy, place=self.place)

    def mapping(self) -> dict[str, Any]:
        """The mapping; empty if the value is None. Raises CallerError if the value is not a mapping with text keys."""
        value = self.value if self else {}
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.wrong("a mapping")
        return value

    def items(self) -> Iterator[tuple[str, "Node"]]:
        return ((key, self[key]) for key in self.mapping())

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.wrong("a text")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            raise self.wrong("a number")
        return self.value

    def count(self) -> int:
        if type(self.value) is not int or self.value < 1:
            raise self.wrong("a whole number of 1 or more")
        return self.value

    def words(self) -> list[str]:
        """A list of words; a whole number becomes its digits. If the value is None, the list is empty."""
        value = self.value if self else []
        if not isinstance(value, list):
            raise self.wrong("a list of words")
        return [Node(word, self.file, (*self.keys, str(index))).word() for index, word in enumerate(value)]

    def word(self) -> str:
        if type(self.value) is int:
            return str(self.value)
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def environment(self) -> Environment:
        return {name: part.word() for name, part in self.items()}


# Four bytes for each character that a YAML file may have. A device's file never ends.
MOST_BYTES = 16_000_000
# No caller changes a document, and every variant of every model has the same taxonomy and strategies.
_load_cached_yaml = lru_cache(maxsize=32)(load_yaml)


def read_json(path: Path) -> Node:
    return _read_document(path, json.loads, "JSON")


def read_yaml(path: Path) -> Node:
    return _read_document(path, _load_cached_yaml, "YAML")


def _read_document(path: Path, parse: Callable[[str], Any], form: str) -> Node:
    try:
        with path.open("rb") as file:
            body = file.read(MOST_BYTES + 1)
        if len(body) > MOST_BYTES:
            raise CallerError(f"longer than {MOST_BYTES:,} bytes", "give one recipe", str(path))
        return Node(parse(body.decode("utf-8")), path)
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror}", "check the path and its permissions", str(path)) from error
    # For invalid documents, ruamel also raises some internal errors of its code.
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        problem = " ".join(str(error).split())
        raise CallerError(f"not valid {form}: {problem}", f"give it as UTF-8 {form}", str(path)) from error
