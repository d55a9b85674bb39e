"""How often a server was started for a report, and what each start measured of what is compared with a baseline."""

from dataclasses import dataclass

from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.starts import FIRST
from vllm_qualify.recipe.gates import label_of
from vllm_qualify.report import words
from vllm_qualify.report.model import Report


@dataclass(frozen=True)
class StartsRow:
    """What each start measured, the first one first. `notes` say why a start has no value."""

    metric: str
    values: list[str]
    notes: list[str]


def number_of_starts(report: Report) -> int:
    """How often the server was started."""
    return max((row.start for row in _measured(report).values() if row.start), default=FIRST)


def sentence(report: Report) -> str:
    """The number of starts and their values, in one sentence; empty if only one was planned."""
    if report.plan.starts == FIRST or not report.plan.over_starts:
        return ""
    each = [f"{row.metric}: {' · '.join(row.values)}" for row in rows(report)]
    return "; ".join([f"{number_of_starts(report)} of at most {report.plan.starts}", *each])


def rows(report: Report) -> list[StartsRow]:
    """A row for each gate against the baseline; none if the server was started only once."""
    number = number_of_starts(report)
    if number == FIRST:
        return []
    measured = _measured(report)
    labels = {label_of(gate.metric, gate.task, gate.filter, against_baseline=False): None for gate in report.plan.over_starts}
    return [_row(label, [measured.get(_in_start(label, start)) for start in range(FIRST, number + 1)]) for label in labels]


def _measured(report: Report) -> dict[str, Measurement]:
    return {row.label: row for stage in report.stages for row in stage.measurements}


def _in_start(label: str, start: int) -> str:
    return label if start == FIRST else f"{label} of start {start}"


def _row(label: str, rows: list[Measurement | None]) -> StartsRow:
    values = [words.value(row.value, row.unit) if row else words.DASH for row in rows]
    notes = [row.invalid_because for row in rows if row and row.invalid_because]
    return StartsRow(label, values, notes)
