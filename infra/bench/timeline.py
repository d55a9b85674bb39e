"""What a server was held for: what was done when, by the files of a run, and where the server had nothing to do."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.evidence.accuracy import AFTER, BEFORE
from vllm_qualify.evidence.measurement import StageEvidence

# Shorter gaps are left out.
GAP_S = 0.5
# By hand: `marks` has a line `time name` as each step begins, and another, `time end`, at the end.
MARKS, END = "marks", "end"


class Span(NamedTuple):
    """Something that lasted, between two times in s since 1970."""

    name: str
    began: float
    ended: float


def of_flow(run: Path) -> list[Span]:
    """Smoke, the blocks of accuracy and the repeats of the load, in their order, of a run that finished these stages."""
    evidence, smoke = run / "evidence", StageEvidence.model_validate_json((run / "stages" / "smoke.json").read_bytes())
    began = smoke.started_at.timestamp()
    blocks = [(f"accuracy {path.name}", path / BEFORE, path / AFTER) for path in (evidence / "accuracy").glob("*/r*-b*")]
    load = evidence / "load"
    numbers = [found[1] for path in load.iterdir() if (found := re.fullmatch(r"bench-([0-9]+)\.json", path.name))]
    repeats = [(f"repeat {each}", load / f"metrics-{each}-before.txt", load / f"metrics-{each}-after.txt") for each in numbers]
    found = [Span(name, *(path.stat().st_mtime for path in paths)) for name, *paths in (*blocks, *repeats)]
    return sorted([Span("smoke", began, began + smoke.duration_s), *found], key=lambda span: span.began)


def by_hand(folder: Path) -> list[Span]:
    """As `of_flow`, of what `by_hand.sh` did."""
    marks = [line.partition(" ") for line in (folder / MARKS).read_text().splitlines()]
    return [Span(name, float(at), float(until)) for (at, _, name), (until, _, _) in pairwise(marks)]


def merged(idle: Iterable[tuple[float, float]]) -> list[Span]:
    """The gaps that short times without work, in their order, make together."""
    gaps: list[Span] = []
    for began, ended in idle:
        if gaps and began <= gaps[-1].ended:
            gaps[-1] = Span("idle", gaps[-1].began, ended)
        else:
            gaps.append(Span("idle", began, ended))
    return [gap for gap in gaps if gap.ended - gap.began > GAP_S]


def told(launched: float, ready: float, ended: float, spans: Sequence[Span], gaps: Sequence[Span]) -> Iterator[str]:
    """One line for each step and gap, in s since the launch."""
    # What comes before smoke and after the last step is the server's own start and end.
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
    """The steps that it is in, or between which it is."""
    within = [span.name for span in spans if min(span.ended, gap.ended) - max(span.began, gap.began) > 0]
    if within:
        return f"in {', '.join(within)}"
    before = [span.name for span in spans if span.ended <= gap.began]
    after = [span.name for span in spans if span.began >= gap.ended]
    return f"between {before[-1] if before else 'the start'} and {after[0] if after else 'the end'}"
