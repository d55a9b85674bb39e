"""Scores that others published, which reports show beside ours. They gate nothing and decide nothing."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.values import Count, CountOrZero, FilterName, Frozen, Name, Share, matches


def _score_name(name: str) -> str:
    scores = [known for known, metric in METRICS.items() if metric.is_score]
    if name not in scores:
        raise ValueError(f"there is no score '{name}': take {', '.join(scores)}")
    return name


Source = Annotated[str, Field(strict=True, max_length=500), matches(r"(?s).*\S.*", "say where it is from")]
ScoreName = Annotated[Name, AfterValidator(_score_name)]
Remark = Annotated[str, Field(strict=True, min_length=1, max_length=300)]


class PublishedScore(Frozen):
    """A score that was published, with its source and how it was asked. What the source does not say is left out."""

    score: Share = Field(description="the score, from 0 to 1")
    source: Source = Field(description="where it was published: an address, or a document with its place in it")
    of: Remark | None = Field(None, description="which model or precision it is of, if it is not this one")
    metric: ScoreName | None = Field(None, description="our metric that it is compared with; all scores by default")
    filter: FilterName | None = Field(None, description="the filter of that metric")
    num_fewshot: CountOrZero | None = Field(None, description="solved examples in each prompt")
    api: Literal["completions", "chat"] | None = Field(None, description="`chat` has the model's own template")
    max_gen_toks: Count | None = Field(None, description="the longest reply")
    note: Remark | None = Field(None, description="what else was different, such as sampling or the effort of thinking")
