"""Folders of published JSON."""

from pathlib import Path

import pytest

from tests.recipe.importing.documents import Document, imported, published_document, resolved, written
from vllm_qualify.engine.gpu import fingerprint_of
from vllm_qualify.engine.gpu_products import gpu_type_of
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing.commands import GPU_TYPES
from vllm_qualify.recipe.importing.documents import InexpressibleError


def test_a_folder_leaves_out_what_it_cannot_import_and_says_so(tmp_path: Path) -> None:
    written(published_document(), tmp_path)
    written(published_document(hardware="h100", node_count=2), tmp_path, "h100.json")
    written(published_document(hardware="b200", deploy_type="multi_node"), tmp_path, "b200.json")
    result = imported(tmp_path)
    assert list(result.recipe.gpu_types) == ["h200"]
    assert result.notes == [
        "left out b200.json: a recipe cannot express multi_node, a deployment on several nodes",
        "left out h100.json: a recipe cannot express a deployment on 2 nodes",
    ]


def test_a_folder_of_which_nothing_can_be_imported_gives_the_first_reason(tmp_path: Path) -> None:
    written(published_document(hardware="h100", node_count=2), tmp_path, "h100.json")
    written(published_document(hardware="mi300x"), tmp_path, "mi300x.json")
    with pytest.raises(InexpressibleError, match="a deployment on 2 nodes"):
        imported(tmp_path)


def test_a_broken_file_in_a_folder_is_an_error(tmp_path: Path) -> None:
    written(published_document(), tmp_path)
    (tmp_path / "h100.json").write_text("{")
    with pytest.raises(CallerError, match="not valid JSON"):
        imported(tmp_path)


def test_of_several_files_for_one_gpu_type_the_first_is_imported_and_a_note_says_so(tmp_path: Path) -> None:
    written(published_document("--seed", "1", hardware="rtx_5090"), tmp_path, "rtx_5090.json")
    written(published_document("--seed", "2", hardware="rtx_5090_2x"), tmp_path, "rtx_5090_2x.json")
    result = imported(tmp_path)
    assert {name: serving.server for name, serving in result.recipe.gpu_types.items()} == {"geforce-rtx-5090": {"seed": 1}}
    assert result.notes == ["left out rtx_5090_2x.json: the GPU type geforce-rtx-5090 is rtx_5090.json's already"]


def test_the_gpu_type_is_the_one_that_the_products_name_tells() -> None:
    assert gpu_type_of("NVIDIA GeForce RTX 4090", "8.9") == GPU_TYPES["rtx_4090_2x"]
    assert gpu_type_of("NVIDIA GeForce RTX 5090", "12.0") == GPU_TYPES["rtx_5090"] == GPU_TYPES["rtx_5090_2x"]
    assert gpu_type_of("NVIDIA GB10", "12.1") == GPU_TYPES["dgx_spark_gb10"] == "gb10"
    assert gpu_type_of("NVIDIA GB300", "10.3") == GPU_TYPES["dgx_station_gb300"] == "gb300"
    assert fingerprint_of(None).gpu_type == GPU_TYPES["xeon5"] == GPU_TYPES["xeon6"]


def test_a_recipe_has_the_served_names_of_all_gpu_types(tmp_path: Path) -> None:
    written(published_document("--served-model-name", "one"), tmp_path)
    written(published_document("--served-model-name", "two", hardware="h100"), tmp_path, "h100.json")
    result = imported(tmp_path)
    assert (result.recipe.served_model_name, result.recipe.aliases) == ("two", ["one"])
    assert result.notes == [
        "h100: published as two, and served under all of two, one, as every GPU type is",
        "h200: published as one, and served under all of two, one, as every GPU type is",
    ]


@pytest.mark.parametrize(
    ("second", "names"), [({"variant": "nvfp4"}, ["nvfp4", "fp8"]), ({}, ["other-model", "a-model"])], ids=["named", "unnamed"]
)
def test_each_model_of_a_folder_is_a_variant(second: Document, names: list[str], tmp_path: Path) -> None:
    written(published_document(), tmp_path)
    other = {"hardware": "b200", "argv": ["vllm", "serve", "Org/Other-Model", "--seed", "1"]}
    written(published_document(**other, **second), tmp_path, "b200.json")
    recipe = imported(tmp_path).recipe
    assert list(recipe.variants) == names
    assert resolved(recipe, "b200") == ("Org/Other-Model", {"seed": 1}, {})
    assert resolved(recipe, "h200") == ("Org/A-Model", {}, {})


def test_a_models_own_file_has_its_recommended_command_or_is_an_error(tmp_path: Path) -> None:
    command = published_document("--seed", "3", hardware="h100") | {"by_hardware": {"h100": "/Org/A-Model/hw/h100.json"}}
    result = imported(written({"hf_id": "Org/A-Model", "recommended_command": command}, tmp_path, "A-Model.json"))
    assert resolved(result.recipe, "h100") == ("Org/A-Model", {"seed": 3}, {})
    with pytest.raises(CallerError) as error:
        imported(written({"hf_id": "Org/A-Model", "recommended_command": {}}, tmp_path, "A-Model.json"))
    assert "recommended_command" in error.value.place
