"""What gates of all kinds have in common."""

from abc import abstractmethod
from functools import cache
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from vllm_qualify.recipe.metrics import METRICS, Metric
from vllm_qualify.recipe.values import FilterName, Frozen, Number, TaskName, Text

AGAINST = " against the baseline"
AGAINST_ANCHOR = " against the anchor"
POINTS = "pp"
"""Percentage points: the unit of a difference between two shares."""

Comparison = Literal["answers", "tokens", "load", "likelihood", "anchor"]
"""What is compared: with the baseline the answers to each question, their tokens, the figures of the load, or how likely texts
are; with the anchor the answers."""


Verdict = Literal["pass", "fail", "inconclusive", "invalid"]
"""Of one gate, or of a cell: the worst of its gates'."""


class Limits(NamedTuple):
    """The range in which a gate is met, both ends included. None is an open end."""

    at_least: float | None = None
    at_most: float | None = None


def _above_zero(number: float) -> float:
    if not number > 0:
        raise ValueError("it must be above 0: no measurement can show that nothing at all was lost")
    return number


AboveZero = Annotated[Number, AfterValidator(_above_zero)]


class BaseGate(Frozen):
    """A rule over one metric.

    The unit is the metric's unit; of a loss or a worsening it is `fraction`. Without a `task`, the gate is on the recipe's only
    task.
    """

    compares: ClassVar[Comparison | None] = None
    """what gates of this kind compare, and with which run; None for a gate on the metric itself"""

    metric: Text = Field(description="a name of the metrics")
    filter: FilterName | None = Field(
        default=None,
        description="lm-eval's filter, like `strict-match` or `flexible-extract`, or `none` for tasks without one: required for"
        " a score, refused for others",
    )
    task: TaskName | None = Field(default=None, description="the task of a score; needed where `accuracy` has more than one")
    unit: Text = Field(description="the metric's unit, exactly; of a loss or a worsening it is `fraction`")

    @classmethod
    @abstractmethod
    def fits(cls, metric: Metric) -> bool:
        """Whether a gate of this kind can be on the metric."""

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """The range of values in which it is met."""

    @property
    def meaning(self) -> str:
        """The judged quantity, in words for people."""
        return METRICS[self.metric].meaning

    @property
    def shown_unit(self) -> str:
        """The unit in which its value and bounds are shown to people."""
        return self.unit

    @classmethod
    @cache
    def own_keys(cls) -> tuple[str, ...]:
        """The keys that only this kind has."""
        return tuple(name for name in cls.model_fields if name not in BaseGate.model_fields)

    @classmethod
    def form(cls) -> str:
        """`reference and margin`."""
        return " and ".join(cls.own_keys())

    @property
    def bounds(self) -> list[float]:
        """The closed ends of its range, the lower one first."""
        return [end for end in self.limits if end is not None]

    @property
    def bound(self) -> float | list[float]:
        """For documents: the only bound, or both."""
        return self.bounds[0] if len(self.bounds) == 1 else self.bounds

    @property
    def against(self) -> Comparison | None:
        """What is compared, and with which run; None for a gate on the metric itself."""
        return self.compares

    @property
    def is_against_baseline(self) -> bool:
        return self.against not in (None, "anchor")

    @property
    def is_against_anchor(self) -> bool:
        return self.against == "anchor"

    @property
    def is_compared(self) -> bool:
        """Whether it is against another run, whichever that is."""
        return self.against is not None

    @property
    def is_over_starts(self) -> bool:
        """Whether further starts of the server measure what it compares. Likelihoods and tokens are of the first one alone."""
        return self.against in ("answers", "load")

    @property
    def has_noise(self) -> bool:
        return self.unit != "bool"

    @property
    def label(self) -> str:
        against = {"against_baseline": self.is_against_baseline, "against_anchor": self.is_against_anchor}
        return label_of(self.metric, self.task, self.filter, **against)

    @model_validator(mode="after")
    def _fits_its_metric(self) -> Self:
        metric = metric_of(self.metric)
        if not self.fits(metric):
            raise ValueError(f"{metric.name} takes no gate with {self.form()}")
        unit = metric.compared_unit if self.is_compared else metric.unit
        if self.unit != unit:
            raise ValueError(f"the unit of {self.label} is '{unit}', not '{self.unit}'")
        if metric.is_score and self.filter is None:
            raise ValueError(f"a gate on {metric.name} names lm-eval's filter, like strict-match or flexible-extract")
        if not metric.is_score and self.filter is not None:
            raise ValueError(f"{metric.name} has no filter")
        if metric.stage != "accuracy" and self.task is not None:
            raise ValueError(f"{metric.name} is of no task")
        self._check_bounds(metric)
        return self

    def _check_bounds(self, metric: Metric) -> None:
        for bound in self.bounds:
            if metric.unit in ("fraction", "bool") and not 0 <= bound <= 1:
                raise ValueError(f"{metric.name} lies between 0 and 1, the bound {bound} does not")
            if bound < 0:
                raise ValueError(f"{metric.name} is never negative, the bound {bound} is")


def metric_of(name: str) -> Metric:
    """A metric by its name. Raises ValueError if there is none."""
    metric = METRICS.get(name)
    if metric is None:
        raise ValueError(f"no metric '{name}'; known: {', '.join(METRICS)}")
    return metric


def label_of(
    metric: str, task: str | None, filter_name: str | None, *, against_baseline: bool, against_anchor: bool = False
) -> str:
    """`exact_match (gsm8k, strict-match)`, `ttft_p99_ms against the baseline`."""
    of = ", ".join(name for name in (task, filter_name) if name)
    other = AGAINST if against_baseline else AGAINST_ANCHOR if against_anchor else ""
    return metric + (f" ({of})" if of else "") + other
