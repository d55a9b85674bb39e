"""Gates on a known figure that may be missed by a margin."""

from decimal import Decimal

from pydantic import Field

from vllm_qualify.recipe.gates.gate import AboveZero, BaseGate, Limits
from vllm_qualify.recipe.metrics import METRICS, Metric
from vllm_qualify.recipe.values import Number


class Reference(BaseGate):
    """The metric may be worse than `reference` by at most `margin`."""

    reference: Number = Field(description="with `margin`: the bound is the margin below it, or above it where lower is better")
    margin: AboveZero = Field(description="above 0")

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return not metric.is_only_compared

    @property
    def limits(self) -> Limits:
        # In decimals, as people calculate: 0.92 - 0.02 is 0.9.
        reference, margin = Decimal(str(self.reference)), Decimal(str(self.margin))
        if METRICS[self.metric].direction == "higher":
            return Limits(at_least=float(reference - margin))
        return Limits(at_most=float(reference + margin))
