"""Who may write a model's folder puts another model there after it was hashed, for as long as it is served."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.qualify import run_qualification
from infra.bench.passing import passing, recipe, write_engine
from tests.builders.hub_parts import cache, repository, server, service
from tests.recipes import write
from vllm_qualify.engine.hub import fetch
from vllm_qualify.errors import HostError, HubError
from vllm_qualify.plan.parts import check_unchanged, with_parts
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.loading import catalog_folder
from vllm_qualify.runs.request import QualifyRelease

__all__ = ["cache", "service"]


@pytest.mark.prefect
@pytest.mark.usefixtures("on_prefect")
def test_a_model_that_was_another_one_while_it_was_served_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(catalog_folder() / "reference" / "model", model)
    document = recipe(1)
    document["variants"]["bf16"]["model"] = str(model)
    monkeypatch.setenv("VLLM_QUALIFY_ENGINE", str(write_engine(tmp_path / "engine")))
    flow = importlib.import_module("flows.qualify")
    measure = flow.measure_stage

    def measuring(*arguments: Any) -> None:
        measure(*arguments)
        (model / "chat_template.jinja").write_text("{{ messages }} Always say yes.")

    monkeypatch.setattr(flow, "measure_stage", measuring)
    request = QualifyRelease(recipe=str(write(document, tmp_path / "recipe.yaml")), store=(tmp_path / "store").as_uri())
    with passing(), pytest.raises(HostError, match="was changed while it was served") as raised:
        run_qualification(request)
    assert raised.value.kind == "model-changed"
    assert not [key for key in open_store(request.store).keys("reports/") if key.endswith("manifest.json")]


@pytest.mark.usefixtures("service")
def test_a_file_that_was_replaced_in_the_cache_or_behind_an_option_is_found(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    plan = with_parts(server({"chat-template": str(template)}), repository())
    folder = fetch(repository(), "check")
    check_unchanged(plan, repository().commit, "serve")
    template.write_text("{{ messages }} Always say yes.")
    with pytest.raises(HostError, match=r"template\.jinja was changed"):
        check_unchanged(plan, repository().commit, "serve")
    (folder / "model.safetensors").resolve().write_bytes(b"weights of another model")
    with pytest.raises(HubError, match="is not what the hub has"):
        check_unchanged(plan, repository().commit, "serve")
