"""Recipes: how one model is served on each GPU type, how it is checked and measured, and the gates it must pass.

All models are strict: unknown keys, wrong types, NaN and infinities are refused, and nothing is converted silently.
"""

import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from vllm_qualify.recipe.metrics import METRICS, NCCL_INFINIBAND

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
LEAST_PROMPTS_PER_CLIENT = 5


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
    """Whether an environment variable of this name holds a secret, by the usual naming habits."""
    words = "TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_KEY|ACCESS_KEY|PRIVATE_KEY"
    return bool(re.search(rf"(^|_)({words})(_|$)", name.upper()))


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError("use lower-case letters, digits, '.', '_' and '-', and begin with a letter or digit")
    return name


Name = Annotated[str, Field(strict=True, max_length=100), AfterValidator(_plain_name)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrNone = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, gt=0)]
Gibibytes = Annotated[float, Field(strict=True, ge=0.0625)]
Number = Annotated[float, Field(strict=True)]
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

    `without` takes options and environment names away that these versions do not have.
    """

    vllm: VersionRange
    without: list[Text] = []
    server: ServerArguments = {}
    environment: Environment = {}


class Arguments(Frozen):
    """Server options and environment of one layer of a recipe, with what differs by version."""

    server: ServerArguments = {}
    environment: Environment = {}
    by_version: list[ByVersion] = []

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
    """One set of weights for one engine. `model` is a hub repository, or a folder that begins with `./`, `../`, `/` or `~`.

    `gpu_types`, `profiles` and `vllm` say where it can be served at all; empty lists and None say everywhere. The arguments of
    GPU types and profiles are vLLM's. With another engine those of the variant stand alone, and are that engine's.
    """

    model: Text
    engine: EngineName = VLLM
    revision: Text | None = None
    smoke_golden: Text | None = None
    gpu_types: list[Name] = []
    profiles: list[Name] = []
    vllm: VersionRange | None = None

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

    prompt: Text
    max_tokens: Count = 20
    time_limit_s: Seconds = 120.0


class Questions(Frozen):
    """Local gsm8k-like files (JSON lines with `question` and `answer`) in place of the hub's data set."""

    test: Text
    shots: Text


class Accuracy(Frozen):
    """One lm-eval task. `num_questions` is how many samples the task must score; another count is invalid."""

    task: Text = "gsm8k"
    num_fewshot: CountOrNone = 5
    num_questions: Count
    num_concurrent: Count = 32
    max_gen_toks: Count = 256
    seed: CountOrNone = 1234
    time_limit_s: Seconds = 3600.0
    questions: Questions | None = None


class Load(Frozen):
    """One `vllm bench serve` workload of random prompts; lengths in tokens."""

    input_len: Count
    output_len: Count
    max_concurrency: Count
    num_prompts: Count
    num_warmups: CountOrNone
    repeats: Count = 3
    min_duration_s: Seconds = 60.0
    seed: CountOrNone = 0
    time_limit_s: Seconds = 3600.0

    @model_validator(mode="after")
    def _enough_prompts(self) -> Self:
        least = LEAST_PROMPTS_PER_CLIENT * self.max_concurrency
        if self.num_prompts < least:
            raise ValueError(
                f"num_prompts must be at least {LEAST_PROMPTS_PER_CLIENT} times max_concurrency, so {least} or more"
            )
        return self


class Gate(Frozen):
    """A rule over one metric, absolute: `minimum` for a metric where higher is better, `maximum` where lower is."""

    metric: Text
    filter: Text | None = None
    minimum: Number | None = None
    maximum: Number | None = None
    unit: Text

    @model_validator(mode="after")
    def _fits_its_metric(self) -> Self:
        metric = METRICS.get(self.metric)
        if metric is None:
            raise ValueError(f"no metric '{self.metric}'; known: {', '.join(METRICS)}")
        if metric.unit != self.unit:
            raise ValueError(f"the unit of {metric.name} is '{metric.unit}', not '{self.unit}'")
        wanted, other = ("minimum", "maximum") if metric.direction == "higher" else ("maximum", "minimum")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"{metric.direction} is better for {metric.name}: give '{wanted}' and not '{other}'")
        if metric.stage == "accuracy" and self.filter is None:
            raise ValueError(f"a gate on {metric.name} names lm-eval's filter, like strict-match or flexible-extract")
        if metric.stage != "accuracy" and self.filter is not None:
            raise ValueError(f"{metric.name} has no filter")
        if metric.unit in ("fraction", "bool") and not 0 <= self.bound <= 1:
            raise ValueError(f"{metric.name} lies between 0 and 1, the bound {self.bound} does not")
        if self.bound < 0:
            raise ValueError(f"{metric.name} is never negative, the bound {self.bound} is")
        return self

    @property
    def bound(self) -> float:
        bound = self.minimum if self.minimum is not None else self.maximum
        assert bound is not None  # noqa: S101  (the validator saw to it)
        return bound

    @property
    def label(self) -> str:
        return f"{self.metric} ({self.filter})" if self.filter else self.metric


def _for_a_recipe(gate: Gate) -> Gate:
    stage = METRICS[gate.metric].stage
    if stage == "smoke":
        raise ValueError("smoke always gates by itself; leave it out")
    if gate.metric == NCCL_INFINIBAND:
        raise ValueError(f"{gate.metric} gates by itself where a GPU type has `network: infiniband`; leave it out")
    if stage == "serve":
        raise ValueError(f"{gate.metric} is measured once a run, which shows no noise to judge it by")
    return gate


Gates = list[Annotated[Gate, AfterValidator(_for_a_recipe)]]


class Profile(Arguments):
    """A serving goal: its tunables over the GPU type's arguments, its workload and its gates."""

    load: Load
    gates: Gates = []


class Serving(Arguments):
    """How the model is served on one GPU type. `network` is what NCCL must use between nodes; the server's log tells it."""

    default_variant: Name
    network: Literal["infiniband"] | None = None
    startup_timeout_s: Seconds = 1800.0
    memory_limit_gib: Gibibytes | None = None
    profiles: dict[Name, Profile] = Field(min_length=1)


def _check_known(place: str, names: list[str], known: Collection[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{place} names {', '.join(unknown)}, which the recipe does not have: {', '.join(sorted(known))}")


class Recipe(Frozen):
    """A whole recipe. `gates` hold for every cell; a profile adds its own."""

    name: Name
    description: Text
    served_model_name: Text
    variants: dict[Name, Variant] = Field(min_length=1)
    gpu_types: dict[Name, Serving] = Field(min_length=1)
    smoke: Smoke
    accuracy: Accuracy
    gates: Gates = Field(min_length=1)

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
    def _gates_are_distinct(self) -> Self:
        for profile in self._profiles():
            labels = [gate.label for gate in [*self.gates, *profile.gates]]
            twice = sorted({label for label in labels if labels.count(label) > 1})
            if twice:
                raise ValueError(f"more than one gate on {', '.join(twice)}")
        return self

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
