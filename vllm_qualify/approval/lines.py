"""The index of all cells as lines, one for each cell: a change of one cell rewrites one line, and the others are not parsed.

Whoever reads the index parses all of it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_qualify.approval.row import INDEX_VERSION, Brief, Index

_HEAD = re.compile(rb'\{"index_version":%d,"revision":([0-9]{1,18}),"cells":\[' % INDEX_VERSION)
_LINE = re.compile(rb'\{"cell":"([^"\\]{1,900})","revision":([0-9]{1,18})[,}].*')
_TAIL = b"]}"


@dataclass(frozen=True)
class Lines:
    """The index: each cell's line, sorted, and what revision of the cell's own index it says."""

    revision: int = 0
    of: dict[str, bytes] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)

    def brief(self, cell: str) -> Brief:
        """Raises ValidationError if the line is not one."""
        return Brief.model_validate_json(self.of[cell])

    def changed(self, found: Brief) -> "Lines":
        of = self.of | {found.cell: found.model_dump_json(exclude_none=True).encode()}
        if found.cell not in self.of:
            of = dict(sorted(of.items()))
        return Lines(self.revision, of, self.revisions | {found.cell: found.revision})


def lines_of(index: Index) -> Lines:
    return lines_with(index.cells, index.revision)


def lines_with(cells: Iterable[Brief], revision: int = 0) -> Lines:
    known = {found.cell: found for found in sorted(cells, key=lambda found: found.cell)}
    of = {cell: found.model_dump_json(exclude_none=True).encode() for cell, found in known.items()}
    return Lines(revision, of, {cell: found.revision for cell, found in known.items()})


def write_lines(lines: Lines) -> bytes:
    head = b'{"index_version":%d,"revision":%d,"cells":[' % (INDEX_VERSION, lines.revision)
    return b"\n".join([head, b",\n".join(lines.of.values()), _TAIL])


def parse_lines(body: bytes) -> Lines:
    """Raises ValidationError if it is not an index of this version."""
    head, _, rest = body.partition(b"\n")
    *rows, tail = rest.split(b"\n")
    told = _HEAD.fullmatch(head)
    found = [_LINE.fullmatch(row.removesuffix(b",")) for row in rows if row]
    if not told or tail != _TAIL or not all(found):
        # Somebody else wrote it: as another document of the same content, or none.
        return lines_of(Index.model_validate_json(body))
    matched = [(match[1].decode(), match[0], int(match[2])) for match in found if match]
    of, revisions = {cell: line for cell, line, _ in matched}, {cell: revision for cell, _, revision in matched}
    return Lines(int(told[1]), of, revisions)
