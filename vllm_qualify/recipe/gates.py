"""Gates: rules over one metric; and waivers of them."""

from datetime import date
from decimal import Decimal
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from vllm_qualify.recipe.metrics import METRICS, NCCL_INFINIBAND, SPEEDUP, Metric
from vllm_qualify.recipe.values import Frozen, Name, Number, Text

AGAINST = " against the baseline"


class Gate(Frozen):
    """A rule over one metric, in one of three forms.

    - Absolute: `minimum` where higher is better, `maximum` where lower is, or a `reference` that may be missed by `margin`.
    - `max_loss`, of a score: the share of the questions that may be lost against the baseline, question by question.
    - `max_worsening`, of a measured load: how many times worse than the baseline's it may be, less 1. With 0.05 a time may be
      1.05 times as long, and a rate 1.05 times as low.

    The unit is the metric's; against a baseline it is `fraction`. Without a `task` the gate is on the recipe's only one.
    """

    metric: Text = Field(description="a name of the metrics")
    filter: Text | None = Field(
        default=None,
        description="lm-eval's filter, like `strict-match` or `flexible-extract`, or `none` for tasks without one: required for"
        " a score, refused for others",
    )
    task: Text | None = Field(default=None, description="the task of a score; needed where `accuracy` has more than one")
    minimum: Number | None = Field(default=None, description="the bound where higher is better")
    maximum: Number | None = Field(default=None, description="the bound where lower is better")
    reference: Number | None = Field(
        default=None, description="with `margin`: the bound is the margin below it, or above it where lower is better"
    )
    margin: Number | None = Field(default=None, description="above 0")
    max_loss: Number | None = Field(
        default=None, description="of a score: the share of the questions that may be lost against the baseline, above 0"
    )
    max_worsening: Number | None = Field(
        default=None, description="of the load: how many times worse than the baseline's, less 1, above 0"
    )
    unit: Text = Field(description="the metric's unit, exactly; with `max_loss` and `max_worsening` it is `fraction`")

    @model_validator(mode="after")
    def _fits_its_metric(self) -> Self:
        metric = METRICS.get(self.metric)
        if metric is None:
            raise ValueError(f"no metric '{self.metric}'; known: {', '.join(METRICS)}")
        self._check_form(metric)
        unit = "fraction" if self.is_against_baseline else metric.unit
        if self.unit != unit:
            raise ValueError(f"the unit of {self.label} is '{unit}', not '{self.unit}'")
        if metric.is_score and self.filter is None:
            raise ValueError(f"a gate on {metric.name} names lm-eval's filter, like strict-match or flexible-extract")
        if not metric.is_score and self.filter is not None:
            raise ValueError(f"{metric.name} has no filter")
        if metric.stage != "accuracy" and self.task is not None:
            raise ValueError(f"{metric.name} is of no task")
        if metric.unit in ("fraction", "bool") and not 0 <= self.bound <= 1:
            raise ValueError(f"{metric.name} lies between 0 and 1, the bound {self.bound} does not")
        if self.bound < 0:
            raise ValueError(f"{metric.name} is never negative, the bound {self.bound} is")
        return self

    def _check_form(self, metric: Metric) -> None:
        wanted, other = ("minimum", "maximum") if metric.direction == "higher" else ("maximum", "minimum")
        forms: dict[str, tuple[str, ...]] = {wanted: (wanted,), "reference and margin": ("reference", "margin")}
        if metric.is_score:
            forms["max_loss"] = ("max_loss",)
        if metric.stage == "load" and metric.name != SPEEDUP:
            forms["max_worsening"] = ("max_worsening",)
        names = (wanted, other, "reference", "margin", "max_loss", "max_worsening")
        given = tuple(name for name in names if getattr(self, name) is not None)
        if given not in forms.values():
            told = ", or ".join(f"'{form}'" for form in forms)
            raise ValueError(f"{metric.direction} is better for {metric.name}: give {told}, and nothing beside")
        for name in ("margin", "max_loss", "max_worsening"):
            if name in given and not getattr(self, name) > 0:
                raise ValueError(f"'{name}' must be above 0: no measurement can show that nothing at all was lost")

    @property
    def is_against_baseline(self) -> bool:
        return self.max_loss is not None or self.max_worsening is not None

    @property
    def is_floor(self) -> bool:
        """Whether the value must be at least the bound, and not at most."""
        return not self.is_against_baseline and METRICS[self.metric].direction == "higher"

    @property
    def bound(self) -> float:
        if self.reference is not None and self.margin is not None:
            # In decimals, as people write it: .92 less .02 is .9.
            reference, margin = Decimal(str(self.reference)), Decimal(str(self.margin))
            return float(reference - margin if self.is_floor else reference + margin)
        bound = next(b for b in (self.minimum, self.maximum, self.max_loss, self.max_worsening) if b is not None)
        return float(bound)

    @property
    def has_noise(self) -> bool:
        return self.unit != "bool"

    @property
    def label(self) -> str:
        return label_of(self.metric, self.task, self.filter, against_baseline=self.is_against_baseline)


def label_of(metric: str, task: str | None, filter_name: str | None, *, against_baseline: bool) -> str:
    """`exact_match (gsm8k, strict-match)`, `ttft_p99_ms against the baseline`."""
    of = ", ".join(name for name in (task, filter_name) if name)
    return metric + (f" ({of})" if of else "") + (AGAINST if against_baseline else "")


def _for_a_recipe(gate: Gate) -> Gate:
    stage = METRICS[gate.metric].stage
    if stage == "smoke":
        raise ValueError("smoke always gates by itself; leave it out")
    if gate.metric == NCCL_INFINIBAND:
        raise ValueError(f"{gate.metric} gates by itself where a GPU type has `network: infiniband`; leave it out")
    if stage == "serve":
        raise ValueError(f"{gate.metric} is measured once a run, which shows no noise to judge it by")
    if stage == "sweep":
        remedy = "set load.max_concurrency to the number wanted, and gate the latencies there"
        raise ValueError(f"{gate.metric} is found by one search, which shows no noise to judge it by: {remedy}")
    return gate


Gates = list[Annotated[Gate, AfterValidator(_for_a_recipe)]]


class Waiver(Frozen):
    """One gate of one cell that need not be passed until a day, and who answers for that."""

    gate: Text = Field(
        description="the gate's name as reports have it, like `exact_match (gsm8k, strict-match) against the baseline`"
    )
    gpu_type: Name = Field(description="of the cell")
    variant: Name = Field(description="of the cell")
    profile: Name = Field(description="of the cell")
    owner: Text = Field(description="who answers for it")
    reason: Text = Field(description="why")
    expires: date = Field(description="the last day on which it holds, by UTC, like `2026-12-31`")
