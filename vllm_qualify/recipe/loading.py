"""Read a recipe from YAML: either a valid recipe, or one clear error."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.gates import TAGS
from vllm_qualify.recipe.recipe import LoadedRecipe, Recipe
from vllm_qualify.recipe.yaml_text import load_yaml


def catalog_folder() -> Path:
    """The folder of the recipes in this package."""
    return Path(str(resources.files("vllm_qualify"))) / "catalog"


def catalog_names() -> list[str]:
    return sorted(path.stem for path in catalog_folder().glob("*.yaml"))


def load_recipe(name_or_path: str) -> LoadedRecipe:
    """A recipe by its catalog name (`reference`) or by the path of its YAML file.

    Raises:
        CallerError: no such recipe, not YAML, or not a valid recipe. It names the file, the key path and the allowed values.
    """
    path = _find(name_or_path)
    document = _parse(path)
    return LoadedRecipe(recipe=_validate(document, path), folder=path.parent.resolve())


def _find(name_or_path: str) -> Path:
    is_path = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    path = Path(name_or_path).expanduser() if is_path else catalog_folder() / f"{name_or_path}.yaml"
    if path.is_file():
        return path
    names = ", ".join(catalog_names())
    raise CallerError(
        f"there is no recipe '{name_or_path}'", f"name a YAML file, or one of the catalog: {names}", place="RECIPE"
    )


def _parse(path: Path) -> Any:
    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise CallerError(
            f"not valid YAML: {error.problem or error.context}", "mend the YAML", place=f"{path}{line}"
        ) from error
    except (YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CallerError(f"not readable as YAML: {error}", "write it as UTF-8 YAML 1.2", place=str(path)) from error
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror}", "check the path and its permissions", place=str(path)) from error


def _validate(document: Any, path: Path) -> Recipe:
    if not isinstance(document, dict):
        raise CallerError("a recipe is a mapping of keys", "start from the catalog's reference.yaml", place=str(path))
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise CallerError(*_first_problem(error), place=f"{path}: {_key_path(error)}") from error


def _key_path(error: ValidationError) -> str:
    location = _first(error)["loc"]
    return ".".join(str(part) for part in location if part != "[key]" and part not in TAGS) or "(top level)"


def _first(error: ValidationError) -> ErrorDetails:
    """The error to show. An unknown key comes before a missing one beside it, because it may be a misspelling of that key."""
    first, *others = error.errors()
    if first["type"] != "missing":
        return first
    beside = (each for each in others if each["type"] == "extra_forbidden" and each["loc"][:-1] == first["loc"][:-1])
    return next(beside, first)


def _first_problem(error: ValidationError) -> tuple[str, str]:
    first = _first(error)
    more = f" ({error.error_count() - 1} more after this)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown key{more}", f"allowed here: {', '.join(_allowed_keys(first['loc']))}"
    message = first["msg"].removeprefix("Value error, ")
    shown = "" if first["type"] in ("missing", "value_error") else f", got {_short(first['input'])}"
    return f"{message}{shown}{more}", "see docs/recipes.md for the keys and what each allows"


def _short(value: object) -> str:
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
