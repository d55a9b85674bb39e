"""The stages that a profile may ask for beside its load: a sweep, a soak, and a fit of the server."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import METRICS, TURN_TTFTS
from vllm_qualify.recipe.paths import UNASKED, Paths
from vllm_qualify.recipe.roles import EFFORT, WORK, Settings
from vllm_qualify.recipe.values import Count, Flag, Frozen, Milliseconds, Positive, PositiveShare, Seconds, Text


def _ascending(numbers: list[int]) -> list[int]:
    if numbers != sorted(set(numbers)):
        raise ValueError("write each number once, the smallest first")
    return numbers


class Sweep(Settings):
    """More loads on the same server: a curve of throughput against speed, and the highest load that meets an SLO.

    `concurrencies` request the curve. `slo` requests the most clients and the highest rate of requests that meet it. At least
    one of the two is given.
    """

    concurrencies: Annotated[list[Count], AfterValidator(_ascending), WORK] = Field(
        [], description="the numbers of clients of the curve"
    )
    slo: Annotated[dict[Text, Milliseconds], WORK] = Field(
        {}, description="what must be met: names of the load's latencies, like `ttft_p99_ms`, and the bound of each, in ms"
    )
    search: Annotated[list[Literal["concurrency", "request_rate"]], WORK] = Field(
        ["concurrency", "request_rate"], description="what is searched for where there is an `slo`"
    )
    most_concurrency: Annotated[Count | None, WORK] = Field(
        None, description="the most clients that are tried; none is the server's `max-num-seqs`"
    )
    resolution: Annotated[float, Field(strict=True, ge=0.01, le=0.5), WORK] = Field(
        0.05, description="a search ends when the next level that misses is nearer than this share of the one that meets"
    )
    most_runs: Annotated[Count, EFFORT] = Field(12, description="the most runs of each search")
    min_duration_s: Annotated[Seconds, EFFORT] = Field(30.0, description="a run that is shorter is invalid")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.concurrencies and not self.slo:
            raise ValueError("give 'concurrencies', or an 'slo' to be met, or both")
        for name in self.slo:
            metric = METRICS.get(name)
            if metric is None or metric.stage != "load" or metric.unit != "ms" or name in TURN_TTFTS:
                of_loads = (known for known, each in METRICS.items() if each.stage == "load" and each.unit == "ms")
                known = ", ".join(known for known in of_loads if known not in TURN_TTFTS)
                raise ValueError(f"slo.{name} is not a latency of a load; known: {known}")
        return self


class Soak(Settings):
    """A part of the load for a long time. The part is a share of its clients or of its rate."""

    soak_min: Annotated[Positive, WORK]
    soak_share: Annotated[PositiveShare, WORK]

    @property
    def duration_s(self) -> float:
        return 60 * self.soak_min

    def clients_and_rate(self, load: Load) -> tuple[int, float | None]:
        """The clients, at least one, and the rate in req/s, if the load has one."""
        rate = None if load.request_rate is None else self.soak_share * load.request_rate
        return max(1, math.floor(self.soak_share * load.max_concurrency)), rate


class Fit(Settings):
    """Server options of a profile that are searched for on the machine before the cell is qualified. At least one is set."""

    tensor_parallel_sizes: Annotated[list[Count], AfterValidator(_ascending), WORK] = Field(
        [], description="the smallest is taken with which the server starts"
    )
    max_num_seqs: Annotated[Flag, WORK] = Field(
        False, description="as many requests of the workload's full length as the KV cache holds; for random prompts only"
    )
    max_num_batched_tokens: Annotated[list[Count], AfterValidator(_ascending), WORK] = Field(
        [], description="the one with the highest output throughput is taken; two or more are compared"
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not (self.tensor_parallel_sizes or self.max_num_seqs or self.max_num_batched_tokens):
            raise ValueError("give 'tensor_parallel_sizes', 'max_num_seqs' or 'max_num_batched_tokens'")
        if len(self.max_num_batched_tokens) == 1:
            raise ValueError("max_num_batched_tokens compares: give two or more, or write the one under 'server'")
        return self

    @property
    def options(self) -> list[str]:
        """The server options that it finds."""
        kinds = {
            "tensor-parallel-size": self.tensor_parallel_sizes,
            "max-num-seqs": self.max_num_seqs,
            "max-num-batched-tokens": self.max_num_batched_tokens,
        }
        return [name for name, asked in kinds.items() if asked]


def _none_if_false(value: object) -> object:
    """A key with nothing behind it could mean both."""
    if value is None:
        raise ValueError("say 'false' to take no paths, or '{}' to take them with their defaults")
    return None if value is False else value


class ProfileStages(Frozen):
    """The stages that a profile may ask for beside its load, each by its name. A cell's plan has them as the profile does."""

    sweep: Annotated[Sweep | None, WORK] = Field(None, description="the same workload at other levels")
    fit: Annotated[Fit | None, WORK] = Field(None, description="server arguments that are searched for on the machine")
    paths: Annotated[Paths | None, BeforeValidator(_none_if_false), WORK] = Field(
        UNASKED,
        description="the accuracy questions on the paths that answers take through a busy server; each is a gate. `false`"
        " asks on none",
    )

    @property
    def asked_stages(self) -> dict[str, Settings | None]:
        """What is asked of each of these stages, by its name; None if it is not asked for."""
        return {name: getattr(self, name) for name in ProfileStages.model_fields}
