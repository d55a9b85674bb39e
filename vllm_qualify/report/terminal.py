"""Reports in the terminal: the first screen of one report, or two reports side by side."""

from collections.abc import Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_qualify.drift.finding import WITHOUT_EFFECT
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.metrics import CONTRACT_METRICS
from vllm_qualify.report import head, words
from vllm_qualify.report.diff import Change, ChangeKind, Moved, ReportDiff, Trend, VerdictChange, setting_words
from vllm_qualify.report.model import Report
from vllm_qualify.report.words import GateRow
from vllm_qualify.secrets import plain

STYLES: dict[Verdict, str] = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "invalid": "magenta"}
HEADS = ("gate", "value", "bound", "interval", "smallest visible change", "verdict")
# The columns that get the remaining width, the most useful first.
GROWING = (3, 1, 2, 4, 0)
MOVED = ("measurement", "A", "B", "change", "B is")
MOVED_GROWING = (1, 2, 3, 0)
TREND_STYLES: dict[Trend, str] = {"better": "green", "worse": "bold red", "equal": "", "unclear": "magenta"}
MARKS: dict[ChangeKind, str] = {"added": "+", "removed": "-", "changed": "~"}
# The parts of a comparison that are settings, by their titles.
SECTIONS = {
    "Release": "release",
    "Machine": "machine",
    "Server configuration": "server",
    "Server environment": "environment",
    "Workload": "workload",
    "Gates": "gates",
    "Tools": "tools",
}
NOT_SURE = "?"
GAPS = (2, 1)
INDENT = "  "
SIMPLE = str.maketrans({"→": "->", "—": "-", "≥": ">=", "≤": "<=", "·": "-", words.NO_BREAK: ""})


def show_report(report: Report, console: Console, page: str | None) -> None:
    """Print `report`: as a table from about 80 columns on, gate by gate if a table does not fit. Nothing is cut off.

    Only styles that the console allows are used. Outside text is printed without markup or control codes.
    """
    rows = words.gate_rows(report.judgement)
    _print_head(report, console)
    if rows:
        console.print()
        _print_rows(HEADS, [_gate_cells(row, console) for row in _kept_as_one(rows)], GROWING, console)
        console.print()
    _print_reasons(rows, console)
    found = report.details.drift.findings if report.details.drift else []
    # What the model's own file does to replies, and what the recipe sets without an effect.
    for warning in [*report.plan.warnings, *(finding.told for finding in found if finding.kind in WITHOUT_EFFECT)]:
        _print_wrapped(_plain_text(f"Warning: {warning}", console, "yellow"), console)
    _print_sweep(report, console)
    if page is not None:
        # Never wrapped, so that a path or an address can be copied as a whole.
        console.print(_plain_text(f"Page: {page}", console), soft_wrap=True)


def show_diff(diff: ReportDiff, console: Console) -> None:
    """Print a comparison: what cannot be compared and why, what differs, and the results. It is as plain as `show_report`."""
    for name, side in (("A", diff.a), ("B", diff.b)):
        line = f"{name}: {side.outcome.upper()}  {side.cell}, run {side.run_id}, {words.time(side.created_at)}"
        _print_wrapped(_plain_text(line, console, "bold"), console)
    console.print()
    _print_unlike(diff, console)
    for title, part in SECTIONS.items():
        _print_changes(title, getattr(diff, part), console)
    _print_verdicts(diff.verdicts, console)
    console.print()
    _print_moved(diff.measurements, console)
    for name, labels in (("A", diff.alone_a), ("B", diff.alone_b)):
        if labels:
            _print_wrapped(_plain_text(f"Only {name} measured: {', '.join(labels)}", console), console)


def _print_unlike(diff: ReportDiff, console: Console) -> None:
    for unlike in diff.unlike:
        what = _plain_text(
            f"Not comparable ({unlike.metric or unlike.task or ', '.join(unlike.stages)}): ", console, "bold magenta"
        )
        _print_wrapped(Text.assemble(what, _plain_text(unlike.because, console)), console)
    if diff.unlike:
        console.print()


def _print_changes(title: str, changed: Sequence[Change], console: Console) -> None:
    _print_wrapped(_plain_text(title if changed else f"{title}: no difference", console, "bold"), console)
    for change in changed:
        settings = [setting_words(setting) for setting in (change.a, change.b) if setting is not None]
        line = f"{MARKS[change.kind]} {change.what}: {' → '.join(settings)}"
        _print_wrapped(_plain_text(line, console), console, INDENT)


def _print_verdicts(changed: Sequence[VerdictChange], console: Console) -> None:
    _print_wrapped(_plain_text("Verdicts" if changed else "Verdicts: no difference", console, "bold"), console)
    for change in changed:
        old, new = _verdict_words(change.a, change.a_counts_as), _verdict_words(change.b, change.b_counts_as)
        texts = [
            _plain_text(f"{change.gate}: {old} → ", console),
            _plain_text(new, console, STYLES[change.b] if change.b else ""),
        ]
        _print_wrapped(Text.assemble(*texts, _plain_text(f": {change.because}", console)), console, INDENT)


def _verdict_words(verdict: Verdict | None, counts_as: Verdict | None) -> str:
    if verdict is None:
        return "no gate"
    return verdict if verdict == counts_as else f"{verdict}, waived"


def _print_moved(moved: Sequence[Moved], console: Console) -> None:
    if not moved:
        _print_wrapped(_plain_text("No measurement is in both.", console), console)
        return
    _print_rows(MOVED, [_moved_cells(row, console) for row in moved], MOVED_GROWING, console)
    console.print()
    labels: dict[str, list[str]] = {}
    for row in moved:
        labels.setdefault(row.because, []).append(row.label)
    for because, sharing in labels.items():
        if because:
            bold = _plain_text(", ".join(sharing), console, "bold")
            _print_wrapped(Text.assemble(bold, _plain_text(f": {because}", console)), console)


def _moved_cells(moved: Moved, console: Console) -> list[Text]:
    others = [side.value for side in (moved.a, moved.b) if side.value is not None]
    a, b = (words.value(side.value, side.unit, others) for side in (moved.a, moved.b))
    trend = f"{moved.trend}{NOT_SURE}" if moved.trend in ("better", "worse") and not moved.is_sure else moved.trend
    texts = [_plain_text(text, console) for text in (moved.label, a, b, _change_words(moved))]
    return [*texts, _plain_text(trend, console, TREND_STYLES[moved.trend] if moved.is_sure else "")]


def _change_words(moved: Moved) -> str:
    """The change like `+4.21 %`, relative to A. For shares, or if A is zero, the difference."""
    if moved.ratio is not None:
        return f"{100 * (moved.ratio - 1):+,.2f}{words.NO_BREAK}%"
    if moved.difference is None:
        return words.DASH
    return f"{'+' if moved.difference > 0 else ''}{words.change(moved.difference, moved.unit)}"


def _print_head(report: Report, console: Console) -> None:
    outcome = _plain_text(report.outcome.upper(), console, "bold green" if report.passed else "bold red")
    _print_wrapped(Text.assemble(outcome, "  ", _plain_text(report.plan.cell.id, console, "bold")), console)
    for name, fact in head.facts(report):
        _print_wrapped(_plain_text(f"{name}: {fact}", console), console)
    console.print()
    _print_wrapped(_plain_text(head.tally_line(report), console), console)


def _kept_as_one(rows: Sequence[GateRow]) -> list[GateRow]:
    """The rows with one in place of all checks of the API's contract that are kept: there are 16 and more of them."""
    kept = [row for row in rows if row.gate in CONTRACT_METRICS and row.verdict == "pass"]
    if len(kept) < 2:
        return list(rows)
    one = replace(kept[0], gate=f"contract ({len(kept)} checks)")
    return [one if row is kept[0] else row for row in rows if row not in kept[1:]]


def _gate_cells(row: GateRow, console: Console) -> list[Text]:
    texts = [row.gate, row.value, row.bound, row.interval, row.change]
    return [*(_plain_text(text, console) for text in texts), _plain_text(row.verdict, console, STYLES[row.verdict])]


def _print_rows(heads: Sequence[str], rows: Sequence[Sequence[Text]], growing: Sequence[int], console: Console) -> None:
    """Print a table. If a word would have to be broken, print row by row, with the last cell beside the first one."""
    layout = _fit_columns([heads, *([cell.plain for cell in row] for row in rows)], growing, console.width)
    if layout is None:
        _print_stacked(heads, rows, console)
    else:
        console.print(_make_table(heads, rows, *layout))


def _fit_columns(lines: Sequence[Sequence[str]], growing: Sequence[int], width: int) -> tuple[list[int], int] | None:
    """The widths of the columns and the gap between them, without breaking a word; None if they do not fit."""
    columns = list(zip(*lines, strict=True))
    wide = [max(map(cell_len, column)) for column in columns]
    narrow = [max(cell_len(word) for cell in column for word in cell.split(" ")) for column in columns]
    widths = [least if column in growing else wide[column] for column, least in enumerate(narrow)]
    gap = next((gap for gap in GAPS if sum(widths) + gap * (len(columns) - 1) <= width), None)
    if gap is None:
        return None
    spare = width - sum(widths) - gap * (len(columns) - 1)
    for column in growing:
        more = min(spare, wide[column] - widths[column])
        widths[column] += more
        spare -= more
    return widths, gap


def _make_table(heads: Sequence[str], rows: Sequence[Sequence[Text]], widths: Sequence[int], gap: int) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for number, (name, width) in enumerate(zip(heads, widths, strict=True)):
        left = number in (0, len(heads) - 1)
        table.add_column(name, width=width, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _print_stacked(heads: Sequence[str], rows: Sequence[Sequence[Text]], console: Console) -> None:
    for first, *others, last in rows:
        _print_wrapped(Text.assemble(last, ": ", first), console)
        for name, cell in zip(heads[1:-1], others, strict=True):
            _print_wrapped(Text.assemble(f"{name}: ", cell), console, INDENT)


def _print_reasons(rows: Sequence[GateRow], console: Console) -> None:
    reasons = list(head.reasons(rows))
    for labels, row in reasons:
        verdict = _plain_text(row.verdict, console, STYLES[row.verdict])
        _print_wrapped(Text.assemble(_plain_text(labels, console, "bold"), ": ", verdict), console)
        _print_wrapped(_plain_text(row.because, console), console, INDENT)
        if row.waiver:
            _print_wrapped(_plain_text(row.waiver, console, "bold"), console, INDENT)
    if reasons:
        console.print()


def _print_sweep(report: Report, console: Console) -> None:
    rows = [words.measurement_row(each) for stage in report.stages if stage.stage == "sweep" for each in stage.measurements]
    for row in rows:
        value = row.value if row.is_valid else f"none: {row.note}"
        _print_wrapped(_plain_text(f"{row.metric}: {value}", console), console)
    if rows:
        console.print()


def _plain_text(text: str, console: Console, style: str = "") -> Text:
    """Outside text without markup or control codes, and only with characters that the console's encoding has."""
    shown = plain(text)
    if console.options.ascii_only:
        shown = shown.translate(SIMPLE).encode("ascii", "backslashreplace").decode()
    return Text(shown, style=style)


def _print_wrapped(text: Text, console: Console, indent: str = "") -> None:
    for line in text.wrap(console, max(console.width - len(indent), 1), overflow="fold"):
        line.rstrip()
        console.print(Text.assemble(indent, line), soft_wrap=True)
