"""What is printed to be deployed of the catalog's recipes for GPUs: production's configuration, all of it and no more."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from tests.approval.builder import RUN, Change, approved, made_key, of_plan, publish_report
from tests.builders.changed import changed
from tests.report.builder import image_report
from vllm_qualify import cli
from vllm_qualify.approval.signing import PUBLIC_KEY
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.server import MODEL, Part
from vllm_qualify.plan.cell import Cell
from vllm_qualify.plan.choice import Choice, select
from vllm_qualify.plan.server import server_plan
from vllm_qualify.publish.store import Store
from vllm_qualify.recipe.loading import catalog_folder, catalog_names, load_recipe

pytestmark = pytest.mark.usefixtures("believed")

VERSION, COMMIT = "0.32.0", "c" * 40
IMAGE = EngineImage(repository="vllm/vllm-openai", tag=f"v{VERSION}", digest=f"sha256:{64 * 'a'}", platform="linux/amd64")
# What says which model is served and where; all else is the recipe's.
IDENTITY = {"model", "revision", "tokenizer-revision", "served-model-name", "host", "port"}


class Production(NamedTuple):
    """By hand, from vllm-project/recipes: the tokens of the context, and the options of tools, thoughts and pictures."""

    context_tok: int
    features: Mapping[str, object]


TOOLS = "enable-auto-tool-choice"
HERMES, HARMONY = ({TOOLS: True, "tool-call-parser": parser} for parser in ("hermes", "openai"))
NEMOTRON = {TOOLS: True, "tool-call-parser": "qwen3_coder", "reasoning-parser": "nemotron_v3"}
IN_PRODUCTION = {
    "llama-3.3-70b": Production(131072, {}),
    "llama-4-scout": Production(131072, {}),
    "nemotron-3-nano": Production(262144, NEMOTRON),
    "qwen3-32b": Production(40960, HERMES | {"reasoning-parser": "qwen3"}),
    "qwen3-next-80b": Production(262144, HERMES),
    "qwen3-vl-235b": Production(262144, {"mm-encoder-tp-mode": "data"}),
    "gpt-oss-20b": Production(131072, HARMONY),
    "gpt-oss-120b": Production(131072, HARMONY),
}
FEATURES = ("enable-auto-tool-choice", "tool-call-parser", "reasoning-parser", "mm-encoder-tp-mode")
OF_CACHES = ("enable-prefix-caching", "no-enable-prefix-caching")


def cells() -> Iterator[tuple[str, str, str, str]]:
    """Recipe, GPU type, variant and profile: of each recipe on each of its GPU types one cell."""
    for name in IN_PRODUCTION:
        for gpu_type, serving in load_recipe(name).recipe.gpu_types.items():
            yield name, gpu_type, serving.default_variant, "throughput"


def written(name: str, gpu_type: str, variant: str, profile: str) -> dict[str, Any]:
    """The server's options as the catalog's file has them for a cell, read without the product's own code."""
    document = yaml.safe_load((catalog_folder() / f"{name}.yaml").read_text())
    serving = document["gpu_types"][gpu_type]
    places = (serving, document["variants"][variant], serving["profiles"][profile])
    options = {option: value for place in places for option, value in place.get("server", {}).items()}
    # A mapping is an option's value as JSON.
    mappings = {option: json.dumps(value, sort_keys=True) for option, value in options.items() if isinstance(value, dict)}
    return options | mappings


def qualified(name: str, gpu_type: str, variant: str, profile: str) -> Change:
    """As if the cell had been qualified on such a GPU: the plan of its server is the product's."""
    loaded = load_recipe(name)
    selection = select(loaded, Choice(gpu_type=gpu_type, variant=variant, profile=profile), None)
    release = image_report().plan.cell.release
    server = server_plan(loaded, selection, profile, IMAGE, VERSION, COMMIT)
    parts = [Part(option=MODEL, name=server.model, revision=COMMIT), *server.parts]
    server = changed(server, gpus=[0], parts=parts)
    served = changed(changed(release, "engine", digest=IMAGE.digest), model=server.model, revision=COMMIT)
    cell = Cell(recipe=name, release=served, variant=variant, gpu_type=gpu_type, profile=profile)
    machine = changed(image_report().plan.fingerprint, gpu_type=gpu_type)
    return of_plan(cell=cell, server=server, fingerprint=machine)


def test_every_recipe_for_gpus_is_looked_at() -> None:
    assert {name for name in catalog_names() if not name.startswith("reference")} == set(IN_PRODUCTION)


@pytest.mark.parametrize("cell", list(cells()), ids="/".join)
def test_what_is_printed_is_the_catalogs_configuration_and_nothing_else(
    cell: tuple[str, str, str, str], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = made_key(tmp_path / "key")
    monkeypatch.setenv(f"{PUBLIC_KEY}_FILE", str(tmp_path / "key.pub"))
    approved(store, publish_report(store, tmp_path / "runs", RUN, qualified(*cell)), key, datetime.now(UTC))
    name, gpu_type, variant, profile = cell
    asked = ["approved", "get", f"{name}/{variant}/{gpu_type}/{profile}", "--format", "config", "--store", store.url]
    done = CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 0, done.output
    options = yaml.safe_load(done.output)
    of_recipe = {option: value for option, value in options.items() if option not in IDENTITY}
    assert of_recipe == written(*cell)
    assert of_recipe["max-model-len"] == IN_PRODUCTION[name].context_tok
    assert {option: value for option, value in of_recipe.items() if option in FEATURES} == IN_PRODUCTION[name].features
    assert not [option for option in OF_CACHES if option in done.output]
