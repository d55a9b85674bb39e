"""Small recipes with loads of seconds on the real engine, and what their runs measured."""

from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families as families

from tests.qualified import Qualified
from tests.recipes import Document
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.report.model import Report

# Long enough that a sample of the server comes in each load, which is taken twice a second.
LOAD: Document = {
    "input_len": 16,
    "output_len": 24,
    "max_concurrency": 4,
    "num_prompts": 40,
    "num_warmups": 2,
    "repeats": 2,
    "most_repeats": 2,
    "min_duration_s": 0.01,
    "time_limit_s": 120,
}
Qualify = Callable[..., Qualified]


def measured(report: Report, stage: str) -> dict[str, Measurement]:
    (finished,) = (each for each in report.stages if each.stage == stage)
    return {measurement.metric: measurement for measurement in finished.measurements}


def runs_of(qualified: Qualified) -> list[Path]:
    return sorted((qualified.home / "runs").iterdir())


def counted(pages: list[Path], name: str) -> float:
    """How much a counter gained between two of the server's pages."""
    before, after = (
        sum(sample.value for family in families(page.read_text()) for sample in family.samples if sample.name == name)
        for page in pages
    )
    return after - before
