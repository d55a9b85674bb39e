"""How a model is served: its weights, the engine, and the server's arguments and environment."""

import math
import re
from typing import Annotated, Literal, Self

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, Field, JsonValue, model_validator

from vllm_qualify.recipe.contract import Capabilities
from vllm_qualify.recipe.environment import check_name
from vllm_qualify.recipe.values import Frozen, Name, Text

EngineName = Literal["vllm", "tensorrt-llm"]
VLLM: EngineName = "vllm"
SETTABLE_BY_US = (
    *("model", "host", "port", "served-model-name", "config", "revision", "tokenizer-revision"),
    *("uds", "api-key", "hf-token"),
)
# What begins with a dash, and is not a number: a parser reads it as an option, wherever it stands.
_AN_OPTION = re.compile(r"-(?![0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?\Z)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _server_key(key: str) -> str:
    if key.partition(".")[0].replace("_", "-") in SETTABLE_BY_US:
        raise ValueError(f"'{key}' is set by vllm-qualify; leave it out")
    if key.partition(".")[0] == "env_overrides":
        raise ValueError(f"'{key}' sets variables: write them under 'environment'")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", key):
        raise ValueError(f"'{key}' is not a `vllm serve` option: write it without the leading dashes, like max-model-len")
    return key


def _server_value(value: JsonValue) -> JsonValue:
    _check_given(value)
    # A mapping becomes JSON, but these become words of the server's command line.
    for word in value if isinstance(value, list) else [value]:
        if isinstance(word, str) and _AN_OPTION.match(word):
            raise ValueError(f"'{word}' begins with a dash: the server would read it as an option of its own")
    return value


def _check_given(value: JsonValue) -> None:
    if value is None:
        raise ValueError("give a value, or leave the option out")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_given(inner)


def is_environment_name(name: str) -> bool:
    """Whether a variable may have this name, which is none of a secret's."""
    return bool(_VARIABLE.fullmatch(name)) and not is_secret_name(name)


def _environment_name(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"'{name}' is not the name of an environment variable")
    if is_secret_name(name):
        raise ValueError(f"'{name}' names a secret: set it in the environment of vllm-qualify, never in a recipe")
    return name


def is_secret_name(name: str) -> bool:
    """Whether a variable with this name holds a secret, by the usual names. A variable that ends in `_FILE` holds a path."""
    if name.upper().endswith("_FILE"):
        return False
    words = "TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS|CREDENTIALS?|AUTH_STRING|API_KEY|ACCESS_KEY|PRIVATE_KEY"
    # As in PGPASSWORD and MYSQL_PWD.
    return bool(re.search(rf"(^|_)({words})(_|$)|PASSWORD$|[A-Z]_PWD$", name.upper()))


ServerArguments = dict[Annotated[str, AfterValidator(_server_key)], Annotated[JsonValue, AfterValidator(_server_value)]]
Environment = dict[Annotated[str, AfterValidator(_environment_name)], Annotated[str, Field(strict=True)]]
"""Of a plan: also one that an earlier version made of a recipe that set other variables."""
RecipeEnvironment = dict[
    Annotated[str, AfterValidator(_environment_name), AfterValidator(check_name)], Annotated[str, Field(strict=True)]
]


def _version_range(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"'{text}' is not a range of versions: write it like >=0.12,<0.14") from error
    return text


VersionRange = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_version_range)]


def covers(versions: str, version: str) -> bool:
    """Whether a range includes a version.

    A nightly or a release candidate counts as its final version. Local parts like `+cpu` do not count.
    """
    return Version(version).base_version in SpecifierSet(versions)


class ByVersion(Frozen):
    """Changes for a range of vLLM versions (PEP 440) to the settings beside this entry.

    Each entry whose range includes the version under test is applied, in the order of the list.
    """

    vllm: VersionRange = Field(description="the versions that it is for")
    without: list[Text] = Field(
        [], description="server arguments and environment names from beside it that these versions do not have"
    )
    server: ServerArguments = Field({}, description="over those beside it")
    environment: RecipeEnvironment = Field({}, description="over that beside it")


class Arguments(Frozen):
    """Server options and environment of one layer of a recipe, with the differences by version."""

    server: ServerArguments = Field(
        {}, description="options of the server; those of the GPU type come first, then the variant's, then the profile's"
    )
    environment: RecipeEnvironment = Field(
        {}, description="variables of the server process, in the same order; numbers are quoted"
    )
    by_version: list[ByVersion] = Field([], description="what differs for some versions of vLLM")

    @model_validator(mode="after")
    def _options_are_of_the_engine(self) -> Self:
        """vLLM accepts a name with `-` and with `_`, so one option could be given twice. Fields after a dot have `_` alone."""
        layers = [self.server, *(entry.server for entry in self.by_version)]
        names = [name.partition(".") for layer in layers for name in layer]
        wrong = [(option, dot + field) for option, dot, field in names if "_" in option]
        if wrong and self.of_vllm:
            option, field = wrong[0]
            raise ValueError(f"write {option}{field} as {option.replace('_', '-')}{field}")
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

    def for_version(self, version: str) -> tuple[ServerArguments, Environment]:
        """The layer's server options and environment for a version of vLLM."""
        server, environment = dict(self.server), dict(self.environment)
        for entry in self.by_version:
            if covers(entry.vllm, version):
                server = {name: value for name, value in server.items() if name not in entry.without} | entry.server
                environment = {name: value for name, value in environment.items() if name not in entry.without}
                environment |= entry.environment
        return server, environment


def _publishers_key(text: str) -> str:
    # cryptography takes a tenth of a second, and few recipes have a key.
    from vllm_qualify.recipe.publisher import public_key

    public_key(text)
    return text


class Variant(Arguments):
    """One set of weights for one engine, and where it can be served.

    The arguments of GPU types and profiles are vLLM's. With another engine only the variant's arguments are used; they are
    arguments of that engine.
    """

    model: Text = Field(
        description="a repository of the Hugging Face hub, or a folder: then it begins with `./`, `../`, `/` or `~` and holds"
        " a `config.json`"
    )
    engine: EngineName = Field(VLLM, description="what serves it")
    revision: Text | None = Field(
        None,
        description="branch, tag or commit on the hub; none is its default branch. The commit behind it is served and recorded",
    )
    signed_by: Annotated[Text, AfterValidator(_publishers_key)] | None = Field(
        None,
        description="the publisher's public key (PEM; P-256, P-384 or P-521). With it, a model is served only if `model.sig`"
        " (Open Model Signing) is a signature of all of its files by this key",
    )
    smoke_golden: Text | None = Field(
        None, description="the exact reply to the smoke prompt. With it, the gate `smoke_golden` is added"
    )
    gpu_types: list[Name] = Field(
        [], description="the GPU types that can serve it, like Blackwell's for NVFP4; empty is all of the recipe's"
    )
    profiles: list[Name] = Field([], description="the profiles that it is for; empty is all")
    capabilities: Capabilities | None = Field(
        None, description="what its servers offer beyond completions, in place of the recipe's `capabilities`"
    )
    vllm: VersionRange | None = Field(None, description="the versions of vLLM that can serve it, like `>=0.15`; none is all")
    baseline: Name | None = Field(
        None, description="the variant that it is compared with, like `bf16` for `fp8`; none is itself, as it passed before"
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
        return self.of_vllm and (self.vllm is None or covers(self.vllm, version))
