"""The documents: their examples are valid, and their links lead somewhere."""

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.builders.links import leads_somewhere
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import Recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
DESIGN = ROOT / "docs" / "design"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md")]


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
    """It is the README's recipe with the example's keys, variants, gates, GPU type or profile."""
    yaml = YAML(typ="safe")
    (whole,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    recipe, part = yaml.load(whole), yaml.load(example)
    if "gpu_types" in part:
        recipe["gpu_types"]["h200"] |= part["gpu_types"]["h200"]
    elif part.keys() <= Recipe.model_fields.keys():
        recipe |= part
    else:
        recipe["gpu_types"]["h200"]["profiles"]["balanced"] = part
    with (tmp_path / "example.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(recipe, file)
    assert list(load_recipe(str(tmp_path / "example.yaml")).recipe.cells())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_places_that_are_there(document: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not leads_somewhere(document, link)] == []


def test_contributing_names_files_that_are_there() -> None:
    """By their whole path, or by their path in the package."""
    named = re.findall(r"`([\w/.-]+/[\w/.-]*)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    made = {".venv/bin/vllm-qualify", ".cache/bump/env"}
    rooms = (ROOT, ROOT / "vllm_qualify")
    assert [path for path in named if path not in made and not any((room / path).exists() for room in rooms)] == []


def test_the_index_of_design_pages_is_whole() -> None:
    index = (DESIGN / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\((\d{4}-[a-z-]+\.md)\)", index)) == sorted(path.name for path in DESIGN.glob("0*.md"))
