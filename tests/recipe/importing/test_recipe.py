"""The imported recipe: what is not the source's, what a folder of published JSON becomes, and the file that is written."""

from pathlib import Path

import pytest

from tests.recipe.importing.documents import Document, import_words, imported, published_document, resolved, written
from vllm_qualify.engine.gpu import fingerprint_of
from vllm_qualify.engine.gpu_products import gpu_type_of
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.importing import import_recipe, write_recipe
from vllm_qualify.recipe.importing.commands import GPU_TYPES
from vllm_qualify.recipe.importing.documents import InexpressibleError
from vllm_qualify.recipe.loading import load_recipe


@pytest.mark.parametrize(
    ("minimum", "filter_", "place"),
    [
        *((minimum, "strict-match", "--exact-match-minimum") for minimum in (None, 0.0, -1.0, 1.01, float("nan"))),
        *((0.5, filter_, "--exact-match-filter") for filter_ in (None, "", "strict")),
    ],
)
def test_bound_and_filter_of_the_gate_are_the_callers(
    minimum: float | None, filter_: str | None, place: str, tmp_path: Path
) -> None:
    path = written(published_document(), tmp_path)
    with pytest.raises(CallerError) as error:
        import_recipe(path, exact_match_minimum=minimum, exact_match_filter=filter_)
    assert error.value.place == place


@pytest.mark.parametrize(
    ("words", "load"),
    [
        ([], (1024, 64, 320, 20)),
        (["--max-num-seqs", "512"], (1024, 512, 2560, 20)),
        (["--max-num-seqs", "1"], (1024, 1, 5, 5)),
        (["--max-num-seqs", "1k"], (1024, 64, 320, 20)),
        (["--no-enable-prefix-caching"], (1024, 64, 320, 20)),
        (["--max-model-len", "1024"], (480, 64, 320, 20)),
        (["--max-model-len", "8"], (1, 64, 320, 20)),
        (["--max-model-len", "auto"], (1024, 64, 320, 20)),
    ],
)
def test_the_load_fits_the_server(words: list[str], load: tuple[int, int, int, int], tmp_path: Path) -> None:
    ours = import_words(tmp_path, *words).recipe.gpu_types["h200"].profiles["balanced"].load
    assert (ours.input_len, ours.max_concurrency, ours.num_prompts, ours.num_warmups) == load
    assert ours.output_len == ours.input_len


TOOLS = ["--tool-call-parser", "hermes", "--enable-auto-tool-choice"]


@pytest.mark.parametrize(
    ("words", "capabilities"),
    [
        ([], []),
        (["--reasoning-parser", "qwen3"], ["chat", "reasoning"]),
        (TOOLS, ["chat", "tools"]),
        (["--tool-call-parser", "hermes"], []),
        ([*TOOLS, "--reasoning-parser", "qwen3"], ["chat", "tools", "reasoning"]),
    ],
)
def test_published_parsers_are_promises(words: list[str], capabilities: list[str], tmp_path: Path) -> None:
    assert import_words(tmp_path, *words).recipe.capabilities == capabilities


def test_where_a_chat_is_promised_gsm8k_is_asked_by_chat(tmp_path: Path) -> None:
    task = import_words(tmp_path, "--reasoning-parser", "qwen3").recipe.accuracy[0]
    assert (task.task, task.api, task.stop, task.max_gen_toks) == ("gsm8k", "chat", [], 4096)
    task = import_words(tmp_path).recipe.accuracy[0]
    assert (task.task, task.api, task.stop, task.max_gen_toks) == ("gsm8k", "completions", None, None)


def test_a_reply_to_gsm8k_leaves_room_for_its_examples(tmp_path: Path) -> None:
    task = import_words(tmp_path, "--reasoning-parser", "qwen3", "--max-model-len", "4096").recipe.accuracy[0]
    assert task.max_gen_toks == 2048


def test_the_written_recipe_says_why_gsm8k_is_asked_by_chat(tmp_path: Path) -> None:
    write_recipe(import_words(tmp_path, *TOOLS), tmp_path / "recipe.yaml")
    written_lines = (tmp_path / "recipe.yaml").read_text().splitlines()
    comment = written_lines[written_lines.index("accuracy:") - 1]
    assert "by chat, which is what is promised" in " ".join(written_lines)
    assert comment.startswith("# ")


def test_only_what_all_gpu_types_have_is_promised(tmp_path: Path) -> None:
    written(published_document("--reasoning-parser", "qwen3"), tmp_path)
    written(published_document(hardware="h100"), tmp_path, "h100.json")
    assert imported(tmp_path).recipe.capabilities == []


def test_the_written_recipe_loads_and_says_where_it_comes_from(tmp_path: Path) -> None:
    result = imported(written(published_document("--host", "h", env={"VLLM_A": "1"}), tmp_path / "Org" / "A-Model" / "hw"))
    path = tmp_path / "recipe.yaml"
    write_recipe(result, path)
    assert load_recipe(str(path)).recipe == result.recipe
    assert result.recipe.gates == [gate_of(metric="exact_match", filter="flexible-extract", minimum=0.8, unit="fraction")]
    text = path.read_text()
    assert text.startswith("# Imported from vllm-project/recipes: Org/A-Model/hw/h200.json.\n")
    assert "# Published image for h200: vllm/vllm-openai:latest\n" in text
    assert "# - h200: dropped --host h" in text
    assert "chooses the gate: exact_match (flexible-extract) of at least 0.8." in text
    assert str(tmp_path) not in text
    assert max(map(len, text.splitlines())) <= 128


def test_a_file_outside_its_place_is_named_without_its_folders(tmp_path: Path) -> None:
    assert imported(written(published_document(), tmp_path)).source == "h200.json"
    assert imported(tmp_path).source == f"{tmp_path.name}/*.json"


def test_a_recipe_is_never_written_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("mine")
    with pytest.raises(CallerError, match="such a file already"):
        write_recipe(import_words(tmp_path), path)
    assert path.read_text() == "mine"


# --- folders


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


def test_a_folder_of_which_nothing_can_be_imported_gives_the_first_reason_and_a_broken_file_is_an_error(tmp_path: Path) -> None:
    written(published_document(hardware="h100", node_count=2), tmp_path, "h100.json")
    written(published_document(hardware="mi300x"), tmp_path, "mi300x.json")
    with pytest.raises(InexpressibleError, match="a deployment on 2 nodes"):
        imported(tmp_path)
    (tmp_path / "h200.json").write_text("{")
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
