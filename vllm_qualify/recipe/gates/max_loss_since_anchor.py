"""Gates on the loss of a score against the anchor, question by question."""

from typing import ClassVar

from pydantic import Field

from vllm_qualify.recipe.gates.gate import POINTS, AboveZero, BaseGate, Comparison, Limits
from vllm_qualify.recipe.metrics import METRICS, Metric


class MaxLossSinceAnchor(BaseGate):
    """For a score: at most the share `max_loss_since_anchor` of the questions may be lost against the cell's anchor.

    It goes with a gate with `max_loss` on the same score, which decides how often questions are asked.
    """

    compares: ClassVar[Comparison | None] = "anchor"

    max_loss_since_anchor: AboveZero = Field(
        description="of a score: the share of the questions that may be lost against the anchor; at least `max_loss` of the"
        " same score"
    )

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.is_score

    @property
    def limits(self) -> Limits:
        return Limits(at_most=self.max_loss_since_anchor)

    @property
    def meaning(self) -> str:
        return f"what is lost since the anchor of the {METRICS[self.metric].meaning}"

    @property
    def shown_unit(self) -> str:
        return POINTS
