"""vLLM's own messages: found in a log's line by their words, and decided by their family. Pure but for reading the catalog.

`python -m infra.engine_messages` makes the catalog's table from the source in vLLM's wheels.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from vllm_qualify.engine.failure.families import Family, decide
from vllm_qualify.recipe.loading import catalog_folder

# A message with fewer literal words could be anybody's.
LEAST_WORDS = 4
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
    anchor: int
    """the place, among the words of the text's first line, of two words that find it"""
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


@cache
def _index_messages() -> dict[_Pair, list[Statement]]:
    """By the two words side by side that find a message. What is only logged may be survived, and is not looked for."""
    index = defaultdict(list)
    for each in read_table().statements:
        if each.raised:
            words = _first_line(each.text).split(maxsplit=each.anchor + 2)
            index[words[each.anchor], words[each.anchor + 1]].append(each)
    return index


def anchor_messages(texts: Iterable[str]) -> dict[str, int]:
    """For each text that can be known again in a log, the place of its first of two words that the fewest of the texts have."""
    pairs = {text: found for text in texts if (found := _whole_pairs(text)) and _count_words(text) >= LEAST_WORDS}
    common = Counter(pair for found in pairs.values() for pair in set(found.values()))
    return {text: min(found, key=lambda place: common[found[place]]) for text, found in pairs.items()}


def _count_words(text: str) -> int:
    return sum(VALUE not in word and len(word) > 1 for word in _first_line(text).split())


def _whole_pairs(text: str) -> dict[int, _Pair]:
    """Words that stand side by side in every log with this message, by the place of the first."""
    pairs = enumerate(pairwise(_first_line(text).split()))
    return {place: pair for place, pair in pairs if VALUE not in pair[0] and VALUE not in pair[1]}


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
