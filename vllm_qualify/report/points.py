"""Rows and drawings of a load: its repeats as points, its percentiles beside the baseline's, and the cost of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_qualify.evidence.load.figures import STAGE as LOAD
from vllm_qualify.evidence.measurement import Interval, Measurement
from vllm_qualify.judge.estimate import cost_in_words
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS, OUTPUT_THROUGHPUT
from vllm_qualify.report import words
from vllm_qualify.report.model import Report
from vllm_qualify.report.words import DASH

ALWAYS = ("request_throughput_req_s", OUTPUT_THROUGHPUT)
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
PERCENTILES = ("p50", "p90", "p99")
# The sizes of a drawing, in its own units; it scales to the available width. Our line of points is above the baseline's.
WIDTH, HEIGHT, LEFT, RIGHT = 420.0, 92.0, 60.0, 12.0
OURS_Y, THEIRS_Y, AXIS_Y = 32.0, 54.0, 70.0
# The free space at both ends, as a share of the drawn range.
MARGIN = 0.06


@dataclass(frozen=True)
class Mark:
    x: float
    text: str


@dataclass(frozen=True)
class Strip:
    """A metric's repeats on a line, with its interval and the bounds of its gates; and the baseline's repeats, if any."""

    metric: str
    meaning: str
    ours: list[Mark]
    theirs: list[Mark]
    interval: tuple[float, float] | None
    bounds: list[Mark]
    least: str
    most: str
    text: str


@dataclass(frozen=True)
class LatencyRow:
    """The percentiles of one latency, each as (ours, the baseline's)."""

    name: str
    meaning: str
    percentiles: list[tuple[str, str]]


def strips(report: Report) -> list[Strip]:
    """A strip for the throughput and for every metric with a gate, if it was measured in repeats."""
    gated = [gate.gate for gate in report.judgement.gates]
    wanted = dict.fromkeys([*ALWAYS, *(gate.metric for gate in gated)])
    ours, theirs = _by_metric(report.measurements), _by_metric(report.baseline_measurements)
    return [
        _make_strip(ours[name], theirs.get(name), [gate for gate in gated if gate.metric == name and not gate.is_compared])
        for name in wanted
        if name in ours and ours[name].repeats
    ]


def _by_metric(measurements: Sequence[Measurement]) -> dict[str, Measurement]:
    """The valid measurements of the first start by metric. Measurements of tasks have no repeats and are left out."""
    return {row.metric: row for row in measurements if (row.task, row.start) == (None, None) and row.value is not None}


def _make_strip(ours: Measurement, theirs: Measurement | None, gates: Sequence[Gate]) -> Strip:
    before = theirs.repeats if theirs else []
    ends = [ours.interval.lower, ours.interval.upper] if ours.interval else []
    drawn = [*ours.repeats, *before, *ends, *(bound for gate in gates for bound in gate.bounds)]
    least, most = min(drawn), max(drawn)
    room = (most - least or abs(most) or 1.0) * MARGIN
    low, high = least - room, most + room

    def x(number: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (number - low) / (high - low), 1)

    def marks(numbers: Sequence[float]) -> list[Mark]:
        return [Mark(x(number), words.value(number, ours.unit)) for number in numbers]

    return Strip(
        metric=ours.label,
        meaning=METRICS[ours.metric].meaning,
        ours=marks(ours.repeats),
        theirs=marks(before),
        interval=(x(ends[0]), x(ends[1])) if ends else None,
        bounds=[Mark(x(bound), words.words_of_bound(gate)) for gate in gates for bound in gate.bounds],
        least=words.value(least, ours.unit, [most]),
        most=words.value(most, ours.unit, [least]),
        text=_strip_words(ours, theirs, gates),
    )


def _strip_words(ours: Measurement, theirs: Measurement | None, gates: Sequence[Gate]) -> str:
    row = words.measurement_row(ours)
    interval = f"interval {row.interval}" if ours.interval else ""
    bounds = [f"bound {words.words_of_bound(gate)}" for gate in gates]
    baseline = f"baseline {words.measurement_row(theirs).repeats}" if theirs and theirs.repeats else ""
    return "; ".join(filter(None, [f"repeats {row.repeats}", interval, *bounds, baseline]))


def latency_rows(report: Report) -> list[LatencyRow]:
    """The rows of the latencies; empty if no load was measured."""
    ours, theirs = _by_metric(report.measurements), _by_metric(report.baseline_measurements)
    if not any(row.metric.startswith(f"{name}_") for row in report.measurements for name in LATENCIES):
        return []
    rows = []
    for name, title in LATENCIES.items():
        metrics = [f"{name}_{which}_ms" for which in PERCENTILES]
        percentiles = [(_value_words(ours.get(metric)), _value_words(theirs.get(metric))) for metric in metrics]
        rows.append(LatencyRow(title, METRICS[f"{name}_mean_ms"].meaning.removesuffix(", mean"), percentiles))
    return rows


def _value_words(row: Measurement | None) -> str:
    return words.value(row.value, row.unit) if row else DASH


def cost(report: Report) -> tuple[str, str]:
    """The cost of a million output tokens at the profile's load, and how it follows; or DASH, and why there is no cost."""
    plan, output = report.plan, _by_metric(report.measurements).get(OUTPUT_THROUGHPUT)
    if plan.price_usd_gpu_hour is None:
        return DASH, "the price of a GPU hour is not given: give the recipe price_usd_gpu_hour, or the run --price-usd-gpu-hour"
    if output is None or not output.value:
        return DASH, f"there is no valid {OUTPUT_THROUGHPUT}"
    # As the sweep counts them: a server on a CPU counts as one.
    gpus = max(1, len(plan.server.gpus))
    usd_s = plan.price_usd_gpu_hour * gpus / 3600
    at = f"{gpus} times {plan.price_usd_gpu_hour:g} usd an hour for {words.value(output.value, 'tok/s')}"
    if output.interval and output.interval.lower > 0:
        ends = Interval(lower=1e6 * usd_s / output.interval.upper, upper=1e6 * usd_s / output.interval.lower)
        at += f"; interval {words.interval(ends, 'usd/Mtok')}"
    return words.value(1e6 * usd_s / output.value, "usd/Mtok"), at


def effort(report: Report) -> str:
    """What the load took: repeats, minutes of its stage, GPU-minutes, and money if there is a price; empty without a load."""
    stage = next((each for each in report.stages if each.stage == LOAD), None)
    if stage is None:
        return ""
    repeats = len(stage.commands) // (2 if report.plan.beside else 1)
    counted = f"{repeats} repeat{'' if repeats == 1 else 's'}, " if repeats else ""
    elsewhere = f", in run {stage.taken_from}" if stage.taken_from else ""
    return f"{counted}{cost_in_words(report.plan, stage.duration_s)}{elsewhere}"


def window(report: Report) -> str:
    """The window of the load's figures, in words; empty if it is the steady state."""
    told = "the figures are over whole runs, as bench counts: ramp-up and tail are in them"
    return told if report.plan.load.window == "whole" else ""
