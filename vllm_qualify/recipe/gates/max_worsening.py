"""Gates on how much worse the load's figures are than the baseline's."""

from typing import ClassVar

from pydantic import Field

from vllm_qualify.recipe.gates.gate import AboveZero, BaseGate, Comparison, Limits
from vllm_qualify.recipe.metrics import METRICS, Metric


class MaxWorsening(BaseGate):
    """For the load: how many times worse than the baseline's figure it may be, minus 1.

    With a `max_worsening` of 0.05, a time may be 1.05 times as long, and a rate may fall to 1/1.05.
    """

    against: ClassVar[Comparison | None] = "load"

    max_worsening: AboveZero = Field(description="of the load: how many times worse than the baseline's, less 1, above 0")

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.stage == "load"

    @property
    def limits(self) -> Limits:
        return Limits(at_most=self.max_worsening)

    @property
    def meaning(self) -> str:
        return f"how much worse: {METRICS[self.metric].meaning}"
