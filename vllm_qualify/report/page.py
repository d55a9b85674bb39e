"""A report as one page for people: a single HTML file that needs no network and no script."""

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, get_args
from urllib.parse import urlsplit

from jinja2 import Environment, StrictUndefined, Template

from vllm_qualify.engine.environment import EngineIdentity
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.evidence.measurement import CONFIDENCE, EvidenceFile, StageEvidence
from vllm_qualify.judge.verdict import Checks
from vllm_qualify.recipe.metrics import Stage
from vllm_qualify.report import words
from vllm_qualify.report.model import Report

STAGES: tuple[Stage, ...] = get_args(Stage)
LINKABLE = ("", "file", "http", "https", "s3")
CHOSEN_AT_START = ("host", "port")

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """The measurements of one stage."""

    stage: Stage
    rows: list[tuple[words.MeasurementRow, str]]
    """each with its note, a repeated one folded"""
    sources: list[str]


@dataclass(frozen=True)
class FileRow:
    file: EvidenceFile
    stage: Stage
    address: str
    """empty if there is no address that may be linked"""


def render_page(report: Report, link: Callable[[EvidenceFile], str]) -> str:
    """The page of `report`. `link` gives the address of an evidence file, relative to where the page will lie, or absolute.

    Everything from outside is escaped, and the page's own policy forbids scripts and every request.
    """
    rows = words.gate_rows(report.judgement)
    return _template().render(
        report=report,
        plan=report.plan,
        release=report.plan.cell.release,
        gates=list(zip(rows, words.fold_repeats([row.because for row in rows]), strict=True)),
        deciding=[] if report.approved else [row.gate for row in rows if row.verdict == report.judgement.verdict],
        sections=[_section(stage) for stage in _in_order(report.stages)],
        stages=_in_order(report.stages),
        absent=[name for name in STAGES if name not in {stage.stage for stage in report.stages}],
        files=[_file_row(file, stage.stage, link) for stage in _in_order(report.stages) for file in stage.files],
        server=_server(report),
        images=_images(report),
        workload=_workload(report),
        tools=_tools(report),
        checks=list(Checks.model_fields),
        statistics=_flat(report.judgement.validation.get("statistics")),
        confidence=f"{CONFIDENCE:.0%}".replace("%", " %"),
        both=f"{2 * CONFIDENCE - 1:.0%}".replace("%", " %"),
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_finalize, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"time": words.time, "duration": words.duration, "size": words.size, "command": shlex.join}
    environment.globals |= {"DASH": words.DASH, "tally": words.tally, "hardware": words.hardware, "engine": words.engine}
    return environment.from_string(resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8"))


def _finalize(found: object) -> object:
    """Control and direction characters from outside are shown, not obeyed. Markup that the template made stays as it is."""
    return words.plain(found) if type(found) is str else found


def _in_order(stages: Iterable[StageEvidence]) -> list[StageEvidence]:
    return sorted(stages, key=lambda stage: STAGES.index(stage.stage))


def _section(stage: StageEvidence) -> Section:
    rows = [words.measurement_row(found) for found in stage.measurements]
    notes = words.fold_repeats([row.note for row in rows])
    return Section(stage.stage, list(zip(rows, notes, strict=True)), sorted({row.source for row in rows}))


def _file_row(file: EvidenceFile, stage: Stage, link: Callable[[EvidenceFile], str]) -> FileRow:
    address = link(file)
    return FileRow(file, stage, address if _may_be_linked(address) else "")


def _may_be_linked(address: str) -> bool:
    """An address such as `javascript:…` would run as a script of the page."""
    try:
        return urlsplit(address).scheme in LINKABLE
    except ValueError:
        return False


def _server(report: Report) -> Pairs:
    config = report.plan.server.config(port=0)
    return [(name, _json(setting)) for name, setting in config.items() if name not in CHOSEN_AT_START]


def _images(report: Report) -> list[tuple[str, Pairs]]:
    """What the image under test says of itself, and the load client's if that is another one."""
    engines = {"Image under test": report.plan.cell.release.engine, "Image of the load client": report.plan.client}
    return [(name, _image(found)) for name, found in engines.items() if found and found.image]


def _image(engine: EngineIdentity) -> Pairs:
    assert engine.image is not None  # noqa: S101  (told by the caller)
    about = engine.image
    facts = {"reference": about.reference, "digest": engine.digest, "platform": about.platform, "image ID": about.image_id}
    facts |= {"created": about.created, KINDS[engine.kind].title: engine.version}
    facts |= {f"label {name}": value for name, value in sorted(about.labels.items())}
    return [(name, value) for name, value in facts.items() if value]


def _workload(report: Report) -> list[tuple[str, Pairs]]:
    plan = report.plan
    golden: Pairs = [("golden text", _json(plan.smoke_golden))] if plan.smoke_golden is not None else []
    return [
        ("smoke", _settings(plan.smoke.model_dump()) + golden),
        ("accuracy", _settings(plan.accuracy.model_dump())),
        ("load", _settings(plan.load.model_dump())),
    ]


def _settings(found: dict[str, Any]) -> Pairs:
    return [(name, _json(setting)) for name, setting in found.items() if setting is not None]


def _tools(report: Report) -> list[tuple[str, str, str]]:
    """(tool, version, where it was used), each once."""
    engine = report.plan.cell.release.engine
    maker, _, version = report.made_by.rpartition(" ")
    found = [(maker, version, "report"), ("Python", engine.python, "engine")]
    found += [(name, number, "engine") for name, number in engine.packages.items()]
    used = [(name, number, stage.stage) for stage in _in_order(report.stages) for name, number in stage.tools.items()]
    found += [(name, number, stage) for name, number, stage in used if engine.packages.get(name) != number]
    judged_by = _flat(report.judgement.suite.get("meta")).get("great_expectations_version")
    return [*found, *([("Great Expectations", judged_by, "judge")] if judged_by else [])]


def _flat(found: object) -> dict[str, str]:
    """The plain entries of what should be a mapping."""
    entries = found.items() if isinstance(found, dict) else ()
    return {
        str(name).replace("_", " ") if isinstance(entry, int | float) else str(name): _entry(entry) for name, entry in entries
    }


def _entry(found: object) -> str:
    if found is None:
        return words.DASH
    return f"{found:,.4g}" if isinstance(found, float) else str(found)


def _json(setting: object) -> str:
    """Text in quotes, so that the text "1" is not taken for the number 1."""
    return json.dumps(setting, ensure_ascii=False, default=str)
