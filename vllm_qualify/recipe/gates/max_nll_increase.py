"""Gates on how much less likely texts are than under the baseline."""

from typing import ClassVar

from pydantic import Field

from vllm_qualify.recipe.gates.gate import AboveZero, BaseGate, Comparison, Limits
from vllm_qualify.recipe.metrics import LIKELIHOODS, METRICS, Metric


class MaxNllIncrease(BaseGate):
    """For a likelihood: per token, the negative log-likelihood may be at most so much larger than under the baseline.

    Both builds score the same texts, and the increase is taken text by text.
    """

    compares: ClassVar[Comparison | None] = "likelihood"

    max_nll_increase: AboveZero = Field(
        description="of a likelihood: how much larger it may be than under the baseline, in nats per token, above 0"
    )

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.name in LIKELIHOODS

    @property
    def limits(self) -> Limits:
        return Limits(at_most=self.max_nll_increase)

    @property
    def meaning(self) -> str:
        return f"increase of the {METRICS[self.metric].meaning}"
