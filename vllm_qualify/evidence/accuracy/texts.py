"""Faults of a reply's text that a score does not show: it ends in a loop, or in another script than it was asked in."""

import unicodedata
from collections import Counter
from functools import cache

# A reply ends in a loop if its end is one part, written at least so often, over at least so many characters. It is our choice.
# Of gsm8k's 8,792 reference answers none ends so. Of 1,000 that were made to repeat a sentence up to 1,000 characters 989 did,
# of those up to 4,000 characters all.
LEAST_TIMES, LEAST_CHARACTERS = 4, 200
# The end of a reply in which loops are looked for. The longest part that is found is a quarter of it.
LOOKED_AT = 4000
# Each loop has its last characters again one part earlier: so nearly all replies are done after one search.
ENDING = 20
# A reply is in another script if more than this share of its letters is in scripts that what was asked has no letter of. It is
# our choice: single Greek letters in a formula are less.
MOST_FOREIGN = 0.1


def ends_in_loop(text: str) -> bool:
    """Whether a reply ends in a part that is repeated LEAST_TIMES or more, over LEAST_CHARACTERS or more."""
    end = text.rstrip()[-LOOKED_AT:]
    if len(end) < LEAST_CHARACTERS or end.count(end[-ENDING:]) < LEAST_TIMES - 1:
        return False
    alike = _match_prefixes(end[::-1])
    return any(
        length + alike[length] >= max(LEAST_TIMES * length, LEAST_CHARACTERS)
        for length in range(1, len(end) // LEAST_TIMES + 1)
    )


def _match_prefixes(text: str) -> list[int]:
    """For each place, how long the text from there on is the same as from its beginning: the Z-algorithm, in linear time.

    D. Gusfield, "Algorithms on Strings, Trees and Sequences", 1997, section 1.4.
    """
    lengths, left, right = [0] * len(text), 0, 0
    for place in range(1, len(text)):
        length = min(right - place, lengths[place - left]) if place < right else 0
        while place + length < len(text) and text[length] == text[place + length]:
            length += 1
        if place + length > right:
            left, right = place, place + length
        lengths[place] = length
    return lengths


def is_in_other_script(text: str, asked: str) -> bool:
    """Whether more than MOST_FOREIGN of a reply's letters are in scripts that what was asked has no letter of."""
    letters, known = _count_letters(text), _count_letters(asked)
    foreign = sum(count for script, count in letters.items() if script not in known)
    return foreign > MOST_FOREIGN * letters.total()


def _count_letters(text: str) -> Counter[str]:
    """How many letters there are of each script. Bold or wide letters count as the plain letter (NFKC)."""
    counted: Counter[str] = Counter()
    for letter, count in Counter(unicodedata.normalize("NFKC", text)).items():
        if script := _find_script(letter):
            counted[script] += count
    return counted


@cache
def _find_script(character: str) -> str:
    """The script of a letter: the first word of its Unicode name, such as LATIN or CJK. Empty for all that is no letter."""
    return unicodedata.name(character, "").partition(" ")[0] if character.isalpha() else ""
