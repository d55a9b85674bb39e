"""Files of a model are from outside: each attack ends in one clear error that names the file, and in no other way."""

import json
import os
from pathlib import Path

import pytest

from tests.builders.families import make_family, make_model, read_family
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.drafting import model_files
from vllm_qualify.recipe.drafting.model_files import read_model_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_family("qwen3", tmp_path)


def problem_of(model: Path) -> str:
    with pytest.raises(CallerError) as raised:
        read_model_files(model, "the-model")
    assert raised.value.remedy
    return str(raised.value)


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    assert "there is no config.json in the-model" in problem_of(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[" * 100_000 + "]" * 100_000, "its JSON is nested too deeply"),
        ("{", "it is no JSON"),
        ('["a list"]', "it is no JSON object"),
        ("9" * 5000, "it is no JSON"),
        (b"\xff\xfe", "it is not UTF-8"),
    ],
)
def test_a_file_that_is_no_object_of_json_is_named(model: Path, name: str, body: str | bytes, said: str) -> None:
    (model / name).write_bytes(body if isinstance(body, bytes) else body.encode())
    assert f"the-model: {name}: {said}" in problem_of(model)


def test_a_huge_file_is_not_read(model: Path) -> None:
    with (model / "config.json").open("wb") as file:
        file.truncate(10 * 2**40)
    assert f"it has more than {model_files.MOST_BYTES:,} bytes" in problem_of(model)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "tokenizer.json"])
def test_a_pipe_a_device_and_a_dead_link_are_refused_before_they_are_opened(model: Path, name: str) -> None:
    file = model / name
    file.unlink()
    os.mkfifo(file)
    assert f"the-model: {name}: it is no regular file" in problem_of(model)
    for target, said in (("/dev/zero", "it is no regular file"), ("nowhere", "it is a link to a file that is not there")):
        file.unlink()
        file.symlink_to(target)
        assert f"the-model: {name}: {said}" in problem_of(model)
    file.unlink()
    file.symlink_to(name)
    assert f"the-model: {name}: it cannot be read" in problem_of(model)


def test_a_link_to_a_file_is_followed_as_in_a_hubs_cache(model: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs"
    (model / "config.json").rename(blob)
    (model / "config.json").symlink_to(blob)
    assert read_model_files(model, "it").config["model_type"] == "qwen3"


def test_a_template_of_its_own_file_goes_before_the_tokenizers(model: Path) -> None:
    about = {"chat_template": [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]}
    (model / "tokenizer_config.json").write_text(json.dumps(about))
    assert list(read_model_files(model, "it").templates) == ["default"]
    (model / "chat_template.jinja").unlink()
    read = read_model_files(model, "it")
    assert (read.templates, read.template_file) == ({"default": "one", "tool_use": "two"}, "tokenizer_config.json")


@pytest.mark.parametrize("given", [5, {"a": "b"}, [1], [{"name": "default", "template": 5}], [{"name": None, "template": "a"}]])
def test_a_template_that_is_no_text_is_refused(model: Path, given: object) -> None:
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    assert "its chat_template is no text, and no list of named texts" in problem_of(model)


def test_weights_are_counted_in_the_form_that_vllm_prefers(model: Path) -> None:
    read = read_model_files(model, "it")
    assert (read.weights_bytes, read.weights_by) == (34_321_930_240, "model.safetensors.index.json")
    for name, size in (
        ("model-1.safetensors", 300),
        ("model-2.safetensors", 40),
        ("consolidated.safetensors", 340),
        ("a.bin", 5),
    ):
        (model / name).write_bytes(b"0" * size)
    read = read_model_files(model, "it")
    assert (read.weights_bytes, read.weights_by) == (340, "its .safetensors files")


@pytest.mark.parametrize("total", [-1, "many", True, None, 1e300])
def test_an_index_that_lies_about_the_size_counts_for_nothing(model: Path, total: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}}))
    assert read_model_files(model, "it").weights_bytes is None


def test_tokens_in_reserve_are_no_markup_and_a_vocabulary_cannot_fill_the_question(tmp_path: Path) -> None:
    document = read_family("llama-3.1")
    named = document["tokens"]
    document["tokens"] = [*named, *(f"<|reserved_special_token_{number}|>" for number in range(250))]
    assert read_model_files(make_model(document, tmp_path / "llama"), "it").markup == named
    document["tokens"] = [f"<{letter * 50}{other}>" for letter in "abcdefghij" for other in range(10_000)]
    markup = read_model_files(make_model(document, tmp_path / "many"), "it").markup
    assert sum(map(len, markup)) <= model_files.MOST_MARKUP_CHARACTERS
