"""Gates with one absolute bound."""

from pydantic import Field

from vllm_qualify.recipe.gates.gate import BaseGate, Limits
from vllm_qualify.recipe.metrics import Metric
from vllm_qualify.recipe.values import Number


class Minimum(BaseGate):
    """Where higher is better: the metric must be at least `minimum`."""

    minimum: Number = Field(description="the bound where higher is better")

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.direction == "higher" and not metric.is_only_compared

    @property
    def limits(self) -> Limits:
        return Limits(at_least=self.minimum)


class Maximum(BaseGate):
    """Where lower is better: the metric must be at most `maximum`."""

    maximum: Number = Field(description="the bound where lower is better")

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.direction == "lower" and not metric.is_only_compared

    @property
    def limits(self) -> Limits:
        return Limits(at_most=self.maximum)
