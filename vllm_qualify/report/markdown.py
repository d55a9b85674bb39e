"""A report's first screen as Markdown, for Prefect's UI."""

import hashlib
import re
from collections.abc import Sequence
from urllib.parse import quote, urlsplit

from vllm_qualify.report import head, words
from vllm_qualify.report.model import Report
from vllm_qualify.report.words import GateRow
from vllm_qualify.secrets import plain

# A browser does not follow links of other schemes from a page of Prefect.
LINKABLE = ("http", "https")
GATES = ("verdict", "gate", "value", "bound", "interval", "smallest visible change")
# The special characters of Markdown and HTML, and text that renderers turn into links automatically.
_MARKUP = re.compile(r"""[!"#$&'()*+:<=>@\[\\\]^_`{|}~]|(?<=www)\.""", re.IGNORECASE)


def first_screen(report: Report, page: str) -> str:
    """The outcome, what was qualified, the gates, why it did not pass, and a link to `page`. Outside text stays plain text."""
    rows, address = words.gate_rows(report.judgement), quote(page, safe="/:?&=%+@,;~")
    name = f"[The whole report](<{address}>)" if urlsplit(address).scheme in LINKABLE else "The whole report"
    parts = [
        f"# {report.outcome.upper()}: {escape_text(report.plan.cell.id)}",
        escape_text(head.tally_line(report)),
        _table_lines(("what", "which"), [(name, escape_text(text)) for name, text in head.facts(report)]),
        _table_lines(GATES, [_gate_cells(row) for row in rows]) if rows else "",
        "\n".join(_reason_line(labels, row) for labels, row in head.reasons(rows)),
        f"{name}: {escape_text(page)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def artifact_key(what: str, cell_id: str) -> str:
    """The key of a cell's artifact. It has lower-case letters, digits and dashes, and is different for every cell."""
    readable = re.sub(r"[^a-z0-9]+", "-", cell_id.lower()).strip("-")
    return f"{what}-{readable}-{hashlib.sha256(cell_id.encode()).hexdigest()[:6]}"


def escape_text(text: str) -> str:
    """Text for use within a line, without markup in Markdown or HTML. Control characters are made visible."""
    line = re.sub(r"[ \t\n]+", " ", plain(text)).strip(" ")
    return _MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", line)


def _table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gate_cells(row: GateRow) -> list[str]:
    return [f"**{row.verdict}**", *map(escape_text, (row.gate, row.value, row.bound, row.interval, row.change))]


def _reason_line(labels: str, row: GateRow) -> str:
    waiver = f"; **{escape_text(row.waiver)}**" if row.waiver else ""
    return f"- **{row.verdict}** {escape_text(labels)}: {escape_text(row.because)}{waiver}"
