"""Read a recipe from YAML: either a valid recipe, or one clear error."""

import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from shlex import quote
from stat import S_ISREG
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.gates import TAGS
from vllm_qualify.recipe.recipe import LoadedRecipe, Recipe
from vllm_qualify.recipe.values import expand_user

# YAML of others is read within bounds: what a short text refers to again and again can be a billion values.
MOST_VALUES, MOST_CHARACTERS = 200_000, 4_000_000
MOST_SCHEMA_BYTES = 200_000
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/(?!.*\.ya?ml$)[A-Za-z0-9][\w.-]{0,95}")


def catalog_folder() -> Path:
    """The folder of the recipes in this package."""
    return Path(str(resources.files("vllm_qualify"))) / "catalog"


def catalog_names() -> list[str]:
    return sorted(path.stem for path in catalog_folder().glob("*.yaml"))


def load_recipe(name_or_path: str) -> LoadedRecipe:
    """A recipe by its catalog name (`reference`) or by the path of its YAML file.

    Raises CallerError if there is no such recipe, or it is not valid. It names the file, the key path and the allowed values.
    """
    is_path = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    path = expand_user(name_or_path) if is_path else catalog_folder() / f"{name_or_path}.yaml"
    if not path.is_file():
        raise _make_error_of_missing(name_or_path, path)
    document = _parse_yaml(path)
    if not isinstance(document, dict):
        raise CallerError("a recipe is a mapping of keys", "start from the catalog's reference.yaml", str(path))
    _read_schemas(document, path)
    try:
        return LoadedRecipe(recipe=Recipe.model_validate(document), folder=path.parent.resolve())
    except ValidationError as error:
        raise _first_problem(error, path) from error


def _read_schemas(document: dict[str, Any], recipe: Path) -> None:
    """Put the content of each file that `json_schemas` names in its place. Raises CallerError if it is none of a schema."""
    entries = document.get("json_schemas")
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        named = entry.get("json_schema") if isinstance(entry, dict) else None
        if not isinstance(named, str):
            continue
        place = f"{recipe}: json_schemas.{number}.json_schema"
        try:
            schema = _read_object(recipe.parent / expand_user(named))
        except OSError as error:
            problem = f"{short(named)} cannot be read: {error.strerror}"
            raise CallerError(problem, "check the path and its permissions", place) from error
        if schema is None:
            problem = f"{short(named)} is no file with a JSON object of at most {MOST_SCHEMA_BYTES:,} bytes"
            raise CallerError(problem, "mend the file", place)
        entry["json_schema"] = schema


def _read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object that a file has; None if it has none or too many bytes, or is no regular file. Raises OSError."""
    try:
        status = file.stat()
        # A pipe has no bytes yet, and to read it would wait for them.
        if not S_ISREG(status.st_mode) or status.st_size > MOST_SCHEMA_BYTES:
            return None
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _make_error_of_missing(name: str, path: Path) -> CallerError:
    """There is no such recipe. Perhaps a model is meant: a folder with one, or a repository of the hub."""
    remedy = f"name a YAML file, or one of the catalog: {', '.join(catalog_names())}"
    # A folder here may be named without `./`.
    folders = (path, Path(name))
    if any((folder / "config.json").is_file() for folder in folders) or (_HUB_NAME.fullmatch(name) and not path.exists()):
        remedy = f"if this is a model, draft a recipe of it: `vllm-qualify recipe new {quote(name)} --output mine.yaml`"
    return CallerError(f"there is no recipe '{name}'", remedy, "RECIPE")


def _parse_yaml(path: Path) -> Any:
    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path} line {mark.line + 1}" if mark else str(path)
        raise CallerError(f"not valid YAML: {error.problem or error.context}", "mend the YAML", place) from error
    except (YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CallerError(f"not readable as YAML: {error}", "write it as UTF-8 YAML 1.2", str(path)) from error
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror}", "check the path and its permissions", str(path)) from error


def load_yaml(text: str) -> Any:
    """The document of a YAML 1.2 text.

    Raises what ruamel raises for documents that are not valid, and ValueError if the text is too long, if written out it has
    too many values, or if a value contains itself.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    # The pure loader reads YAML 1.2, as the tools that write recipes do; the C loader reads 1.1.
    document = YAML(typ="safe", pure=True).load(text)
    _count_values(document, {})
    return document


def _count_values(value: Any, known: dict[int, int | None]) -> int:
    """How many values it has, each counted as often as it is referred to. `known` has the sizes by identity."""
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    if not inner:
        return 1
    if id(value) not in known:
        known[id(value)] = None
        known[id(value)] = 1 + sum(_count_values(each, known) for each in inner)
    size = known[id(value)]
    if size is None:
        raise ValueError("a value contains itself")
    if size > MOST_VALUES:
        raise ValueError(f"written out, it has more than {MOST_VALUES:,} values")
    return size


def _first_problem(error: ValidationError, path: Path) -> CallerError:
    """An unknown key comes before a missing one beside it, because it may be a misspelling of that key."""
    first, *others = error.errors()
    if first["type"] == "missing":
        unknown = (each for each in others if each["type"] == "extra_forbidden" and each["loc"][:-1] == first["loc"][:-1])
        first = next(unknown, first)
    place = f"{path}: {'.'.join(str(part) for part in first['loc'] if part != '[key]' and part not in TAGS) or '(top level)'}"
    more = f" ({len(others)} more after this)" if others else ""
    if first["type"] == "extra_forbidden":
        return CallerError(f"unknown key{more}", f"allowed here: {', '.join(_allowed_keys(first['loc']))}", place)
    shown = "" if first["type"] in ("missing", "value_error") else f", got {short(first['input'])}"
    problem = f"{first['msg'].removeprefix('Value error, ')}{shown}{more}"
    return CallerError(problem, "see docs/recipes.md for the keys and what each allows", place)


def short(value: object) -> str:
    """The value as Python writes it, cut so that it fits into a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _allowed_keys(location: Sequence[int | str]) -> list[str]:
    """The keys of all models that can hold the last part of `location`."""
    models: list[type[BaseModel]] = [Recipe]
    for part in location[:-1]:
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [inner for field in fields for inner in _inner_models(field.annotation)] or models
    return list(dict.fromkeys(key for model in models for key in model.model_fields))


def _inner_models(annotation: Any) -> list[type[BaseModel]]:
    """The models inside `X`, `X | Y`, `list[X]` or `dict[str, X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _inner_models(argument)]
