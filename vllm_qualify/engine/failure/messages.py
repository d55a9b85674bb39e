"""vLLM's own messages: found in a log's line by their words, and decided by their family. Pure but for reading the catalog.

`python -m infra.engine_messages` makes the catalog's table from the source in vLLM's wheels.
"""

import gzip
import json
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from vllm_qualify.engine.failure.families import Family, decide
from vllm_qualify.recipe.loading import catalog_folder

# A message with fewer literal words could be anybody's.
LEAST_WORDS = 3
VALUE = "{}"
_Pair = tuple[str, str]


class Statement(NamedTuple):
    """A `raise` or a `logger.error` of vLLM's source."""

    place: str
    """the file, below the package vllm"""
    raised: str
    """the exception's class; empty for a logged message"""
    text: str
    """the message, `{}` for each value"""
    versions: list[int]
    """the versions that have it, as places in the table's list of versions"""


class MessageTable(NamedTuple):
    """The messages of several versions of vLLM."""

    versions: list[str]
    statements: list[Statement]


@cache
def read_table() -> MessageTable:
    content = json.loads(gzip.decompress((catalog_folder() / "messages.json.gz").read_bytes()))
    return MessageTable(content["versions"], [Statement(*each) for each in content["statements"]])


def find_family(said: str) -> Family | None:
    """The family of the message of vLLM that the line says; of several messages, that of the one with the longest text."""
    index = _index_messages()
    found = (message for pair in pairwise(said.split()) for message in index.get(pair, ()) if _is_said(message.text, said))
    longest = max(found, key=lambda message: len(message.text), default=None)
    return decide(longest.place, longest.text) if longest else None


def is_readable(text: str) -> bool:
    """Whether the message has words enough to be known again in a log."""
    words = [word for word in _first_line(text).split() if VALUE not in word and len(word) > 1]
    return len(words) >= LEAST_WORDS and bool(_whole_pairs(text))


@cache
def _index_messages() -> dict[_Pair, list[Statement]]:
    """By the two words side by side that the fewest messages have."""
    readable = [each for each in read_table().statements if is_readable(each.text)]
    common = Counter(pair for each in readable for pair in _whole_pairs(each.text))
    index = defaultdict(list)
    for each in readable:
        index[min(_whole_pairs(each.text), key=common.__getitem__)].append(each)
    return index


def _whole_pairs(text: str) -> list[_Pair]:
    """Words that stand side by side in every log with this message."""
    return [pair for pair in pairwise(_first_line(text).split()) if VALUE not in pair[0] and VALUE not in pair[1]]


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0].strip()


def _is_said(text: str, said: str) -> bool:
    """Whether the message's literal parts stand in the line in their order. No regular expression: the line may be hostile."""
    place = 0
    for part in _first_line(text).split(VALUE):
        place = said.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True
