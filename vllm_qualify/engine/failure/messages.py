"""Messages of vLLM and of its packages: found in a log's line by their words, and decided by their family.

Pure but for reading the catalog. `python -m infra.engine_messages` and `python -m infra.package_messages` make its two tables
from what is in the wheels.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from vllm_qualify.engine.failure.families import Family, decide
from vllm_qualify.engine.failure.package_families import decide_package
from vllm_qualify.recipe.loading import catalog_folder

ENGINE, PACKAGES = "messages.json.gz", "package-messages.json.gz"
# A message with fewer literal words could be anybody's.
LEAST_WORDS = 4
VALUE = "{}"
_NUMBERED = "cuda/"
# A failing process says one thing many times, and so does each rank.
_MOST_LINES_KEPT = 1000
_VLLM = "vLLM"
_Pair = tuple[str, str]
_Row = tuple[str, str, str, int, list[int]]
"""a statement as the table's file has it"""


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


class Message(NamedTuple):
    """Who says it, and what it means."""

    speaker: str
    family: Family

    @property
    def is_of_engine(self) -> bool:
        return self.speaker == _VLLM


@cache
def read_table(name: str = ENGINE) -> MessageTable:
    content = _read_content(name)
    return MessageTable(content["versions"], [Statement(*each) for each in content["statements"]])


def _read_rows(name: str) -> list[_Row]:
    rows: list[_Row] = _read_content(name)["statements"]
    return rows


@cache
def _read_content(name: str) -> Any:
    return json.loads(gzip.decompress((catalog_folder() / name).read_bytes()).decode())


@lru_cache(_MOST_LINES_KEPT)
def find_message(said: str) -> Message | None:
    """The message that the line says, of vLLM or of a package; of several, that with the longest text.

    If vLLM's longest message is not decided, nobody else's is taken for it.
    """
    words = [f"{one} {next_}" for one, next_ in pairwise(said.split())]
    of_engine, of_package = (_find_longest(said, words, name) for name in (ENGINE, PACKAGES))
    if of_engine and (of_package is None or len(of_engine.text) >= len(of_package.text)):
        return _make_message(_VLLM, decide(of_engine.place, of_engine.text))
    if of_package is None:
        return None
    return _make_message(of_package.place.split("/")[0], decide_package(of_package.place, of_package.text))


def find_family(said: str) -> Family | None:
    message = find_message(said)
    return message.family if message else None


def find_fate(said: str) -> str:
    """What the line's message means; empty for a line that nobody knows."""
    family = find_family(said)
    return family.fate if family else ""


def _make_message(speaker: str, family: Family | None) -> Message | None:
    return Message(speaker, family) if family else None


def _find_longest(said: str, words: list[str], name: str) -> Statement | None:
    index = _index_messages(name)
    found = (row for pair in words for row in index.get(pair, ()) if _is_said(row[2], said))
    longest = max(found, key=lambda row: len(row[2]), default=None)
    return Statement(*longest) if longest else None


@cache
def _index_messages(name: str) -> dict[str, list[_Row]]:
    """By the two words side by side that find a message. What vLLM only logs may be survived, and is not looked for.

    The first failure waits for the index, so it makes few objects: the rows stay as the file has them.
    """
    index = defaultdict(list)
    for row in _read_rows(name):
        place, raised, text, anchor, _ = row
        if (raised or name == PACKAGES) and not place.startswith(_NUMBERED):
            words = text.split(maxsplit=anchor + 2)
            index[f"{words[anchor]} {words[anchor + 1]}"].append(row)
    return index


def find_numbered(said: str) -> Message | None:
    """The error of CUDA or HIP with this name (`cudaErrorNoDevice`) or text; None for one that the release itself made."""
    place = _index_numbered().get(said.strip().lower().replace("rocm-capable", "cuda-capable"))
    family = decide_package(place, "") if place else None
    return Message("CUDA", family) if family and family.fate != "crashed" else None


@cache
def _index_numbered() -> dict[str, str]:
    """The places of numbered errors by name, without who numbers, and by text."""
    places = {place: text for place, _, text, *_ in _read_rows(PACKAGES) if place.startswith(_NUMBERED)}
    return {text.lower(): place for place, text in places.items()} | {_name_of(place).lower(): place for place in places}


def _name_of(place: str) -> str:
    return place.removeprefix(_NUMBERED).removeprefix("cudaError")


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
