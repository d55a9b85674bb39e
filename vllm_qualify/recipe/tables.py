"""The catalog's tables of what each version of vLLM knows. drift/probe.py makes them from vLLM's own code."""

import gzip
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from packaging.version import InvalidVersion, Version
from pydantic import JsonValue

from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.loading import catalog_folder
from vllm_qualify.recipe.values import Frozen

WORDS_FOR_PEOPLE = ("description", "title")
Schema = dict[str, JsonValue] | None
ModelKind = Literal["dense", "hybrid"]


class Option(Frozen):
    """An option of `vllm serve`."""

    is_flag: bool
    negatives: list[str]
    """the names that switch a flag off"""
    several: bool
    choices: list[str] | None
    type: str | None
    default: JsonValue
    destination: str


class EngineTable(Frozen):
    """What one vLLM knows."""

    version: str
    options: dict[str, Option]
    configs: dict[str, dict[str, Schema]]
    """the fields of its configuration classes; a field without a schema accepts any value"""
    environment: list[str]
    metrics: list[str]
    registries: dict[str, list[str]] = {}
    """the registered names, by the option or the field that takes one"""
    required: dict[str, str] = {}
    """the flags that need another option"""
    ignoring: list[str] = []
    """the configuration classes that ignore fields that they do not have; the others refuse them"""
    resolved: dict[ModelKind, dict[str, JsonValue]] = {}
    """for each kind of model on a GPU, the values that vLLM gives to options that are left out"""


def tables_folder() -> Path:
    return catalog_folder() / "engines"


def known_versions() -> list[str]:
    """The versions that have a table in the catalog, the oldest first."""
    return sorted((path.name.removesuffix(".json.gz") for path in tables_folder().glob("*.json.gz")), key=Version)


def parse_version(text: str, option: str = "--vllm") -> Version:
    """Raises CallerError if the text is not a version."""
    try:
        return Version(text)
    except InvalidVersion as error:
        raise CallerError(f"'{text}' is not a version of vLLM", "write it like 0.32.0", option) from error


def table_of(version: str, option: str = "--vllm") -> EngineTable:
    """The table of a version, or of the newest patch release before it with the same minor version.

    Raises CallerError if the catalog has none; the error names those that it has.
    """
    wanted = parse_version(version, option)
    same_minor = [known for known in known_versions() if Version(known).release[:2] == wanted.release[:2]]
    fitting = [known for known in same_minor if Version(known) <= Version(wanted.base_version)]
    if not fitting:
        remedy = f"it has {', '.join(known_versions())}; or ask an environment or an image"
        raise CallerError(f"the catalog has no table of vLLM {version}", remedy, option)
    return _read_table(tables_folder() / f"{fitting[-1]}.json.gz")


@cache
def _read_table(path: Path) -> EngineTable:
    return EngineTable.model_validate_json(gzip.decompress(path.read_bytes()))


class EngineJudgement(Frozen):
    """An engine's judgement of one server."""

    parsed: bool
    """whether its parser accepted every option and value"""
    unnamed: list[str] = []
    """the options that it then had set, and that no key of the config file names"""
    refused: str | None
    """why it refused the server"""
    unclear: str | None
    """why the judgement is unclear"""


class ProbeAnswer(EngineTable):
    """The probe's answer: the engine's table, its build, and its judgement of each server in the request."""

    build: Literal["cuda", "cpu"]
    servers: list[EngineJudgement]

    @property
    def table(self) -> EngineTable:
        return EngineTable(**{name: getattr(self, name) for name in EngineTable.model_fields})


def parse_answer(text: str) -> ProbeAnswer:
    """Raises HostError if it is not an answer of the probe."""
    try:
        return ProbeAnswer.model_validate(_without_words(json.loads(text)))
    except ValueError as error:
        remedy, said = "see what its Python wrote", text.splitlines()[-10:]
        raise HostError("the engine did not report what it knows", remedy, "check", said) from error


def _without_words(value: Any) -> Any:
    """Schemas without the texts for people, which are half of their size."""
    if isinstance(value, dict):
        return {name: _without_words(inner) for name, inner in value.items() if name not in WORDS_FOR_PEOPLE}
    return [_without_words(inner) for inner in value] if isinstance(value, list) else value


def write_table(version: str, answer: Path) -> Path:
    """Keep the probe's answer as the catalog's table of `version`: the same bytes for the same answer.

    Raises HostError if the answer is not valid, or has no resolved options for one kind of model.
    """
    table = parse_answer(answer.read_text()).table.model_copy(update={"version": version})
    missing = [kind for kind in get_args(ModelKind) if not table.resolved.get(kind)]
    if missing:
        problem = f"vLLM {version} made nothing of the probe's {' and '.join(missing)} model"
        raise HostError(problem, "give the probe a model of that kind that this version knows", "drift/probe.py")
    text = json.dumps(table.model_dump(), separators=(",", ":"), sort_keys=True)
    path = tables_folder() / f"{version}.json.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return path


if __name__ == "__main__":
    write_table(sys.argv[1], Path(sys.argv[2]))
