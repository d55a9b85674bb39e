"""Verdicts over gates: what Great Expectations found, in the design's four words."""

from collections.abc import Sequence
from typing import Literal

from vllm_qualify.evidence.measurement import Interval, Measurement
from vllm_qualify.recipe.model import Frozen, Gate

Verdict = Literal["pass", "fail", "inconclusive", "invalid"]
# The worst of a cell's gates decides it.
WORST_FIRST: tuple[Verdict, ...] = ("fail", "invalid", "inconclusive", "pass")


class Checks(Frozen):
    """How the expectations of one gate came out."""

    present: bool
    """exactly one row of the table is the gate's"""
    trusted: bool
    """the row is marked valid and its value is a number"""
    noise_known: bool
    """the row has both interval bounds"""
    surely_inside: bool
    """the whole interval meets the bound"""
    maybe_inside: bool
    """some of the interval meets the bound"""


class GateVerdict(Frozen):
    """One gate with its verdict. A value nearer to the bound than `smallest_visible_change` cannot be told from it."""

    gate: Gate
    verdict: Verdict
    because: str
    checks: Checks
    value: float | None = None
    interval: Interval | None = None
    sample_count: int = 0
    smallest_visible_change: float | None = None
    source: str | None = None


class Judgement(Frozen):
    """The verdict of a cell with everything that it was judged by."""

    verdict: Verdict
    gates: list[GateVerdict]
    suite: dict[str, object]
    validation: dict[str, object]

    @property
    def approved(self) -> bool:
        return self.verdict == "pass"


def decide(checks: Checks) -> Verdict:
    """The verdict of one gate. No evidence never passes: every way to `pass` goes through all five checks."""
    if not (checks.present and checks.trusted):
        return "invalid"
    if not checks.noise_known:
        return "inconclusive"
    if checks.surely_inside:
        return "pass" if checks.maybe_inside else "invalid"
    return "inconclusive" if checks.maybe_inside else "fail"


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict of a cell; `invalid` without any gate."""
    return next((verdict for verdict in WORST_FIRST if verdict in verdicts), "invalid")


def gate_verdict(gate: Gate, checks: Checks, found: Sequence[Measurement]) -> GateVerdict:
    """The verdict of one gate over the measurements of its metric and filter, of which there should be exactly one."""
    verdict = decide(checks)
    if len(found) != 1:
        because = (
            f"{len(found)} measurements where one is needed" if found else "no measurement: the stage left no evidence for it"
        )
        return GateVerdict(gate=gate, verdict=verdict, because=because, checks=checks)
    measurement, interval = found[0], bounds_of(found[0])
    return GateVerdict(
        gate=gate,
        verdict=verdict,
        because=measurement.invalid_because or _because(verdict, checks, is_check=gate.unit == "bool"),
        checks=checks,
        value=measurement.value,
        interval=interval,
        sample_count=measurement.sample_count,
        smallest_visible_change=_visible(measurement, interval, gate),
        source=measurement.source,
    )


def bounds_of(measurement: Measurement) -> Interval | None:
    """The interval that is judged. A yes-or-no check has no noise: its value is both of its bounds."""
    if measurement.unit == "bool" and measurement.value is not None:
        return Interval(lower=measurement.value, upper=measurement.value)
    return measurement.interval


def _visible(measurement: Measurement, interval: Interval | None, gate: Gate) -> float | None:
    if interval is None or measurement.value is None:
        return None
    return measurement.value - interval.lower if gate.minimum is not None else interval.upper - measurement.value


def _because(verdict: Verdict, checks: Checks, *, is_check: bool) -> str:
    if verdict == "invalid":
        return "the table's row for it cannot be trusted"
    if is_check:
        return "it holds" if verdict == "pass" else "it does not hold"
    if verdict == "inconclusive":
        told = "the bound lies within the interval" if checks.noise_known else "measured once, which shows no noise"
        return f"{told}: more samples could decide"
    return "the whole interval meets the bound" if verdict == "pass" else "the whole interval misses the bound"
