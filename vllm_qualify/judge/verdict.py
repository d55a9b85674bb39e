"""Verdicts on gates: the results of Great Expectations in the design's four words."""

from collections.abc import Sequence
from datetime import date
from typing import Any, Literal

from vllm_qualify.evidence.measurement import Interval, Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.recipe.gates import Gate, Verdict, Waiver
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.values import Frozen, Share

# The outcome of a cell. A passed cell may still need an approval, which is a separate decision.
Outcome = Literal["passed", "not passed"]
# The worst of a cell's gates decides it.
WORST_FIRST: tuple[Verdict, ...] = ("fail", "invalid", "inconclusive", "pass")


class Checks(Frozen):
    """The results of the expectations of one gate."""

    present: bool
    """exactly one row of the table belongs to the gate"""
    trusted: bool
    """the row is marked valid and its value is a number"""
    noise_known: bool
    """the row has both interval bounds"""
    surely_inside: bool
    """the whole interval meets the bound"""
    maybe_inside: bool
    """some of the interval meets the bound"""


class GateVerdict(Frozen):
    """One gate with its verdict. A value nearer to the bound than `smallest_visible_change` cannot be distinguished from it.

    `expectations` are the `meta.id` of the expectations that decided, in suite and result. `traced_to` is the raw evidence as
    `path:line`. `waiver` is valid on the day of the judgement, `expired` was valid before. `p_value` is that of a gate with
    noise that fails or is undecided, and None for others: see `judge.chance`.
    """

    gate: Gate
    verdict: Verdict
    because: str
    checks: Checks
    value: float | None = None
    interval: Interval | None = None
    sample_count: int = 0
    smallest_visible_change: float | None = None
    source: str | None = None
    traced_to: list[str] = []
    expectations: list[int] = []
    waiver: Waiver | None = None
    expired: Waiver | None = None
    p_value: Share | None = None

    @property
    def counts_as(self) -> Verdict:
        """The verdict, or `pass` if the gate is waived. An unknown result cannot be waived: `invalid` stays."""
        return "pass" if self.waiver and self.verdict in ("fail", "inconclusive") else self.verdict


class Judgement(Frozen):
    """The verdict of a cell with everything that it was judged by.

    `comparisons` are the measurements against the baseline and the anchor. `not_judged` are the gates that had nothing to be
    held against, and those on paths that were not asked for and not proven.
    """

    verdict: Verdict
    gates: list[GateVerdict]
    not_judged: list[Gate] = []
    comparisons: list[Measurement] = []
    levels: Levels
    suite: dict[str, object]
    validation: dict[str, object]

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"


def verdict_from(checks: Checks) -> Verdict:
    """The verdict of one gate. A gate without evidence never passes: `pass` needs all five checks."""
    if not (checks.present and checks.trusted):
        return "invalid"
    if not checks.noise_known:
        return "inconclusive"
    if checks.surely_inside:
        return "pass" if checks.maybe_inside else "invalid"
    return "inconclusive" if checks.maybe_inside else "fail"


def worst_verdict(verdicts: list[Verdict]) -> Verdict:
    """The verdict of a cell; `invalid` without any gate."""
    return next((verdict for verdict in WORST_FIRST if verdict in verdicts), "invalid")


def is_decided(gate: Gate, measurements: Sequence[Measurement]) -> bool:
    """Whether more samples would change nothing: no bound is within the interval, or no measurement can be trusted.

    The result agrees with `judge`, without the seconds that Great Expectations takes.
    """
    rows = measurements_of(gate, measurements)
    if len(rows) != 1 or rows[0].invalid_because is not None:
        return True
    interval = bounds_of(rows[0])
    return interval is not None and not any(interval.lower <= bound <= interval.upper for bound in gate.bounds)


def surely_misses(gate: Gate, measurements: Sequence[Measurement]) -> bool:
    rows = measurements_of(gate, measurements)
    interval = bounds_of(rows[0]) if len(rows) == 1 and rows[0].invalid_because is None else None
    return interval is not None and is_missed(gate, interval.lower, interval.upper)


def is_missed(gate: Gate, lower: float, upper: float) -> bool:
    """Whether no number of a range meets the gate's bound."""
    at_least, at_most = gate.limits
    return (at_least is not None and upper < at_least) or (at_most is not None and lower > at_most)


def measurements_of(gate: Gate, measurements: Sequence[Measurement]) -> list[Measurement]:
    """The gate's measurement. A measurement that failed before its filter was known counts for all filters."""
    own = [row for row in measurements if row.label == gate.label]
    return own or [
        row
        for row in measurements
        if (row.metric, row.filter) == (gate.metric, None)
        and row.task in (None, gate.task)
        and (row.is_against_baseline, row.against_anchor) == (gate.is_against_baseline, gate.is_against_anchor)
    ]


def with_waiver(verdict: GateVerdict, waivers: Sequence[Waiver], today: date) -> GateVerdict:
    """The verdict with the waiver of its gate, if there is one."""
    waiver = next((waiver for waiver in waivers if waiver.gate == verdict.gate.label), None)
    state = "waiver" if waiver and today <= waiver.expires else "expired"
    return verdict.model_copy(update={state: waiver}) if waiver else verdict


def gate_verdict(gate: Gate, checks: Checks, rows: Sequence[Measurement], expectations: Sequence[int] = ()) -> GateVerdict:
    """The verdict of one gate on the measurements of its metric and filter. There should be exactly one."""
    verdict = verdict_from(checks)
    judged: dict[str, Any] = {"gate": gate, "verdict": verdict, "checks": checks, "expectations": list(expectations)}
    if not rows:
        return GateVerdict(because="no measurement: the stage left no evidence for it", **judged)
    if len(rows) > 1:
        return GateVerdict(because=f"{len(rows)} measurements where one is needed", **judged)
    measurement, interval = rows[0], bounds_of(rows[0])
    return GateVerdict(
        because=measurement.invalid_because or _explain_verdict(verdict, checks, measurement, is_check=gate.unit == "bool"),
        value=measurement.value,
        interval=interval,
        sample_count=measurement.sample_count,
        smallest_visible_change=_smallest_change(measurement, interval, gate),
        source=measurement.source,
        traced_to=measurement.traced_to,
        **judged,
    )


def bounds_of(measurement: Measurement) -> Interval | None:
    """The interval that is judged. A yes-or-no check has no noise: both of its bounds are its value."""
    if measurement.unit == "bool" and measurement.value is not None:
        return Interval(lower=measurement.value, upper=measurement.value)
    return measurement.interval


def _smallest_change(measurement: Measurement, interval: Interval | None, gate: Gate) -> float | None:
    if interval is None or measurement.value is None:
        return None
    at_least, at_most = gate.limits
    reaches = [measurement.value - interval.lower] if at_least is not None else []
    reaches += [interval.upper - measurement.value] if at_most is not None else []
    return max(reaches)


def _explain_verdict(verdict: Verdict, checks: Checks, measurement: Measurement, *, is_check: bool) -> str:
    if verdict == "invalid":
        return "the table's row for it cannot be trusted"
    if is_check:
        finding = f": {measurement.finding}" if measurement.finding else ""
        return "it holds" if verdict == "pass" else f"it does not hold{finding}"
    beside = ["the baseline is history, measured on another day"] if measurement.is_history else []
    beside += [f"the interval does not have {part}" for part in measurement.not_in_interval]
    if verdict != "inconclusive":
        # What keeps a gate open does not, where it is decided; how much of a score is form stays so.
        is_score = METRICS[measurement.metric].is_score
        beside = [*filter(None, [measurement.finding if is_score else ""]), *beside]
        return "; ".join([f"the whole interval {'meets' if verdict == 'pass' else 'misses'} the bound", *beside])
    reason = "the bound lies within the interval"
    if not checks.noise_known:
        is_early = measurement.ended_because is not None and len(measurement.repeats) > 1
        reason = "it ended before the first planned look" if is_early else "measured once, which shows no noise"
    open_because = filter(None, (measurement.finding, measurement.ended_because))
    return "; ".join([f"{reason}: what was measured does not decide", *open_because, *beside])
