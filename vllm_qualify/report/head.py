"""A report's first screen in words, for the terminal and Prefect's UI."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_qualify.evidence.starts import FIRST
from vllm_qualify.recipe.gates import label_of
from vllm_qualify.report import points, words
from vllm_qualify.report.changes import changes_of
from vllm_qualify.report.model import Report
from vllm_qualify.report.words import GateRow

CUT_SHARE, LINE_BREAK = "truncated_answers", "↵"


def facts(report: Report) -> list[tuple[str, str]]:
    """Named facts: what was qualified, on which machine, when, where, and compared with what."""
    plan, release, changed = report.plan, report.plan.cell.release, changes_of(report)
    machine = f" on {report.judged_on}" if report.judged_on else ""
    origin = f", judged again from run {report.rejudged_from}" if report.rejudged_from else ""
    rows = [
        ("Engine", f"{words.engine(release.engine)} ({release.engine.digest})"),
        ("Model", f"{release.model} at {release.revision}"),
        ("Signed by", words.publisher(plan.server)),
        ("Also from", "; ".join(words.parts(plan.server))),
        ("Hardware", f"{plan.fingerprint.gpu_type}: {words.hardware(plan.fingerprint)}"),
        ("Judged", f"{words.time(report.created_at)}{machine} by {report.made_by}"),
        ("Run", f"{report.run_id}{origin}"),
        ("Load", "; ".join(filter(None, (points.effort(report), points.window(report))))),
        ("Baseline", words.baseline_sentence(plan)),
        ("As baseline", words.unlosable_sentence(plan, [row for stage in report.stages for row in stage.measurements])),
        ("Anchor", words.anchor_sentence(plan)),
        ("Cut answers", cut_sentence(report)),
        ("Replies", " · ".join(first_replies(report))),
        ("Paths", words.unproven_sentence(plan, report.judgement)),
        ("Starts", starts_sentence(report)),
        ("Tries", words.tries(plan)),
        ("Trusts code", "; ".join(plan.foreign_code)),
        ("Opens the server", "; ".join(plan.openings)),
        ("Since then", changed.brief if changed else ""),
    ]
    return [(name, text) for name, text in rows if text]


def cut_sentence(report: Report) -> str:
    """The share of each task's answers that were cut at the most tokens allowed; empty without a task that counts them."""
    counted = [row for row in report.measurements if row.metric == CUT_SHARE and not row.start]
    known = {row.task: words.value(row.value, row.unit) if row.invalid_because is None else "not known" for row in counted}
    return "; ".join(f"{task}: {text}" for task, text in known.items())


def first_replies(report: Report) -> list[str]:
    """What the model replied to the first questions of the first task whose replies are kept, each in one line."""
    told = next((each for each in report.details.questions if each.first_replies), None)
    replies = told.first_replies if told else []
    return [f"question {each.question}: {_in_one_line(each.said.text)}{'…' if each.said.cut else ''}" for each in replies]


def _in_one_line(text: str) -> str:
    """A text with a sign in place of each break of a line; of an empty one, the word."""
    return f" {LINE_BREAK} ".join(" ".join(line.split()) for line in text.splitlines()) or "(empty)"


def deciding_gates(report: Report) -> list[str]:
    """The gates that keep the cell from passing."""
    judgement = report.judgement
    return [] if report.passed else [gate.gate.label for gate in judgement.gates if gate.counts_as == judgement.verdict]


def tally_line(report: Report) -> str:
    """How many gates have which verdict, and which of them decide."""
    decided = ", ".join(deciding_gates(report))
    return words.tally(report.judgement) + (f". Decided by {decided}" if decided else "")


def reasons(rows: Sequence[GateRow]) -> Iterator[tuple[str, GateRow]]:
    """Gates that did not pass or have a waiver. Gates with the same verdict, reason and waiver are grouped."""
    groups: dict[tuple[str, str, str], list[GateRow]] = {}
    for row in rows:
        if row.verdict != "pass" or row.waiver:
            groups.setdefault((row.verdict, row.because, row.waiver), []).append(row)
    for group in groups.values():
        yield ", ".join(row.gate for row in group), group[0]


@dataclass(frozen=True)
class StartsRow:
    """What each start measured, the first one first. `notes` say why a start has no value."""

    metric: str
    values: list[str]
    notes: list[str]


def _count_starts(report: Report) -> int:
    return max((row.start for row in report.measurements if row.start), default=FIRST)


def starts_sentence(report: Report) -> str:
    """The number of starts and their values, in one sentence; empty if only one was planned."""
    if report.plan.starts == FIRST or not report.plan.gates_over_starts:
        return ""
    each = [f"{row.metric}: {' · '.join(row.values)}" for row in starts_rows(report)]
    return "; ".join([f"{_count_starts(report)} of at most {report.plan.starts}", *each])


def starts_rows(report: Report) -> list[StartsRow]:
    """A row for each gate against the baseline; none if the server was started only once."""
    number = _count_starts(report)
    if number == FIRST:
        return []
    measured = {row.label: row for row in report.measurements}
    gates = report.plan.gates_over_starts
    table = []
    for label in dict.fromkeys(label_of(gate.metric, gate.task, gate.filter, against_baseline=False) for gate in gates):
        further = [f"{label} of start {start}" for start in range(FIRST + 1, number + 1)]
        starts = [measured.get(each) for each in (label, *further)]
        values = [words.value(row.value, row.unit) if row else words.DASH for row in starts]
        table.append(StartsRow(label, values, [row.invalid_because for row in starts if row and row.invalid_because]))
    return table
