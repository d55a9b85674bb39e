"""Gates on the loss of a score against the baseline, question by question."""

from typing import ClassVar

from pydantic import Field

from vllm_qualify.recipe.gates.gate import POINTS, AboveZero, BaseGate, Comparison, Limits
from vllm_qualify.recipe.metrics import METRICS, Metric


class MaxLoss(BaseGate):
    """For a score: at most the share `max_loss` of the questions may be lost against the baseline, question by question."""

    compares: ClassVar[Comparison | None] = "answers"

    max_loss: AboveZero = Field(
        description="of a score: the share of the questions that may be lost against the baseline, above 0"
    )

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.is_score

    @property
    def limits(self) -> Limits:
        return Limits(at_most=self.max_loss)

    @property
    def meaning(self) -> str:
        return f"what is lost of the {METRICS[self.metric].meaning}"

    @property
    def shown_unit(self) -> str:
        return POINTS
