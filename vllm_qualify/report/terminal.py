"""A report in the terminal: the outcome, a row per gate, why those that did not pass did not, and where the page is."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_qualify.judge.verdict import Verdict
from vllm_qualify.report import words
from vllm_qualify.report.model import Report
from vllm_qualify.report.words import GateRow

STYLES: dict[Verdict, str] = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "invalid": "magenta"}
HEADS = ("gate", "value", "bound", "interval", "smallest visible change", "verdict")
# Columns that get what width is left over, the most useful first.
GROWING = (3, 1, 2, 4, 0)
GAPS = (2, 1)
INDENT = "  "
SIMPLE = str.maketrans({"—": "-", "≥": ">=", "≤": "<=", "·": "-", words.NO_BREAK: ""})


def show_report(report: Report, console: Console, page: str | None) -> None:
    """Print `report`: as a table from about 80 columns on, gate by gate where a table has no room.

    Nothing is cut off, styles are only those that the console allows, and outside text is neither markup nor control codes.
    """
    rows = words.gate_rows(report.judgement)
    _print_head(report, console)
    if rows:
        _print_gates(rows, console)
    _print_reasons(rows, console)
    _print_sweep(report, console)
    if page is not None:
        # Never wrapped: a path or an address is copied whole.
        console.print(_text(f"Page: {page}", console), soft_wrap=True)


def _print_head(report: Report, console: Console) -> None:
    release = report.plan.cell.release
    outcome = _text(report.outcome.upper(), console, "bold green" if report.approved else "bold red")
    _print_wrapped(Text.assemble(outcome, "  ", _text(report.plan.cell.id, console, "bold")), console)
    engine = f"{words.engine(release.engine)} ({release.engine.digest})"
    facts = [
        f"{release.model} at {release.revision}",
        engine,
        words.hardware(report.plan.fingerprint),
        f"{words.time(report.created_at)}, run {report.run_id}" + _origin(report),
    ]
    if compared := words.compared(report.plan):
        facts.append(f"baseline: {compared}")
    for fact in facts:
        _print_wrapped(_text(fact, console), console)
    console.print()
    _print_wrapped(_text(words.tally(report.judgement), console), console)


def _origin(report: Report) -> str:
    return f", judged again from run {report.rejudged_from}" if report.rejudged_from else ""


def _print_gates(rows: Sequence[GateRow], console: Console) -> None:
    cells = [_cells(row, console) for row in rows]
    layout = _layout([list(HEADS), *([cell.plain for cell in line] for line in cells)], console.width)
    console.print()
    if layout is None:
        _print_stacked(cells, console)
    else:
        console.print(_table(cells, *layout))
    console.print()


def _cells(row: GateRow, console: Console) -> list[Text]:
    texts = [row.gate, row.value, row.bound, row.interval, row.change]
    return [*(_text(text, console) for text in texts), _text(row.verdict, console, STYLES[row.verdict])]


def _layout(lines: Sequence[Sequence[str]], width: int) -> tuple[list[int], int] | None:
    """The columns' widths and the gap between them, without breaking a word; None if there is no room for that."""
    columns = list(zip(*lines, strict=True))
    wide = [max(map(cell_len, column)) for column in columns]
    narrow = [max(cell_len(word) for cell in column for word in cell.split(" ")) for column in columns]
    narrow[-1] = wide[-1]
    for gap in GAPS:
        spare = width - sum(narrow) - gap * (len(columns) - 1)
        if spare >= 0:
            return _grown(narrow, wide, spare), gap
    return None


def _grown(narrow: Sequence[int], wide: Sequence[int], spare: int) -> list[int]:
    widths = list(narrow)
    for column in GROWING:
        more = min(spare, wide[column] - widths[column])
        widths[column] += more
        spare -= more
    return widths


def _table(cells: Sequence[Sequence[Text]], widths: Sequence[int], gap: int) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for number, (head, width) in enumerate(zip(HEADS, widths, strict=True)):
        left = number in (0, len(HEADS) - 1)
        table.add_column(head, width=width, justify="left" if left else "right", overflow="fold")
    for line in cells:
        table.add_row(*line)
    return table


def _print_stacked(cells: Sequence[Sequence[Text]], console: Console) -> None:
    for gate, *numbers, verdict in cells:
        _print_wrapped(Text.assemble(verdict, ": ", gate), console)
        for head, number in zip(HEADS[1:-1], numbers, strict=True):
            _print_wrapped(Text.assemble(f"{head}: ", number), console, INDENT)


def _print_reasons(rows: Sequence[GateRow], console: Console) -> None:
    others = [row for row in rows if row.verdict != "pass" or row.waiver]
    for labels, row in _by_reason(others):
        head = Text.assemble(_text(labels, console, "bold"), ": ", _text(row.verdict, console, STYLES[row.verdict]))
        _print_wrapped(head, console)
        _print_wrapped(_text(row.because, console), console, INDENT)
        if row.waiver:
            _print_wrapped(_text(row.waiver, console, "bold"), console, INDENT)
    if others:
        console.print()


def _print_sweep(report: Report, console: Console) -> None:
    """What the sweep found, and what it costs; a line each."""
    found = [row for stage in report.stages if stage.stage == "sweep" for row in stage.measurements]
    for row in map(words.measurement_row, found):
        told = row.value if row.is_valid else f"none: {row.note}"
        _print_wrapped(_text(f"{row.metric}: {told}", console), console)
    if found:
        console.print()


def _by_reason(rows: Sequence[GateRow]) -> Iterator[tuple[str, GateRow]]:
    """Gates that share verdict and reason are told once, together."""
    groups: dict[tuple[str, str, str], list[GateRow]] = {}
    for row in rows:
        groups.setdefault((row.verdict, row.because, row.waiver), []).append(row)
    for group in groups.values():
        yield ", ".join(row.gate for row in group), group[0]


def _text(text: str, console: Console, style: str = "") -> Text:
    """Outside text as it is: no markup, no control codes, and only characters that the console's encoding has."""
    shown = words.plain(text)
    if console.options.ascii_only:
        shown = shown.translate(SIMPLE).encode("ascii", "backslashreplace").decode()
    return Text(shown, style=style)


def _print_wrapped(text: Text, console: Console, indent: str = "") -> None:
    for line in text.wrap(console, max(console.width - len(indent), 1), overflow="fold"):
        line.rstrip()
        console.print(Text.assemble(indent, line), soft_wrap=True)
