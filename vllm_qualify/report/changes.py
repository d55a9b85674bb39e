"""The changes against the approved baseline, as rows for the page. Outside text is not escaped yet."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from pydantic import JsonValue

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
ENGINES = {"vllm", "tensorrt_llm"}


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
        changed = ", ".join(row.what for row in self.facts if not row.is_same) or "nothing of the release"
        if self.config is None:
            return f"changed: {changed}; configuration not known"
        counts = Counter(row.change for row in self.config)
        settings = ", ".join(f"{counts[change]} {change}" for change in get_args(diff.ChangeKind) if counts[change])
        return f"changed: {changed}; settings: {settings or 'the same'}"


def changes_of(report: Report) -> Changes | None:
    """The changes; None without a baseline."""
    plan, then = report.plan, report.details.before
    if plan.baseline is None:
        return None
    return Changes(
        facts=_fact_rows(plan, plan.baseline, then.server if then else None),
        config=list(_config_rows(then.server, plan.server)) if then else None,
        metrics=[_metric_row(gate, report) for gate in words.worst_first(report.judgement) if gate.gate.is_compared],
    )


def _fact_rows(plan: CellPlan, then: Baseline, server: ServerPlan | None) -> list[FactRow]:
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
    old, new = before.engine.packages, now.engine.packages
    others = [FactRow(name, old.get(name, DASH), new.get(name, DASH)) for name in sorted({*old, *new} - ENGINES)]
    others += _server_rows(server, plan.server) if server else []
    return [*rows, *(row for row in others if not row.is_same)]


def _server_rows(before: ServerPlan, now: ServerPlan) -> list[FactRow]:
    """How the server is started, apart from its configuration."""
    limits = (f"{each.memory_limit_gib:g} GiB" if each.memory_limit_gib else DASH for each in (before, now))
    return [
        FactRow("launcher", before.engine.launcher, now.engine.launcher),
        FactRow("GPUs", f"{len(before.gpus)}", f"{len(now.gpus)}"),
        FactRow("memory limit", *limits),
        FactRow("draft model's digest", before.draft_digest or DASH, now.draft_digest or DASH),
    ]


def _config_rows(before: ServerPlan, now: ServerPlan) -> Iterator[ConfigRow]:
    old, new = (
        {name: setting for name, setting in server_options(server).items() if name not in OPTIONS_OF_RELEASE}
        for server in (before, now)
    )
    changed = {"option": diff.changed_settings(old, new), "environment": diff.changed_settings(before.variables, now.variables)}
    for where, changes in changed.items():
        for change in sorted(changes, key=lambda change: change.what):
            yield ConfigRow(change.kind, where, change.what, _as_json(change.a), _as_json(change.b))


def _as_json(setting: JsonValue) -> str:
    return DASH if setting is None else json.dumps(setting, ensure_ascii=False)


def _metric_row(result: GateVerdict, report: Report) -> MetricRow:
    gate, unit = result.gate, result.gate.shown_unit
    compared = next(iter(measurements_of(gate, report.judgement.comparisons)), None)
    return MetricRow(
        gate=label_of(gate.metric, gate.task, gate.filter, against_baseline=False),
        other="anchor" if gate.is_against_anchor else "baseline",
        then=_own_value(gate, report.details.anchor if gate.is_against_anchor else report.baseline_measurements),
        now=_own_value(gate, report.measurements),
        worse=words.value(compared.value if compared else None, unit, gate.bounds),
        interval=words.interval(compared.interval if compared else None, unit, gate.bounds),
        bound=words.words_of_bound(gate),
        verdict=result.verdict,
        because=result.because,
    )


def _own_value(gate: Gate, measurements: list[Measurement]) -> str:
    label = label_of(gate.metric, gate.task, gate.filter, against_baseline=False)
    rows = [row for row in measurements if row.label == label]
    return words.value(rows[0].value, rows[0].unit) if len(rows) == 1 else DASH
