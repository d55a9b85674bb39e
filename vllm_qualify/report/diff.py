"""Two reports side by side: their inputs and their results. Pure; `terminal.show_diff` prints it.

Measurements that were made in different ways are not called better or worse: only like is compared with like.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import JsonValue

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.measurement import Interval, Measurement
from vllm_qualify.evidence.stages import TABLE
from vllm_qualify.judge.compare import NOT_OF_THE_WORKLOAD, SAME_QUESTIONS
from vllm_qualify.judge.verdict import Outcome, bounds_of
from vllm_qualify.plan.cell import CellPlan, LikelihoodPlan
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.metrics import GOODPUT, METRICS, SLO_COST, STAGES, Direction, Stage
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.recipe.workload import Load
from vllm_qualify.report import words
from vllm_qualify.report.model import Report

ChangeKind = Literal["added", "removed", "changed"]
Trend = Literal["better", "worse", "equal", "unclear"]
CHOSEN_AT_START = ("host", "port")
# The measuring stages whose results depend on the machine, and those whose results depend on the client of the load.
TIMED = [name for name, kind in TABLE.items() if kind.is_timed and kind.has_measurements]
BY_CLIENT = [name for name, kind in TABLE.items() if kind.uses_bench and kind.has_measurements]
# The settings that the answers depend on. A report knows local files only by their paths.
QUESTIONS = {*SAME_QUESTIONS, "questions", "task_folder"}
# Settings that do not change the requests: how long and how often a load is measured, where its prompts are, what is counted.
NOT_OF_THE_REQUESTS = NOT_OF_THE_WORKLOAD | {"slo"}
NO_NOISE_KNOWN = "measured once: the noise is unknown"
WITHIN_NOISE = "the intervals overlap: noise alone can be the reason"


class Side(Frozen):
    """The identity of one report."""

    run_id: str
    cell: str
    outcome: Outcome
    created_at: datetime


class Change(Frozen):
    """One setting that differs: `added` is only in B, `removed` only in A. A missing setting is null."""

    what: str
    kind: ChangeKind
    a: JsonValue = None
    b: JsonValue = None


class Unlike(Frozen):
    """Why measurements of these stages cannot be compared: all of them, or only those of the named lm-eval task or metric."""

    stages: list[Stage]
    task: str | None = None
    metric: str | None = None
    because: str

    def covers(self, stage: Stage, measurement: Measurement) -> bool:
        return stage in self.stages and self.task in (None, measurement.task) and self.metric in (None, measurement.metric)


class Moved(Frozen):
    """One measurement that both reports have.

    `difference` is B minus A, and `ratio` is B divided by A; both are null if a value is missing. There is no ratio for shares
    or for zero. `trend` says whether B is better or worse than A. `because` says why it is unclear, or not certain.
    """

    stage: Stage
    label: str
    unit: str
    a: Measurement
    b: Measurement
    difference: float | None = None
    ratio: float | None = None
    trend: Trend
    because: str = ""

    @property
    def is_sure(self) -> bool:
        return self.trend != "unclear" and not self.because


class VerdictChange(Frozen):
    """A gate of both reports whose verdict differs, or whose counted verdict differs because of a waiver."""

    gate: str
    a: Verdict
    b: Verdict
    a_counts_as: Verdict
    b_counts_as: Verdict
    because: str


class ReportDiff(Frozen):
    """What differs between the reports A and B, and what both measured. `alone_a` is only in A, `alone_b` only in B."""

    diff_version: Literal[1] = 1
    a: Side
    b: Side
    unlike: list[Unlike]
    release: list[Change]
    machine: list[Change]
    server: list[Change]
    environment: list[Change]
    workload: list[Change]
    gates: list[Change]
    tools: list[Change]
    verdicts: list[VerdictChange]
    measurements: list[Moved]
    alone_a: list[str]
    alone_b: list[str]


def diff(a: Report, b: Report) -> ReportDiff:
    """The difference between two reports, of any two cells."""
    ours, theirs = _measurements(a), _measurements(b)
    unlike = [*_unlike(a.plan, b.plan), *_unlike_tools(a, b)]
    return ReportDiff(
        a=_side(a),
        b=_side(b),
        unlike=unlike,
        release=changed_settings(_release(a), _release(b)),
        machine=changed_settings(_machine(a), _machine(b)),
        server=changed_settings(effective_server(a.plan), effective_server(b.plan)),
        environment=changed_settings(a.plan.server.variables, b.plan.server.variables),
        workload=changed_settings(_workload(a.plan), _workload(b.plan)),
        gates=changed_settings(_gates(a.plan), _gates(b.plan)),
        tools=changed_settings(_tools(a), _tools(b)),
        verdicts=_verdicts(a, b),
        measurements=[_moved(*key, ours[key], theirs[key], unlike) for key in ours if key in theirs],
        alone_a=[label for stage, label in ours if (stage, label) not in theirs],
        alone_b=[label for stage, label in theirs if (stage, label) not in ours],
    )


def changed_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    """The settings that differ. Settings of an inner mapping are compared one by one, as `outer.inner`."""
    old, new = dict(_flat(a)), dict(_flat(b))
    return [_change(what, old.get(what), new.get(what)) for what in {**old, **new} if old.get(what) != new.get(what)]


def server_options(server: ServerPlan) -> dict[str, JsonValue]:
    """The server's options without its host and port, which are chosen at each start."""
    return {name: setting for name, setting in server.config(port=0).items() if name not in CHOSEN_AT_START}


def effective_server(plan: CellPlan) -> dict[str, Any]:
    """The server's options, and the resources that it runs on."""
    server = plan.server
    about = {"GPUs": len(server.gpus), "memory_limit_gib": server.memory_limit_gib, "draft_digest": server.draft_digest}
    return {**server_options(server), **about, "startup_timeout_s": server.startup_timeout_s}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for name, setting in settings.items():
        if isinstance(setting, dict) and setting:
            yield from _flat(setting, f"{prefix}{name}.")
        elif setting is not None and setting != {}:
            yield f"{prefix}{name}", setting


def _change(what: str, a: JsonValue, b: JsonValue) -> Change:
    kind: ChangeKind = "added" if a is None else "removed" if b is None else "changed"
    return Change(what=what, kind=kind, a=a, b=b)


def _side(report: Report) -> Side:
    return Side(run_id=report.run_id, cell=report.plan.cell.id, outcome=report.outcome, created_at=report.created_at)


def _release(report: Report) -> dict[str, Any]:
    cell, client = report.plan.cell, report.plan.client_image
    engine = cell.release.engine
    image = engine.image.model_dump(include={"reference", "platform", "image_id", "created"}) if engine.image else None
    return {
        "recipe": cell.recipe,
        "variant": cell.variant,
        "profile": cell.profile,
        "model": cell.release.model,
        "revision": cell.release.revision,
        "engine": engine.model_dump(include={"kind", "launcher", "version", "digest"}),
        "image": image,
        "client image": client.pinned if client else None,
    }


def _machine(report: Report) -> dict[str, Any]:
    """The machine's fingerprint, without the list of devices, which is not compared."""
    return report.plan.fingerprint.model_dump(exclude={"devices"})


def _workload(plan: CellPlan) -> dict[str, Any]:
    return {
        "smoke": _dumped(plan.smoke) | {"golden": plan.smoke_golden},
        "contract": _dumped(plan.contract),
        "accuracy": {task.name: task.settings.model_dump(mode="json", exclude={"task"}) for task in plan.accuracy},
        "likelihood": _scored(plan.likelihood),
        "load": _dumped(plan.load),
        "sweep": _dumped(plan.sweep),
        "soak": _dumped(plan.soak),
        "fit": _dumped(plan.fit),
        "price_usd_gpu_hour": plan.price_usd_gpu_hour,
    }


def _gates(plan: CellPlan) -> dict[str, Any]:
    bounds = {gate.label: words.bound(gate) for gate in plan.gates}
    waivers = {f"waiver of {given.gate}": f"until {given.expires} by {given.owner}: {given.reason}" for given in plan.waivers}
    others = {name: each.run_id if each else None for name, each in (("baseline", plan.baseline), ("anchor", plan.anchor))}
    return {**bounds, **waivers, **others}


def _tools(report: Report) -> dict[str, Any]:
    engine = report.plan.cell.release.engine
    maker, _, version = report.made_by.rpartition(" ")
    judged_by = report.judgement.suite.get("meta")
    by_stage = {name: number for stage in report.stages for name, number in stage.tools.items()}
    return {
        maker: version,
        "engine": {"python": engine.python, **engine.packages},
        **by_stage,
        "great_expectations": judged_by.get("great_expectations_version") if isinstance(judged_by, dict) else None,
    }


def _verdicts(a: Report, b: Report) -> list[VerdictChange]:
    before = {result.gate.label: result for result in a.judgement.gates}
    both = [(before[result.gate.label], result) for result in b.judgement.gates if result.gate.label in before]
    return [
        VerdictChange(
            gate=new.gate.label,
            a=old.verdict,
            b=new.verdict,
            a_counts_as=old.counts_as,
            b_counts_as=new.counts_as,
            because=new.because,
        )
        for old, new in both
        if (old.verdict, old.counts_as) != (new.verdict, new.counts_as)
    ]


def _measurements(report: Report) -> dict[tuple[Stage, str], Measurement]:
    """The measurements by stage and label, in the order of the stages. Comparisons have the stage of what they compare.

    What further starts measured is left out: there may be more of them in one report than in the other.
    """
    stages = [stage for stage in report.stages if TABLE[stage.stage].has_measurements]
    own = {(stage.stage, measurement.label): measurement for stage in stages for measurement in stage.measurements}
    others = [*report.judgement.comparisons, *report.details.speedups]
    measurements = own | {(_stage_of(each), each.label): each for each in others}
    return dict(sorted(measurements.items(), key=lambda entry: STAGES.index(entry[0][0])))


def _stage_of(measurement: Measurement) -> Stage:
    return METRICS[measurement.metric].stage


def _moved(stage: Stage, label: str, a: Measurement, b: Measurement, unlike: Sequence[Unlike]) -> Moved:
    trend, because = _trend(a, b, _why_unlike(stage, a, b, unlike))
    difference, ratio = _change_in_numbers(a, b)
    return Moved(
        stage=stage, label=label, unit=b.unit, a=a, b=b, difference=difference, ratio=ratio, trend=trend, because=because
    )


def _change_in_numbers(a: Measurement, b: Measurement) -> tuple[float | None, float | None]:
    """The difference and the ratio; None for one that does not exist."""
    if a.value is None or b.value is None or a.unit != b.unit:
        return None, None
    has_ratio = a.value != 0 and a.unit not in (*words.SHARES, "bool")
    return b.value - a.value, b.value / a.value if has_ratio else None


def _why_unlike(stage: Stage, a: Measurement, b: Measurement, unlike: Sequence[Unlike]) -> str:
    """Why two measurements cannot be compared; empty if they can."""
    if a.against != b.against:
        return f"A is against run {a.against}, B against run {b.against}"
    if a.unit != b.unit:
        return f"A is in {a.unit or 'no unit'}, B in {b.unit or 'no unit'}"
    return "; ".join(reason.because for reason in unlike if reason.covers(stage, a))


def _trend(a: Measurement, b: Measurement, unlike: str) -> tuple[Trend, str]:
    reasons = (("A", a.invalid_because), ("B", b.invalid_because))
    invalid = [f"{side} is invalid: {reason}" for side, reason in reasons if reason]
    if a.value is None or b.value is None or unlike:
        return "unclear", "; ".join(invalid) or unlike
    direction = _direction(b)
    if direction is None:
        return "unclear", f"it is not known which way is better for {b.metric}"
    if a.value == b.value:
        return "equal", ""
    return ("better" if (b.value > a.value) == (direction == "higher") else "worse"), _noise(bounds_of(a), bounds_of(b))


def _direction(measurement: Measurement) -> Direction | None:
    """The better direction. Against a baseline, the value mostly is a loss or a worsening, so lower is better."""
    metric = METRICS.get(measurement.metric)
    if measurement.against is not None:
        return metric.compared_direction if metric else "lower"
    return metric.direction if metric else None


def _noise(a: Interval | None, b: Interval | None) -> str:
    """Why a difference is not certain; empty if it is."""
    if a is None or b is None:
        return NO_NOISE_KNOWN
    return WITHIN_NOISE if a.lower <= b.upper and b.lower <= a.upper else ""


def _unlike(a: CellPlan, b: CellPlan) -> Iterator[Unlike]:
    if a.fingerprint.id != b.fingerprint.id:
        yield Unlike(stages=TIMED, because=f"A was measured on {a.fingerprint.id}, B on {b.fingerprint.id}")
    if a.client_version != b.client_version:
        because = f"A's load client was vLLM {a.client_version}, B's {b.client_version}"
        yield Unlike(stages=BY_CLIENT, because=because)
    if other := changed_settings(_requests(a.load), _requests(b.load)):
        yield Unlike(stages=BY_CLIENT, because=f"the load was another one: {_in_words(other)}")
    if a.load.slo != b.load.slo:
        because = f"another SLO was to be met: {_in_words(changed_settings(_dumped(a.load.slo), _dumped(b.load.slo)))}"
        yield Unlike(stages=["load"], metric=GOODPUT, because=because)
    if a.sweep and b.sweep and a.sweep.slo != b.sweep.slo:
        because = f"the sweep's SLO was another one: {_in_words(changed_settings(a.sweep.slo, b.sweep.slo))}"
        yield Unlike(stages=["sweep"], because=because)
    if a.sweep and b.sweep and a.price_usd_gpu_hour != b.price_usd_gpu_hour:
        prices = f"{_or_none(a.price_usd_gpu_hour)} and {_or_none(b.price_usd_gpu_hour)}"
        yield Unlike(stages=["sweep"], metric=SLO_COST, because=f"a GPU's price an hour was {prices}")
    if a.soak and b.soak and a.soak != b.soak:
        other = changed_settings(_dumped(a.soak), _dumped(b.soak))
        yield Unlike(stages=["soak"], because=f"the soak was another one: {_in_words(other)}")
    yield from _unlike_texts(a, b)
    yield from _unlike_tasks(a, b)


def _unlike_texts(a: CellPlan, b: CellPlan) -> Iterator[Unlike]:
    if not (a.scores_answers and b.scores_answers):
        return
    if (mine := _answers_of(a)) != (other := _answers_of(b)):
        yield Unlike(stages=["likelihood"], because=f"A scored the answers of run {mine}, B those of {other}")
    if changed := changed_settings(_scored(a.likelihood), _scored(b.likelihood)):
        yield Unlike(stages=["likelihood"], because=f"other texts were scored: {_in_words(changed)}")


def _answers_of(plan: CellPlan) -> str:
    """The run that gave the answers that this one scores: its baseline, or itself."""
    return plan.baseline.run_id if plan.baseline else plan.run_id


def _unlike_tasks(a: CellPlan, b: CellPlan) -> Iterator[Unlike]:
    before = {task.name: task.settings for task in a.accuracy}
    for task in b.accuracy:
        if task.name not in before:
            continue
        old, new = (settings.model_dump(mode="json", include=QUESTIONS) for settings in (before[task.name], task.settings))
        if other := changed_settings(old, new):
            because = f"{task.name} was asked in another way: {_in_words(other)}"
            yield Unlike(stages=["accuracy"], task=task.name, because=because)


def _unlike_tools(a: Report, b: Report) -> Iterator[Unlike]:
    """Other versions of lm-eval are unlike: the same task can have other prompts, which a report does not contain."""
    old, new = (next((stage.tools for stage in report.stages if stage.stage == "accuracy"), None) for report in (a, b))
    if old is not None and new is not None and (other := changed_settings(old, new)):
        yield Unlike(stages=["accuracy"], because=f"the questions were asked by other tools: {_in_words(other)}")


def _requests(load: Load) -> dict[str, Any]:
    return load.model_dump(mode="json", exclude=NOT_OF_THE_REQUESTS)


def _scored(plan: LikelihoodPlan | None) -> dict[str, Any]:
    """What is scored; the place of the file of texts does not count."""
    return _dumped(plan.settings) | {"texts": plan.texts_sha256} if plan else {}


def _dumped(settings: Frozen | None) -> dict[str, Any]:
    return settings.model_dump(mode="json") if settings else {}


def _in_words(changes: Sequence[Change]) -> str:
    return ", ".join(f"{each.what} {_or_none(each.a)} and {_or_none(each.b)}" for each in changes)


def _or_none(setting: JsonValue) -> str:
    return "none" if setting is None else str(setting)
