"""The imported recipe: what is not the source's, and the file that is written."""

from pathlib import Path

import pytest

from tests.recipe.importing.documents import import_words, imported, published_document, written
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing import import_recipe, write_recipe
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


def test_the_gate_is_the_one_given(tmp_path: Path) -> None:
    (gate,) = import_words(tmp_path).recipe.gates
    assert (gate.metric, gate.filter, gate.bound, gate.unit) == ("exact_match", "flexible-extract", 0.8, "fraction")


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
    recipe = import_words(tmp_path, *words).recipe
    ours = recipe.gpu_types["h200"].profiles["balanced"].load
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


def test_only_what_all_gpu_types_have_is_promised(tmp_path: Path) -> None:
    written(published_document("--reasoning-parser", "qwen3"), tmp_path)
    written(published_document(hardware="h100"), tmp_path, "h100.json")
    assert imported(tmp_path).recipe.capabilities == []


def test_the_written_recipe_loads_and_says_where_it_comes_from(tmp_path: Path) -> None:
    result = imported(written(published_document("--host", "h", env={"VLLM_A": "1"}), tmp_path / "Org" / "A-Model" / "hw"))
    path = tmp_path / "recipe.yaml"
    write_recipe(result, path)
    assert load_recipe(str(path)).recipe == result.recipe
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
