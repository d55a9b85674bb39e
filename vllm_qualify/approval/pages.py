"""What the board and the pages of cells share. Each tells the revision that it shows, and never gives way to an older one.

A writer draws a page twice at most: docs/design/0025 says why.
"""

import base64
import hashlib
import json
import random
import re
import time
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from jinja2 import Template

from vllm_qualify.approval.row import Index, Row
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.bundle import TYPES
from vllm_qualify.publish.store import MissingObjectError, Store, checked_key, retry_swap
from vllm_qualify.report.templates import template
from vllm_qualify.secrets import plain

# A page has its revision within its first bytes.
D = TypeVar("D", Row, Index)
_REVISION = re.compile(rb'<html lang="en" data-revision="([0-9]{1,18})"[ >]')
BEGIN = 200
# Characters that could end the data's element, or a line of its text, are written as JSON escapes.
_ESCAPED = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})
_DIGITS = 5
# Between looks whether others have drawn a page.
_PAUSES_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)


class Page(NamedTuple):
    """A page in the store: the revision that it was drawn from, its tag, and the page itself."""

    revision: int
    tag: str
    body: bytes


Draw = Callable[[Page | None], bytes]
"""Gives the new page, by the one that is there."""


def write_page(store: Store, key: str, what: str, revision: int, draw: Draw, *, after: int = 0) -> None:
    """Draw a page, unless the store has one of this revision or of a newer one. Raises StoreError if another object is there.

    `draw` is given the page that is there, and draws the newest index that the store has by now. So whoever loses to two
    others finds a page that is new enough: the second of them read the index when this writer's change was in it.

    `after` is the revision that others are about to draw. It is waited for, a third of a second at most: they may have died.
    """

    pauses = iter(_PAUSES_S)

    def attempt() -> None:
        there = read_page(store, key, what)
        while there and there.revision < after and (pause_s := next(pauses, None)):
            time.sleep(random.uniform(pause_s / 2, pause_s))  # so that those who wait do not all look at once
            there = read_page(store, key, what)
        if not there:
            store.swap(key, draw(None), TYPES[".html"], None)
        elif there.revision < revision:
            store.swap(key, draw(there), TYPES[".html"], there.tag)

    retry_swap(attempt, what, "try again later", store.locate(key))


def read_page(store: Store, key: str, what: str) -> Page | None:
    """A page in the store; None if there is none yet. Raises StoreError if another object is in its place."""
    try:
        stored = store.read(key)
    except MissingObjectError:
        return None
    match = _REVISION.search(stored.body[:BEGIN])
    if not match:
        remedy = "move it away, or give the store a folder or a prefix of its own"
        raise StoreError(f"not {what.replace('the ', 'a ', 1)}", remedy, store.locate(key))
    return Page(int(match[1]), stored.tag, stored.body)


def page_revision(store: Store, key: str, what: str) -> int:
    """The revision of the index that a page shows; 0 without a page. Raises as `read_page`."""
    page = read_page(store, key, what)
    return page.revision if page else 0


def newest_index(store: Store, key: str, own: D, parse: Callable[[bytes], D]) -> D:
    """The index in the store if it is newer than `own`. What is no index is passed over: its next writer reports it."""
    try:
        there = parse(store.get(key))
    except (MissingObjectError, ValueError):
        return own
    return there if there.revision > own.revision else own


@cache
def page_template(name: str, *scripts: str) -> Template:
    """The template of a page, with the style of both and its own script, which is made of these files."""
    script = "".join(map(_read_file, ("words.js", *scripts)))
    wrapped = f'"use strict";\n(() => {{\n{script}}})();\n'
    return template(__package__, name, style=_read_file("board.css"), script=wrapped, source=_policy_source)


def _read_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy_source(text: str) -> str:
    """How a Content-Security-Policy names an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def address(*parts: str) -> str:
    """An address relative to the store's root; empty if the names could lead to another place."""
    try:
        return quote(checked_key("/".join(parts)))
    except ValueError:
        return ""


# --- the data of a page's script


class Texts(dict[str, int]):
    """Numbers for texts. Each text is stored once, because most texts are repeated in every row."""

    def number(self, text: str | None) -> int | None:
        return None if text is None else self.setdefault(plain(text), len(self))


def data_of(**parts: object) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(parts, separators=(",", ":")).translate(_ESCAPED)


def round_shown(number: float | None) -> float | None:
    """Rounded to the digits that the pages show; the report has all digits."""
    return None if number is None else float(f"{number:.{_DIGITS}g}")
