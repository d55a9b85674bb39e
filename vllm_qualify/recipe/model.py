"""Recipes: how one model is served on each GPU type, how it is checked and measured, and the gates it must pass.

All models are strict: unknown keys, wrong types, NaN and infinities are refused, and nothing is converted silently.
"""

import math
import re
from collections.abc import Collection, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, Self

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from vllm_qualify.recipe.metrics import GOODPUT, METRICS, NCCL_INFINIBAND, SPEEDUP, Metric, least_prompts, least_requests

EngineName = Literal["vllm", "tensorrt-llm"]
VLLM: EngineName = "vllm"
SETTABLE_BY_US = (
    "model",
    "host",
    "port",
    "served-model-name",
    "config",
    "revision",
    "tokenizer-revision",
    "uds",
    "api-key",
    "hf-token",
)
# For a steady state, and for a whole run with its ramp-up and tail.
LEAST_PROMPTS_PER_CLIENT, LEAST_OF_WHOLE_RUN = 5, 1
# How often a baseline is asked each question at least: with fewer its own noise is most of what a comparison does not know.
LEAST_REPETITIONS = 4
AGAINST = " against the baseline"


class Frozen(BaseModel):
    """Base of every typed document of this project."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _server_key(key: str) -> str:
    if key.replace("_", "-") in SETTABLE_BY_US:
        raise ValueError(f"'{key}' is set by vllm-qualify; leave it out")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", key):
        raise ValueError(f"'{key}' is not a `vllm serve` option: write it without the leading dashes, like max-model-len")
    return key


def _server_value(value: JsonValue) -> JsonValue:
    if value is None:
        raise ValueError("give a value, or leave the option out")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _server_value(inner)
    return value


def _environment_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"'{name}' is not the name of an environment variable")
    if is_secret_name(name):
        raise ValueError(f"'{name}' names a secret: set it in the environment of vllm-qualify, never in a recipe")
    return name


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret, by the usual naming habits; a `_FILE` holds a path."""
    if name.upper().endswith("_FILE"):
        return False
    words = "TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_KEY|ACCESS_KEY|PRIVATE_KEY"
    return bool(re.search(rf"(^|_)({words})(_|$)", name.upper()))


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError("use lower-case letters, digits, '.', '_' and '-', and begin with a letter or digit")
    return name


def _task_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("it is no name of an lm-eval task: letters, digits, '.', '_' and '-'")
    return name


def _ascending(numbers: list[int]) -> list[int]:
    if numbers != sorted(set(numbers)):
        raise ValueError("write each number once, the smallest first")
    return numbers


Name = Annotated[str, Field(strict=True, max_length=100), AfterValidator(_plain_name)]
TaskName = Annotated[str, Field(strict=True, max_length=100), AfterValidator(_task_name)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrNone = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, gt=0)]
Gibibytes = Annotated[float, Field(strict=True, ge=0.0625)]
Number = Annotated[float, Field(strict=True)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
ServerArguments = dict[Annotated[str, AfterValidator(_server_key)], Annotated[JsonValue, AfterValidator(_server_value)]]
Environment = dict[Annotated[str, AfterValidator(_environment_name)], Annotated[str, Field(strict=True)]]


def _version_range(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"'{text}' is no range of versions: write it like >=0.12,<0.14") from error
    return text


VersionRange = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_version_range)]


def covers(versions: str, version: str) -> bool:
    """Whether a range has a version in it.

    A nightly or a release candidate counts as the version that it leads to; local parts like `+cpu` do not count.
    """
    return Version(version).base_version in SpecifierSet(versions)


class ByVersion(Frozen):
    """What differs for a range of vLLM versions (PEP 440), over what stands beside it.

    Each entry whose range has the version under test changes it, in the order of the list.
    """

    vllm: VersionRange = Field(description="the versions that it is for")
    without: list[Text] = Field(
        default=[], description="server arguments and environment names from beside it that these versions do not have"
    )
    server: ServerArguments = Field(default={}, description="over those beside it")
    environment: Environment = Field(default={}, description="over that beside it")


class Arguments(Frozen):
    """Server options and environment of one layer of a recipe, with what differs by version."""

    server: ServerArguments = Field(
        default={},
        description="options of the server; those of the GPU type come first, then the variant's, then the profile's",
    )
    environment: Environment = Field(
        default={}, description="variables of the server process, in the same order; numbers are quoted"
    )
    by_version: list[ByVersion] = Field(default=[], description="what differs for some versions of vLLM")

    @model_validator(mode="after")
    def _options_are_of_the_engine(self) -> Self:
        """vLLM takes both forms of a name, so that one option could stand here twice."""
        layers = [self.server, *(entry.server for entry in self.by_version)]
        names = [name for layer in layers for name in layer if "_" in name]
        if names and self.of_vllm:
            raise ValueError(f"write {names[0]} as {names[0].replace('_', '-')}")
        return self

    @property
    def of_vllm(self) -> bool:
        """Whether the server options are vLLM's."""
        return True

    @model_validator(mode="after")
    def _takes_away_what_is_there(self) -> Self:
        for number, entry in enumerate(self.by_version):
            absent = [name for name in entry.without if name not in {**self.server, **self.environment}]
            if absent:
                raise ValueError(f"by_version.{number}.without names {', '.join(absent)}, which the keys beside it do not set")
        return self

    def at(self, version: str) -> tuple[ServerArguments, Environment]:
        """The layer's server options and environment for a version of vLLM."""
        server, environment = dict(self.server), dict(self.environment)
        for entry in self.by_version:
            if covers(entry.vllm, version):
                server = {name: value for name, value in server.items() if name not in entry.without} | entry.server
                environment = {name: value for name, value in environment.items() if name not in entry.without}
                environment |= entry.environment
        return server, environment


class Variant(Arguments):
    """One set of weights for one engine, and where it can be served at all.

    The arguments of GPU types and profiles are vLLM's. With another engine those of the variant stand alone, and are that
    engine's.
    """

    model: Text = Field(
        description="a repository of the Hugging Face hub, or a folder: then it begins with `./`, `../`, `/` or `~` and holds a"
        " `config.json`",
    )
    engine: EngineName = Field(default=VLLM, description="what serves it")
    revision: Text | None = Field(
        default=None,
        description="branch, tag or commit on the hub; none is its default branch. The commit behind it is served and recorded",
    )
    smoke_golden: Text | None = Field(
        default=None, description="the exact reply to the smoke prompt. With it, the gate `smoke_golden` is added"
    )
    gpu_types: list[Name] = Field(
        default=[], description="the GPU types that can serve it, like Blackwell's for NVFP4; empty is all of the recipe's"
    )
    profiles: list[Name] = Field(default=[], description="the profiles that it is for; empty is all")
    vllm: VersionRange | None = Field(
        default=None, description="the versions of vLLM that can serve it, like `>=0.15`; none is all"
    )
    baseline: Name | None = Field(
        default=None,
        description="the variant that it is compared with, like `bf16` for `fp8`; none is itself, as it was approved before",
    )

    @model_validator(mode="after")
    def _versions_are_vllms(self) -> Self:
        for name, given in (("vllm", self.vllm), ("by_version", self.by_version)):
            if given and not self.of_vllm:
                raise ValueError(f"'{name}' is about versions of vLLM; leave it out with engine {self.engine}")
        return self

    @property
    def of_vllm(self) -> bool:
        return self.engine == VLLM

    @property
    def is_local(self) -> bool:
        return self.model.startswith(("./", "../", "/", "~"))

    def fits_gpu_type(self, gpu_type: str) -> bool:
        return not self.gpu_types or gpu_type in self.gpu_types

    def fits_profile(self, profile: str) -> bool:
        return not self.profiles or profile in self.profiles

    def fits_version(self, version: str) -> bool:
        """Whether a version of vLLM can serve it."""
        return self.of_vllm and (self.vllm is None or covers(self.vllm, version))


class Smoke(Frozen):
    """The fixed prompt, asked twice at temperature 0."""

    prompt: Text = Field(description="asked twice, at temperature 0")
    max_tokens: Count = Field(default=20, description="longest reply")
    time_limit_s: Seconds = Field(default=120.0, description="for each request")


class Questions(Frozen):
    """Local gsm8k-like files (JSON lines with `question` and `answer`) in place of the hub's data set."""

    test: Text = Field(description="path of the questions")
    shots: Text = Field(description="path of the solved examples")


class Accuracy(Frozen):
    """One lm-eval task: of text to be written, in completions or in chats, or of choices by their likelihood.

    Where a gate compares with a baseline, its questions are asked again and again until the comparison is decided. Replies that
    are empty or never came are no wrong answers.
    """

    task: TaskName = Field(
        default="gsm8k",
        description="a task of lm-eval, or of a YAML file in `task_folder`. Groups like mmlu are named task by task",
    )
    api: Literal["completions", "chat"] = Field(
        default="completions",
        description="how the server is asked; a chat has the server's own template, and the examples as turns",
    )
    num_fewshot: CountOrNone = Field(
        default=5, description="solved examples in each prompt; a task that says 0 itself keeps it"
    )
    num_questions: Count = Field(
        description="how many questions are asked, the same ones in each run; of a task that has more, `seed` draws them"
    )
    num_concurrent: Count | None = Field(
        default=None,
        description="requests under way at one time; none follows the server's `max-num-seqs`, up to 256, or is 64",
    )
    max_gen_toks: Count = Field(default=256, description="longest reply")
    seed: CountOrNone = Field(default=1234, description="of lm-eval, and of the order of the questions")
    most_repetitions: Count = Field(
        default=10,
        description="how often all questions are asked at most, where a gate compares with a baseline; then 4 or more",
    )
    sequential: Flag = Field(
        default=True,
        description="end as soon as every gate on the task is decided; a run that becomes a baseline asks everything",
    )
    max_unanswered: Share = Field(
        default=0.002,
        description="a larger share of empty replies makes the task `invalid`; fewer are left out, and not counted as wrong",
    )
    time_limit_s: Seconds = Field(
        default=3600.0, description="for each block of questions: a fifth of them, or without `sequential` all"
    )
    questions: Questions | None = Field(default=None, description="local files in place of the task's own data")
    task_folder: Text | None = Field(default=None, description="a folder with lm-eval's YAML files of own tasks")


class Slo(Frozen):
    """What a request must meet to count for goodput, in ms; at least one of these."""

    ttft_ms: Seconds | None = Field(default=None, description="most time to the first token")
    tpot_ms: Seconds | None = Field(default=None, description="most time per output token after the first")
    e2el_ms: Seconds | None = Field(default=None, description="most time to the last token")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.wanted:
            raise ValueError("give at least one of ttft_ms, tpot_ms and e2el_ms")
        return self

    @property
    def wanted(self) -> dict[str, float]:
        """`vllm bench serve`'s names of the times with their limits in ms."""
        given = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2el": self.e2el_ms}
        return {name: limit for name, limit in given.items() if limit is not None}


class Workload(Frozen):
    """What `vllm bench serve` asks: prompts that are random, or those of a file. End-of-text is ignored in replies."""

    input_len: Count | None = Field(default=None, description="length of each random prompt; either this or `prompts`")
    output_len: Count = Field(description="length of each reply")
    length_spread: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.0, description="random lengths lie evenly between 1 less and 1 plus this, times `input_len` and `output_len`"
    )
    prompts: Text | None = Field(default=None, description="path of a file with the prompts: JSON lines, each with a `prompt`")
    api: Literal["completions", "chat"] = Field(
        default="completions", description="how the server is asked; a chat has the server's own template"
    )
    num_warmups: CountOrNone = Field(description="requests before each repeat that are not measured")
    repeats: Count = Field(default=5, description="how often the workload is run. One repeat alone shows no noise")
    most_repeats: Count = Field(
        default=10,
        description="how often it is run at most: after `repeats` one more at a time, until every gate on the load is decided",
    )
    time_budget_s: Seconds | None = Field(
        default=None,
        description="no repeat begins that would not end within it, by the longest so far; what is undecided then is"
        " `inconclusive`. The first repeat is always run; `--time-budget` goes over it",
    )
    window: Literal["steady", "whole"] = Field(
        default="steady",
        description="what the figures are over: the steady state, or the whole run as bench counts it, with ramp-up and tail,"
        " to repeat a published run like for like. The two are never compared",
    )
    min_duration_s: Seconds = Field(default=60.0, description="a repeat that is shorter makes the load measurements `invalid`")
    seed: CountOrNone = Field(
        default=0, description="of the first repeat; each further one adds 1, so that no random prompt comes twice"
    )
    time_limit_s: Seconds = Field(default=3600.0, description="for each repeat")
    slo: Slo | None = Field(default=None, description="what a request must meet to count for `goodput_req_s`")

    @property
    def looks(self) -> range:
        """After how many repeats the gates are looked at."""
        return range(self.repeats, max(self.repeats, self.most_repeats) + 1)

    @property
    def least_prompts_per_client(self) -> int:
        return LEAST_OF_WHOLE_RUN if self.window == "whole" else LEAST_PROMPTS_PER_CLIENT

    def least_prompts(self, metric: str) -> int:
        """How many prompts a gate on the metric needs: of a whole run no request is cut off."""
        return least_requests(metric) if self.window == "whole" else least_prompts(metric)

    @property
    def longest_tok(self) -> int | None:
        """The most tokens that one request can take, prompt and reply; None where a file has the prompts."""
        if self.input_len is None:
            return None
        return sum(math.ceil(length * (1 + self.length_spread)) for length in (self.input_len, self.output_len))

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if (self.input_len is None) == (self.prompts is None):
            raise ValueError("give 'input_len' for random prompts, or 'prompts' for those of a file, one of the two")
        if self.prompts is not None and self.length_spread:
            raise ValueError("'length_spread' is of random prompts; leave it out with 'prompts'")
        return self


class LoadSettings(Workload):
    """A recipe's workload: without `max_concurrency` there are as many clients as the server's `max-num-seqs`, and without
    `num_prompts` as many prompts as that many clients and the gates need."""

    max_concurrency: Count | None = Field(
        default=None, description="clients: requests under way at one time; none is as many as the server's `max-num-seqs`"
    )
    num_prompts: Count | None = Field(
        default=None,
        description="requests of each repeat, at least 5 for each client, or 1 with `window: whole`; none is 5 for each, or as"
        " many as the gates' percentiles need. With `fit.max_num_seqs` it needs `max_concurrency`",
    )

    def of(self, max_num_seqs: int | None, least_prompts: int) -> "Load":
        """The load of a server. Raises ValueError where it does not follow, or there are too few prompts."""
        clients = self.max_concurrency or max_num_seqs
        if clients is None:
            raise ValueError("give max_concurrency, or the server its max-num-seqs")
        prompts = self.num_prompts or max(LEAST_PROMPTS_PER_CLIENT * clients, least_prompts)
        return Load.model_validate(self.model_dump() | {"max_concurrency": clients, "num_prompts": prompts})

    @model_validator(mode="after")
    def _enough_prompts(self) -> Self:
        if self.max_concurrency and self.num_prompts:
            self.of(None, 1)
        return self


class Load(Workload):
    """One `vllm bench serve` workload, all of it known. `prompts_sha256` is of the file's content."""

    max_concurrency: Count
    num_prompts: Count
    prompts_sha256: str | None = None

    @model_validator(mode="after")
    def _enough_prompts(self) -> Self:
        each = self.least_prompts_per_client
        least = each * self.max_concurrency
        if self.num_prompts < least:
            times = f"{each} times max_concurrency" if each > 1 else "max_concurrency"
            raise ValueError(f"num_prompts must be at least {times}, so {least} or more{self._fewer_are_told}")
        return self

    @property
    def _fewer_are_told(self) -> str:
        is_enough = self.num_prompts >= LEAST_OF_WHOLE_RUN * self.max_concurrency
        return "; or set `window: whole`, for figures over the whole run with its ramp-up and tail" if is_enough else ""


class Sweep(Frozen):
    """Loads beside the profile's own, on the same server: a curve of throughput against speed, and the most that meets an SLO.

    `concurrencies` ask for the curve, `slo` for the most clients and the highest rate of requests that meet it; at least one of
    the two is given.
    """

    concurrencies: Annotated[list[Count], AfterValidator(_ascending)] = Field(
        default=[], description="the numbers of clients of the curve"
    )
    slo: dict[Text, Seconds] = Field(
        default={},
        description="what must be met: names of the load's latencies, like `ttft_p99_ms`, and the bound of each, in ms",
    )
    search: list[Literal["concurrency", "request_rate"]] = Field(
        default=["concurrency", "request_rate"], description="what is searched for where there is an `slo`"
    )
    most_concurrency: Count | None = Field(
        default=None, description="the most clients that are tried; none is the server's `max-num-seqs`"
    )
    resolution: Annotated[float, Field(strict=True, ge=0.01, le=0.5)] = Field(
        default=0.05,
        description="a search ends when the next level that misses is nearer than this share of the one that meets",
    )
    most_runs: Count = Field(default=12, description="the most runs of each search")
    min_duration_s: Seconds = Field(default=30.0, description="a run that is shorter is invalid")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.concurrencies and not self.slo:
            raise ValueError("give 'concurrencies', or an 'slo' to be met, or both")
        for name in self.slo:
            metric = METRICS.get(name)
            if metric is None or metric.stage != "load" or metric.unit != "ms":
                known = ", ".join(known for known, each in METRICS.items() if each.stage == "load" and each.unit == "ms")
                raise ValueError(f"slo.{name} is no latency of a load; known: {known}")
        return self


class Fit(Frozen):
    """What of a profile's server is found on the machine itself before the cell is qualified; at least one is asked for."""

    tensor_parallel_sizes: Annotated[list[Count], AfterValidator(_ascending)] = Field(
        default=[], description="the smallest is taken with which the server starts"
    )
    max_num_seqs: Flag = Field(
        default=False,
        description="as many requests of the workload's full length as the KV cache holds; for random prompts only",
    )
    max_num_batched_tokens: Annotated[list[Count], AfterValidator(_ascending)] = Field(
        default=[], description="the one with the highest output throughput is taken; two or more are compared"
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
        found = {
            "tensor-parallel-size": self.tensor_parallel_sizes,
            "max-num-seqs": self.max_num_seqs,
            "max-num-batched-tokens": self.max_num_batched_tokens,
        }
        return [name for name, asked in found.items() if asked]


class Gate(Frozen):
    """A rule over one metric, in one of three forms.

    - Absolute: `minimum` where higher is better, `maximum` where lower is, or a `reference` that may be missed by `margin`.
    - `max_loss`, of a score: the share of the questions that may be lost against the baseline, question by question.
    - `max_worsening`, of a measured load: how many times worse than the baseline's it may be, less 1. With 0.05 a time may be
      1.05 times as long, and a rate 1.05 times as low.

    The unit is the metric's; against a baseline it is `fraction`. Without a `task` the gate is on the recipe's only one.
    """

    metric: Text = Field(description="a name of the metrics")
    filter: Text | None = Field(
        default=None,
        description="lm-eval's filter, like `strict-match` or `flexible-extract`, or `none` for tasks without one: required for"
        " a score, refused for others",
    )
    task: Text | None = Field(default=None, description="the task of a score; needed where `accuracy` has more than one")
    minimum: Number | None = Field(default=None, description="the bound where higher is better")
    maximum: Number | None = Field(default=None, description="the bound where lower is better")
    reference: Number | None = Field(
        default=None, description="with `margin`: the bound is the margin below it, or above it where lower is better"
    )
    margin: Number | None = Field(default=None, description="above 0")
    max_loss: Number | None = Field(
        default=None, description="of a score: the share of the questions that may be lost against the baseline, above 0"
    )
    max_worsening: Number | None = Field(
        default=None, description="of the load: how many times worse than the baseline's, less 1, above 0"
    )
    unit: Text = Field(description="the metric's unit, exactly; with `max_loss` and `max_worsening` it is `fraction`")

    @model_validator(mode="after")
    def _fits_its_metric(self) -> Self:
        metric = METRICS.get(self.metric)
        if metric is None:
            raise ValueError(f"no metric '{self.metric}'; known: {', '.join(METRICS)}")
        self._check_form(metric)
        unit = "fraction" if self.is_against_baseline else metric.unit
        if self.unit != unit:
            raise ValueError(f"the unit of {self.label} is '{unit}', not '{self.unit}'")
        if metric.is_score and self.filter is None:
            raise ValueError(f"a gate on {metric.name} names lm-eval's filter, like strict-match or flexible-extract")
        if not metric.is_score and self.filter is not None:
            raise ValueError(f"{metric.name} has no filter")
        if metric.stage != "accuracy" and self.task is not None:
            raise ValueError(f"{metric.name} is of no task")
        if metric.unit in ("fraction", "bool") and not 0 <= self.bound <= 1:
            raise ValueError(f"{metric.name} lies between 0 and 1, the bound {self.bound} does not")
        if self.bound < 0:
            raise ValueError(f"{metric.name} is never negative, the bound {self.bound} is")
        return self

    def _check_form(self, metric: Metric) -> None:
        wanted, other = ("minimum", "maximum") if metric.direction == "higher" else ("maximum", "minimum")
        forms: dict[str, tuple[str, ...]] = {wanted: (wanted,), "reference and margin": ("reference", "margin")}
        if metric.is_score:
            forms["max_loss"] = ("max_loss",)
        if metric.stage == "load" and metric.name != SPEEDUP:
            forms["max_worsening"] = ("max_worsening",)
        names = (wanted, other, "reference", "margin", "max_loss", "max_worsening")
        given = tuple(name for name in names if getattr(self, name) is not None)
        if given not in forms.values():
            told = ", or ".join(f"'{form}'" for form in forms)
            raise ValueError(f"{metric.direction} is better for {metric.name}: give {told}, and nothing beside")
        for name in ("margin", "max_loss", "max_worsening"):
            if name in given and not getattr(self, name) > 0:
                raise ValueError(f"'{name}' must be above 0: no measurement can show that nothing at all was lost")

    @property
    def is_against_baseline(self) -> bool:
        return self.max_loss is not None or self.max_worsening is not None

    @property
    def is_floor(self) -> bool:
        """Whether the value must be at least the bound, and not at most."""
        return not self.is_against_baseline and METRICS[self.metric].direction == "higher"

    @property
    def bound(self) -> float:
        if self.reference is not None and self.margin is not None:
            # In decimals, as people write it: .92 less .02 is .9.
            reference, margin = Decimal(str(self.reference)), Decimal(str(self.margin))
            return float(reference - margin if self.is_floor else reference + margin)
        bound = next(b for b in (self.minimum, self.maximum, self.max_loss, self.max_worsening) if b is not None)
        return float(bound)

    @property
    def has_noise(self) -> bool:
        return self.unit != "bool"

    @property
    def label(self) -> str:
        return label_of(self.metric, self.task, self.filter, against_baseline=self.is_against_baseline)


def label_of(metric: str, task: str | None, filter_name: str | None, *, against_baseline: bool) -> str:
    """`exact_match (gsm8k, strict-match)`, `ttft_p99_ms against the baseline`."""
    of = ", ".join(name for name in (task, filter_name) if name)
    return metric + (f" ({of})" if of else "") + (AGAINST if against_baseline else "")


def _for_a_recipe(gate: Gate) -> Gate:
    stage = METRICS[gate.metric].stage
    if stage == "smoke":
        raise ValueError("smoke always gates by itself; leave it out")
    if gate.metric == NCCL_INFINIBAND:
        raise ValueError(f"{gate.metric} gates by itself where a GPU type has `network: infiniband`; leave it out")
    if stage == "serve":
        raise ValueError(f"{gate.metric} is measured once a run, which shows no noise to judge it by")
    if stage == "sweep":
        remedy = "set load.max_concurrency to the number wanted, and gate the latencies there"
        raise ValueError(f"{gate.metric} is found by one search, which shows no noise to judge it by: {remedy}")
    return gate


Gates = list[Annotated[Gate, AfterValidator(_for_a_recipe)]]


class Waiver(Frozen):
    """One gate of one cell that need not be passed until a day, and who answers for that."""

    gate: Text = Field(
        description="the gate's name as reports have it, like `exact_match (gsm8k, strict-match) against the baseline`"
    )
    gpu_type: Name = Field(description="of the cell")
    variant: Name = Field(description="of the cell")
    profile: Name = Field(description="of the cell")
    owner: Text = Field(description="who answers for it")
    reason: Text = Field(description="why")
    expires: date = Field(description="the last day on which it holds, by UTC, like `2026-12-31`")


class Approval(Frozen):
    """How reports that passed become approvals, which deployments trust."""

    automatic: bool = Field(
        default=False,
        description="approve at once where every gate was judged and passed without a waiver, and a key to sign with is given;"
        " else a person decides",
    )
    valid_days: int = Field(
        default=90,
        ge=1,
        le=3650,
        description="from the decision until the approval expires; a waiver that it rests on can end it earlier",
    )


class Profile(Arguments):
    """A serving goal: its tunables over the GPU type's arguments, its workload and its gates."""

    load: LoadSettings = Field(description="the workload")
    sweep: Sweep | None = Field(default=None, description="the same workload at other levels")
    fit: Fit | None = Field(default=None, description="server arguments to be found on the machine")
    gates: Gates = Field(default=[], description="gates of this profile, beside those of the recipe")

    @model_validator(mode="after")
    def _fit_finds_what_is_open(self) -> Self:
        set_too = [name for name in (self.fit.options if self.fit else []) if name in self.server]
        if set_too:
            raise ValueError(f"fit finds {', '.join(set_too)}, and the server sets it too: leave one of the two out")
        if self.fit and self.fit.max_num_seqs and self.load.longest_tok is None:
            raise ValueError("fit finds max_num_seqs for random prompts only, whose length is known: give it under 'server'")
        if self.fit and self.fit.max_num_seqs and self.load.num_prompts and not self.load.max_concurrency:
            raise ValueError("fit finds max_num_seqs, which the clients follow: leave load.num_prompts out, which follows them")
        return self


class Serving(Arguments):
    """How the model is served on one GPU type."""

    default_variant: Name = Field(description="one of `variants`; `--variant` chooses another")
    warm_starts: CountOrNone = Field(
        default=0, description="how often the server is started once more after the load, now that its caches are full"
    )
    price_usd_gpu_hour: Annotated[float, Field(strict=True, gt=0)] | None = Field(
        default=None, description="what one GPU costs an hour; `--price-usd-gpu-hour` goes over it"
    )
    network: Literal["infiniband"] | None = Field(
        default=None, description="what NCCL must use between nodes; the server's log tells it"
    )
    startup_timeout_s: Seconds = Field(default=1800.0, description="from the launch to the first completion that came back")
    memory_limit_gib: Gibibytes | None = Field(
        default=None, description="limit of the container's host memory; only with `--launcher docker`"
    )
    profiles: dict[Name, Profile] = Field(min_length=1, description="`throughput`, `balanced`, `latency`, or any other name")


def _check_known(place: str, names: list[str], known: Collection[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{place} names {', '.join(unknown)}, which the recipe does not have: {', '.join(sorted(known))}")


class Recipe(Frozen):
    """A whole recipe. `gates` hold for every cell; a profile adds its own."""

    name: Name = Field(description="first part of the cell's id, and of the report's place in the store")
    description: Text = Field(description="one sentence for people")
    served_model_name: Text = Field(description="the name under which the server offers the model")
    variants: dict[Name, Variant] = Field(min_length=1, description="the sets of weights")
    gpu_types: dict[Name, Serving] = Field(
        min_length=1,
        description="how the model is served on each GPU type: `h100`, `h200`, `b200`, …, `cpu`, as NVML tells them",
    )
    smoke: Smoke = Field(description="the fixed prompt")
    accuracy: list[Accuracy] = Field(min_length=1, description="the lm-eval tasks")
    gates: Gates = Field(min_length=1, description="gates of every cell")
    waivers: list[Waiver] = Field(default=[], description="gates that need not be passed for some time")
    approval: Approval = Field(
        default=Approval(), description="who turns a report that passed into an approval, and for how long"
    )

    @model_validator(mode="after")
    def _default_variants_exist(self) -> Self:
        for gpu_type, serving in self.gpu_types.items():
            if serving.default_variant not in self.variants:
                known = ", ".join(self.variants)
                raise ValueError(
                    f"gpu_types.{gpu_type}.default_variant '{serving.default_variant}' is not among the variants: {known}"
                )
        return self

    @model_validator(mode="after")
    def _variants_fit(self) -> Self:
        """A name that no cell has is a slip of the pen, and would quietly forbid what its author wanted."""
        for name, variant in self.variants.items():
            _check_known(f"variants.{name}.gpu_types", variant.gpu_types, self.gpu_types)
            _check_known(
                f"variants.{name}.profiles", variant.profiles, {p for s in self.gpu_types.values() for p in s.profiles}
            )
            if not any(variant_of_cell == name for _, variant_of_cell, _ in self.cells()):
                raise ValueError(f"variants.{name} has no cell: its profiles are not those of its GPU types")
        for gpu_type, serving in self.gpu_types.items():
            if not any(cell[:2] == (gpu_type, serving.default_variant) for cell in self.cells()):
                raise ValueError(f"gpu_types.{gpu_type}.default_variant '{serving.default_variant}' is not for {gpu_type}")
        return self

    @model_validator(mode="after")
    def _tasks_are_distinct(self) -> Self:
        tasks = [accuracy.task for accuracy in self.accuracy]
        twice = sorted({task for task in tasks if tasks.count(task) > 1})
        if twice:
            raise ValueError(f"accuracy has the task {', '.join(twice)} more than once")
        for gate in [*self.gates, *(gate for profile in self._profiles() for gate in profile.gates)]:
            if METRICS[gate.metric].stage == "accuracy":
                self._check_task(gate, tasks)
        return self

    @model_validator(mode="after")
    def _comparisons_have_repetitions(self) -> Self:
        gates = [*self.gates, *(gate for profile in self._profiles() for gate in profile.gates)]
        for accuracy in self.accuracy:
            paired = any(gate.max_loss is not None and gate.task in (None, accuracy.task) for gate in gates)
            if paired and accuracy.most_repetitions < LEAST_REPETITIONS:
                problem = f"accuracy of {accuracy.task}: most_repetitions must be {LEAST_REPETITIONS} or more"
                raise ValueError(f"{problem} for a gate with max_loss, whose baseline is asked so often at least")
        return self

    def _check_task(self, gate: Gate, tasks: list[TaskName]) -> None:
        if gate.task is None and len(tasks) > 1:
            raise ValueError(f"the gate on {gate.label} must name its 'task', one of {', '.join(tasks)}")
        if gate.task is not None and gate.task not in tasks:
            raise ValueError(f"the gate on {gate.label} names a task that accuracy does not have: {', '.join(tasks)}")

    @model_validator(mode="after")
    def _gates_are_distinct(self) -> Self:
        for profile in self._profiles():
            labels = [gate.label for gate in self.gates_of(profile)]
            twice = sorted({label for label in labels if labels.count(label) > 1})
            if twice:
                raise ValueError(f"more than one gate on {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _percentiles_have_requests(self) -> Self:
        for gpu_type, serving in self.gpu_types.items():
            for name, profile in serving.profiles.items():
                for gate in self.gates_of(profile):
                    least = profile.load.least_prompts(gate.metric)
                    if profile.load.num_prompts is not None and profile.load.num_prompts < least:
                        place = f"gpu_types.{gpu_type}.profiles.{name}.load.num_prompts"
                        raise ValueError(f"{place} must be {least} or more for the gate on {gate.label}")
        return self

    @model_validator(mode="after")
    def _goodput_has_an_slo(self) -> Self:
        for profile in self._profiles():
            if profile.load.slo is None and any(gate.metric == GOODPUT for gate in self.gates_of(profile)):
                raise ValueError(f"a gate on {GOODPUT} needs the workload's 'slo'")
        return self

    @model_validator(mode="after")
    def _waivers_are_of_gates(self) -> Self:
        """A waiver with a slip of the pen would be one that nobody notices is missing."""
        for waiver in self.waivers:
            cell = (waiver.gpu_type, waiver.variant, waiver.profile)
            if cell not in set(self.cells()):
                raise ValueError(f"the waiver of {waiver.gate} is for {'/'.join(cell)}, which the recipe does not have")
            labels = [gate.label for gate in self.gates_of(self.gpu_types[waiver.gpu_type].profiles[waiver.profile])]
            if waiver.gate not in labels:
                raise ValueError(f"there is no gate '{waiver.gate}' to be waived; there are: {'; '.join(labels)}")
        return self

    @model_validator(mode="after")
    def _baselines_exist(self) -> Self:
        for name, variant in self.variants.items():
            if variant.baseline:
                _check_known(f"variants.{name}.baseline", [variant.baseline], self.variants)
        return self

    def gates_of(self, profile: Profile) -> list[Gate]:
        """The gates of the recipe and of one of its profiles, each score with its task."""
        only = self.accuracy[0].task
        return [
            gate.model_copy(update={"task": only}) if METRICS[gate.metric].stage == "accuracy" and not gate.task else gate
            for gate in [*self.gates, *profile.gates]
        ]

    def cells(self, version: str | None = None) -> Iterator[tuple[str, str, str]]:
        """GPU type, variant and profile of every cell that can be: at a version of vLLM, or else at any."""
        for gpu_type, serving in self.gpu_types.items():
            for name, variant in self.variants.items():
                if variant.fits_gpu_type(gpu_type) and (version is None or variant.fits_version(version)):
                    yield from ((gpu_type, name, profile) for profile in serving.profiles if variant.fits_profile(profile))

    def _profiles(self) -> Iterator[Profile]:
        for serving in self.gpu_types.values():
            yield from serving.profiles.values()


class LoadedRecipe(Frozen):
    """A recipe with the folder that its relative paths start from."""

    recipe: Recipe
    folder: Path

    def path(self, relative: str) -> Path:
        """An absolute path for a path written in the recipe."""
        return (self.folder / Path(relative).expanduser()).resolve()
