"""The paths that an answer can take through a busy server, and how a server is asked on each of them."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from vllm_qualify.recipe.contract import Capability
from vllm_qualify.recipe.metrics import CONSTRAINED, PATHS
from vllm_qualify.recipe.roles import EFFORT, WORK, Settings
from vllm_qualify.recipe.values import Count, Seconds, Text

BusyPath = Literal["cached", "concurrent", "evicted", "aborted", "constrained"]
# What a model promises whose replies can be held to a form.
FORMS: frozenset[Capability] = frozenset({"json_schema", "tools"})


class Paths(Settings):
    """The same prompts on each path that an answer can take through a busy server. They are the recipe's accuracy questions."""

    leave_out: Annotated[dict[BusyPath, Text], WORK] = Field(
        {},
        description="paths that are not taken, each with the reason, which reports show: `cached`, `concurrent`, `evicted`,"
        " `aborted`, `constrained`. They are not judged. `cold` is always taken",
    )
    num_prompts: Annotated[int, Field(strict=True, ge=16, le=10_000), EFFORT] = Field(
        64, description="how many of the accuracy questions are asked on each path, if there are so many"
    )
    reply_tok: Annotated[int, Field(strict=True, ge=1, le=256), WORK] = Field(
        16, description="the tokens of each reply; their likelihoods are compared"
    )
    num_concurrent: Annotated[Count | None, WORK] = Field(
        None, description="requests at once; none is as many as the load has clients, up to 64"
    )
    filler_tok: Annotated[Count, WORK] = Field(
        512, description="the tokens of each of the other prompts that keep the server busy and push prompts out of its cache"
    )
    most_filler_tok: Annotated[Count, EFFORT] = Field(
        2_000_000,
        description="the most tokens of other prompts that are sent to push prompts out of the cache. A larger cache makes"
        " `evicted` invalid: leave it out, or raise this",
    )
    num_aborts: Annotated[Count, EFFORT] = Field(96, description="how many clients hang up before `aborted`")
    num_constrained: Annotated[Count, EFFORT] = Field(
        512,
        description="how many replies must fit a JSON schema or call a tool, where `capabilities` promise that: a quarter of"
        " them are for a schema if both are promised, and most of the calls are streamed",
    )
    time_limit_s: Annotated[Seconds, EFFORT] = Field(120.0, description="for each request")

    def taken(self, capabilities: Collection[Capability]) -> list[str]:
        """The paths that are taken of a model with these capabilities, in their order."""
        paths = [*PATHS, *([] if FORMS.isdisjoint(capabilities) else [CONSTRAINED])]
        return [path for path in paths if path not in self.leave_out]
