"""Checkpoints whose weights are not whole, made byte by byte in safetensors' form."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.safetensors_files import TENSOR as A
from tests.builders.safetensors_files import write_file
from vllm_qualify.engine.weights import check_tokenizer, check_weights
from vllm_qualify.errors import ReleaseError
from vllm_qualify.recipe.loading import catalog_folder

B: dict[str, object] = {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two files with three tensors, and their index."""
    write_file(tmp_path / "model-00001-of-00002.safetensors", {"a": A, "b": B, "__metadata__": {"format": "pt"}})
    write_file(tmp_path / "model-00002-of-00002.safetensors", {"c": A}, 12)
    write_index(tmp_path, {"a": 1, "b": 1, "c": 2})
    return tmp_path


def write_index(folder: Path, parts: dict[str, int]) -> None:
    named = {name: f"model-{part:05}-of-00002.safetensors" for name, part in parts.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))


def problem_of(folder: Path) -> str:
    with pytest.raises(ReleaseError) as raised:
        check_weights(folder, "org/made", "check")
    assert (raised.value.kind, raised.value.place, raised.value.retry) == ("incomplete-model", "check", False)
    assert "the weights of org/made are not whole: " in raised.value.problem
    assert len(raised.value.problem) < 2000
    return raised.value.problem


def test_whole_checkpoints_pass_and_folders_without_safetensors_are_not_checked(model: Path, tmp_path: Path) -> None:
    check_weights(model, "org/made", "check")
    for name in ("reference", "reference-chat", "reference-vision"):
        check_weights(catalog_folder() / name / "model", name, "check")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_model.bin").write_bytes(b"weights")
    check_weights(tmp_path / "other", "org/made", "check")


def test_a_file_that_no_index_names_is_left_alone(model: Path) -> None:
    """Publishers keep a second form of the weights beside the first, as `consolidated.safetensors`."""
    write_file(model / "consolidated.safetensors", {"layers.a": A}, 12)
    check_weights(model, "org/made", "check")


def test_what_real_checkpoints_have_and_vllm_serves_is_let_pass(model: Path) -> None:
    """An unnamed tensor (vllm-project/vllm#54230), a tied one that the index names, hidden copies, leftovers."""
    write_index(model, {"a": 1, "c": 2, "lm_head.weight": 2})
    (model / "._model-00001-of-00002.safetensors").write_bytes(b"\0\5\x16\7")
    (model / "consolidated.safetensors.index.json").write_text('{"weight_map": {"x": "consolidated-00001.safetensors"}}')
    write_file(model / "optimizer-00001-of-00002.safetensors", {"o": A}, 12)
    check_weights(model, "org/made", "check")


def test_an_index_without_any_file_is_of_another_form(tmp_path: Path) -> None:
    """As a folder of GGUF files, or one that is served with `load-format: dummy`, has it."""
    write_index(tmp_path, {"a": 1})
    check_weights(tmp_path, "org/made", "check")


FIRST = "model-00001-of-00002.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (
        lambda model: (model / FIRST).write_bytes((model / FIRST).read_bytes()[:-1]),
        "15 bytes of tensors, and its header",
    ),
    "longer": (lambda model: (model / FIRST).write_bytes((model / FIRST).read_bytes() + b"x"), "17 bytes of tensors"),
    "empty": (lambda model: (model / FIRST).write_bytes(b""), "no header that fits"),
    "header cut": (lambda model: (model / FIRST).write_bytes((model / FIRST).read_bytes()[:40]), "no header that fits"),
    "a tensor less": (lambda model: write_file(model / FIRST, {"a": A}, 12), "has b, which the file that it names does not"),
    "a tensor in two files": (
        lambda model: write_file(model / "model-00002-of-00002.safetensors", {"a": A, "c": A | {"data_offsets": [12, 24]}}, 24),
        "a is in two files",
    ),
    "a part less": (lambda model: (model / FIRST).unlink(), f"{FIRST}, which model.safetensors.index.json names, is not there"),
    "no map": (lambda model: (model / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "no JSON": (lambda model: (model / "model.safetensors.index.json").write_text("{"), "cannot be read"),
    "another type": (lambda model: write_file(model / FIRST, {"a": A | {"dtype": "F32"}, "b": B}), "a in model-00001"),
    "another shape": (lambda model: write_file(model / FIRST, {"a": A | {"shape": [2, 4]}, "b": B}), "not its shape of BF16"),
    "overlap": (lambda model: write_file(model / FIRST, {"a": A, "b": B | {"data_offsets": [8, 12]}}, 12), "overlap"),
    "gap": (lambda model: write_file(model / FIRST, {"a": A, "b": B | {"data_offsets": [16, 20]}}, 20), "leave a gap"),
    "backwards": (lambda model: write_file(model / FIRST, {"a": A | {"data_offsets": [12, 0]}, "b": B}), "not its shape"),
    "no shape": (lambda model: write_file(model / FIRST, {"a": {"dtype": "F32"}}), "does not say type, shape and place of a"),
    "a number for a tensor": (lambda model: write_file(model / FIRST, {"a": 1}), "does not say type, shape and place"),
    "booleans": (lambda model: write_file(model / FIRST, {"a": A | {"shape": [True, 6]}}), "does not say"),
    "twice": (lambda model: write_file(model / FIRST, b'{"a": 1, "a": 2}'), "a name stands there twice"),
    "a list": (lambda model: write_file(model / FIRST, b"[]"), "has no JSON object"),
    "deep": (lambda model: write_file(model / FIRST, b'{"a":' * 50_000), "cannot be read"),
    "a length without end": (lambda model: (model / FIRST).write_bytes(b"\xff" * 64), "no header that fits"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_not_whole_is_told(what: str, model: Path) -> None:
    change, told = BROKEN[what]
    change(model)
    assert told in problem_of(model)


def test_a_part_that_is_missing_is_told_without_an_index(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    check_weights(model, "org/made", "check")
    (model / FIRST).unlink()
    assert "of 2 files model-…-of-00002.safetensors 1 are there" in problem_of(model)


def test_a_real_checkpoint_that_lost_a_tensor_is_refused(tmp_path: Path) -> None:
    """The reference model's own file, of which the last tensor's bytes are gone, with a header that tells of them or not."""
    whole = (catalog_folder() / "reference" / "model" / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    begin = header[last]["data_offsets"][0]
    (tmp_path / "model.safetensors").write_bytes(whole[: 8 + length + begin])
    assert "its header tells of" in problem_of(tmp_path)
    del header[last]
    write_file(tmp_path / "model.safetensors", header, begin)
    # One file has no index to miss it in: only the answers show it.
    check_weights(tmp_path, "org/made", "check")


OF_FAMILIES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "qwen.tiktoken",
    "spiece.model",
    "tokenization_mine.py",
    "model.Q4_1.gguf",
)


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_each_familys_tokenizer_is_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    check_tokenizer(tmp_path, "org/made", "check")


def test_a_folder_without_a_tokenizer_is_told_before_a_server_starts(tmp_path: Path) -> None:
    """Its configuration alone is none."""
    for name in ("config.json", "tokenizer_config.json", "model.safetensors", "chat_template.jinja"):
        (tmp_path / name).touch()
    with pytest.raises(ReleaseError, match=r"org/made has no file of a tokenizer\n  remedy: add its files") as raised:
        check_tokenizer(tmp_path, "org/made", "check")
    assert raised.value.kind == "incomplete-model"


def test_the_catalogs_models_have_tokenizers() -> None:
    for name in ("reference", "reference-chat", "reference-vision"):
        check_tokenizer(catalog_folder() / name / "model", name, "check")
