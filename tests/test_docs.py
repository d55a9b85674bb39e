"""What the documents say of recipes and metrics is what the code has: nothing missing, nothing made up."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.recipe import Recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
DESIGN = ROOT / "docs" / "design"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md")]

Defaults = dict[str, str]


def default_of(field: FieldInfo) -> str:
    """A field's default as the document's table writes it."""
    if field.is_required():
        return "required"
    default = field.get_default()
    if default is None:
        return "none"
    if default in ({}, []):
        return "empty"
    if isinstance(default, BaseModel):
        return "see below"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, int | float) else f"`{default}`"


def models_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models inside a type, each with its steps: `.*` for every mapping or list around it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    step = ".*" if get_origin(annotation) in (dict, list) else ""
    for argument in get_args(annotation):
        for steps, model in models_in(argument):
            yield step + steps, model


def keys_of(model: type[BaseModel], place: str = "") -> dict[str, Defaults]:
    """Place in the recipe → its keys with their defaults; a name that the author chooses, or a list's index, is `*`."""
    found = {place: {name: default_of(field) for name, field in model.model_fields.items()}}
    for name, field in model.model_fields.items():
        for steps, inner in models_in(field.annotation):
            for inner_place, keys in keys_of(inner, f"{place}.{name}{steps}".lstrip(".")).items():
                found[inner_place] = found.get(inner_place, {}) | keys
    return found


def section(heading: str) -> str:
    """The text below a `##` heading of docs/recipes.md."""
    return RECIPES.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the table rows that begin with a name in code style."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]


def documented_keys() -> dict[str, Defaults]:
    found = {}
    for part in section("Keys").split("\n### ")[1:]:
        heading, _, text = part.partition("\n")
        places = re.findall("`([^`]+)`", heading) if heading != "(top level)" else [""]
        for place in places:
            found[re.sub("<[^>]+>", "*", place)] = {name.strip("`"): default for name, _, default, _ in rows(text)}
    return found


def test_every_recipe_key_is_documented_with_its_default_and_no_other() -> None:
    """Those of gates are in the reference alone."""
    assert documented_keys() == {place: keys for place, keys in keys_of(Recipe).items() if not place.endswith("gates.*")}


def test_every_metric_is_documented_and_no_other() -> None:
    documented = {name.strip("`"): others for name, *others in rows(section("Metrics"))}
    assert documented == {name: [m.stage, m.unit, m.direction, m.meaning] for name, m in METRICS.items()}


def test_the_readme_opens_with_its_two_commands() -> None:
    title, demo, test = [line for line in README.splitlines() if line.strip()][:3]
    assert title == "# vllm-qualify"
    assert re.match(r" {4}make demo +# ", demo)
    assert re.match(r" {4}make test +# ", test)


def test_the_readmes_recipe_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "example.yaml").write_text(example, encoding="utf-8")
    assert "h200" in load_recipe(str(tmp_path / "example.yaml")).recipe.gpu_types


@pytest.mark.parametrize("example", re.findall(r"^```yaml\n(.*?)^```$", RECIPES, re.DOTALL | re.MULTILINE))
def test_each_example_of_the_recipes_document_is_valid_in_a_recipe(example: str, tmp_path: Path) -> None:
    """It is the README's recipe with the example's variants, GPU type or profile."""
    yaml = YAML(typ="safe")
    (whole,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    recipe, part = yaml.load(whole), yaml.load(example)
    if "variants" in part:
        recipe |= part
    elif "gpu_types" in part:
        recipe["gpu_types"]["h200"] |= part["gpu_types"]["h200"]
    else:
        recipe["gpu_types"]["h200"]["profiles"]["balanced"] = part
    with (tmp_path / "example.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(recipe, file)
    assert list(load_recipe(str(tmp_path / "example.yaml")).recipe.cells())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_that_are_there(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


def test_the_index_of_design_pages_is_whole() -> None:
    index = (DESIGN / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\((\d{4}-[a-z-]+\.md)\)", index)) == sorted(path.name for path in DESIGN.glob("0*.md"))
