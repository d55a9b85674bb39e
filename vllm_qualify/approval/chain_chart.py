"""The chain of a cell as a drawing: the score of each approved run with its interval, and that of the anchor as a line."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_qualify.approval.row import ChainLink, Row
from vllm_qualify.publish.bundle import Score
from vllm_qualify.secrets import plain

# In the drawing's own units; the page sets its real width. They are those of the other charts, without the labels below.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 172, 62, 14, 12, 14


@dataclass(frozen=True)
class Tick:
    y: float
    text: str


@dataclass(frozen=True)
class RunMark:
    """One run's score at (x, y), its interval from `top` to `bottom`. The page fills a baseline's."""

    x: float
    y: float
    top: float
    bottom: float
    is_baseline: bool
    title: str


@dataclass(frozen=True)
class Chain:
    """The drawing. `anchor_y` is None if the anchor has no score of this metric. `summary` says in words what is drawn."""

    metric: str
    ticks: list[Tick]
    marks: list[RunMark]
    path: str
    anchor: str
    anchor_y: float | None
    summary: str

    @property
    def box(self) -> str:
        return f"0 0 {WIDTH} {HEIGHT}"

    @property
    def ends(self) -> tuple[int, int]:
        return LEFT, WIDTH - RIGHT


ScoredLink = tuple[ChainLink, Score]


def chart_of(row: Row) -> Chain | None:
    """The drawing of the approved runs that have the newest one's score; None if there is none. Revoked ones are left out."""
    scored = [(link, link.score) for link in row.chain if link.score and not link.revoked]
    if not scored:
        return None
    metric = scored[-1][1].metric
    known: list[ScoredLink] = [(link, score) for link, score in scored if score.metric == metric]
    least, most = _scale_ends([score for _, score in known])
    slot = (WIDTH - LEFT - RIGHT) / len(known)

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - least) / (most - least)), 1)

    marks = [_run_mark(link, score, round(LEFT + slot * (at + 0.5), 1), y) for at, (link, score) in enumerate(known)]
    anchor = next((score for link, score in known if link.run_id == row.anchor), None)
    return Chain(
        metric=plain(metric),
        ticks=_scale_ticks(least, most, y),
        marks=marks,
        path="".join(f"{'L' if at else 'M'}{mark.x:g} {mark.y:g}" for at, mark in enumerate(marks)),
        anchor=plain(row.anchor or ""),
        anchor_y=y(anchor.value) if anchor else None,
        summary=_summarize_scores(known, anchor),
    )


def _scale_ends(scores: Sequence[Score]) -> tuple[float, float]:
    """The least and the most of the scale: a tenth more than the scores and their intervals reach."""
    lowest = min(score.interval.lower if score.interval else score.value for score in scores)
    highest = max(score.interval.upper if score.interval else score.value for score in scores)
    reach = (highest - lowest or abs(highest) / 10 or 1.0) / 10
    return max(0.0, lowest - reach), highest + reach


def _run_mark(link: ChainLink, score: Score, x: float, y: Callable[[float], float]) -> RunMark:
    interval = score.interval
    reach = f" ({_format_share(interval.lower)} to {_format_share(interval.upper)})" if interval else ""
    kind = ", made to be an anchor" if link.new_anchor else ", made to be a baseline" if link.establishes else ""
    top, bottom = (y(interval.upper), y(interval.lower)) if interval else (y(score.value), y(score.value))
    title = f"{plain(link.run_id)}{kind}: {_format_share(score.value)}{reach}"
    return RunMark(x, y(score.value), top, bottom, link.establishes, title)


def _scale_ticks(least: float, most: float, y: Callable[[float], float]) -> list[Tick]:
    """Some three lines at round numbers."""
    magnitude = 10.0 ** math.floor(math.log10((most - least) / 3))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= (most - least) / 3.5)
    decimals = max(0, math.ceil(-math.log10(step * 100) - 1e-9))
    numbers = range(math.ceil(least / step), math.floor(most / step) + 1)
    return [Tick(y(number * step), f"{100 * number * step:.{decimals}f} %") for number in numbers]


def _summarize_scores(known: Sequence[ScoredLink], anchor: Score | None) -> str:
    newest = f"newest {_format_share(known[-1][1].value)}"
    since = f", {100 * (known[-1][1].value - anchor.value):+.2f} points since the anchor" if anchor else ""
    return f"{len(known)} approved {'run' if len(known) == 1 else 'runs'}: {newest}{since}"


def _format_share(value: float) -> str:
    return f"{100 * value:.2f} %"
