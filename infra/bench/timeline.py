"""The timeline of a held server, from the files of a run: each step with its times, and the gaps in which the server idled."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.evidence.accuracy.lm_eval_process import AFTER, BEFORE
from vllm_qualify.evidence.measurement import StageEvidence

# Shorter gaps are left out.
GAP_S = 0.5
# The work by hand writes a line `time name` into `marks` when a step begins, and `time end` at the end.
MARKS, END = "marks", "end"


class Span(NamedTuple):
    """A named stretch of time: begin and end in s since 1970."""

    name: str
    began: float
    ended: float


def of_flow(run: Path) -> list[Span]:
    """Smoke, the blocks of accuracy and the repeats of the load, in order. The run must have finished these stages."""
    evidence, smoke = run / "evidence", StageEvidence.model_validate_json((run / "stages" / "smoke.json").read_bytes())
    began = smoke.started_at.timestamp()
    blocks = [(f"accuracy {path.name}", path / BEFORE, path / AFTER) for path in (evidence / "accuracy").glob("*/r*-b*")]
    load = evidence / "load"
    numbers = [match[1] for path in load.iterdir() if (match := re.fullmatch(r"bench-([0-9]+)\.json", path.name))]
    repeats = [(f"repeat {each}", load / f"metrics-{each}-before.txt", load / f"metrics-{each}-after.txt") for each in numbers]
    spans = [Span(name, *(path.stat().st_mtime for path in paths)) for name, *paths in (*blocks, *repeats)]
    return sorted([Span("smoke", began, began + smoke.duration_s), *spans], key=lambda span: span.began)


def by_hand(folder: Path) -> list[Span]:
    """As `of_flow`, for the work of `by_hand.sh`."""
    marks = [line.partition(" ") for line in (folder / MARKS).read_text().splitlines()]
    return [Span(name, float(at), float(until)) for (at, _, name), (until, _, _) in pairwise(marks)]


def merged(idle: Iterable[tuple[float, float]]) -> list[Span]:
    """Join adjacent idle times, in order, into gaps. Gaps of GAP_S or less are left out."""
    gaps: list[Span] = []
    for began, ended in idle:
        if gaps and began <= gaps[-1].ended:
            gaps[-1] = Span("idle", gaps[-1].began, ended)
        else:
            gaps.append(Span("idle", began, ended))
    return [gap for gap in gaps if gap.ended - gap.began > GAP_S]


def timetable(launched: float, ready: float, ended: float, spans: Sequence[Span], gaps: Sequence[Span]) -> Iterator[str]:
    """One line for each step and gap, in s since the launch."""
    # The time before smoke is the server's start; the time after the last step is its end.
    rest = [
        Span("start, to the first completion", launched, ready),
        Span("the rest, and the server's end", _last(spans), ended),
    ]
    idle = [Span(f"  idle: {_during(gap, spans)}", gap.began, gap.ended) for gap in gaps]
    for span in sorted([*rest, *spans, *idle], key=lambda span: span.began):
        yield f"{span.began - launched:9.1f} {span.ended - launched:8.1f} {span.ended - span.began:7.1f}  {span.name}"


def _last(spans: Sequence[Span]) -> float:
    return max(span.ended for span in spans)


def _during(gap: Span, spans: Sequence[Span]) -> str:
    """The step that the gap is in, or the steps that it is between."""
    within = [span.name for span in spans if min(span.ended, gap.ended) - max(span.began, gap.began) > 0]
    if within:
        return f"in {', '.join(within)}"
    before = [span.name for span in spans if span.ended <= gap.began]
    after = [span.name for span in spans if span.began >= gap.ended]
    return f"between {before[-1] if before else 'the start'} and {after[0] if after else 'the end'}"
