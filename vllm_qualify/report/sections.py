"""The details of a report as rows, figures and a drawing, for its page. Outside text is not escaped yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vllm_qualify.evidence.idle import Idle, Stretch, sum_of
from vllm_qualify.evidence.load.fitting import Tried, Try
from vllm_qualify.evidence.load.soak import SoakCourse
from vllm_qualify.evidence.load.speculation import Drafting, SameText, SpeculationDetails
from vllm_qualify.evidence.load.sweep import OUTPUT, TPOT, UNITS, CurvePoint, Point, SloLevel, SweepPlan, Swept
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.startup import PARTS, Startup
from vllm_qualify.evidence.watched import Series, chart
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.serving import ServerArguments
from vllm_qualify.report import words
from vllm_qualify.report.words import DASH

# The latencies of each point that a sweep without an SLO shows.
LATENCIES = ("ttft_p50_ms", TPOT)
PURPOSES = {
    "curve": "curve",
    "concurrency": "search for the most clients",
    "request_rate": "search for the highest rate",
}
GOALS = {"concurrency": "most clients", "request_rate": "highest rate of requests"}
WARMTH = {
    True: "warm: what is compiled came from a cache",
    False: "cold: it compiled",
    None: "it is not known whether it was cold or warm",
}
# The sizes of the drawing, in its own units; it scales to the available width.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640.0, 320.0, 64.0, 40.0, 32.0, 40.0
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


@dataclass(frozen=True)
class DraftingRow:
    """The drafts at one number of simultaneous requests; the rates are by position."""

    name: str
    clients: str
    length: str
    rate: str
    rates: str
    note: str


@dataclass(frozen=True)
class TryRow:
    """One start of a fit. The chosen start had exactly the options of the result."""

    options: str
    kv_cache: str
    holds: str
    throughput: str
    note: str
    is_chosen: bool


def course_figures(course: Series) -> list[Figure]:
    """The figures of the server's course. A figure without any value is left out."""
    figures = [
        _figure("Requests in the server", "req", course.time_s, {"running": course.running, "waiting": course.waiting}),
        _figure("KV cache in use", "share", course.time_s, {"in use": course.kv_cache_usage}),
        _figure("Output tokens per second", "tok/s", course.time_s, {"output": course.output_tok_s}),
    ]
    return [figure for figure in figures if figure is not None]


def soak_figures(course: SoakCourse) -> list[Figure]:
    """The figures of a soak, with a point for each round. A figure without any value is left out."""
    latencies = [(name, {name.upper(): values}) for name, values in course.latency_ms.items()]
    figures = [
        _figure("Resident memory of the server's processes", "MiB", course.time_s, {"host": course.host_mib}),
        _figure("Used memory of the server's GPUs", "MiB", course.time_s, {"GPUs": course.gpu_mib}),
        *(_figure(f"Mean {name.upper()} of a round", "ms", course.time_s, line) for name, line in latencies),
    ]
    return [figure for figure in figures if figure is not None]


def _figure(title: str, unit: str, time_s: list[float], lines: dict[str, list[float | None]]) -> Figure | None:
    known = {name: [value for value in line if value is not None] for name, line in lines.items()}
    if not any(known.values()):
        return None
    ranges = [f"{name} {_range(values, unit)}" for name, values in known.items()]
    missing = sum(any(line[at] is None for line in lines.values()) for at in range(len(time_s)))
    gaps = f"; samples that do not tell it all: {missing} of {len(time_s)}" if missing else ""
    drawn = chart(title, unit, time_s, lines)
    # The chart escapes its inputs.
    return Figure(Markup(drawn), f"{'; '.join(ranges)}{gaps}")  # noqa: S704  (our own drawing, its labels escaped)


def _range(values: Sequence[float], unit: str) -> str:
    if not values:
        return "not reported"
    ends = (min(values), max(values))
    if unit == "req":
        return " to ".join(f"{number:,g}" for number in ends)
    return " to ".join(words.value(number, "fraction" if unit == "share" else unit) for number in ends)


def sweep_section(swept: Swept, planned: SweepPlan, before: Sequence[CurvePoint] = ()) -> SweepSection:
    """The section of the sweep. `before` is the baseline's curve."""
    slo = planned.sweep.slo
    latencies = list(slo) or list(LATENCIES)
    on_curve = {point.folder: point for point in swept.curve}
    goals = [(goal, swept.level_of(goal)) for goal in planned.goals]
    return SweepSection(
        slo=[f"{name} ≤{words.NO_BREAK}{bound:,g} ms" for name, bound in slo.items()],
        latencies=latencies,
        plot=plot(swept.curve, before) if swept.curve else None,
        points=[_point_row(point, on_curve.get(point.folder), latencies, planned.gpus) for point in swept.points],
        searched=[_searched(GOALS[goal], UNITS[goal], level) for goal, level in goals],
        problems=swept.curve_problems,
    )


def _searched(name: str, unit: str, level: SloLevel | None) -> Fact:
    if level is None or level.value is None:
        return name, DASH, (level.invalid_because if level else None) or "it was not searched for"
    return name, f"{level.value:,g} {unit}", level.note


def _point_row(point: Point, on_curve: CurvePoint | None, latencies: Sequence[str], gpus: int) -> PointRow:
    figures, unit = point.figures, UNITS["request_rate" if point.asked.is_open else "concurrency"]
    return PointRow(
        run=point.folder,
        purpose=PURPOSES[point.asked.purpose],
        level=f"{point.asked.level:,g} {unit}",
        per_gpu=words.value(figures[OUTPUT] / gpus, "tok/s") if OUTPUT in figures else DASH,
        per_user=words.value(1000 / figures[TPOT], "tok/s") if figures.get(TPOT, 0.0) > 0 else DASH,
        latencies=[words.value(figures.get(name), "ms") for name in latencies],
        meets={True: "met", False: "missed", None: DASH}[point.meets_slo],
        note=point.invalid_because or point.overloaded_because or ("on the front" if on_curve and on_curve.is_on_front else ""),
        is_invalid=point.invalid_because is not None,
    )


def plot(curve: Sequence[CurvePoint], before: Sequence[CurvePoint] = ()) -> Plot:
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

    ours, theirs = dots(curve), dots(before)
    return Plot(ours, _front(ours), theirs, _front(theirs), words.value(most_user, "tok/s"), words.value(most_gpu, "tok/s"))


def _front(dots: Sequence[Dot]) -> str:
    """A path through the points of the front."""
    front = sorted((dot.x, dot.y) for dot in dots if dot.is_on_front)
    return "".join(f"{'L' if at else 'M'}{x:g} {y:g}" for at, (x, y) in enumerate(front))


def drafting_rows(details: SpeculationDetails) -> list[DraftingRow]:
    named = {
        "fixed prompts, greedy": details.greedy,
        "one request at a time": details.batch1,
        "the profile's load": details.profile,
    }
    return [_drafting_row(name, drafting) for name, drafting in named.items()]


def _drafting_row(name: str, drafting: Drafting) -> DraftingRow:
    return DraftingRow(
        name=name,
        clients=f"{drafting.max_concurrency:,}",
        length=words.value(drafting.length_tok, "tok"),
        rate=words.value(drafting.rate, "fraction"),
        rates=" · ".join(words.value(rate, "fraction") for rate in drafting.rates) or DASH,
        note=drafting.invalid_because or "",
    )


def speedup_rows(speedups: Sequence[Measurement]) -> list[Fact]:
    """Each speedup with its interval, or with the reason why there is no value."""
    rows = [words.measurement_row(measurement) for measurement in speedups]
    return [(f"{row.metric}: {row.meaning}", row.value, row.note or f"interval {row.interval}") for row in rows]


def same_text_sentence(texts: SameText | None) -> str:
    """How many texts are the same without speculative decoding, and where the others begin to differ, in one sentence."""
    if texts is None:
        return (
            "It is not known whether the texts are the same without it: the measurement speculative_same_text has the reason."
        )
    parted = [f"that of prompt {number} at character {at:,}" for number, at in enumerate(texts.parts_at, 1) if at is not None]
    same = f"{texts.same} of {len(texts.parts_at)} greedy texts are the same without it"
    return f"{same}; they part: {', '.join(parted)}." if parted else f"{same}."


def startup_rows(startup: Startup) -> list[Fact]:
    """The whole start, then its parts in their order."""
    parts = [(part, metric, getattr(startup, part)) for part, metric in PARTS.items()]
    rows = [(METRICS[metric].meaning, _seconds(value), startup.because.get(part, "")) for part, metric, value in parts]
    return [(METRICS["startup_s"].meaning, _seconds(startup.startup_s), ""), *rows]


def idle_rows(idle: Idle) -> list[Fact]:
    """Each GPU; if there are several, also all together. If nothing is certain, only the reason."""
    if idle.because is not None:
        return [("The GPUs idled", DASH, idle.because)]
    several = len(idle.gpus) > 1
    rows = [_idle_row(f"GPU {gpu.index} idled", gpu.start, gpu.serving) for gpu in idle.gpus]
    starts, servings = (sum_of([getattr(gpu, part) for gpu in idle.gpus]) for part in ("start", "serving"))
    return [*rows, *([_idle_row("All of them together idled", starts, servings)] if several else [])]


def _idle_row(what: str, start: Stretch, serving: Stretch) -> Fact:
    whole = sum_of([start, serving])
    parts = [
        f"{_seconds(each.idle_s)} of {_seconds(each.told_s)} {when}"
        for each, when in ((start, "before the first completion"), (serving, "after it"))
    ]
    return what, words.value(whole.share, "fraction"), ", ".join(parts)


def _seconds(value: float | None) -> str:
    return words.duration(value) if value is not None else DASH


def try_rows(tried: Tried) -> list[TryRow]:
    return [_try_row(each, tried.found) for each in tried.tries]


def _try_row(tried: Try, chosen: ServerArguments) -> TryRow:
    return TryRow(
        options=options_text(tried.arguments) or "those of the recipe",
        kv_cache=f"{tried.kv_cache_tok:,} tok" if tried.kv_cache_tok is not None else DASH,
        holds=f"{tried.holds:,} req" if tried.holds is not None else DASH,
        throughput=words.value(tried.output_throughput_tok_s, "tok/s"),
        note=tried.failed_because or "",
        is_chosen=tried.failed_because is None and tried.arguments == chosen,
    )


def options_text(arguments: ServerArguments) -> str:
    return ", ".join(f"{name} {value}" for name, value in arguments.items())
