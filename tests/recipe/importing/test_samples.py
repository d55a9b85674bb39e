"""Samples of vllm-project/recipes: that all are imported, and that a server gets what is published."""

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from ruamel.yaml import YAML

from tests.engine.script import run_script
from tests.recipe.importing.documents import TRANSLATED, imported, resolved
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.recipe.importing import Imported, write_recipe
from vllm_qualify.recipe.importing.commands import GPU_TYPES, SHORT_FORMS
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.serving import ServerArguments

# Recipes of vllm-project/recipes with their published commands; not part of this project.
SAMPLES = Path(__file__).parents[4] / "shared" / "data" / "vllm-recipes"
PUBLISHED = SAMPLES / "api"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="samples of vllm-project/recipes are not beside this checkout")

FILES = sorted(PUBLISHED.glob("*/*/hw/*.json"))
FOLDERS = sorted(PUBLISHED.glob("*/*"))


@cache
def imported_sample(source: Path) -> Imported:
    return imported(source)


def brief(path: Path) -> str:
    return "/".join([*path.parts[-4:-2], path.stem]) if path.suffix else path.name


def argv_of(recipe: Recipe, gpu_type: str) -> list[str]:
    """The command that vLLM makes of the recipe's `--config` file, without what vllm-qualify sets itself."""
    model, arguments, _ = resolved(recipe, gpu_type)
    return ["vllm", "serve", model, *(word for name, value in arguments.items() for word in config_words(name, value))]


def config_words(name: str, value: JsonValue) -> list[str]:
    """The words of one key, as docs/recipes.md has them ("Server arguments")."""
    assert value is not False
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def options_in(argv: list[str]) -> dict[str, list[Any]]:
    """The options of a command that is written out in full; JSON is compared as what it says."""
    options: dict[str, list[Any]] = {}
    for word in argv[3:]:
        if word.startswith("--"):
            assert word not in options
            options[word] = []
        else:
            options[list(options)[-1]].append(json.loads(word) if word.startswith("{") else word)
    return options


@needs_samples
@pytest.mark.parametrize("file", FILES, ids=brief)
def test_a_server_gets_the_published_command_and_environment(file: Path) -> None:
    published = json.loads(file.read_text(encoding="utf-8"))
    result, gpu_type = imported_sample(file), GPU_TYPES[file.stem]
    argv = argv_of(result.recipe, gpu_type)
    assert argv[:3] == published["argv"][:3]
    assert options_in(argv) == options_in(published["argv"])
    assert resolved(result.recipe, gpu_type)[2] == published["env"]
    assert result.images == {gpu_type: published["docker_image"]}
    assert list(result.recipe.gpu_types) == [gpu_type]
    assert result.source == "/".join(file.parts[-4:])


@needs_samples
@pytest.mark.parametrize("folder", FOLDERS, ids=brief)
def test_a_folder_becomes_one_recipe_with_every_gpu_type(folder: Path) -> None:
    result = imported_sample(folder)
    assert imported(folder / "hw") == result
    files = {GPU_TYPES[file.stem]: file for file in FILES if file.parent.parent == folder}
    assert set(result.recipe.gpu_types) == set(files)
    assert len(result.recipe.variants) == 1
    for gpu_type, file in files.items():
        assert resolved(result.recipe, gpu_type) == resolved(imported_sample(file).recipe, gpu_type)
    assert not [note for note in result.notes if note.startswith("left out")]


def sample_variants() -> Iterator[tuple[Path, str, Path]]:
    """Each YAML sample's variants with the folder of its JSON, which may not be there."""
    for file in sorted(SAMPLES.glob("models/*/*.yaml")):
        document = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
        for name, variant in document["variants"].items():
            own = f"{file.parent.name}/{file.stem}"
            yield file, name, PUBLISHED / (own if name == "default" else variant.get("model_id", own))


@needs_samples
@pytest.mark.parametrize(("source", "variant", "folder"), list(sample_variants()), ids=lambda value: Path(value).name)
def test_yaml_gives_what_the_json_has_which_is_used_where_it_is(
    source: Path, variant: str, folder: Path, tmp_path: Path
) -> None:
    result = imported(source, variant, published=tmp_path).recipe
    assert list(result.variants) == [variant]
    # Some have no JSON here; the JSON that there is has fewer GPU types than taxonomy.yaml by now.
    assert result.gpu_types
    for file in folder.glob("hw/*.json"):
        gpu_type = GPU_TYPES[file.stem]
        assert resolved(result, gpu_type) == resolved(imported_sample(file).recipe, gpu_type)
    beside = imported(source, variant)
    assert ("/hw/*.json" in beside.source) == folder.is_dir()
    assert not [note for note in beside.notes if "differs" in note]


@needs_samples
def test_where_yaml_and_json_differ_the_json_is_believed_and_a_note_says_so(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES, tmp_path / "recipes")
    yaml = tmp_path / "recipes/models/openai/gpt-oss-20b.yaml"
    file = tmp_path / "recipes/api/openai/gpt-oss-20b/hw/h200.json"
    document = json.loads(file.read_text())
    document["argv"] += ["--max-num-seqs", "7"]
    document["env"] = {"VLLM_X": "1"}
    file.write_text(json.dumps(document))
    result = imported(yaml)
    assert result.recipe.gpu_types["h200"].server["max-num-seqs"] == 7
    assert "h200: the YAML differs from the JSON, which is used, in max-num-seqs, VLLM_X" in result.notes


@pytest.mark.engine
def test_vllm_reads_the_recipe_as_it_reads_the_published_command(engine: EngineEnvironment, tmp_path: Path) -> None:
    cases = [(argv, dict(options)) for argv, options in TRANSLATED] + [published_case(file) for file in FILES]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    ended = run_script(engine, PROBE, tmp_path)
    assert ended.returncode == 0, ended.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["short forms"] == SHORT_FORMS
    assert answer["unlike"] == []


def published_case(file: Path) -> tuple[list[str], ServerArguments]:
    return json.loads(file.read_text())["argv"][3:], resolved(imported_sample(file).recipe, GPU_TYPES[file.stem])[1]


PROBE = """
import json, sys
import yaml
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

folder = sys.argv[1]
parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))

def parsed(words):
    options = vars(parser.parse_args(["org/model", *words]))
    del options["config"]
    return repr(sorted(options.items()))

def of_config(options):
    with open(f"{folder}/server.yaml", "w") as file:
        yaml.safe_dump(options, file, sort_keys=False)
    return parsed(["--config", f"{folder}/server.yaml"])

def short_forms():
    for action in parser._actions:
        long = next(name for name in action.option_strings or ["--"] if name.startswith("--"))
        yield from ((name, long) for name in action.option_strings if not name.startswith("--") and name != "-h")

cases = json.load(open(f"{folder}/cases.json"))
unlike = [words for words, options in cases if parsed(words) != of_config(options)]
json.dump({"short forms": dict(short_forms()), "unlike": unlike}, open(f"{folder}/answer.json", "w"))
"""


@needs_samples
@pytest.mark.parametrize("source", [*FILES, *FOLDERS, *sorted(SAMPLES.glob("models/*/*.yaml"))], ids=brief)
def test_every_sample_is_imported_and_loads_again_as_it_was(source: Path, tmp_path: Path) -> None:
    result = imported_sample(source)
    write_recipe(result, tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml")).recipe == result.recipe
    assert str(SAMPLES.parent) not in (tmp_path / "recipe.yaml").read_text()


@needs_samples
def test_a_model_of_the_harmony_format_is_asked_as_in_the_catalog() -> None:
    imported_task = imported_sample(SAMPLES / "models/openai/gpt-oss-20b.yaml").recipe.accuracy[0]
    assert imported_task == load_recipe("gpt-oss-20b").recipe.accuracy[0]
