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


def _single(rng: Random, size: int) -> Question:
    """One code in prose."""
    (key,) = _distinct(1, partial(_key, rng))
    value = _number(rng)
    text = "\n".join(_hidden(rng, _prose(rng, size), [_code(key, value)]))
    return Question(
        f"The following text says somewhere what the code of one thing is.\n\n{text}\n\n"
        f"Question: What is the code of {key}? Reply with the number alone.\nAnswer:",
        [value],
    )


def _multikey(rng: Random, size: int) -> Question:
    """One code among others."""
    keys, values = _distinct(size, partial(_key, rng)), _distinct(size, partial(_number, rng))
    place = _below(rng, size)
    text = "\n".join(map(_code, keys, values))
    return Question(
        f"Each line of the following list says what the code of one thing is.\n\n{text}\n\n"
        f"Question: What is the code of {keys[place]}? Reply with the number alone.\nAnswer:",
        [values[place]],
    )


def _multivalue(rng: Random, size: int) -> Question:
    """All codes of one thing, in prose."""
    (key,) = _distinct(1, partial(_key, rng))
    values = _distinct(VALUES, partial(_number, rng))
    text = "\n".join(_hidden(rng, _prose(rng, size), [_code(key, value) for value in values]))
    return Question(
        f"The following text says in several places what a code of one thing is.\n\n{text}\n\n"
        f"Question: What are all {VALUES} codes of {key}? Reply with the numbers alone.\nAnswer:",
        values,
    )


def _tracking(rng: Random, size: int) -> Question:
    """All names that have one value, which each passes on to the next; names with another value are in between."""
    each = HOPS + 1
    names = _distinct(CHAINS * each, lambda: "".join(_one_of(rng, _LETTERS) for _ in range(5)))
    values = _distinct(CHAINS, lambda: str(10_000 + _below(rng, 90_000)))
    lines = _prose(rng, size)
    chains = [names[each * place : each * (place + 1)] for place in range(CHAINS)]
    for chain, value in zip(chains, values, strict=True):
        said = [f"VAR {chain[0]} = {value}", *(f"VAR {name} = VAR {before}" for before, name in pairwise(chain))]
        lines = _hidden(rng, lines, said)
    text = "\n".join(lines)
    return Question(
        f"The following text gives values to names. A name can get the value of another one.\n\n{text}\n\n"
        f"Question: Which {each} names have the value {values[0]}? Reply with the names alone.\nAnswer:",
        chains[0],
    )


def _frequent(rng: Random, size: int) -> Question:
    """The most frequent of made words. As in RULER, the k-th is there in proportion to 1 / k²."""
    counts = [math.floor(size * 6 / (math.pi * rank) ** 2) for rank in range(1, size)]
    often = [count for count in counts if count > 1]
    counts = often + [1] * (size - sum(often))
    words = _distinct(len(counts), partial(_word, rng))
    text = " ".join(_shuffled(rng, [word for word, count in zip(words, counts, strict=True) for _ in range(count)]))
    return Question(
        f"The following text is of made words. Some are there more often than others.\n\n{text}\n\n"
        f"Question: Which {FREQUENT} words are there most often? Reply with the words alone.\nAnswer:",
        words[:FREQUENT],
    )


class Kind(NamedTuple):
    """How questions of a kind are made, and the least size that gives one."""

    make: Callable[[Random, int], Question]
    least: int


KINDS = {
    "single": Kind(_single, 1),
    "multikey": Kind(_multikey, 2),
    "multivalue": Kind(_multivalue, VALUES),
    "tracking": Kind(_tracking, CHAINS * HOPS),
    # With fewer words the third and the fourth would be there equally often.
    "frequent": Kind(_frequent, 40),
}


# --- parts of texts. Of `Random` only `random()` is used: Python promises that it stays the same.


def _below(rng: Random, most: int) -> int:
    return int(rng.random() * most)


def _one_of(rng: Random, items: Sequence[Item]) -> Item:
    return items[_below(rng, len(items))]


def _shuffled(rng: Random, items: Sequence[Item]) -> list[Item]:
    return [item for _, item in sorted(((rng.random(), item) for item in items), key=lambda pair: pair[0])]


def _distinct(count: int, make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)


def _word(rng: Random) -> str:
    return "".join(_one_of(rng, letters) for letters in (_CONSONANTS, _VOWELS) * 4)


def _key(rng: Random) -> str:
    return f"{_one_of(rng, _WHAT.split())}-{_word(rng)}"


def _number(rng: Random) -> str:
    """All have seven digits, so that none is a part of another."""
    return str(1_000_000 + _below(rng, 9_000_000))


def _code(key: str, value: str) -> str:
    return f"A code of {key} is {value}."


def _prose(rng: Random, size: int) -> list[str]:
    words = [each.split() for each in (_WHO, _DID, _WHAT, _WHERE)]
    return ["The {} {} a {} at the {}.".format(*(_one_of(rng, each) for each in words)) for _ in range(size)]


def _hidden(rng: Random, lines: list[str], needles: list[str]) -> list[str]:
    """The lines with the needles at random places, in their order."""
    places = sorted(_below(rng, len(lines) + 1) for _ in needles)
    starts = [0, *places]
    ends = [*places, len(lines)]
    parts = [lines[start:end] for start, end in zip(starts, ends, strict=True)]
    return [*(line for part, needle in zip(parts, needles, strict=False) for line in [*part, needle]), *parts[-1]]


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
