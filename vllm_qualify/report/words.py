"""Numbers, times and outside text for people, on the page and in the terminal. A missing value is DASH, never 0."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from itertools import combinations, pairwise, product

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.server import MODEL, ServerPlan
from vllm_qualify.evidence.measurement import Interval, Measurement
from vllm_qualify.judge.verdict import WORST_FIRST, GateVerdict, Judgement
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import POINTS, Gate, Verdict
from vllm_qualify.recipe.metrics import METRICS

DASH = "—"
NO_BREAK = "\N{NO-BREAK SPACE}"
# A report says of a smaller p-value that the p-value is under this one.
LEAST_TOLD = 1e-5
SHARES = ("fraction", POINTS)
DIGITS = 4
CHANGE_DIGITS = 3
MOST_DECIMALS = 12
SHARE_DECIMALS = 2
# As many changed files of an engine are named.
MOST_NAMED = 3
WORTH_FOLDING = 40
AS_ABOVE = "as above"


@dataclass(frozen=True)
class GateRow:
    """One gate's verdict in words. A missing value, interval, change or count is DASH, and `because` has the reason."""

    verdict: Verdict
    gate: str
    meaning: str
    value: str
    bound: str
    interval: str
    change: str
    samples: str
    because: str
    waiver: str


@dataclass(frozen=True)
class MeasurementRow:
    """One measurement in words. `note` says why there is no value or no interval."""

    metric: str
    meaning: str
    value: str
    interval: str
    repeats: str
    samples: str
    note: str
    source: str
    is_valid: bool


def gate_rows(judgement: Judgement) -> list[GateRow]:
    """The gates in the order of `worst_first`."""
    return [_gate_row(result) for result in worst_first(judgement)]


def brief_gate_rows(judgement: Judgement) -> tuple[list[GateRow], list[GateRow]]:
    """The gates to be read before a decision, the worst verdict first, and apart from them the yes-or-no checks that hold."""
    results = worst_first(judgement)
    holding = [result for result in results if result.verdict == "pass" and not result.gate.has_noise]
    return [_gate_row(result) for result in results if result not in holding], [_gate_row(result) for result in holding]


def worst_first(judgement: Judgement) -> list[GateVerdict]:
    """The worst verdict first. Within a verdict, yes-or-no checks are last; otherwise the order of judging stays."""
    return sorted(judgement.gates, key=lambda gate: (WORST_FIRST.index(gate.verdict), not gate.gate.has_noise))


def _gate_row(result: GateVerdict) -> GateRow:
    gate, unit = result.gate, result.gate.shown_unit
    return GateRow(
        verdict=result.verdict,
        gate=gate.label,
        meaning=gate.meaning,
        value=value(result.value, unit, gate.bounds),
        bound=words_of_bound(gate),
        interval=interval(result.interval, unit, gate.bounds),
        change=change(result.smallest_visible_change, unit),
        samples=count(result.sample_count),
        because=_explain_verdict(result),
        waiver=_waiver_words(result),
    )


def _explain_verdict(result: GateVerdict) -> str:
    """Why it has its verdict; of one that fails or misses its bound also how small a chance of a wrong `fail` suffices."""
    chance = result.p_value
    if chance is None or chance == 1:
        return result.because
    # Of scores and loads that another run is compared with, the words name the hypothesis.
    hypothesis = ", of a release that lost nothing" if result.gate.against in ("answers", "load") else ""
    return f"{result.because}; it would just fail with a chance of a wrong `fail` of {share(chance)}{hypothesis}"


def _waiver_words(result: GateVerdict) -> str:
    """Who waived the gate, until when and why; empty without a waiver."""
    given = result.waiver or result.expired
    if given is None:
        return ""
    state = "waived until" if result.waiver else "no longer waived: expired after"
    useless = ", which waives no invalid evidence" if result.waiver and result.verdict == "invalid" else ""
    return f"{state} {given.expires} by {given.owner}{useless}: {given.reason}"


def levels(judgement: Judgement) -> str:
    """How certain the verdicts are, in one sentence."""
    noisy = sum(result.gate.has_noise for result in judgement.gates)
    missed, met = judgement.levels.false_pass, judgement.levels.false_fail
    at_margin, all_of_them = judgement.levels.at_margin.false_fail, met * max(noisy, 1)
    return (
        f"A gate whose bound is missed passes with a chance of at most {share(missed)}; one whose bound is met fails with at "
        f"most {share(met)}. One that compares scores or loads with another run fails with at most {share(met)} if nothing was "
        f"lost, and with at most {share(at_margin)} if as much was lost as it allows. So a release that lost nothing and meets "
        f"the bounds of all its {noisy} gates with noise is failed with at most {share(all_of_them)}. All of this holds over "
        f"all the times that a gate was looked at."
    )


def share(number: float) -> str:
    """A chance or a part: `5 %`, `0.83 %`, `under 0.001 %`. The number is never written with an exponent."""
    if 0 < number < LEAST_TOLD:
        return f"under{NO_BREAK}{share(LEAST_TOLD)}"
    return f"{Decimal(f'{100 * number:.2g}'):f}{NO_BREAK}%"


def baseline_sentence(plan: CellPlan) -> str:
    """What the cell was compared with, in one sentence; empty if no gate compares it."""
    if plan.baseline is None:
        names = ", ".join(gate.label for gate in plan.gates_against_baseline)
        uncompared = "this run was made to be a baseline, and is compared with none; not judged"
        return f"{uncompared}: {names}" if plan.establishes else ""
    then = plan.baseline
    made = "this run was made to be a baseline in the place of " if plan.establishes else ""
    only_here = ", which is not in the store" if then.folder else ""
    if not any(gate.against == "load" for gate in plan.gates):
        loads = ""
    elif plan.load_alone:
        loads = f", but not its load: {plan.load_alone}"
    else:
        loads = ", loads in turns" if plan.beside else ", loads unpaired: measured then and now"
    return f"{made}run {then.run_id} of {then.cell.id} on {engine(then.cell.release.engine)}{only_here}{loads}"


def unlosable_sentence(plan: CellPlan, measurements: Sequence[Measurement]) -> str:
    """Which gates no later run can fail against this one, a baseline: it scores no more than they let be lost.

    Empty if there is none.
    """
    losses = [gate for gate in plan.gates if plan.establishes and gate.against in ("answers", "anchor")]
    own = [row for row in measurements if row.against is None and row.start is None]
    scores = {(row.metric, row.task, row.filter): row.value for row in own}
    told = [
        f"{gate.label} ({words_of_bound(gate)}), since it scores {value(score, 'fraction')}"
        for gate in losses
        if (score := scores.get((gate.metric, gate.task, gate.filter))) is not None and score <= gate.bounds[0]
    ]
    return f"no later run can fail against it: {'; '.join(told)}" if told else ""


def unproven_sentence(plan: CellPlan, judgement: Judgement) -> str:
    """Which paths were not judged, since nothing proves that answers took them; empty if there is none."""
    unproven = [gate.label for gate in judgement.not_judged if plan.need_not_be_proven(gate)]
    return f"not judged, since nothing proves them: {', '.join(unproven)}" if unproven else ""


def anchor_sentence(plan: CellPlan) -> str:
    """Which run the cell is held against for good, in one sentence; empty if no gate is against an anchor."""
    if plan.new_anchor:
        return "this run was made to be the anchor of later ones, and is held against none before it"
    if plan.anchor:
        then = plan.anchor
        return f"run {then.run_id} of {then.cell.id} on {engine(then.cell.release.engine)}, {then.chosen}"
    names = ", ".join(gate.label for gate in plan.gates if gate.is_against_anchor)
    return f"none: no baseline of the cell is approved yet; not judged: {names}" if names else ""


def tries(plan: CellPlan) -> str:
    """How often the release was qualified for this cell before, in one sentence; empty for the first time."""
    if not plan.tries:
        return ""
    verdicts = ", ".join(f"{tried.verdict} (run {tried.run_id})" for tried in plan.tries)
    return f"this is try {len(plan.tries) + 1} of this model and engine in this cell; before: {verdicts}"


def measurement_row(measurement: Measurement) -> MeasurementRow:
    metric = METRICS.get(measurement.metric)
    no_noise = "a yes-or-no check has no interval" if measurement.unit == "bool" else "measured once: no interval"
    return MeasurementRow(
        metric=measurement.label,
        meaning=metric.meaning if metric else "",
        value=value(measurement.value, measurement.unit),
        interval=interval(measurement.interval, measurement.unit),
        repeats=_with_unit(measurement.repeats, measurement.unit, (), " · ") if measurement.repeats else DASH,
        samples=count(measurement.sample_count),
        note=measurement.invalid_because or ("" if measurement.interval else no_noise),
        source=measurement.source,
        is_valid=measurement.invalid_because is None,
    )


def fold_repeats(reasons: Sequence[str]) -> list[str]:
    """The reasons. A long reason that only repeats the one before it becomes AS_ABOVE."""
    pairs = pairwise(["", *reasons])
    return [AS_ABOVE if reason == last and len(reason) > WORTH_FOLDING else reason for last, reason in pairs]


def tally(judgement: Judgement) -> str:
    """`12 gates: 1 fail, 3 invalid, 8 pass; 1 waived`."""
    counts = Counter(gate.verdict for gate in judgement.gates)
    if not counts:
        return "no gate was judged"
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in WORST_FIRST if counts[verdict])
    waived = sum(gate.counts_as != gate.verdict for gate in judgement.gates)
    waivers = f"; {waived} waived" if waived else ""
    return f"{len(judgement.gates)} {'gate' if len(judgement.gates) == 1 else 'gates'}: {counted}{waivers}"


def value(number: float | None, unit: str, apart_from: Sequence[float] = ()) -> str:
    """A measured value with its unit. It has enough digits to look different from each different number in `apart_from`."""
    return _with_unit([number], unit, apart_from) if number is not None else DASH


def interval(ends: Interval | None, unit: str, apart_from: Sequence[float] = ()) -> str:
    """`78.12 to 81.90 %`; DASH for a yes-or-no check, which has no noise."""
    if ends is None or unit == "bool":
        return DASH
    return _with_unit([ends.lower, ends.upper], unit, apart_from)


def words_of_bound(gate: Gate) -> str:
    """The gate's bounds exactly as the recipe has them, each with its direction; `yes` for a yes-or-no check."""
    if gate.unit == "bool":
        return ", ".join(map(_yes_or_no, gate.bounds))
    ends = zip("≥≤", gate.limits, strict=True)
    return ", ".join(f"{sign}{NO_BREAK}{_exact_text(end, gate.shown_unit)}" for sign, end in ends if end is not None)


def _exact_text(number: float, unit: str) -> str:
    exact = Decimal(str(number)) * (100 if unit in SHARES else 1)
    text = f"{exact:,f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + _unit_suffix(unit)


def change(number: float | None, unit: str) -> str:
    """A difference between two values of `unit`. Between shares it is in POINTS: a `%` could mean a share of the share."""
    if number is None or unit == "bool":
        return DASH
    if unit in SHARES:
        return _percent_text(number, SHARE_DECIMALS) + _unit_suffix(POINTS)
    return _figure_text(number, _count_decimals(number, CHANGE_DIGITS)) + _unit_suffix(unit)


def count(number: int) -> str:
    return f"{number:,}" if number else DASH


def duration(seconds: float) -> str:
    """`34.2 s`, `12 min 05 s`, `1 h 03 min`."""
    if 0 < seconds < 0.05:
        return "under 0.1 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


def size(number: float) -> str:
    """Bytes in binary units: `812 B`, `1.4 MiB`."""
    if number < 1024:
        return f"{number:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1023.95:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:,.1f} TiB"


def time(moment: datetime) -> str:
    """In UTC, to the second; a time without a zone is taken as UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return f"{aware.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def engine(identity: EngineIdentity) -> str:
    """`vLLM 0.32.0 from vllm/vllm-openai:v0.32.0`, or `vLLM 0.32.0 from an environment of this machine`."""
    source = identity.image.reference if identity.image else "a local environment"
    return f"{KINDS[identity.kind].title} {identity.version} from {source}{changed_files(identity)}"


def changed_files(identity: EngineIdentity) -> str:
    """The files of an engine that are not as they were installed; empty if there are none."""
    named = identity.changed_files[:MOST_NAMED]
    more = f" and {len(identity.changed_files) - MOST_NAMED} more" if len(identity.changed_files) > MOST_NAMED else ""
    return f", with files changed since: {', '.join(named)}{more}" if named else ""


def parts(server: ServerPlan) -> list[str]:
    """What shapes the replies besides the model: each repository or file with its option and its commit or digest."""
    return [f"{part.option}: {part.name} at {part.revision}" for part in server.parts if part.option != MODEL]


def publisher(server: ServerPlan) -> str:
    """By what key the model's files are signed; empty if the recipe names none."""
    if server.signed_by is None:
        return ""
    # cryptography takes a tenth of a second.
    from vllm_qualify.recipe.publisher import key_id

    return f"the publisher's key {key_id(server.signed_by)[:16]}: all files are those that it signed"


def hardware(machine: Fingerprint) -> str:
    """`NVIDIA H200 · SXM · 8 GPUs · 140.4 GiB each · compute capability 9.0 · driver 580.159.04`."""
    kind, share = ("core", "") if machine.gpu_type == "cpu" else ("GPU", " each" if machine.count != 1 else "")
    parts = [
        machine.name,
        machine.form_factor or "",
        f"{machine.count} {kind}{'' if machine.count == 1 else 's'}",
        f"{size(machine.memory_mib * 2**20)}{share}",
        f"compute capability {machine.compute_capability}" if machine.compute_capability else "",
        f"driver {machine.driver}" if machine.driver else "",
        ", ".join(machine.features),
    ]
    return " · ".join(part for part in parts if part)


def _with_unit(numbers: list[float], unit: str, apart_from: Sequence[float], between: str = " to ") -> str:
    if not all(map(math.isfinite, numbers)):
        return f"{between.join(map(str, numbers))} {unit}"
    if unit == "bool":
        return between.join(map(_yes_or_no, numbers))
    figure = _percent_text if unit in SHARES else _figure_text
    decimals = _decimals_apart(figure, unit, numbers, apart_from)
    return between.join(figure(number, decimals) for number in numbers) + _unit_suffix(unit)


def _decimals_apart(figure: Callable[[float, int], str], unit: str, numbers: list[float], apart_from: Sequence[float]) -> int:
    """The number of decimals: enough that different numbers look different, and a small one does not look like zero."""
    others = [*apart_from, 0.0, *([1.0] if unit == "fraction" else [])]
    least = SHARE_DECIMALS if unit in SHARES else min(_count_decimals(number, DIGITS) for number in numbers)
    pairs = [(one, other) for one, other in (*product(numbers, others), *combinations(numbers, 2)) if one != other]
    for decimals in range(least, MOST_DECIMALS):
        if all(figure(one, decimals) != figure(other, decimals) for one, other in pairs):
            return decimals
    return MOST_DECIMALS


def _count_decimals(number: float, digits: int) -> int:
    """The number of decimals that shows `digits` digits."""
    return min(MOST_DECIMALS, max(0, digits - 1 - math.floor(math.log10(abs(number))))) if number else 0


def _figure_text(number: float, decimals: int) -> str:
    return f"{number:,.{decimals}f}"


def _percent_text(number: float, decimals: int) -> str:
    return f"{number * 100:,.{decimals}f}"


def _unit_suffix(unit: str) -> str:
    """The unit after its number. A short sign is never separated from the number."""
    sign = "%" if unit == "fraction" else unit
    return f"{NO_BREAK if sign in ('%', POINTS, 's') else ' '}{sign}"


def _yes_or_no(number: float) -> str:
    return {1.0: "yes", 0.0: "no"}.get(number, f"{number:g} (1 is yes)")
