"""Replies as people read them: their thinking apart, and what differs between two of them."""

import re
from difflib import SequenceMatcher
from typing import NamedTuple

# Qwen, DeepSeek and others write their thinking before `</think>`; a chat template may have written the opening tag.
OPENS, CLOSES = "<think>", "</think>"
# Words, white space and single other characters.
TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
# Of texts that are less alike, the marks would be noise. It is SequenceMatcher's ratio, and the limit is our choice.
LEAST_ALIKE = 0.3
# Comparing takes quadratic time: at this length some milliseconds, whatever the texts are.
MOST_TOKENS = 1200

Pieces = list[tuple[str, bool]]
"""A text in pieces, each with whether it differs from the other text."""


class Reply(NamedTuple):
    """A reply in two parts. `thinking` is None if it has none."""

    thinking: str | None
    answer: str


def apart(text: str) -> Reply:
    """The thinking of a reply, and what follows it. Thinking that does not end has no answer."""
    before, closes, after = text.rpartition(CLOSES)
    if closes:
        return Reply(before.strip().removeprefix(OPENS).strip(), after.strip())
    opened = text.lstrip()
    if opened.startswith(OPENS):
        return Reply(opened.removeprefix(OPENS).strip(), "")
    return Reply(None, text)


def difference(theirs: str, ours: str) -> tuple[Pieces, Pieces] | None:
    """Both texts in pieces; None if they are too different or too long to mark what differs. Equal texts differ nowhere."""
    before, now = TOKEN.findall(theirs), TOKEN.findall(ours)
    matcher = SequenceMatcher(None, before, now)
    if max(len(before), len(now)) > MOST_TOKENS or matcher.ratio() < LEAST_ALIKE:
        return None
    pieces: tuple[Pieces, Pieces] = [], []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        for side, tokens in zip(pieces, (before[i1:i2], now[j1:j2]), strict=True):
            if tokens:
                side.append(("".join(tokens), tag != "equal"))
    return pieces
