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
    """The outcome, what was qualified, the gates, why it did not pass, and a link to `page`.

    Outside text stays plain text, in Markdown and in the HTML that is made from it.
    """
    rows = words.gate_rows(report.judgement)
    parts = [
        f"# {report.outcome.upper()}: {escaped(report.plan.cell.id)}",
        _tally(report),
        _table(("what", "which"), [(name, escaped(text)) for name, text in head.facts(report)]),
        _table(GATES, [_gate(row) for row in rows]) if rows else "",
        "\n".join(_reason(labels, row) for labels, row in head.reasons(rows)),
        _link(page),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def artifact_key(what: str, cell_id: str) -> str:
    """The key of a cell's artifact. It has lower-case letters, digits and dashes, and is different for every cell."""
    readable = re.sub(r"[^a-z0-9]+", "-", cell_id.lower()).strip("-")
    return f"{what}-{readable}-{hashlib.sha256(cell_id.encode()).hexdigest()[:6]}"


def escaped(text: str) -> str:
    """Text for use within a line, without markup in Markdown or HTML. Control characters are made visible."""
    line = re.sub(r"[ \t\n]+", " ", plain(text)).strip(" ")
    return _MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", line)


def _tally(report: Report) -> str:
    decided = ", ".join(map(escaped, head.deciding(report)))
    return escaped(words.tally(report.judgement)) + (f". Decided by {decided}" if decided else "")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gate(row: GateRow) -> list[str]:
    return [f"**{row.verdict}**", *map(escaped, (row.gate, row.value, row.bound, row.interval, row.change))]


def _reason(labels: str, row: GateRow) -> str:
    waiver = f"; **{escaped(row.waiver)}**" if row.waiver else ""
    return f"- **{row.verdict}** {escaped(labels)}: {escaped(row.because)}{waiver}"


def _link(page: str) -> str:
    """The name of the page, as a link if possible, and the page's address as text."""
    address = quote(page, safe="/:?&=%+@,;~")
    name = "The whole report"
    linked = f"[{name}](<{address}>)" if urlsplit(address).scheme in LINKABLE else name
    return f"{linked}: {escaped(page)}"
