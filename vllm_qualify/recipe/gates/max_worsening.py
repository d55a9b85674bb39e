"""Gates on how much worse the load's figures, or the tokens of answers, are than the baseline's."""

from typing import ClassVar

from pydantic import Field

from vllm_qualify.recipe.gates.gate import AboveZero, BaseGate, Comparison, Limits
from vllm_qualify.recipe.metrics import ANSWER_TOKENS, METRICS, Metric


class MaxWorsening(BaseGate):
    """For the load, and for tokens per answer: how many times worse than the baseline's figure it may be, minus 1.

    With a `max_worsening` of 0.05, a time may be 1.05 times as long, and a rate may fall to 1/1.05. Answers may have 1.05 times
    as many tokens; both runs answer the same questions, and are compared question by question.
    """

    compares: ClassVar[Comparison | None] = "load"

    max_worsening: AboveZero = Field(
        description="of the load or of tokens per answer: how many times worse than the baseline's, less 1, above 0"
    )

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.stage == "load" or metric.name == ANSWER_TOKENS

    @property
    def against(self) -> Comparison:
        return "tokens" if self.metric == ANSWER_TOKENS else "load"

    @property
    def limits(self) -> Limits:
        return Limits(at_most=self.max_worsening)

    @property
    def meaning(self) -> str:
        return f"how much worse: {METRICS[self.metric].meaning}"
