"""A report as one page for people: a single HTML file that needs no network and no script."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from jinja2 import Template

from vllm_qualify.engine.environment import EngineIdentity, ImageIdentity
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.evidence.measurement import EvidenceFile, Measurement, StageEvidence
from vllm_qualify.evidence.stages.table import TABLE, wanted_stages
from vllm_qualify.judge.verdict import Checks
from vllm_qualify.recipe.accuracy import USUAL_TOKENS, Accuracy
from vllm_qualify.recipe.metrics import METRICS, STAGES
from vllm_qualify.recipe.published import PublishedScore
from vllm_qualify.report import head, points, sections, words
from vllm_qualify.report.changes import changes_of
from vllm_qualify.report.diff import server_options
from vllm_qualify.report.model import Report
from vllm_qualify.report.path_rows import path_rows
from vllm_qualify.report.question_blocks import questions_sections
from vllm_qualify.report.questions import all_words, has_more_words
from vllm_qualify.report.rerun import rerun
from vllm_qualify.report.templates import template

# The page with more words of questions, beside the report's.
WORDS = "questions.html"
LINKABLE = ("", "file", "http", "https", "s3")
TITLES = {
    "course": "The server during the load",
    "paths": "Paths through a busy server",
    "soak": "Soak",
    "sweep": "Sweep",
    "speculation": "Speculative decoding",
    "startup": "Start-up",
    "idle": "Idle GPUs",
    "fit": "Fit",
}

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """The measurements of one stage, or those against the baseline."""

    name: str
    rows: list[tuple[words.MeasurementRow, str]]
    """each with its note; a repeated note is shortened"""
    sources: list[str]


def render_page(report: Report, link: Callable[[EvidenceFile], str] | None = None) -> str:
    """The page of `report`. `link` gives the address of an evidence file: relative to the page's place, or absolute.

    Without `link` the page stands alone: it leads to no other file of the run, all of which a publisher wrote.
    All outside text is escaped. The page's policy forbids scripts and all requests.
    """
    rows, stages = words.gate_rows(report.judgement), _in_order(report.stages)
    more = WORDS if link and has_more_words(report.details.questions) else ""
    return _page_template("page.html.jinja").render(
        report=report,
        is_apart=False,
        gates=list(zip(rows, words.fold_repeats([row.because for row in rows]), strict=True)),
        sections=_list_sections(report),
        stages=stages,
        absent=[name for name in wanted_stages(report.plan) if name not in {stage.stage for stage in stages}],
        is_alone=link is None,
        files=[_file_row(file, link(file) if link else "") for stage in stages for file in stage.files],
        server=[(name, _as_json(setting)) for name, setting in server_options(report.plan.server).items()],
        images=_list_images(report),
        workload=_workload_settings(report),
        tools=_tool_rows(report),
        checks=list(Checks.model_fields),
        statistics=_flatten_entries(report.judgement.validation.get("statistics")),
        rerun=rerun(report.plan),
        changes=changes_of(report),
        questions=questions_sections(report.details.questions, more),
        more=more,
        published=published_rows(report),
        paths=path_rows(report),
    )


def render_words(report: Report, evidence: Path) -> dict[str, str]:
    """The page of the words that have no room on the page of `report`, by its name, from the evidence; nothing if all have."""
    if not has_more_words(report.details.questions):
        return {}
    questions = questions_sections(all_words(report.plan, evidence))
    return {WORDS: _page_template("words.html.jinja").render(report=report, is_apart=True, questions=questions, more="")}


@cache
def _page_template(name: str) -> Template:
    return template(__package__, name, TITLES=TITLES, drawing=sections, head=head, points=points, words=words)


def _in_order(stages: Iterable[StageEvidence]) -> list[StageEvidence]:
    return sorted(stages, key=lambda stage: STAGES.index(stage.stage))


def _list_sections(report: Report) -> list[Section]:
    stages = [stage for stage in _in_order(report.stages) if TABLE[stage.stage].has_measurements]
    measured = [_make_section(stage.stage, stage.measurements) for stage in stages]
    compared = report.judgement.comparisons
    return measured + ([_make_section("against other runs", compared)] if compared else [])


def _make_section(name: str, measurements: Sequence[Measurement]) -> Section:
    rows = [words.measurement_row(measurement) for measurement in measurements]
    notes = words.fold_repeats([row.note for row in rows])
    return Section(name, list(zip(rows, notes, strict=True)), sorted({row.source for row in rows}))


def _file_row(file: EvidenceFile, address: str) -> tuple[EvidenceFile, str]:
    """A file and its address; none if it is not safe to link: one such as `javascript:…` would run as a script of the page."""
    try:
        return file, address if urlsplit(address).scheme in LINKABLE else ""
    except ValueError:
        return file, ""


def _list_images(report: Report) -> list[tuple[str, Pairs]]:
    """The facts of the image under test, and of the load client's image if that is another one."""
    engines = {"Image under test": report.plan.cell.release.engine, "Image of the load client": report.plan.client}
    return [(name, _image_facts(engine, engine.image)) for name, engine in engines.items() if engine and engine.image]


def _image_facts(engine: EngineIdentity, about: ImageIdentity) -> Pairs:
    facts = {"reference": about.reference, "digest": engine.digest, "platform": about.platform, "image ID": about.image_id}
    facts |= {"created": about.created, KINDS[engine.kind].title: engine.version}
    facts |= {f"label {name}": value for name, value in sorted(about.labels.items())}
    return [(name, value) for name, value in facts.items() if value]


def _workload_settings(report: Report) -> list[tuple[str, Pairs]]:
    sections = [section for kind in TABLE.values() for section in kind.settings(report.plan).items()]
    return [
        (title, [(name, _as_json(setting)) for name, setting in settings.items() if setting is not None])
        for title, settings in sections
    ]


def _tool_rows(report: Report) -> list[tuple[str, str, str]]:
    """Each tool once, as (tool, version, where it was used)."""
    engine = report.plan.cell.release.engine
    maker, _, version = report.made_by.rpartition(" ")
    tools = [(maker, version, "report"), ("Python", engine.python, "engine")]
    tools += [(name, number, "engine") for name, number in engine.packages.items()]
    used = [(name, number, stage.stage) for stage in _in_order(report.stages) for name, number in stage.tools.items()]
    tools += [(name, number, stage) for name, number, stage in used if engine.packages.get(name) != number]
    judged_by = _flatten_entries(report.judgement.suite.get("meta")).get("great_expectations_version")
    return [*tools, *([("Great Expectations", judged_by, "judge")] if judged_by else [])]


def _flatten_entries(document: object) -> dict[str, str]:
    """The plain entries of `document`; empty if it is not a mapping."""
    entries = document.items() if isinstance(document, dict) else ()
    return {
        str(name).replace("_", " ") if isinstance(entry, int | float) else str(name): _entry_words(entry)
        for name, entry in entries
    }


def _entry_words(value: object) -> str:
    if value is None:
        return words.DASH
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _as_json(setting: object) -> str:
    """The setting as JSON. Text is in quotes, so that the text "1" does not look like the number 1."""
    return json.dumps(setting, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class PublishedRow:
    """A published score. `address` is that of its source, if it has one. `ours` has our scores with their intervals."""

    task: str
    score: str
    of: str
    source: str
    address: str
    ours: list[str]
    differs: list[str]


def published_rows(report: Report) -> list[PublishedRow]:
    measured = [row for stage in report.stages if stage.stage == "accuracy" for row in stage.measurements]
    return [
        PublishedRow(
            task=task.name,
            score=words.value(published.score, "fraction"),
            of=published.of or "",
            source=published.source,
            address=published.source if _is_web_address(published.source) else "",
            ours=[_our_score(row) for row in measured if row.task == task.name and _is_beside(row, published)],
            differs=[*_list_differences(published, task.settings), *([published.note] if published.note else [])],
        )
        for task in report.plan.accuracy
        for published in task.settings.published
    ]


def _is_beside(row: Measurement, published: PublishedScore) -> bool:
    same_metric = METRICS[row.metric].is_score and published.metric in (None, row.metric)
    return same_metric and published.filter in (None, row.filter)


def _our_score(row: Measurement) -> str:
    name = f"{row.metric} ({row.filter})" if row.filter else row.metric
    if row.value is None:
        return f"{name}: invalid"
    return f"{name}: {words.value(row.value, row.unit)}, interval {words.interval(row.interval, row.unit)}"


def _list_differences(published: PublishedScore, settings: Accuracy) -> Iterator[str]:
    asked = {"shots": "num_fewshot", "API": "api", "longest reply, in tokens": "max_gen_toks"}
    for word, key in asked.items():
        theirs, ours = getattr(published, key), getattr(settings, key)
        if theirs is None or theirs != ours:
            there = "not said" if theirs is None else _setting_words(theirs)
            yield f"{word}: {there} there, {_setting_words(ours)} here"


def _setting_words(value: object) -> str:
    if value is None:
        return f"the task's own, or else {USUAL_TOKENS},"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_web_address(text: str) -> bool:
    """Whether it may be a link: an address such as `javascript:…` would run as a script of the page."""
    try:
        return urlsplit(text).scheme in ("http", "https") and bool(urlsplit(text).netloc)
    except ValueError:
        return False
