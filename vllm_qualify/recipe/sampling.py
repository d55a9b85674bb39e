"""How the next token is chosen, where a task's answers are sampled: the numbers of OpenAI's requests, and of vLLM's."""

from typing import Annotated, Any

from pydantic import Field

from vllm_qualify.recipe.values import Flag, Frozen, NotNegative, Number, Positive, PositiveShare, Share, Text

Penalty = Annotated[float, Field(strict=True, ge=-2, le=2)]
# What a chat's template takes: no lists and no mappings.
TemplateValue = Flag | Annotated[int, Field(strict=True)] | Number | Text


class Sampling(Frozen):
    """What is sent with each request of a task. What is left out is the server's: often the model's generation_config.json."""

    temperature: NotNegative = Field(description="0 takes the likeliest token")
    top_p: PositiveShare | None = Field(None, description="only the likeliest tokens that have this share together")
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = Field(
        None, description="only so many of the likeliest tokens; 0 and -1 are all"
    )
    min_p: Share | None = Field(None, description="only tokens that have this share of the likeliest one's")
    presence_penalty: Penalty | None = Field(None, description="against tokens that came before")
    frequency_penalty: Penalty | None = Field(None, description="against tokens, by how often they came before")
    repetition_penalty: Positive | None = Field(None, description="above 1 is against tokens that came before")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def numbers(self) -> dict[str, Any]:
        """Those that are sent, by their names in requests."""
        return self.model_dump(exclude_none=True)
