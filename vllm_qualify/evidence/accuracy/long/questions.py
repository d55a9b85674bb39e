"""Questions about texts of any length, made from a seed, and their score.

The kinds are those of RULER that need no data (Hsieh et al. 2024, arXiv 2404.06654; github.com/NVIDIA/RULER): codes that are
hidden in prose or among other codes, values that are passed on, and words that are counted. The texts are this project's own,
so that the scores are not RULER's. `long.yaml` names functions of this module.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")
# As in RULER: so many values of one key (niah_multivalue), and so often a value is passed on (variable_tracking).
VALUES, HOPS = 4, 4
# Chains of values: one is asked for.
CHAINS = 2
# The most frequent words that are asked for (RULER's freq_words_extraction).
FREQUENT = 3
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_WHO = "baker captain doctor farmer gardener hunter joiner keeper lawyer miller nurse painter sailor singer tailor teacher"
_DID = "carried cleaned counted drew dropped found hid kept lifted lost mended moved painted sold washed wrapped"
_WHAT = "basket bell blanket bottle candle carpet chair coat drum kettle ladder lamp mirror pillow rope saddle"
_WHERE = "barn bridge cellar church forest garden harbour hill kitchen market mill orchard river school station tower"


class Question(NamedTuple):
    """The whole prompt, and the texts that its reply must have."""

    text: str
    wanted: list[str]


def made(kind: str, seed: int, number: int, size: int) -> Question:
    """The question of this number, the same for the same arguments. `size` is how many lines or words its text has."""
    return KINDS[kind].make(Random(f"{seed} {kind} {number}"), size)


def _make_question(about: str, text: str, question: str, wanted: list[str]) -> Question:
    return Question(f"{about}\n\n{text}\n\nQuestion: {question} alone.\nAnswer:", wanted)


def _make_single(rng: Random, size: int) -> Question:
    """One code in prose."""
    key, text, values = _hide_codes(rng, size, 1)
    about = "The following text says somewhere what the code of one thing is."
    return _make_question(about, text, f"What is the code of {key}? Reply with the number", values)


def _make_multivalue(rng: Random, size: int) -> Question:
    """All codes of one thing, in prose."""
    key, text, values = _hide_codes(rng, size, VALUES)
    about = "The following text says in several places what a code of one thing is."
    return _make_question(about, text, f"What are all {VALUES} codes of {key}? Reply with the numbers", values)


def _hide_codes(rng: Random, size: int, count: int) -> tuple[str, str, list[str]]:
    """A key, prose that hides its codes, and the codes."""
    (key,) = _make_distinct(1, partial(_make_key, rng))
    values = _make_distinct(count, partial(_make_number, rng))
    lines = _hide_lines(rng, _make_prose(rng, size), [_code_sentence(key, value) for value in values])
    return key, "\n".join(lines), values


def _make_multikey(rng: Random, size: int) -> Question:
    """One code among others."""
    keys, values = _make_distinct(size, partial(_make_key, rng)), _make_distinct(size, partial(_make_number, rng))
    place = _draw_below(rng, size)
    about = "Each line of the following list says what the code of one thing is."
    text = "\n".join(map(_code_sentence, keys, values))
    return _make_question(about, text, f"What is the code of {keys[place]}? Reply with the number", [values[place]])


def _make_tracking(rng: Random, size: int) -> Question:
    """All names that have one value, which each passes on to the next; names with another value are in between."""
    each = HOPS + 1
    names = _make_distinct(CHAINS * each, lambda: "".join(_draw_one(rng, _LETTERS) for _ in range(5)))
    values = _make_distinct(CHAINS, lambda: str(10_000 + _draw_below(rng, 90_000)))
    lines = _make_prose(rng, size)
    chains = [names[each * place : each * (place + 1)] for place in range(CHAINS)]
    for chain, value in zip(chains, values, strict=True):
        said = [f"VAR {chain[0]} = {value}", *(f"VAR {name} = VAR {before}" for before, name in pairwise(chain))]
        lines = _hide_lines(rng, lines, said)
    about = "The following text gives values to names. A name can get the value of another one."
    question = f"Which {each} names have the value {values[0]}? Reply with the names"
    return _make_question(about, "\n".join(lines), question, chains[0])


def _make_frequent(rng: Random, size: int) -> Question:
    """The most frequent of made words. As in RULER, the k-th is there in proportion to 1 / k²."""
    counts = [math.floor(size * 6 / (math.pi * rank) ** 2) for rank in range(1, size)]
    often = [count for count in counts if count > 1]
    counts = often + [1] * (size - sum(often))
    words = _make_distinct(len(counts), partial(_make_word, rng))
    text = " ".join(_shuffle_items(rng, [word for word, count in zip(words, counts, strict=True) for _ in range(count)]))
    about = "The following text is of made words. Some are there more often than others."
    question = f"Which {FREQUENT} words are there most often? Reply with the words"
    return _make_question(about, text, question, words[:FREQUENT])


class Kind(NamedTuple):
    """How questions of a kind are made, and the least size that gives one."""

    make: Callable[[Random, int], Question]
    least: int


KINDS = {
    "single": Kind(_make_single, 1),
    "multikey": Kind(_make_multikey, 2),
    "multivalue": Kind(_make_multivalue, VALUES),
    "tracking": Kind(_make_tracking, CHAINS * HOPS),
    # With fewer words the third and the fourth would be there equally often.
    "frequent": Kind(_make_frequent, 40),
}


# --- parts of texts. Of `Random` only `random()` is used: Python promises that it stays the same.


def _draw_below(rng: Random, most: int) -> int:
    return int(rng.random() * most)


def _draw_one(rng: Random, items: Sequence[Item]) -> Item:
    return items[_draw_below(rng, len(items))]


def _shuffle_items(rng: Random, items: Sequence[Item]) -> list[Item]:
    return [item for _, item in sorted(((rng.random(), item) for item in items), key=lambda pair: pair[0])]


def _make_distinct(count: int, make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)


def _make_word(rng: Random) -> str:
    return "".join(_draw_one(rng, letters) for letters in (_CONSONANTS, _VOWELS) * 4)


def _make_key(rng: Random) -> str:
    return f"{_draw_one(rng, _WHAT.split())}-{_make_word(rng)}"


def _make_number(rng: Random) -> str:
    """All have seven digits, so that none is a part of another."""
    return str(1_000_000 + _draw_below(rng, 9_000_000))


def _code_sentence(key: str, value: str) -> str:
    return f"A code of {key} is {value}."


def _make_prose(rng: Random, size: int) -> list[str]:
    words = [each.split() for each in (_WHO, _DID, _WHAT, _WHERE)]
    return ["The {} {} a {} at the {}.".format(*(_draw_one(rng, each) for each in words)) for _ in range(size)]


def _hide_lines(rng: Random, lines: list[str], needles: list[str]) -> list[str]:
    """The lines with the needles at random places, in their order."""
    places = sorted(_draw_below(rng, len(lines) + 1) for _ in needles)
    hiding = list(lines)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        hiding.insert(place, needle)
    return hiding


# --- what `long.yaml` names


def asked(document: dict[str, Any]) -> str:
    return made(*(document[name] for name in ("topic", "seed", "number", "size"))).text


def target(document: dict[str, Any]) -> str:
    return ", ".join(document["wanted"])


def scores(document: dict[str, Any], replies: list[str]) -> dict[str, float]:
    """RULER's `string_match_all`: the share of the wanted texts that the reply has, in capital or small letters."""
    (reply,) = replies
    wanted: list[str] = document["wanted"]
    return {"string_match_all": sum(each.lower() in reply.lower() for each in wanted) / len(wanted)}
