"""Measurements: the typed form of what a stage measured, and of the evidence behind it."""

import hashlib
import math
import re
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from scipy import special

from vllm_qualify.evidence.sequential import Sides
from vllm_qualify.recipe.gates import label_of
from vllm_qualify.recipe.metrics import METRICS, StageName
from vllm_qualify.recipe.values import Count, CountOrZero, Frozen, Number

UNUSABLE = (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError)
"""The errors of reading evidence if a file is missing, cut or not as its tool writes it. They make the measurement invalid."""


class Interval(Frozen):
    """One-sided confidence bounds from below and from above, in the metric's unit.

    One bound decides `pass` and the other `fail`. Each has its own chance of an error, see `sequential.sides`.
    """

    lower: Number
    upper: Number

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.lower > self.upper:
            raise ValueError("an interval's lower bound lies above its upper one")
        return self


class Measurement(Frozen):
    """One row of evidence."""

    metric: str
    task: str | None = None
    filter: str | None = None
    against: str | None = None
    """The run that is the baseline, or the anchor with `against_anchor`.

    With it, the value says how much worse the cell is: the share of questions lost, how many times worse, less 1, or by how
    many nats per token less likely. Of likeliest tokens it is the share in which both agree.
    """
    start: Count | None = None
    """the further start of the server, from 2 on; None is the first, which the other stages measure"""
    against_anchor: bool = False
    value: Number | None
    """None exactly if `invalid_because` says why no value can be trusted"""
    unit: str
    sample_count: CountOrZero
    repeats: list[Number] = []
    interval: Interval | None = None
    invalid_because: str | None = None
    is_unproven: bool = False
    """whether it is invalid only because nothing proves that the answers took their path, or could have shown a fault"""
    ended_because: str | None = None
    """why less was measured than planned"""
    not_in_interval: list[str] = []
    """the uncertainties that the interval does not have, since nothing measured them"""
    is_history: bool = False
    """whether the baseline was measured on another day"""
    finding: str = ""
    """what is wrong where a check does not hold, or what keeps a gate open"""
    source: str
    """for people"""
    traced_to: list[str] = []
    """each raw file with its line, as `path:line`"""
    fingerprint: str = ""
    """the id of the machine that measured it (`engine.gpu.Fingerprint`)"""

    @property
    def label(self) -> str:
        against = {"against_baseline": self.is_against_baseline, "against_anchor": self.against_anchor}
        label = label_of(self.metric, self.task, self.filter, **against)
        return label if self.start is None else f"{label} of start {self.start}"

    @property
    def is_against_baseline(self) -> bool:
        return self.against is not None and not self.against_anchor

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest number that its metric can have."""
        metric = METRICS.get(self.metric)
        is_share = metric is not None and metric.unit in ("fraction", "bool")
        is_difference = metric is not None and metric.compared_unit != "fraction"
        least = -math.inf if is_difference else -1.0
        least_itself = -math.inf if metric is not None and metric.is_growth else 0.0
        return (least if self.against is not None else least_itself, 1.0 if is_share else math.inf)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.value is None) != (self.invalid_because is not None):
            raise ValueError("a measurement has either a value or the reason why it is invalid")
        least, largest = self.range
        bounds = [self.interval.lower, self.interval.upper] if self.interval else []
        for number in [*bounds, *self.repeats, *([] if self.value is None else [self.value])]:
            if not least <= number <= largest:
                raise ValueError(f"{number} is no {self.metric}: it lies between {least} and {largest}")
        if self.value is not None and self.sample_count == 0:
            raise ValueError("a value needs at least one sample")
        if self.value is not None and bounds and not bounds[0] <= self.value <= bounds[1]:
            raise ValueError("the value lies outside its interval")
        return self


# A file's name is a part of its key in the store, which takes no others.
_STORED_NAME = re.compile(r"[A-Za-z0-9_@+=~][A-Za-z0-9_@+=~.,:-]{0,254}")


def _check_relative(path: str) -> str:
    """Check a report's path. A report can come from a store, and its paths must stay inside the folder they are put into."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise ValueError("a relative path without '..' is needed")
    if not _STORED_NAME.fullmatch(parts[-1]):
        raise ValueError("a file's name is of A-Z a-z 0-9 _@+=~.,:- and does not begin with one of .,:-")
    return path


class EvidenceFile(Frozen):
    """A file as the tool wrote it. `path` is relative to the run's evidence folder."""

    path: Annotated[str, AfterValidator(_check_relative)]
    sha256: str
    size: int


class StageEvidence(Frozen):
    """What one stage left: its files, unchanged, and the measurements read from them.

    `run_id` is the run that it is a stage of. `taken_from` is the run that measured it, if that was another run with the same
    inputs.
    """

    stage: StageName
    started_at: datetime
    duration_s: float
    commands: list[list[str]] = []
    tools: dict[str, str] = {}
    files: list[EvidenceFile] = Field(min_length=1)
    measurements: list[Measurement]
    taken_from: str | None = None
    run_id: str


def valid(metric: str, value: float, source: str, **others: object) -> Measurement:
    """A measurement of a declared metric; a value that is not a finite number becomes an invalid one."""
    if not math.isfinite(value):
        return invalid(metric, f"the value is {value}", source, filter=others.get("filter"))
    return _measurement(metric, source, {"value": float(value), **others})


def invalid(metric: str, because: str, source: str, **others: object) -> Measurement:
    return _measurement(metric, source, {"value": None, "sample_count": 0, **others, "invalid_because": because})


def _measurement(metric: str, source: str, fields: dict[str, object]) -> Measurement:
    unit = METRICS[metric].compared_unit if fields.get("against") else METRICS[metric].unit
    return Measurement.model_validate({"metric": metric, "unit": unit, "source": source, **fields})


def share_interval(successes: float, trials: int, at: Sides) -> Interval:
    """Wilson's score bounds for a share (Wilson 1927, "Probable inference", JASA 22), also for scores between 0 and 1.

    Of all scores with the same mean, zeros and ones scatter most, so the bounds are wide enough for any scores.
    """
    return _wilson_interval(successes / trials, lambda _: trials, at)


def interval_of_means(means: Sequence[float], answers: int, at: Sides) -> Interval:
    """Wilson's bounds for the mean of questions' means, where each question was answered several times: `answers` in all.

    A question's answers are related, so they are a cluster, and the questions are what was drawn. How much their means scatter
    says how many independent answers they are worth: at most all, and where all means are 0 or all 1, one for each question.
    The scatter is itself estimated, which costs what Student's t costs (Korn & Graubard 1998, "Confidence intervals for
    proportions with small expected number of positive counts estimated from survey data", Survey Methodology 24).
    """
    return _wilson_interval(statistics.fmean(means), lambda alpha: _independent_answers(means, answers, alpha), at)


def _independent_answers(means: Sequence[float], answers: int, alpha: float) -> float:
    """How many independent answers the questions' means are worth, at a one-sided level."""
    mean, count = statistics.fmean(means), len(means)
    if count < 2 or mean in (0.0, 1.0):
        return count
    of_single, between = mean * (1 - mean), statistics.variance(means)
    if between == 0:
        return answers
    student = -float(special.stdtrit(count - 1, alpha))
    return min(float(answers), of_single / between * count * (_z_score(alpha) / student) ** 2)


def _z_score(alpha: float) -> float:
    return -float(special.ndtri(alpha))


def _wilson_interval(share: float, trials_at: Callable[[float], float], at: Sides) -> Interval:
    """Wilson's bounds, each of so many trials as `trials_at` gives for its level."""

    def bound_at(side: int, alpha: float) -> float:
        z, trials = side * _z_score(alpha), trials_at(alpha)
        middle = share + z * z / (2 * trials)
        reach = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
        return min(1.0, max(0.0, (middle + reach) / (1 + z * z / trials)))

    return around(share, bound_at(-1, at.below), bound_at(1, at.above))


def geometric_mean(repeats: Sequence[float]) -> float:
    """The geometric mean of repeated times or rates, all above zero: their typical value."""
    return math.exp(math.fsum(math.log(value) for value in repeats) / len(repeats))


def repeat_interval(repeats: Sequence[float], at: Sides) -> Interval | None:
    """Student's t bounds for the geometric mean of repeats, all above zero; None for fewer than two.

    Times and rates vary by ratios, so the bounds are taken over logarithms and are never below zero. One repeat shows no noise.
    """
    if len(repeats) < 2:
        return None
    logs = [math.log(value) for value in repeats]
    error, middle = statistics.stdev(logs) / math.sqrt(len(logs)), statistics.fmean(logs)
    lower, upper = (-float(special.stdtrit(len(logs) - 1, alpha)) * error for alpha in at)
    return around(geometric_mean(repeats), math.exp(middle - lower), math.exp(middle + upper))


def around(value: float, lower: float, upper: float) -> Interval:
    """An interval that contains the value, even if rounding in the last digit would push it out."""
    return Interval(lower=min(lower, value), upper=max(upper, value))


def in_words(error: BaseException) -> str:
    """One of UNUSABLE in a few words. A missing file is given by its name, without the folders of this machine."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {Path(error.filename).name}"
    return repr(error)


def describe(path: Path, folder: Path) -> EvidenceFile:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return EvidenceFile(path=path.relative_to(folder).as_posix(), sha256=sha256, size=path.stat().st_size)
