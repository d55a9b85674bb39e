"""A sign of a failure in a server's log, and what signs are made of."""

import re
from typing import NamedTuple

from vllm_qualify.engine.failure.meanings import FailureClass, Turn


class Sign(NamedTuple):
    """A pattern for the log's telling lines, and the failure that it shows.

    The pattern's groups, and `whole` for the whole match, fill the problem's braces. In a match over several lines, the line
    where the group `telling` begins is shown first, or else the match's first line. With `through`, the match counts only as
    the end of a traceback with a frame that has this in its line. With `needs`, each match has one of these words in it: a log
    without them is not searched. `turn` is whose turn it is where this is not that of the kind. What a sign shows `of_image` is
    its owner's turn if the server ran from an image.
    """

    kind: FailureClass
    pattern: re.Pattern[str]
    problem: str
    remedy: str | None = None
    retry: bool | None = None
    through: re.Pattern[str] | None = None
    needs: tuple[str, ...] = ()
    turn: Turn | None = None
    of_image: bool = True


def make_sign(
    kind: FailureClass,
    pattern: str,
    problem: str,
    remedy: str | None = None,
    retry: bool | None = None,
    through: str | None = None,
    *,
    needs: tuple[str, ...] = (),
    turn: Turn | None = None,
    of_image: bool = True,
) -> Sign:
    frame = re.compile(through) if through else None
    return Sign(kind, re.compile(pattern, re.M), problem, remedy, retry, frame, needs, turn, of_image)


NEXT_LINES = r"(?:[^\n]*\n){0,4}?[^\n]*?"


def line_up_to(words: str) -> str:
    """The line up to the first of these words in it: the search for what follows begins only once in a line."""
    return rf"^(?>[^\n]*?(?:{words}))"
