"""Bounds that a run suggests for its recipe, never the run's own value: by the distance that the run can see, or by a price."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from vllm_qualify.evidence.accuracy import answers
from vllm_qualify.evidence.measurement import UNUSABLE, Interval, Measurement, StageEvidence, in_words
from vllm_qualify.evidence.sequential import Levels, levels_for
from vllm_qualify.judge.compare.looks import drop_unanswered, list_questions, make_record
from vllm_qualify.judge.compare.places import answers_path
from vllm_qualify.judge.information import errors_in_margin
from vllm_qualify.judge.paired import answers_by_question, repetitions_for
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import POINTS, Gate, gate_of, label_of, refused_in_recipes
from vllm_qualify.recipe.metrics import METRICS, OUTPUT_THROUGHPUT, Metric, StageName
from vllm_qualify.recipe.values import Frozen

# Written unless other metrics are named, beside one score of each task and its cut answers: of each kind the first that has a
# bound, unless the recipe has a gate of the kind.
USUAL = {
    OUTPUT_THROUGHPUT: (OUTPUT_THROUGHPUT,),
    "ttft_": ("ttft_p99_ms", "ttft_p90_ms", "ttft_p50_ms"),
    "tpot_": ("tpot_p99_ms", "tpot_p90_ms", "tpot_p50_ms"),
}
TRUNCATED = "truncated_answers"
# A bound is twice the visible distance from the value. Beyond this share of the value it would be 0, or twice the value.
MOST_NOISE = 0.5
# Between two builds a load is measured so often at least, by each.
LEAST_REPEATS = 2

State = Literal["proposed", "kept", "none"]


class Price(Frozen):
    """What a later run pays to see a relative gate's loss: of one build, on one start of the server."""

    answers: int | None = None
    repeats: int | None = None
    minutes: float


class Bound(Frozen):
    """What a run suggests for one gate.

    `visible` is how far the value lies from the end of its interval on the bad side, in the metric's unit. `gate` is the
    suggestion, `own` the gate that the recipe has already. `is_usual` says whether it is written without being named.
    """

    label: str
    state: State
    unit: str
    value: float | None = None
    interval: Interval | None = None
    visible: float | None = None
    gate: Gate | None = None
    own: Gate | None = None
    reason: str
    price: Price | None = None
    is_usual: bool = False


class Hurts(Frozen):
    """What the user calls a loss that hurts: a share of the questions, and how many times slower, less 1; None for no gate."""

    loss: float | None = None
    worsening: float | None = None


def suggest_bounds(
    plan: CellPlan, stages: Sequence[StageEvidence], evidence: Path, own: Sequence[Gate], hurts: Hurts
) -> list[Bound]:
    """The bounds that a run suggests, beside the gates `own` that its cell has: first the absolute ones."""
    rows = [row for stage in stages for row in stage.measurements if row.against is None and row.start is None]
    judgeable = [row for row in rows if _may_have_gate(METRICS[row.metric])]
    absolute = [_suggest_absolute(row, _find_own(own, row)) for row in judgeable]
    usual = _choose_usual(absolute, judgeable, own)
    absolute = [bound.model_copy(update={"is_usual": bound.label in usual}) for bound in absolute]
    seconds = {stage.stage: stage.duration_s for stage in stages}
    pricing = _Pricing(plan, evidence, seconds, hurts)
    return [*absolute, *(pricing.suggest_relative(row, own) for row in judgeable if row.label in usual and pricing.fits(row))]


def _may_have_gate(metric: Metric) -> bool:
    return refused_in_recipes(metric) is None and not metric.is_only_compared and metric.unit != "bool"


def _find_own(own: Sequence[Gate], row: Measurement) -> Gate | None:
    return next((gate for gate in own if not gate.is_compared and gate.label == row.label), None)


def _choose_usual(bounds: Sequence[Bound], rows: Sequence[Measurement], own: Sequence[Gate]) -> set[str]:
    """The labels of what is written by default: gates that the recipe has, and the usual ones of what it has no gate on."""
    chosen = {gate.label for gate in own if not gate.is_compared}
    usable = [bound.label for bound in bounds if bound.state == "proposed"]
    for task in {row.task for row in rows if METRICS[row.metric].is_score}:
        scores = [row for row in rows if METRICS[row.metric].is_score and row.task == task]
        if not any(row.label in chosen for row in scores):
            chosen.add(max(scores, key=lambda row: row.value or 0.0).label)
    chosen.update(label for label in usable if label.startswith(TRUNCATED))
    for kind, names in USUAL.items():
        if not any(label.startswith(kind) for label in chosen):
            chosen.update([name for name in names if name in usable][:1])
    return chosen


# --- absolute bounds


def _suggest_absolute(row: Measurement, own: Gate | None) -> Bound:
    metric = METRICS[row.metric]
    visible = _visible_distance(row, metric)
    about = {"label": row.label, "unit": metric.unit, "value": row.value, "interval": row.interval, "visible": visible}
    if row.value is None or row.interval is None or visible is None:
        why = row.invalid_because or row.ended_because or "it was measured once, which shows no noise"
        return _without_bound(about, own, f"no bound follows: {why}")
    if not (metric.is_growth or metric.unit == "fraction") and visible > MOST_NOISE * row.value:
        return _without_bound(about, own, f"too noisy: the run sees no change under {_told(visible, metric.unit)}")
    bound = outside_bound(row.value, row.interval, metric)
    key = "minimum" if metric.direction == "higher" else "maximum"
    try:
        gate = gate_of(metric=row.metric, filter=row.filter, task=row.task, unit=metric.unit, **{key: bound})
    except ValidationError:
        gate = None
    if gate is None or gate.cannot_fail:
        return _without_bound(about, own, f"too noisy: all would meet a bound {_told(visible, metric.unit)} outside")
    if own is not None:
        return Bound(**about, state="kept", gate=gate, own=own, reason=_compare_bounds(own, gate))
    apart = abs(_bad_end(row.interval, metric) - bound)
    reason = f"{_told(apart, metric.unit)} outside the interval; the run sees {_told(visible, metric.unit)}"
    return Bound(**about, state="proposed", gate=gate, reason=reason)


def _told(distance: float, unit: str) -> str:
    """A distance in its unit, between shares in percentage points, with three digits."""
    number, told = (100 * distance, POINTS) if unit == "fraction" else (distance, unit)
    return f"{float(f'{number:.3g}'):,g} {told}"


def _without_bound(about: Mapping[str, object], own: Gate | None, reason: str) -> Bound:
    return Bound.model_validate({**about, "state": "kept" if own else "none", "own": own, "reason": reason})


def _compare_bounds(own: Gate, suggested: Gate) -> str:
    """What a suggestion says of a gate that the recipe has. The gate is kept: who loosens a bound does it by hand."""
    (ours_least, ours_most), (least, most) = own.limits, suggested.limits
    is_looser = (least is not None and ours_least is not None and least < ours_least) or (
        most is not None and ours_most is not None and most > ours_most
    )
    if suggested.bounds == own.bounds:
        return "kept; the run suggests the same"
    return f"kept; the run suggests a {'looser' if is_looser else 'tighter'} one: change it by hand, if at all"


def _bad_end(interval: Interval, metric: Metric) -> float:
    return interval.lower if metric.direction == "higher" else interval.upper


def _visible_distance(row: Measurement, metric: Metric) -> float | None:
    if row.value is None or row.interval is None:
        return None
    return abs(row.value - _bad_end(row.interval, metric))


def outside_bound(value: float, interval: Interval, metric: Metric) -> float:
    """A readable bound outside an interval, by the distance from the value to the interval's bad end or a little more.

    So a release that is as good passes, and one that is worse by four such distances is sure to be seen. It has as many digits
    as the distance makes sense of: its last digit is that of the distance's first. Without a distance it has two digits.
    """
    end = _bad_end(interval, metric)
    distance = abs(value - end)
    step = 10.0 ** math.floor(math.log10(distance or abs(value) / 10 or 0.01))
    away = -1 if metric.direction == "higher" else 1
    round_away: Callable[[float], int] = math.floor if away < 0 else math.ceil
    steps = round_away((end + away * distance) / step)
    if distance == 0 and not away * (steps * step - value) > 0:
        steps += away
    bound = round(steps * step, max(0, -math.floor(math.log10(step))))
    # Growth may be negative, and no gate's bound is.
    return max(0.0, bound) if metric.is_growth else bound


# --- relative bounds


class _Pricing:
    """Relative gates with what they cost, by what a run measured."""

    def __init__(self, plan: CellPlan, evidence: Path, seconds: Mapping[StageName, float], hurts: Hurts) -> None:
        self.plan, self.evidence, self.seconds, self.hurts = plan, evidence, seconds, hurts
        self.levels: Levels = levels_for(plan)

    def fits(self, row: Measurement) -> bool:
        metric = METRICS[row.metric]
        return (metric.is_score and self.hurts.loss is not None) or (
            metric.stage == "load" and self.hurts.worsening is not None
        )

    def suggest_relative(self, row: Measurement, own: Sequence[Gate]) -> Bound:
        metric = METRICS[row.metric]
        label = label_of(row.metric, row.task, row.filter, against_baseline=True)
        mine = next((gate for gate in own if gate.label == label), None)
        about = {"label": label, "unit": metric.compared_unit, "own": mine, "is_usual": True}
        if row.value is None:
            return Bound(**about, state="kept" if mine else "none", reason=f"no gate follows from it: {row.invalid_because}")
        try:
            if metric.is_score:
                margin = self.hurts.loss or 0.0
                price, most, advice = self._price_of_loss(row, margin)
            else:
                margin = self.hurts.worsening or 0.0
                price, most, advice = self._price_of_worsening(row, margin)
        except UNUSABLE as error:
            return Bound(**about, state="kept" if mine else "none", reason=f"its price is not known: {in_words(error)}")
        key = "max_loss" if metric.is_score else "max_worsening"
        gate = gate_of(metric=row.metric, filter=row.filter, task=row.task, unit=metric.compared_unit, **{key: margin})
        if mine is not None:
            return Bound(**about, state="kept", gate=gate, price=price, reason=_compare_bounds(mine, gate))
        if advice:
            return Bound(**about, state="none", price=price, reason=advice)
        return Bound(**about, state="proposed", gate=gate, price=price, reason=most)

    def _price_of_loss(self, row: Measurement, margin: float) -> tuple[Price, str, str]:
        """The price of seeing a loss, the reason, and the advice where the recipe's questions are too few."""
        task = next(task for task in self.plan.accuracy if task.name == row.task)
        noise, questions, asked, is_guess = self._noise_of_answer(row, task)
        needed = repetitions_for(margin, noise, questions, self.levels)
        seconds = self.seconds["accuracy"] / max(1, asked * len(self.plan.accuracy))
        price = Price(answers=needed * questions, minutes=needed * questions * seconds / 60)
        guess = ", at most: each question was asked once, so that the noise of an answer is not known" if is_guess else ""
        most = task.settings.most_repetitions
        if (row.value or 0.0) <= margin:
            return price, "", f"of {row.value or 0.0:.2%} right answers no such loss can come: ask what this model can answer"
        if needed > most and not is_guess:
            wanted = math.ceil(questions * needed / most)
            advice = f"{questions:,} questions asked {most} times do not show it: ask {wanted:,}, or allow a larger loss"
            return price, "", advice
        return price, f"this loss hurts; to see it each question is asked {needed} times{guess}", ""

    def _noise_of_answer(self, row: Measurement, task: TaskPlan) -> tuple[float, int, int, bool]:
        """The variance of one answer, the questions, the answers, and whether the variance is only the largest possible."""
        answered = drop_unanswered(answers.load(self.evidence / answers_path(task.name)))
        gate = gate_of(metric=row.metric, filter=row.filter, task=row.task, unit="fraction", max_loss=0.5)
        scores = answers_by_question(make_record(answered, gate, list_questions(answered)))
        questions = len(scores.asked)
        if scores.spare:
            return scores.noise, questions, len(answered), False
        # Of answers that are right or wrong, as if no question was harder than another.
        share = ((row.value or 0.0) * questions + 0.5) / (questions + 1)
        return share * (1 - share), questions, len(answered), True

    def _price_of_worsening(self, row: Measurement, margin: float) -> tuple[Price, str, str]:
        """The same for a load, by how its repeats scatter: two means differ by at most errors_in_margin standard errors.

        What starts of a server differ by comes on top, and is not known from one run.
        """
        logs = [math.log(value) for value in row.repeats]
        if len(logs) < LEAST_REPEATS:
            raise ValueError("it has one repeat, which shows no noise")
        mean = math.fsum(logs) / len(logs)
        variance = math.fsum((each - mean) ** 2 for each in logs) / (len(logs) - 1)
        needed = math.ceil(2 * variance * (errors_in_margin(self.levels) / math.log1p(margin)) ** 2)
        needed, most = max(LEAST_REPEATS, needed), self.plan.load.looks[-1] * self.plan.starts
        price = Price(repeats=needed, minutes=needed * self.seconds["load"] / len(logs) / 60)
        if needed > most:
            advice = f"its repeats scatter: to see it takes {needed:,}, and {most:,} are allowed. Raise num_prompts"
            return price, "", advice
        return price, f"this worsening hurts; to see it takes {needed} repeats or more, since starts of a server differ too", ""


def find_named(bounds: Sequence[Bound], names: Sequence[str]) -> Iterator[Bound]:
    """The bounds that are to be written: those of the named metrics or gates, or else the usual ones."""
    for bound in bounds:
        is_named = any(name in (bound.label, bound.label.split()[0]) for name in names) if names else bound.is_usual
        if bound.state == "proposed" and is_named:
            yield bound
