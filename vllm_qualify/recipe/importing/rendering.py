"""An imported recipe, and its YAML file for people."""

import io
import textwrap
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from vllm_qualify.errors import CallerError, writing
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.values import Frozen

_WIDTH = 128
_COMMENTS = {
    "capabilities": "What the published parsers are for. Each adds checks of the API's contract, which gate the release.",
    "gpu_types": (
        "Arguments and environment are the published ones, all of them and no others. The rest of a GPU type is not the "
        "source's. The timeout is the seed recipes': compiling a large model alone can take more than half an hour. The load "
        "is plain: at max-num-seqs where that is given and else at 64 requests, with five times as many prompts; raise "
        "num_prompts if a repeat is shorter than min_duration_s. No gates on speed: the source has no numbers."
    ),
    "smoke": "Not the source's: the seed recipes' prompt.",
    "accuracy": "Not the source's: all of gsm8k, as for the seed recipes.",
    "gates": "Not the source's: bound and filter were given at the import.",
}


class Imported(Frozen):
    """A recipe and its source. `images` are the published images by GPU type; a recipe itself never names an image."""

    recipe: Recipe
    source: str
    images: dict[str, str] = {}
    notes: list[str] = []


def write_recipe(imported: Imported, path: Path) -> None:
    """Write the recipe as YAML. Comments name its source, and the parts that the source does not have.

    Raises:
        CallerError: the file exists already.
        HostError: it cannot be written.
    """
    if path.exists():
        raise CallerError("there is such a file already", "give another name, or move it away", place=str(path))
    with writing("recipe"):
        path.write_text(rendered(imported), encoding="utf-8")


def rendered(imported: Imported) -> str:
    """The recipe as YAML with its comments."""
    header = [f"Imported from vllm-project/recipes: {imported.source}.", *_image_lines(imported.images), _gate_line(imported)]
    lines = [_comment(line) for line in header] + [_comment(f"- {note}", "  ") for note in imported.notes]
    document = imported.recipe.model_dump(exclude_unset=True)
    document["gpu_types"] = {name: _default_variant_first(serving) for name, serving in document["gpu_types"].items()}
    sections = [_section(key, value) for key, value in document.items()]
    apart = [f"\n{section}" if section.count("\n") > 1 else section for section in sections]
    return "\n".join([*lines, "".join(apart)])


def _gate_line(imported: Imported) -> str:
    gates = "; ".join(f"{gate.label} of at least {gate.bounds[0]:g}" for gate in imported.recipe.gates)
    return f"The source has no scores, so the person who imports it chooses the gate: {gates}."


def _default_variant_first(serving: dict[str, Any]) -> dict[str, Any]:
    return {"default_variant": serving["default_variant"]} | serving


def _image_lines(images: dict[str, str]) -> list[str]:
    by_image: dict[str, list[str]] = {}
    for gpu_type, image in images.items():
        by_image.setdefault(image, []).append(gpu_type)
    return [f"Published image for {', '.join(gpu_types)}: {image}" for image, gpu_types in by_image.items()]


def _comment(text: str, indent: str = "") -> str:
    """Comment lines. Characters that are not printable become spaces, so that they cannot end the comment."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.fill(
        plain, _WIDTH, initial_indent="# ", subsequent_indent=f"# {indent}", break_long_words=False, break_on_hyphens=False
    )


def _section(key: str, value: object) -> str:
    """One top-level key with its comment."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 2**16
    text = io.StringIO()
    if key in _COMMENTS:
        text.write(f"{_comment(_COMMENTS[key])}\n")
    yaml.dump({key: value}, text)
    return text.getvalue()
