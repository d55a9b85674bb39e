"""The index of all cells as lines, one for each cell: a change of one cell rewrites one line, and the others are not parsed.

A reader of the index parses all of it.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from vllm_qualify.approval.layout import INDEX_KEY
from vllm_qualify.approval.row import INDEX_VERSION, Brief, Index
from vllm_qualify.publish.store import MissingObjectError, Store

# A name in runs of plain characters, which is four times as fast as one character after the other.
_LINE = rb'\n\{"cell":("[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"),"revision":([0-9]{1,18})[,}][^\n]*+'
_LINES = re.compile(_LINE)
_HEAD = re.compile(rb'\{"index_version":%d,"revision":([0-9]{1,18}),"cells":\[' % INDEX_VERSION)
_END = b"\n]}"
# Python before 3.11.5 mistakes a possessive repetition of what can step back (cpython issue 106052): it let a comma stand
# before the end of the index. So nothing follows the lines here, and the last one is given its comma first.
_ALL_LINES = re.compile(rb"(?:%b(?<=\},))*+" % _LINE)


@dataclass(frozen=True)
class Lines:
    """The index. `text` has each cell's line, sorted, each between a line break and a comma."""

    revision: int = 0
    text: bytes = b""

    def revision_of(self, cell: str) -> int | None:
        """The revision of the cell's own index that its line says; None without a line."""
        begin, end = self._place_of(cell)
        match = _LINES.match(self.text, begin, end)
        return int(match[2]) if match else None

    def revisions(self) -> Iterator[tuple[str, int]]:
        """All cells, sorted, each with the revision of its own index."""
        return ((json.loads(match[1]), int(match[2])) for match in _LINES.finditer(self.text))

    def plain_revisions(self) -> list[tuple[bytes, bytes]]:
        """As `revisions`, but as it is written, which is fast: a name with an escape keeps it."""
        return [(name[1:-1], revision) for name, revision in _LINES.findall(self.text)]

    def brief(self, cell: str) -> Brief:
        """Raises ValidationError if the line is not one, or if there is none."""
        begin, end = self._place_of(cell)
        return Brief.model_validate_json(self.text[begin:end].removesuffix(b","))

    def changed(self, brief: Brief) -> "Lines":
        """The index with this line in place of the cell's own; without one, it comes where the order wants it."""
        begin, end = self._place_of(brief.cell)
        # Views: the lines that stay are copied once.
        seen = memoryview(self.text)
        return Lines(self.revision, b"".join([seen[:begin], _line(brief), seen[end:]]))

    def _place_of(self, cell: str) -> tuple[int, int]:
        """Where the cell's line begins and ends; without one, twice the place where it would begin."""
        begin = self.text.find(_begin(cell))
        if begin < 0:
            later = (match.start() for match in _LINES.finditer(self.text) if json.loads(match[1]) > cell)
            begin = next(later, len(self.text))
            return begin, begin
        end = self.text.find(b"\n", begin + 1)
        return begin, len(self.text) if end < 0 else end


def lines_of(index: Index) -> Lines:
    return lines_with(index.cells, index.revision)


def lines_with(cells: Iterable[Brief], revision: int = 0) -> Lines:
    known = {cell.cell: cell for cell in cells}
    return Lines(revision, b"".join(_line(known[cell]) for cell in sorted(known)))


def write_lines(lines: Lines) -> bytes:
    text = memoryview(lines.text)[: -1 if lines.text else 0]
    return b"".join([_head(lines.revision), text, _END])


def parse_lines(body: bytes) -> Lines:
    """Raises ValidationError if it is not an index of this version."""
    head = _HEAD.match(body)
    if head and body.endswith(_END):
        # The last line alone has no comma.
        lines = body[head.end() : -len(_END)]
        text = lines and lines + b","
        if _ALL_LINES.fullmatch(text):
            return Lines(int(head[1]), text)
    # Somebody else wrote it: as another document of the same content, or none.
    return lines_of(Index.model_validate_json(body))


def newest_lines(store: Store, own: Lines) -> Lines:
    """The index in the store if it is newer than `own`; else that. What is no index is passed over: its next writer reports it.

    Raises StoreError if it cannot be read.
    """
    try:
        body = store.get(INDEX_KEY)
    except MissingObjectError:
        return own
    if body.startswith(_head(own.revision)):
        return own
    try:
        return max(own, parse_lines(body), key=lambda lines: lines.revision)
    except ValidationError:
        return own


def _head(revision: int) -> bytes:
    return b'{"index_version":%d,"revision":%d,"cells":[' % (INDEX_VERSION, revision)


def _line(cell: Brief) -> bytes:
    return b"\n%b," % cell.model_dump_json(exclude_none=True).encode()


def _begin(cell: str) -> bytes:
    """How a cell's line begins. JSON has no line break within a text, so nothing else looks so."""
    return b'\n{"cell":%b,"revision":' % json.dumps(cell, ensure_ascii=False).encode()
