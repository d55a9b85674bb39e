"""What a configuration says of a model: wrong types are refused, and lengths follow vLLM's own rule."""

from pathlib import Path
from typing import Any

import pytest

from tests.builders.families import make_model, read_family
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.drafting.model_files import read_model_files
from vllm_qualify.recipe.drafting.shape import Shape, describe_shape


def shape_of(folder: Path, family: str = "qwen3", /, **changes: Any) -> Shape:
    document = read_family(family)
    document["config"] |= changes
    return describe_shape(read_model_files(make_model(document, folder / "it"), "the-model"))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("max_position_embeddings", "many", "max_position_embeddings is 'many', where a whole number is meant"),
        ("max_position_embeddings", -5, "where a whole number is meant"),
        ("max_position_embeddings", 1.5, "where a whole number is meant"),
        ("max_position_embeddings", float("nan"), "where a whole number is meant"),
        ("max_position_embeddings", float("inf"), "where a whole number is meant"),
        ("max_position_embeddings", True, "where a whole number is meant"),
        ("max_position_embeddings", 10**18, "is none of a model"),
        ("num_attention_heads", [32], "num_attention_heads is [32], where a whole number is meant"),
        ("architectures", "LlamaForCausalLM", "where a list of words is meant"),
        ("architectures", [5], "where a list of words is meant"),
        ("architectures", [], "it names no architecture of a model"),
        ("architectures", ["a\nname: b"], "it names no architecture of a model"),
        ("model_type", {"a": "b"}, "where a word is meant"),
        ("model_type", "a\n# b", "where a word is meant"),
        ("text_config", "text", "text_config is 'text', where an object is meant"),
        ("rope_scaling", [1], "where an object is meant"),
        ("vision_config", 5, "where an object is meant"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(tmp_path: Path, key: str, value: Any, said: str) -> None:
    with pytest.raises(CallerError) as raised:
        shape_of(tmp_path, **{key: value})
    assert said in str(raised.value)
    assert "the-model: config.json" in str(raised.value)


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        (None, 40960),
        ({"rope_type": "linear", "factor": 4.0}, 163840),
        ({"type": "dynamic", "factor": 2.0}, 81920),
        # vLLM 0.32: of these the context is the scaled one already.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10240}, 40960),
        ({"rope_type": "llama3", "factor": 8.0}, 40960),
        ({"rope_type": "linear", "factor": "4"}, 40960),
        ({"rope_type": ["a"], "factor": 4.0}, 40960),
        ({"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}, 163840),
    ],
)
def test_the_context_follows_the_scaling(tmp_path: Path, scaling: object, tokens: int) -> None:
    assert shape_of(tmp_path, rope_scaling=scaling).context_tok == tokens


def test_a_model_that_says_no_context_has_what_vllm_assumes(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, max_position_embeddings=None)
    assert (shape.context_tok, "vLLM then assumes it" in shape.context_by) == (2048, True)


def test_layers_with_a_window_keep_the_window_alone(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 32
    shape = shape_of(tmp_path, sliding_window=1024, layer_types=kinds)
    # Keys and values of 8 heads of 128 numbers of 2 bytes.
    each = 2 * 8 * 128 * 2
    assert shape.cache_bytes(8192) == each * 32 * (8192 + 1024)
    assert shape._replace(sliding_layers=0, attention_layers=64).cache_bytes(8192) == each * 64 * 8192


def test_a_state_keeps_no_tokens_and_a_compressed_vector_is_kept_once(tmp_path: Path) -> None:
    assert shape_of(tmp_path, "qwen3-next").attention_layers == 12
    deepseek = shape_of(tmp_path / "other", "deepseek-v3")
    assert (deepseek.cache_bytes(1000), deepseek.kv_heads) == (61 * 1000 * 2 * (512 + 64), 1)


def test_a_quantized_model_is_named_by_its_method(tmp_path: Path) -> None:
    assert shape_of(tmp_path, quantization_config={"quant_method": "compressed-tensors"}).weights == "compressed-tensors"
    hostile = shape_of(tmp_path / "other", quantization_config={"quant_method": "a: b\n"})
    assert hostile.weights == "bf16"
