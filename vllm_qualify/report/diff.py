"""Two reports side by side, inputs and results. Only like is compared with like: else nothing is called better or worse."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from pydantic import JsonValue

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.stages.table import TABLE
from vllm_qualify.judge.verdict import GateVerdict, Outcome, bounds_of
from vllm_qualify.plan.cell import CellPlan, LikelihoodPlan
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.metrics import GOODPUT, METRICS, SLO_COST, STAGES, Direction, StageName
from vllm_qualify.recipe.roles import PLACE, WORK, part
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report import words
from vllm_qualify.report.model import Report

ChangeKind = Literal["added", "removed", "changed"]
Trend = Literal["better", "worse", "equal", "unclear"]
CHOSEN_AT_START = ("host", "port")
# The measuring stages whose results depend on the machine, and those whose results depend on the client of the load.
TIMED = [name for name, kind in TABLE.items() if kind.is_timed and kind.has_measurements]
BY_CLIENT = [name for name, kind in TABLE.items() if kind.uses_bench and kind.has_measurements]
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

    stages: list[StageName]
    task: str | None = None
    metric: str | None = None
    because: str

    def covers(self, stage: StageName, measurement: Measurement) -> bool:
        return stage in self.stages and self.task in (None, measurement.task) and self.metric in (None, measurement.metric)


class Moved(Frozen):
    """One measurement that both reports have.

    `difference` is B minus A, and `ratio` is B divided by A; both are null if a value is missing. There is no ratio for shares
    or for zero. `trend` says whether B is better or worse than A. `because` says why it is unclear, or not certain.
    """

    stage: StageName
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
    """A gate with different verdicts, or with different counted verdicts because of a waiver.

    A gate of one report alone is listed unless it passed. The other report's verdict is null.
    """

    gate: str
    a: Verdict | None
    b: Verdict | None
    a_counts_as: Verdict | None
    b_counts_as: Verdict | None
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
    ours, theirs = _compared_measurements(a), _compared_measurements(b)
    unlike = [*_unlike_plans(a.plan, b.plan), *_unlike_tools(a, b)]
    return ReportDiff(
        a=Side(run_id=a.run_id, cell=a.plan.cell.id, outcome=a.outcome, created_at=a.created_at),
        b=Side(run_id=b.run_id, cell=b.plan.cell.id, outcome=b.outcome, created_at=b.created_at),
        unlike=unlike,
        release=changed_settings(_release_settings(a), _release_settings(b)),
        machine=changed_settings(*(report.plan.fingerprint.model_dump(exclude={"devices"}) for report in (a, b))),
        server=changed_settings(effective_server(a.plan), effective_server(b.plan)),
        environment=changed_settings(a.plan.server.variables, b.plan.server.variables),
        workload=changed_settings(_workload_settings(a.plan), _workload_settings(b.plan)),
        gates=changed_gates(a.plan, b.plan),
        tools=changed_settings(_tool_versions(a), _tool_versions(b)),
        verdicts=_changed_verdicts(a, b),
        measurements=[_compare_measurement(*key, ours[key], theirs[key], unlike) for key in ours if key in theirs],
        alone_a=[label for stage, label in ours if (stage, label) not in theirs],
        alone_b=[label for stage, label in theirs if (stage, label) not in ours],
    )


def changed_gates(a: CellPlan, b: CellPlan) -> list[Change]:
    """What two plans judge by that differs: bounds, waivers, and the runs to compare with."""
    return changed_settings(_gate_settings(a), _gate_settings(b))


def words_of_change(change: Change) -> str:
    """The change in a few words, for a sentence: on one line, whatever line ends a waiver's reason has."""
    settings = [" ".join(setting_words(setting).split()) for setting in (change.a, change.b) if setting is not None]
    return f"{change.what} {change.kind}: {' → '.join(settings)}"


def setting_words(setting: JsonValue) -> str:
    """The setting. Text has no quotes, unless it would look like another type: "1" is not 1."""
    if isinstance(setting, str) and setting.strip():
        try:
            json.loads(setting)
        except ValueError:
            return setting
    return json.dumps(setting, ensure_ascii=False)


def changed_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    """The settings that differ. Settings of an inner mapping are compared one by one, as `outer.inner`."""
    old, new = dict(_flatten_settings(a)), dict(_flatten_settings(b))
    return [_make_change(what, old.get(what), new.get(what)) for what in old | new if old.get(what) != new.get(what)]


def server_options(server: ServerPlan) -> dict[str, JsonValue]:
    """The server's options without its host and port, which are chosen at each start."""
    return {name: setting for name, setting in server.config(port=0).items() if name not in CHOSEN_AT_START}


def effective_server(plan: CellPlan) -> dict[str, Any]:
    """The server's options, and the resources that it runs on."""
    server = plan.server
    about = {"GPUs": len(server.gpus), "memory_limit_gib": server.memory_limit_gib, "draft_digest": server.draft_digest}
    return {**server_options(server), **about, "startup_timeout_s": server.startup_timeout_s}


def _flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for name, setting in settings.items():
        if isinstance(setting, dict) and setting:
            yield from _flatten_settings(setting, f"{prefix}{name}.")
        elif setting is not None and setting != {}:
            yield f"{prefix}{name}", setting


def _make_change(what: str, a: JsonValue, b: JsonValue) -> Change:
    kind: ChangeKind = "added" if a is None else "removed" if b is None else "changed"
    return Change(what=what, kind=kind, a=a, b=b)


def _release_settings(report: Report) -> dict[str, Any]:
    cell, client = report.plan.cell, report.plan.client_image
    engine = cell.release.engine
    image = engine.image.model_dump(include={"reference", "platform", "image_id", "created"}) if engine.image else None
    return {
        **cell.model_dump(include={"recipe", "variant", "profile"}),
        **cell.release.model_dump(include={"model", "revision"}),
        "engine": engine.model_dump(include={"kind", "launcher", "version", "digest"}),
        "image": image,
        "client image": client.pinned if client else None,
    }


def _workload_settings(plan: CellPlan) -> dict[str, Any]:
    return {
        "smoke": _dump_settings(plan.smoke) | {"golden": plan.smoke_golden},
        "contract": _dump_settings(plan.contract),
        "accuracy": {task.name: task.settings.model_dump(mode="json", exclude={"task"}) for task in plan.accuracy},
        "likelihood": _texts_settings(plan.likelihood),
        "load": _dump_settings(plan.load),
        "soak": _dump_settings(plan.soak),
        **{name: _dump_settings(settings) for name, settings in plan.asked_stages.items()},
        "price_usd_gpu_hour": plan.price_usd_gpu_hour,
    }


def _gate_settings(plan: CellPlan) -> dict[str, Any]:
    bounds = {gate.label: words.words_of_bound(gate) for gate in plan.gates}
    waivers = {f"waiver of {given.gate}": f"until {given.expires} by {given.owner}: {given.reason}" for given in plan.waivers}
    others = {name: each.run_id if each else None for name, each in (("baseline", plan.baseline), ("anchor", plan.anchor))}
    return {**bounds, **waivers, **others}


def _tool_versions(report: Report) -> dict[str, Any]:
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


def _changed_verdicts(a: Report, b: Report) -> list[VerdictChange]:
    before, after = ({result.gate.label: result for result in report.judgement.gates} for report in (a, b))
    pairs = {label: (before.get(label), after.get(label)) for label in [*after, *before]}
    return [_change_verdict(label, *pair) for label, pair in pairs.items() if _is_other_verdict(*pair)]


def _is_other_verdict(old: GateVerdict | None, new: GateVerdict | None) -> bool:
    if old and new:
        return (old.verdict, old.counts_as) != (new.verdict, new.counts_as)
    return any(alone.verdict != "pass" for alone in (old, new) if alone)


def _change_verdict(label: str, old: GateVerdict | None, new: GateVerdict | None) -> VerdictChange:
    verdicts = {"a": old and old.verdict, "b": new and new.verdict}
    counted = {"a_counts_as": old and old.counts_as, "b_counts_as": new and new.counts_as}
    because = new.because if new else f"B has no such gate; in A: {old.because}" if old else ""
    return VerdictChange(gate=label, **verdicts, **counted, because=because)


def _compared_measurements(report: Report) -> dict[tuple[StageName, str], Measurement]:
    """The measurements by stage and label, in the order of the stages. Comparisons have the stage of what they compare.

    What further starts measured is left out: there may be more of them in one report than in the other.
    """
    stages = [stage for stage in report.stages if TABLE[stage.stage].has_measurements]
    own = {(stage.stage, measurement.label): measurement for stage in stages for measurement in stage.measurements}
    others = [*report.judgement.comparisons, *report.details.speedups]
    measurements = own | {(_stage_of(each), each.label): each for each in others}
    return dict(sorted(measurements.items(), key=lambda entry: STAGES.index(entry[0][0])))


def _stage_of(compared: Measurement) -> StageName:
    """The stage of a comparison. A metric that only another version knows has the stage of its kind: with a task or without."""
    metric = METRICS.get(compared.metric)
    return metric.stage if metric else "accuracy" if compared.task else "load"


def _compare_measurement(stage: StageName, label: str, a: Measurement, b: Measurement, unlike: Sequence[Unlike]) -> Moved:
    trend, because = _find_trend(a, b, _why_unlike(stage, a, b, unlike))
    difference = ratio = None
    if a.value is not None and b.value is not None and a.unit == b.unit:
        difference = b.value - a.value
        ratio = b.value / a.value if a.value != 0 and a.unit not in (*words.SHARES, "bool") else None
    numbers = {"difference": difference, "ratio": ratio}
    return Moved(stage=stage, label=label, unit=b.unit, a=a, b=b, **numbers, trend=trend, because=because)


def _why_unlike(stage: StageName, a: Measurement, b: Measurement, unlike: Sequence[Unlike]) -> str:
    """Why two measurements cannot be compared; empty if they can."""
    if a.against != b.against:
        return f"A is against run {a.against}, B against run {b.against}"
    if a.unit != b.unit:
        return f"A is in {a.unit or 'no unit'}, B in {b.unit or 'no unit'}"
    return "; ".join(reason.because for reason in unlike if reason.covers(stage, a))


def _find_trend(a: Measurement, b: Measurement, unlike: str) -> tuple[Trend, str]:
    reasons = (("A", a.invalid_because), ("B", b.invalid_because))
    invalid = [f"{side} is invalid: {reason}" for side, reason in reasons if reason]
    if a.value is None or b.value is None or unlike:
        return "unclear", "; ".join(invalid) or unlike
    direction = _better_direction(b)
    if direction is None:
        return "unclear", f"it is not known which way is better for {b.metric}"
    if a.value == b.value:
        return "equal", ""
    trend: Trend = "better" if (b.value > a.value) == (direction == "higher") else "worse"
    ours, theirs = bounds_of(a), bounds_of(b)
    if ours is None or theirs is None:
        return trend, NO_NOISE_KNOWN
    return trend, WITHIN_NOISE if ours.lower <= theirs.upper and theirs.lower <= ours.upper else ""


def _better_direction(measurement: Measurement) -> Direction | None:
    """The better direction. Against a baseline, the value mostly is a loss or a worsening, so lower is better."""
    metric = METRICS.get(measurement.metric)
    if measurement.against is not None:
        return metric.compared_direction if metric else "lower"
    return metric.direction if metric else None


def _unlike_plans(a: CellPlan, b: CellPlan) -> Iterator[Unlike]:
    if a.fingerprint.id != b.fingerprint.id:
        yield Unlike(stages=TIMED, because=f"A was measured on {a.fingerprint.id}, B on {b.fingerprint.id}")
    if a.client_version != b.client_version:
        yield Unlike(stages=BY_CLIENT, because=f"A's load client was vLLM {a.client_version}, B's {b.client_version}")
    # What is sent: the SLO only says which replies count.
    if other := _differences(*(part(plan.load, WORK) | {"slo": None} for plan in (a, b))):
        yield Unlike(stages=BY_CLIENT, because=f"the load was another one: {other}")
    if a.load.slo != b.load.slo:
        because = f"another SLO was to be met: {_differences(_dump_settings(a.load.slo), _dump_settings(b.load.slo))}"
        yield Unlike(stages=["load"], metric=GOODPUT, because=because)
    if a.sweep and b.sweep and a.sweep.slo != b.sweep.slo:
        because = f"the sweep's SLO was another one: {_differences(a.sweep.slo, b.sweep.slo)}"
        yield Unlike(stages=["sweep"], because=because)
    if a.sweep and b.sweep and a.price_usd_gpu_hour != b.price_usd_gpu_hour:
        prices = f"{_or_none(a.price_usd_gpu_hour)} and {_or_none(b.price_usd_gpu_hour)}"
        yield Unlike(stages=["sweep"], metric=SLO_COST, because=f"a GPU's price an hour was {prices}")
    if a.soak and b.soak and a.soak != b.soak:
        other = _differences(_dump_settings(a.soak), _dump_settings(b.soak))
        yield Unlike(stages=["soak"], because=f"the soak was another one: {other}")
    yield from _unlike_texts(a, b)
    yield from _unlike_tasks(a, b)


def _unlike_texts(a: CellPlan, b: CellPlan) -> Iterator[Unlike]:
    if not (a.scores_answers and b.scores_answers):
        return
    # A run scores the answers of its baseline, or its own.
    mine, other = ((plan.baseline or plan).run_id for plan in (a, b))
    if mine != other:
        yield Unlike(stages=["likelihood"], because=f"A scored the answers of run {mine}, B those of {other}")
    if changed := _differences(_texts_settings(a.likelihood), _texts_settings(b.likelihood)):
        yield Unlike(stages=["likelihood"], because=f"other texts were scored: {changed}")


def _unlike_tasks(a: CellPlan, b: CellPlan) -> Iterator[Unlike]:
    before = {task.name: task.settings for task in a.accuracy}
    for task in b.accuracy:
        # A report knows local files only by their paths.
        asked = [part(settings, WORK, PLACE) for settings in (before.get(task.name, task.settings), task.settings)]
        if other := _differences(*asked):
            because = f"{task.name} was asked in another way: {other}"
            yield Unlike(stages=["accuracy"], task=task.name, because=because)


def _unlike_tools(a: Report, b: Report) -> Iterator[Unlike]:
    """Other versions of lm-eval are unlike: the same task can have other prompts, which a report does not contain."""
    old, new = (next((stage.tools for stage in report.stages if stage.stage == "accuracy"), None) for report in (a, b))
    if old is not None and new is not None and (other := _differences(old, new)):
        yield Unlike(stages=["accuracy"], because=f"the questions were asked by other tools: {other}")


def _texts_settings(plan: LikelihoodPlan | None) -> dict[str, Any]:
    """What is scored; the place of the file of texts does not count."""
    return _dump_settings(plan.settings) | {"texts": plan.texts_sha256} if plan else {}


def _dump_settings(settings: Frozen | None) -> dict[str, Any]:
    return settings.model_dump(mode="json") if settings else {}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The settings that differ, in words; empty if none does."""
    return ", ".join(f"{each.what} {_or_none(each.a)} and {_or_none(each.b)}" for each in changed_settings(a, b))


def _or_none(setting: JsonValue) -> str:
    return "none" if setting is None else str(setting)
