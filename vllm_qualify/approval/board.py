"""The board: one page for all cells, drawn from the index. It needs a browser and the store's files, but no server."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import product
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from jinja2 import Template

from vllm_qualify.approval.layout import day
from vllm_qualify.approval.pointer import Entry
from vllm_qualify.approval.row import Index, ReportLine, Row, Standing
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.errors import StoreError
from vllm_qualify.publish.bundle import TYPES, Summary
from vllm_qualify.publish.store import MissingObjectError, Store, checked_key, swapped
from vllm_qualify.report.templates import template
from vllm_qualify.secrets import plain

BOARD_KEY = "index.html"
NEVER: Literal["never qualified"] = "never qualified"

# The page has its revision within its first bytes.
_REVISION = re.compile(rb'<html lang="en" data-revision="([0-9]{1,18})">')
_BEGIN = 200
# Characters that could end the data's element, or a line of its text, are written as JSON escapes.
_ESCAPED = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})
_DIGITS = 5

BoardState = Standing | Literal["never qualified"]


class Board(NamedTuple):
    """The board in the store: the revision of the index that it was drawn from, and its tag."""

    revision: int
    tag: str


def write_board(store: Store, index: Index) -> None:
    """Draw the board, unless the store has one of this revision of the index or of a newer one.

    Raises:
        StoreError: another object is in its place. StoreBusyError: it changes all the time.
    """

    @cache
    def body() -> bytes:
        return render_board(index).encode()

    def attempt() -> None:
        there = read_board(store)
        if not there or there.revision < index.revision:
            store.swap(BOARD_KEY, body(), TYPES[".html"], there.tag if there else None)

    swapped(attempt, "the board", "try again later", store.locate(BOARD_KEY))


def read_board(store: Store) -> Board | None:
    """The board in the store; None if there is none yet. Raises StoreError if another object is in its place."""
    try:
        stored = store.read(BOARD_KEY)
    except MissingObjectError:
        return None
    told = _REVISION.search(stored.body[:_BEGIN])
    if not told:
        remedy = "move it away, or give the store a folder or a prefix of its own"
        raise StoreError("not a board", remedy, store.locate(BOARD_KEY))
    return Board(int(told[1]), stored.tag)


def render_board(index: Index) -> str:
    """The page. All text of the index is escaped. The page's policy allows its own script and no request."""
    shown = sorted([*map(_shown, index.cells), *_gaps(index.cells)], key=lambda row: row.cell)
    return _template().render(revision=index.revision, rows=shown, data=_data(shown, index))


@cache
def _template() -> Template:
    return template(__package__, "board.html.jinja", style=_file("board.css"), script=_file("board.js"), source=_source)


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """How a Content-Security-Policy names an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# --- the rows


@dataclass(frozen=True)
class Link:
    """A link to a report's page, relative to the board. The address is empty if the names could lead to another place."""

    address: str
    text: str


@dataclass(frozen=True)
class ShownRow:
    """One cell. `state` is the state of its last approval, else of its newest report.

    `newer` is the state of a report that is newer than the last approval. `engine` is the engine that `state` is about.
    A field without a value is None.
    """

    cell: str
    state: BoardState
    newer: Standing | None = None
    engine: str | None = None
    approved: Link | None = None
    last: Entry | None = None
    newest: Link | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Recipe, variant, GPU type, profile."""
        return _parts(self.cell)


def _parts(cell: str) -> tuple[str, ...]:
    parts = cell.split("/", 3)
    return (*parts, *[""] * (4 - len(parts)))


def _shown(row: Row) -> ShownRow:
    newest, last = (row.reports[0] if row.reports else None), row.last
    return ShownRow(
        cell=row.cell,
        state=_state(last, newest),
        newer=newest.standing if newest and last and newest.run_id > last.run_id else None,
        engine=_engine(_subject(row)),
        approved=Link(_address(row.cell, last.run_id), day(last.at)) if last else None,
        last=last,
        newest=_link(row.cell, newest) if newest else None,
    )


def _state(last: Entry | None, newest: ReportLine | None) -> BoardState:
    if last:
        return "revoked" if last.revoked else "approved"
    return newest.standing if newest else NEVER


def _subject(row: Row) -> ReportLine | None:
    """The report that the cell's state is about."""
    if row.last is None:
        return row.reports[0] if row.reports else None
    return next((line for line in row.reports if line.run_id == row.last.run_id), None)


def _engine(line: ReportLine | None) -> str | None:
    return f"{KINDS[line.summary.engine].title} {line.summary.engine_version}" if line and line.summary else None


def _link(cell: str, line: ReportLine) -> Link:
    return Link(_address(cell, line.run_id), day(line.started_at) if line.started_at else line.run_id)


def _address(cell: str, run_id: str) -> str:
    try:
        key = checked_key(f"reports/{cell}/{run_id}/report.html")
    except ValueError:
        return ""
    return quote(key)


def _gaps(rows: Sequence[Row]) -> list[ShownRow]:
    """For each variant, the pairs of its GPU types and profiles that have no report."""
    known = {row.cell for row in rows}
    variants: dict[str, tuple[set[str], set[str]]] = {}
    for cell in known:
        recipe, variant, gpu_type, profile = _parts(cell)
        gpu_types, profiles = variants.setdefault(f"{recipe}/{variant}", (set(), set()))
        gpu_types.add(gpu_type)
        profiles.add(profile)
    every = (f"{name}/{gpu}/{profile}" for name, found in variants.items() for gpu, profile in product(*found))
    return [ShownRow(cell=cell, state=NEVER) for cell in every if cell not in known]


# --- the data of the page's script


class _Texts(dict[str, int]):
    """Numbers for texts. Each text is stored once, because most texts are repeated in every row."""

    def number(self, text: str | None) -> int | None:
        return None if text is None else self.setdefault(plain(text), len(self))


def _data(shown: Iterable[ShownRow], index: Index) -> str:
    """JSON that is safe inside a script element. `board.js` reads it in this order."""
    texts, rows = _Texts(), {row.cell: row for row in index.cells}
    cells = [_cell(found, rows.get(found.cell), texts) for found in shown]
    return json.dumps({"texts": list(texts), "cells": cells}, separators=(",", ":")).translate(_ESCAPED)


def _cell(shown: ShownRow, row: Row | None, texts: _Texts) -> list[Any]:
    lines = row.reports if row else []
    engines = {shown.engine, _engine(lines[0] if lines else None)} - {None}
    last = shown.last
    return [
        [plain(part) for part in shown.parts],
        texts.number(shown.state),
        texts.number(shown.newer),
        texts.number(last.by) if last else None,
        last.expires.isoformat() if last else None,
        [texts.number(engine) for engine in sorted(filter(None, engines))],
        [_run(line, texts) for line in lines],
        last.run_id if last else None,
    ]


def _run(line: ReportLine, texts: _Texts) -> list[Any]:
    found = line.summary
    return [
        plain(line.run_id),
        int(line.started_at.timestamp()) if line.started_at else None,
        texts.number(line.standing),
        texts.number(line.told),
        texts.number(_engine(line)),
        texts.number(found.image if found else None),
        *_figures(found, texts),
    ]


def _figures(found: Summary | None, texts: _Texts) -> list[Any]:
    score = found.score if found else None
    interval = score.interval if score else None
    return [
        texts.number(score.metric if score else None),
        _rounded(score.value if score else None),
        _rounded(interval.lower if interval else None),
        _rounded(interval.upper if interval else None),
        _rounded(found.output_tok_s_per_gpu if found else None),
        found.gpus if found else None,
    ]


def _rounded(number: float | None) -> float | None:
    """Rounded to the digits that the board shows; the report has all digits."""
    return None if number is None else float(f"{number:.{_DIGITS}g}")
