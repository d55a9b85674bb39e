"""A draft model in a folder: resolved from the recipe's folder, recorded by its content, and bound into a container."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders.plans import CPU, engine, loaded, only
from tests.builders.server_plans import IMAGE
from tests.recipes import reference
from vllm_qualify.engine.environment import EngineEnvironment, content_digest
from vllm_qualify.engine.provision import Engines
from vllm_qualify.engine.server import DRAFT_INSIDE, MODEL_INSIDE, ServerPlan, config_text, container_of
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.loading import load_recipe

__all__ = ["engine"]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a recipe, with a draft model."""
    (tmp_path / "recipes" / "draft").mkdir(parents=True)
    (tmp_path / "recipes" / "draft" / "config.json").write_text("{}")
    return tmp_path / "recipes"


def planned(folder: Path, engine: EngineEnvironment, speculative: dict[str, Any] | str) -> CellPlan:
    document = reference()
    document["variants"]["draft"]["server"] = {"speculative-config": speculative}
    return only(plan_cells(loaded(document, folder), Choice(variant="draft"), Engines(engine=engine), CPU))


def drafting(model: str) -> dict[str, Any]:
    return {"method": "draft_model", "model": model, "num_speculative_tokens": 3}


def in_container(server: ServerPlan, **changes: Any) -> ServerPlan:
    return server.model_copy(update={"engine": IMAGE} | changes)


def draft_of(server: ServerPlan) -> object:
    return yaml.safe_load(yaml.safe_load(config_text(server, 8123))["speculative-config"])["model"]


def binds(server: ServerPlan) -> dict[str, tuple[Path, bool]]:
    return {bind.target: (bind.source, bind.read_only) for bind in container_of(server, Path("/run/s.yaml"), 8123, {}).binds}


@pytest.mark.parametrize("written", ["./draft", "../recipes/draft", "~/draft", "{folder}/draft"])
def test_a_draft_models_path_starts_from_the_recipes_folder(
    folder: Path, engine: EngineEnvironment, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    server = planned(folder, engine, drafting(written.format(folder=folder))).server
    assert server.arguments["speculative-config"] == drafting(str(folder / "draft"))
    assert draft_of(server) == str(folder / "draft")
    assert server.draft == folder / "draft"


def test_json_text_is_the_mapping_that_it_says(folder: Path, engine: EngineEnvironment) -> None:
    for speculative in (drafting("./draft"), NGRAM):
        mapping, text = (planned(folder, engine, written).server for written in (speculative, json.dumps(speculative)))
        assert text == mapping
    assert text.arguments["speculative-config"] == NGRAM
    draft = planned(folder, engine, json.dumps(drafting("./draft"))).server
    assert (draft.draft, draft.draft_digest) == (folder / "draft", content_digest(folder / "draft"))
    assert binds(in_container(draft))[DRAFT_INSIDE] == (folder / "draft", True)


@pytest.mark.parametrize("written", ["ngram", "{'method': 'ngram'}", "[]", "7", '"ngram"', "", '{"method": "ngram"'])
def test_text_that_is_no_json_object_is_reported_with_its_place(folder: Path, engine: EngineEnvironment, written: str) -> None:
    with pytest.raises(CallerError, match="is not a JSON object") as raised:
        planned(folder, engine, written)
    assert raised.value.place == "server.speculative-config"


def test_what_the_draft_model_is_becomes_part_of_the_plan(folder: Path, engine: EngineEnvironment) -> None:
    before = planned(folder, engine, drafting("./draft"))
    assert before.server.draft_digest == content_digest(folder / "draft")
    assert CellPlan.model_validate_json(before.model_dump_json()) == before
    (folder / "draft" / "config.json").write_text('{"other": true}')
    after = planned(folder, engine, drafting("./draft"))
    assert after.server.arguments == before.server.arguments
    assert after.server != before.server


def test_the_same_server_without_speculative_decoding_and_a_method_without_a_draft_have_no_draft_model(
    folder: Path, engine: EngineEnvironment
) -> None:
    undrafted = planned(folder, engine, drafting("./draft")).undrafted
    assert undrafted is not None
    assert "speculative-config" not in undrafted.arguments
    by_ngrams = planned(folder, engine, NGRAM).server
    assert by_ngrams.config(8123)["speculative-config"] == NGRAM
    for server in (undrafted, by_ngrams):
        assert (server.draft, server.draft_digest) == (None, None)
        assert list(binds(in_container(server))) == ["/vllm-qualify/server.yaml", MODEL_INSIDE]


def test_a_draft_model_that_is_not_there_is_reported_with_its_place(folder: Path, engine: EngineEnvironment) -> None:
    with pytest.raises(HostError, match=f"no model at {folder / 'drift'}") as raised:
        planned(folder, engine, drafting("./drift"))
    assert "speculative-config" in raised.value.remedy


@pytest.mark.parametrize("revision", [None, "0123abc"])
def test_a_container_has_the_draft_model_at_a_place_of_its_own_and_cannot_write_to_it(
    folder: Path, engine: EngineEnvironment, revision: str | None
) -> None:
    """Whether the model itself is local or the hub's."""
    server = in_container(planned(folder, engine, drafting("./draft")).server, revision=revision)
    assert draft_of(server) == DRAFT_INSIDE
    assert binds(server)[DRAFT_INSIDE] == (folder / "draft", True)


def test_the_catalogs_draft_model_knows_the_models_tokens() -> None:
    catalog = load_recipe("reference")
    variant = catalog.recipe.variants["draft"]
    draft = variant.server["speculative-config"]
    assert isinstance(draft, dict)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (catalog.path(str(draft["model"])) / name).read_bytes() == (catalog.path(variant.model) / name).read_bytes()
