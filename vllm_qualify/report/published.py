"""Published scores beside ours, and what differs in the asking."""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.published import PublishedScore
from vllm_qualify.recipe.workload import USUAL_TOKENS, Accuracy
from vllm_qualify.report import words
from vllm_qualify.report.model import Report


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
            differs=[*_differences(published, task.settings), *([published.note] if published.note else [])],
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


def _differences(published: PublishedScore, settings: Accuracy) -> Iterator[str]:
    asked = {"shots": "num_fewshot", "API": "api", "longest reply, in tokens": "max_gen_toks"}
    for word, key in asked.items():
        theirs, ours = getattr(published, key), getattr(settings, key)
        if theirs is None:
            yield f"{word}: not said there, {_shown(ours)} here"
        elif theirs != ours:
            yield f"{word}: {_shown(theirs)} there, {_shown(ours)} here"


def _shown(value: object) -> str:
    if value is None:
        return f"the task's own, or else {USUAL_TOKENS},"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_web_address(text: str) -> bool:
    """Whether it may be a link: an address such as `javascript:…` would run as a script of the page."""
    try:
        return urlsplit(text).scheme in ("http", "https") and bool(urlsplit(text).netloc)
    except ValueError:
        return False
