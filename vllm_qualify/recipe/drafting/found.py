"""The recipe that vllm-project/recipes publishes for a model, in a checkout or an export of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.drafting.parts import Published
from vllm_qualify.recipe.importing import import_recipe
from vllm_qualify.recipe.importing.documents import MOST_BYTES, InexpressibleError, read_yaml

OPTION = "--published"
# A gate is asked for at an import, and nothing of it is taken over.
GATE: dict[str, Any] = {"exact_match_minimum": 0.5, "exact_match_filter": "flexible-extract"}
# A checkout has some hundred.
MOST_FILES = 5000


def find_published(folder: Path, model: str) -> Published | None:
    """What is published for the repository `org/name` of the hub; None if nothing is.

    `folder` is a checkout (models/ORG/NAME.yaml), or an export of JSON (ORG/NAME/hw/GPU.json). Raises CallerError if it is
    neither, or what it has for the model cannot be read.
    """
    models, export = folder / "models", folder / model / "hw"
    if export.is_dir():
        return _import(export.parent, model, None)
    if not models.is_dir():
        if any(folder.glob("*/*/hw")):
            return None
        remedy = "name a checkout of vllm-project/recipes, or a folder with ORG/NAME/hw/GPU.json"
        raise CallerError(f"there is no folder models in {folder}", remedy, OPTION)
    for file in _files_naming(models, model):
        if (variant := _find_variant(file, model)) is not None:
            return _import(file, model, variant)
    return None


def _files_naming(models: Path, model: str) -> Iterator[Path]:
    """The files that have the model's name in their text: to parse YAML takes much longer."""
    for file in sorted(models.glob("*/*.yaml"))[:MOST_FILES]:
        try:
            with file.open("rb") as opened:
                if model.encode() in opened.read(MOST_BYTES):
                    yield file
        except OSError as error:
            raise CallerError(f"cannot be read: {error.strerror}", "check the path and its permissions", str(file)) from error


def _find_variant(file: Path, model: str) -> str | None:
    """The variant whose weights are the model's."""
    document = read_yaml(file)
    own = document["model"]["model_id"].value
    for name, variant in document["variants"].items():
        if (variant["model_id"].value or own) == model:
            return name
    return None


def _import(source: Path, model: str, variant: str | None) -> Published | None:
    try:
        recipe = import_recipe(source, variant=variant, **GATE).recipe
    except InexpressibleError:
        return None
    servings = {
        name: serving for name, serving in recipe.gpu_types.items() if recipe.variants[serving.default_variant].model == model
    }
    return Published(
        source=f"vllm-project/recipes ({'/'.join(source.parts[-2:])})",
        servers={name: serving.server for name, serving in servings.items()},
        environments={name: serving.environment for name, serving in servings.items()},
    )
