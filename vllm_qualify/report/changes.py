"""The changes against the approved baseline, as rows for the page. Outside text is not escaped yet."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.judge.verdict import GateVerdict, measurements_of
from vllm_qualify.plan.cell import Baseline, CellPlan
from vllm_qualify.recipe.gates import Gate, label_of
from vllm_qualify.report import diff, words
from vllm_qualify.report.diff import server_options
from vllm_qualify.report.model import Report
from vllm_qualify.report.words import DASH

OPTIONS_OF_RELEASE = ("model", "revision", "tokenizer-revision")
OPTION, VARIABLE = "option", "environment"


@dataclass(frozen=True)
class FactRow:
    what: str
    then: str
    now: str

    @property
    def is_same(self) -> bool:
        return self.then == self.now


@dataclass(frozen=True)
class ConfigRow:
    """One option, one field of an option that is a mapping, or one environment variable; DASH if it is not set."""

    change: str
    where: str
    name: str
    then: str
    now: str


@dataclass(frozen=True)
class MetricRow:
    """A gate against the baseline or the anchor, which `other` says: both values, and the judged loss or worsening."""

    gate: str
    other: str
    then: str
    now: str
    worse: str
    interval: str
    bound: str
    verdict: str
    because: str


@dataclass(frozen=True)
class Changes:
    facts: list[FactRow]
    config: list[ConfigRow] | None
    """None if the baseline's configuration is not known"""
    metrics: list[MetricRow]

    @property
    def brief(self) -> str:
        """The changes in one line, for the first screen."""
        changed = [row.what for row in self.facts if not row.is_same]
        if self.config is None:
            return "; ".join([f"changed: {', '.join(changed) or 'nothing of the release'}", "configuration not known"])
        counts = {change: sum(row.change == change for row in self.config) for change in ("added", "removed", "changed")}
        settings = ", ".join(f"{count} {change}" for change, count in counts.items() if count)
        return f"changed: {', '.join(changed) or 'nothing of the release'}; settings: {settings or 'the same'}"


def changes_of(report: Report) -> Changes | None:
    """The changes; None without a baseline."""
    plan, then = report.plan, report.details.before
    if plan.baseline is None:
        return None
    return Changes(
        facts=_facts(plan, plan.baseline, then.server if then else None),
        config=list(_config_rows(then.server, plan.server)) if then else None,
        metrics=[_metric_row(gate, report) for gate in words.worst_first(report.judgement) if gate.gate.is_compared],
    )


def why_none(plan: CellPlan) -> str:
    """Why a cell has no baseline, in one sentence."""
    if plan.establishes:
        return "This run becomes the baseline itself, and is compared with none before it."
    return "No gate of this cell is against a baseline, so it is not compared."


def _facts(plan: CellPlan, then: Baseline, server: ServerPlan | None) -> list[FactRow]:
    before, now = then.cell.release, plan.cell.release
    rows = [
        FactRow("engine", words.engine(before.engine), words.engine(now.engine)),
        FactRow("digest", before.engine.digest, now.engine.digest),
        FactRow("model", before.model, now.model),
        FactRow("model revision", before.revision, now.revision),
        FactRow("variant", then.cell.variant, plan.cell.variant),
        FactRow("hardware", words.hardware(then.fingerprint), words.hardware(plan.fingerprint)),
        FactRow("load client", f"vLLM {then.client_version}", f"vLLM {plan.client_version}"),
    ]
    return [*rows, *_packages(before.engine, now.engine), *(_served(server, plan.server) if server else [])]


def _packages(before: EngineIdentity, now: EngineIdentity) -> list[FactRow]:
    """The packages that changed, without the engine itself."""
    names = [name for name in sorted({*before.packages, *now.packages}) if name not in ("vllm", "tensorrt_llm")]
    rows = [FactRow(name, before.packages.get(name, DASH), now.packages.get(name, DASH)) for name in names]
    return [row for row in rows if not row.is_same]


def _served(before: ServerPlan, now: ServerPlan) -> list[FactRow]:
    """How the server is started, apart from its configuration. Settings that are the same on both servers are left out."""
    limit, draft = ("memory limit", "draft model's digest")
    rows = [
        FactRow("launcher", before.engine.launcher, now.engine.launcher),
        FactRow("GPUs", f"{len(before.gpus)}", f"{len(now.gpus)}"),
        FactRow(limit, *(f"{each.memory_limit_gib:g} GiB" if each.memory_limit_gib else DASH for each in (before, now))),
        FactRow(draft, *(each.draft_digest or DASH for each in (before, now))),
    ]
    return [row for row in rows if not row.is_same]


def _config_rows(before: ServerPlan, now: ServerPlan) -> Iterator[ConfigRow]:
    yield from _differences(OPTION, *(_configured(server) for server in (before, now)))
    yield from _differences(VARIABLE, before.variables, now.variables)


def _configured(server: ServerPlan) -> dict[str, JsonValue]:
    return {name: setting for name, setting in server_options(server).items() if name not in OPTIONS_OF_RELEASE}


def _differences(where: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[ConfigRow]:
    for change in sorted(diff.changed_settings(before, now), key=lambda change: change.what):
        yield ConfigRow(change.kind, where, change.what, _json(change.a), _json(change.b))


def _json(setting: JsonValue) -> str:
    return DASH if setting is None else json.dumps(setting, ensure_ascii=False)


def _metric_row(result: GateVerdict, report: Report) -> MetricRow:
    gate, unit = result.gate, result.gate.shown_unit
    compared = next(iter(measurements_of(gate, report.judgement.comparisons)), None)
    ours = [row for stage in report.stages for row in stage.measurements]
    before = report.details.before
    theirs = report.details.anchor if gate.is_against_anchor else before.measurements if before else []
    return MetricRow(
        gate=label_of(gate.metric, gate.task, gate.filter, against_baseline=False),
        other="anchor" if gate.is_against_anchor else "baseline",
        then=_own_value(gate, theirs),
        now=_own_value(gate, ours),
        worse=words.value(compared.value if compared else None, unit, gate.bounds),
        interval=words.interval(compared.interval if compared else None, unit, gate.bounds),
        bound=words.bound(gate),
        verdict=result.verdict,
        because=result.because,
    )


def _own_value(gate: Gate, measurements: list[Measurement]) -> str:
    """The measured value itself, without a comparison."""
    label = label_of(gate.metric, gate.task, gate.filter, against_baseline=False)
    rows = [row for row in measurements if row.label == label]
    return words.value(rows[0].value, rows[0].unit) if len(rows) == 1 else DASH
