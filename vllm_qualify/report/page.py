"""A report as one page for people: a single HTML file that needs no network and no script."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Template

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.evidence.measurement import EvidenceFile, Measurement, StageEvidence
from vllm_qualify.evidence.stages import TABLE, sweep_plan, wanted
from vllm_qualify.judge.verdict import Checks
from vllm_qualify.recipe.metrics import STAGES, Stage
from vllm_qualify.report import points, sections, starts, words
from vllm_qualify.report.changes import changes_of, why_none
from vllm_qualify.report.diff import server_options
from vllm_qualify.report.head import deciding
from vllm_qualify.report.model import Report
from vllm_qualify.report.published import published_rows
from vllm_qualify.report.question_blocks import questions_sections
from vllm_qualify.report.questions import ScoredQuestions, all_words, has_more_words
from vllm_qualify.report.rerun import rerun
from vllm_qualify.report.templates import template

# The page with more words of questions, beside the report's.
WORDS = "questions.html"
LINKABLE = ("", "file", "http", "https", "s3")
TITLES = {
    "course": "The server during the load",
    "soak": "Soak",
    "sweep": "Sweep",
    "speculation": "Speculative decoding",
    "startup": "Start-up",
    "idle": "Idle GPUs",
    "fit": "Fit",
}

DRAWING = {name: getattr(sections, name) for name in ("WIDTH", "HEIGHT", "LEFT", "RIGHT", "TOP", "BOTTOM")}
STRIP = {name: getattr(points, name) for name in ("WIDTH", "HEIGHT", "LEFT", "RIGHT", "OURS_Y", "THEIRS_Y", "AXIS_Y")}

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """The measurements of one stage, or those against the baseline."""

    name: str
    rows: list[tuple[words.MeasurementRow, str]]
    """each with its note; a repeated note is shortened"""
    sources: list[str]


@dataclass(frozen=True)
class FileRow:
    file: EvidenceFile
    stage: Stage
    address: str
    """empty if no address may be linked"""


def render_page(report: Report, link: Callable[[EvidenceFile], str]) -> str:
    """The page of `report`. `link` gives the address of an evidence file: relative to the page's place, or absolute.

    All outside text is escaped. The page's policy forbids scripts and all requests.
    """
    rows = words.gate_rows(report.judgement)
    return _template().render(
        report=report,
        is_apart=False,
        plan=report.plan,
        release=report.plan.cell.release,
        gates=list(zip(rows, words.fold_repeats([row.because for row in rows]), strict=True)),
        deciding=deciding(report),
        sections=_sections(report),
        stages=_in_order(report.stages),
        absent=_absent(report),
        files=[_file_row(file, stage.stage, link) for stage in _in_order(report.stages) for file in stage.files],
        server=_server(report),
        images=_images(report),
        workload=_workload(report),
        tools=_tools(report),
        checks=list(Checks.model_fields),
        statistics=_flat(report.judgement.validation.get("statistics")),
        levels=words.levels(report.judgement),
        compared=words.compared(report.plan),
        anchored=words.anchored(report.plan),
        starts=starts.rows(report),
        started=starts.sentence(report),
        earlier_tries=words.tries(report.plan),
        rerun=rerun(report.plan),
        waived=[row for row in rows if row.waiver],
        changes=changes_of(report),
        why_no_changes=why_none(report.plan),
        drift=report.details.drift,
        **_questions(report.details.questions, WORDS if has_more_words(report.details.questions) else ""),
        published=published_rows(report),
        strips=points.strips(report),
        latencies=points.latency_rows(report),
        percentiles=points.PERCENTILES,
        cost=points.cost(report),
        effort=points.effort(report),
        window=points.window(report),
        **_details(report),
    )


def render_words(report: Report, evidence: Path) -> dict[str, str]:
    """The page of the words that have no room on the page of `report`, by its name; nothing if there are none.

    It is made of the run's evidence, and lies beside the report's page. Its policy is the same.
    """
    if not has_more_words(report.details.questions):
        return {}
    found = _questions(all_words(report.plan, evidence))
    return {WORDS: _words_template().render(report=report, plan=report.plan, is_apart=True, **found)}


def _questions(tasks: Sequence[ScoredQuestions], more: str = "") -> dict[str, Any]:
    return {
        "questions": questions_sections(tasks, more),
        "more": more,
        "most_topics": max((len(scored.topics) for scored in tasks), default=0),
    }


def _details(report: Report) -> dict[str, Any]:
    """The report's details in the form for the page; None for missing ones."""
    details = report.details
    warm = [row for stage in report.stages for row in stage.measurements if row.metric == "startup_warm_s"]
    return {
        "course": sections.course_figures(details.course) if details.course else None,
        "soak": sections.soak_figures(details.soak) if details.soak else None,
        "swept": _swept(report),
        "drafting": sections.drafting_rows(details.speculation) if details.speculation else None,
        "same_text": sections.same_text_sentence(details.speculation.texts) if details.speculation else None,
        "speedups": sections.speedup_rows(details.speedups),
        "startup": sections.startup_rows(details.startup) if details.startup else None,
        "idle": sections.idle_rows(details.idle) if details.idle else None,
        "warmth": sections.WARMTH[details.startup.warm] if details.startup else None,
        "warm_starts": [words.measurement_row(measurement) for measurement in warm],
        "tries": sections.try_rows(details.fit) if details.fit else None,
        "fitted": sections.options_text(details.fit.found) if details.fit else None,
    }


def _swept(report: Report) -> sections.SweepSection | None:
    results, before = report.details.sweep, report.details.before
    if results is None or report.plan.sweep is None:
        return None
    return sections.sweep_section(results, sweep_plan(report.plan), before.curve if before else [])


@cache
def _template() -> Template:
    return template(__package__, "page.html.jinja", TITLES=TITLES, drawing=DRAWING, strip=STRIP)


@cache
def _words_template() -> Template:
    return template(__package__, "words.html.jinja")


def _absent(report: Report) -> list[Stage]:
    present = {stage.stage for stage in report.stages}
    return [name for name in wanted(report.plan) if name not in present]


def _in_order(stages: Iterable[StageEvidence]) -> list[StageEvidence]:
    return sorted(stages, key=lambda stage: STAGES.index(stage.stage))


def _sections(report: Report) -> list[Section]:
    stages = [stage for stage in _in_order(report.stages) if TABLE[stage.stage].has_measurements]
    measured = [_section(stage.stage, stage.measurements) for stage in stages]
    compared = report.judgement.comparisons
    return [*measured, *([_section("against other runs", compared)] if compared else [])]


def _section(name: str, measurements: Sequence[Measurement]) -> Section:
    rows = [words.measurement_row(measurement) for measurement in measurements]
    notes = words.fold_repeats([row.note for row in rows])
    return Section(name, list(zip(rows, notes, strict=True)), sorted({row.source for row in rows}))


def _file_row(file: EvidenceFile, stage: Stage, link: Callable[[EvidenceFile], str]) -> FileRow:
    address = link(file)
    return FileRow(file, stage, address if _may_be_linked(address) else "")


def _may_be_linked(address: str) -> bool:
    """Whether an address is safe to link: one such as `javascript:…` would run as a script of the page."""
    try:
        return urlsplit(address).scheme in LINKABLE
    except ValueError:
        return False


def _server(report: Report) -> Pairs:
    return [(name, _json(setting)) for name, setting in server_options(report.plan.server).items()]


def _images(report: Report) -> list[tuple[str, Pairs]]:
    """The facts of the image under test, and of the load client's image if that is another one."""
    engines = {"Image under test": report.plan.cell.release.engine, "Image of the load client": report.plan.client}
    return [(name, _image(engine)) for name, engine in engines.items() if engine and engine.image]


def _image(engine: EngineIdentity) -> Pairs:
    assert engine.image is not None  # noqa: S101  (the caller has checked it)
    about = engine.image
    facts = {"reference": about.reference, "digest": engine.digest, "platform": about.platform, "image ID": about.image_id}
    facts |= {"created": about.created, KINDS[engine.kind].title: engine.version}
    facts |= {f"label {name}": value for name, value in sorted(about.labels.items())}
    return [(name, value) for name, value in facts.items() if value]


def _workload(report: Report) -> list[tuple[str, Pairs]]:
    """The settings of each stage that has settings."""
    each = [kind.settings(report.plan) for kind in TABLE.values()]
    return [(title, _settings(section)) for settings in each for title, section in settings.items()]


def _settings(settings: dict[str, Any]) -> Pairs:
    return [(name, _json(setting)) for name, setting in settings.items() if setting is not None]


def _tools(report: Report) -> list[tuple[str, str, str]]:
    """Each tool once, as (tool, version, where it was used)."""
    engine = report.plan.cell.release.engine
    maker, _, version = report.made_by.rpartition(" ")
    tools = [(maker, version, "report"), ("Python", engine.python, "engine")]
    tools += [(name, number, "engine") for name, number in engine.packages.items()]
    used = [(name, number, stage.stage) for stage in _in_order(report.stages) for name, number in stage.tools.items()]
    tools += [(name, number, stage) for name, number, stage in used if engine.packages.get(name) != number]
    judged_by = _flat(report.judgement.suite.get("meta")).get("great_expectations_version")
    return [*tools, *([("Great Expectations", judged_by, "judge")] if judged_by else [])]


def _flat(document: object) -> dict[str, str]:
    """The plain entries of `document`; empty if it is not a mapping."""
    entries = document.items() if isinstance(document, dict) else ()
    return {
        str(name).replace("_", " ") if isinstance(entry, int | float) else str(name): _entry(entry) for name, entry in entries
    }


def _entry(value: object) -> str:
    if value is None:
        return words.DASH
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _json(setting: object) -> str:
    """The setting as JSON. Text is in quotes, so that the text "1" does not look like the number 1."""
    return json.dumps(setting, ensure_ascii=False, default=str)
