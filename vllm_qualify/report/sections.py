"""The details of a report as rows, figures and a drawing, for its page. Outside text is not escaped yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vllm_qualify.evidence.idle import Idle, Stretch, sum_of
from vllm_qualify.evidence.load.greedy import SameText
from vllm_qualify.evidence.load.search import UNITS, Point, SloLevel
from vllm_qualify.evidence.load.soak import SoakCourse
from vllm_qualify.evidence.load.sweep import TPOT, CurvePoint
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.stages.sweep import sweep_plan
from vllm_qualify.evidence.startup import PARTS, Startup
from vllm_qualify.evidence.watched import Series
from vllm_qualify.recipe.metrics import METRICS, OUTPUT_THROUGHPUT
from vllm_qualify.report import words
from vllm_qualify.report.charts import draw_chart
from vllm_qualify.report.model import Report
from vllm_qualify.report.words import DASH

# The latencies of each point that a sweep without an SLO shows.
LATENCIES = ("ttft_p50_ms", TPOT)
PURPOSES = {"curve": "curve", "concurrency": "search for the most clients", "request_rate": "search for the highest rate"}
GOALS = {"concurrency": "most clients", "request_rate": "highest rate of requests"}
WARMTH = {
    True: "warm: what is compiled came from a cache",
    False: "cold: it compiled",
    None: "it is not known whether it was cold or warm",
}
# The sizes of the drawing, in its own units; it scales to the available width.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640.0, 320.0, 64.0, 40.0, 32.0, 40.0
Drawn = tuple[str, str, dict[str, list[float | None]]]
"""A figure's title, unit and lines."""
Fact = tuple[str, str, str]
"""A name, its value or DASH, and a remark or the reason why there is no value."""


@dataclass(frozen=True)
class Figure:
    """A chart, and the range of each of its lines in words."""

    svg: Markup
    text: str


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    label: str
    is_on_front: bool


@dataclass(frozen=True)
class Plot:
    """Our curve and the baseline's, and the maximum of both axes in words. A `front` is the path through a front's points."""

    dots: list[Dot]
    front: str
    before: list[Dot]
    front_before: str
    most_per_user: str
    most_per_gpu: str


@dataclass(frozen=True)
class PointRow:
    """One run of a sweep. A missing figure is DASH, and the note has the reason."""

    run: str
    purpose: str
    level: str
    per_gpu: str
    per_user: str
    latencies: list[str]
    meets: str
    note: str
    is_invalid: bool


@dataclass(frozen=True)
class SweepSection:
    slo: list[str]
    latencies: list[str]
    plot: Plot | None
    points: list[PointRow]
    searched: list[Fact]
    problems: list[str]


def course_figures(course: Series) -> list[Figure]:
    """The figures of the server's course. A figure without any value is left out."""
    drawn: list[Drawn] = [
        ("Requests in the server", "req", {"running": course.running, "waiting": course.waiting}),
        ("KV cache in use", "share", {"in use": course.kv_cache_usage}),
        ("Output tokens per second", "tok/s", {"output": course.output_tok_s}),
    ]
    return _draw_figures(course.time_s, drawn)


def soak_figures(course: SoakCourse) -> list[Figure]:
    """The figures of a soak, with a point for each round. A figure without any value is left out."""
    latencies = [(name.upper(), values) for name, values in course.latency_ms.items()]
    drawn: list[Drawn] = [
        ("Resident memory of the server's processes", "MiB", {"host": course.host_mib}),
        ("Used memory of the server's GPUs", "MiB", {"GPUs": course.gpu_mib}),
        *((f"Mean {name} of a round", "ms", {name: values}) for name, values in latencies),
    ]
    return _draw_figures(course.time_s, drawn)


def _draw_figures(time_s: list[float], drawn: Sequence[Drawn]) -> list[Figure]:
    known = [each for each in drawn if any(value is not None for line in each[2].values() for value in line)]
    return [_draw_figure(time_s, *each) for each in known]


def _draw_figure(time_s: list[float], title: str, unit: str, lines: dict[str, list[float | None]]) -> Figure:
    known = {name: [value for value in line if value is not None] for name, line in lines.items()}
    ranges = [f"{name} {_range_words(values, unit)}" for name, values in known.items()]
    missing = sum(any(line[at] is None for line in lines.values()) for at in range(len(time_s)))
    gaps = f"; samples that do not tell it all: {missing} of {len(time_s)}" if missing else ""
    svg = Markup(draw_chart(title, unit, time_s, lines))  # noqa: S704  (our own drawing, its labels escaped)
    return Figure(svg, f"{'; '.join(ranges)}{gaps}")


def _range_words(values: Sequence[float], unit: str) -> str:
    if not values:
        return "not reported"
    shown_unit = "fraction" if unit == "share" else unit
    ends = (min(values), max(values))
    return " to ".join(f"{number:,g}" if unit == "req" else words.value(number, shown_unit) for number in ends)


def sweep_section(report: Report) -> SweepSection | None:
    """The section of the sweep; None without one."""
    swept, before = report.details.sweep, report.details.before
    if swept is None or report.plan.sweep is None:
        return None
    planned = sweep_plan(report.plan)
    slo = planned.sweep.slo
    latencies = list(slo) or list(LATENCIES)
    on_front = {point.folder for point in swept.curve if point.is_on_front}
    return SweepSection(
        slo=[f"{name} ≤{words.NO_BREAK}{bound:,g} ms" for name, bound in slo.items()],
        latencies=latencies,
        plot=_plot_curves(swept.curve, before.curve if before else []) if swept.curve else None,
        points=[_point_row(point, latencies, planned.gpus, on_front) for point in swept.points],
        searched=[_search_fact(GOALS[goal], UNITS[goal], swept.level_of(goal)) for goal in planned.goals],
        problems=swept.curve_problems,
    )


def _search_fact(name: str, unit: str, level: SloLevel | None) -> Fact:
    if level is None or level.value is None:
        return name, DASH, (level.invalid_because if level else None) or "it was not searched for"
    return name, f"{level.value:,g} {unit}", level.note


def _point_row(point: Point, latencies: Sequence[str], gpus: int, on_front: set[str]) -> PointRow:
    figures, unit = point.figures, UNITS["request_rate" if point.asked.is_open else "concurrency"]
    return PointRow(
        run=point.folder,
        purpose=PURPOSES[point.asked.purpose],
        level=f"{point.asked.level:,g} {unit}",
        per_gpu=words.value(figures[OUTPUT_THROUGHPUT] / gpus, "tok/s") if OUTPUT_THROUGHPUT in figures else DASH,
        per_user=words.value(1000 / figures[TPOT], "tok/s") if figures.get(TPOT, 0.0) > 0 else DASH,
        latencies=[words.value(figures.get(name), "ms") for name in latencies],
        meets={True: "met", False: "missed", None: DASH}[point.meets_slo],
        note=point.invalid_because or point.overloaded_because or ("on the front" if point.folder in on_front else ""),
        is_invalid=point.invalid_because is not None,
    )


def _plot_curves(curve: Sequence[CurvePoint], before: Sequence[CurvePoint]) -> Plot:
    """The points in the units of the drawing. Both axes start at 0."""
    most_user = max(each.tok_s_per_user for each in [*curve, *before])
    most_gpu = max(each.output_tok_s_per_gpu for each in [*curve, *before])

    def dots(points: Sequence[CurvePoint]) -> list[Dot]:
        return [
            Dot(
                x=round(LEFT + (WIDTH - LEFT - RIGHT) * each.tok_s_per_user / most_user, 1),
                y=round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * each.output_tok_s_per_gpu / most_gpu, 1),
                label=f"{each.clients:,}",
                is_on_front=each.is_on_front,
            )
            for each in points
        ]

    ours, theirs, ends = dots(curve), dots(before), [words.value(most, "tok/s") for most in (most_user, most_gpu)]
    return Plot(ours, _front_path(ours), theirs, _front_path(theirs), *ends)


def _front_path(dots: Sequence[Dot]) -> str:
    front = sorted((dot.x, dot.y) for dot in dots if dot.is_on_front)
    return "".join(f"{'L' if at else 'M'}{x:g} {y:g}" for at, (x, y) in enumerate(front))


def speedup_rows(speedups: Sequence[Measurement]) -> list[Fact]:
    """Each speedup with its interval, or with the reason why there is no value."""
    rows = [words.measurement_row(measurement) for measurement in speedups]
    return [(f"{row.metric}: {row.meaning}", row.value, row.note or f"interval {row.interval}") for row in rows]


def same_text_sentence(texts: SameText | None) -> str:
    """How many texts are the same without speculative decoding, and where the others begin to differ, in one sentence."""
    if texts is None:
        reason = "the measurement speculative_same_text has the reason"
        return f"It is not known whether the texts are the same without it: {reason}."
    parted = [f"that of prompt {number} at character {at:,}" for number, at in enumerate(texts.parts_at, 1) if at is not None]
    same = f"{texts.same_count} of {len(texts.parts_at)} greedy texts are the same without it"
    return f"{same}; they part: {', '.join(parted)}." if parted else f"{same}."


def startup_rows(startup: Startup) -> list[Fact]:
    """The whole start, then its parts in their order."""
    return [
        (METRICS[metric].meaning, _duration_words(getattr(startup, part)), startup.because.get(part, ""))
        for part, metric in {"startup_s": "startup_s", **PARTS}.items()
    ]


def idle_rows(idle: Idle) -> list[Fact]:
    """Each GPU; if there are several, also all together. If nothing is certain, only the reason."""
    if idle.because is not None:
        return [("The GPUs idled", DASH, idle.because)]
    rows = [_idle_row(f"GPU {gpu.index} idled", gpu.start, gpu.serving) for gpu in idle.gpus]
    if len(idle.gpus) > 1:
        start, serving = sum_of([gpu.start for gpu in idle.gpus]), sum_of([gpu.serving for gpu in idle.gpus])
        rows.append(_idle_row("All of them together idled", start, serving))
    return rows


def _idle_row(what: str, start: Stretch, serving: Stretch) -> Fact:
    before, after = (f"{_duration_words(each.idle_s)} of {_duration_words(each.told_s)}" for each in (start, serving))
    share = words.value(sum_of([start, serving]).share, "fraction")
    return what, share, f"{before} before the first completion, {after} after it"


def _duration_words(value: float | None) -> str:
    return words.duration(value) if value is not None else DASH
