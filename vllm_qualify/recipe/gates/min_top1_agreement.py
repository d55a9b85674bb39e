"""Gates on how often both builds find the same token likeliest."""

from typing import Annotated, ClassVar

from pydantic import Field

from vllm_qualify.recipe.gates.gate import BaseGate, Comparison, Limits
from vllm_qualify.recipe.metrics import TOP1_SHARES, Metric
from vllm_qualify.recipe.values import Number


class MinTop1Agreement(BaseGate):
    """For a share of likeliest tokens: of the tokens, at least this share has the same likeliest one as under the baseline."""

    compares: ClassVar[Comparison | None] = "likelihood"

    min_top1_agreement: Annotated[Number, Field(gt=0, lt=1)] = Field(
        description="of a share of likeliest tokens: the least share with the same likeliest one as under the baseline,"
        " between 0 and 1"
    )

    @classmethod
    def fits(cls, metric: Metric) -> bool:
        return metric.name in TOP1_SHARES

    @property
    def limits(self) -> Limits:
        return Limits(at_least=self.min_top1_agreement)

    @property
    def meaning(self) -> str:
        whose = "the baseline's answers" if self.metric.startswith("answer") else "the recipe's texts"
        return f"share of the tokens of {whose} at which both builds find the same one likeliest"
