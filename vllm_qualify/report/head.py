"""A report's first screen in words, for the terminal and Prefect's UI."""

from collections.abc import Iterator, Sequence

from vllm_qualify.report import points, starts, words
from vllm_qualify.report.changes import changes_of
from vllm_qualify.report.model import Report
from vllm_qualify.report.words import GateRow


def facts(report: Report) -> list[tuple[str, str]]:
    """Named facts: what was qualified, on which machine, when, where, and compared with what."""
    plan, release, changed = report.plan, report.plan.cell.release, changes_of(report)
    rows = [
        ("Engine", f"{words.engine(release.engine)} ({release.engine.digest})"),
        ("Model", f"{release.model} at {release.revision}"),
        ("Signed by", words.publisher(plan.server)),
        ("Also from", "; ".join(words.parts(plan.server))),
        ("Hardware", f"{plan.fingerprint.gpu_type}: {words.hardware(plan.fingerprint)}"),
        ("Judged", f"{words.time(report.created_at)}{_where(report)} by {report.made_by}"),
        ("Run", f"{report.run_id}{_origin(report)}"),
        ("Load", "; ".join(filter(None, (points.effort(report), points.window(report))))),
        ("Baseline", words.compared(plan)),
        ("Anchor", words.anchored(plan)),
        ("Starts", starts.sentence(report)),
        ("Tries", words.tries(plan)),
        ("Trusts code", "; ".join(plan.foreign_code)),
        ("Since then", changed.brief if changed else ""),
    ]
    return [(name, text) for name, text in rows if text]


def _where(report: Report) -> str:
    return f" on {report.judged_on}" if report.judged_on else ""


def _origin(report: Report) -> str:
    return f", judged again from run {report.rejudged_from}" if report.rejudged_from else ""


def deciding(report: Report) -> list[str]:
    """The gates that keep the cell from passing."""
    judgement = report.judgement
    return [] if report.passed else [gate.gate.label for gate in judgement.gates if gate.counts_as == judgement.verdict]


def reasons(rows: Sequence[GateRow]) -> Iterator[tuple[str, GateRow]]:
    """Gates that did not pass or have a waiver. Gates with the same verdict, reason and waiver are grouped."""
    groups: dict[tuple[str, str, str], list[GateRow]] = {}
    for row in rows:
        if row.verdict != "pass" or row.waiver:
            groups.setdefault((row.verdict, row.because, row.waiver), []).append(row)
    for group in groups.values():
        yield ", ".join(row.gate for row in group), group[0]
