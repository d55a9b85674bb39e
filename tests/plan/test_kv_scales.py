"""An FP8 KV cache without scales is warned of before anything is measured."""

from pathlib import Path

import pytest

from tests.builders.made_servers import server_of
from tests.builders.safetensors_files import write_tensors
from vllm_qualify.plan.kv_scales import kv_scale_warnings, model_warnings

ONE = "model.layers.0.self_attn"


FP8: dict[str, object] = {"kv-cache-dtype": "fp8"}


def weights(folder: Path, *names: str) -> Path:
    write_tensors(folder / "model.safetensors", *names)
    return folder


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_weights_without_scales_are_told(kind: str, tmp_path: Path) -> None:
    model = weights(tmp_path, f"{ONE}.k_proj.weight", f"{ONE}.k_proj.weight_scale")
    (warning,) = kv_scale_warnings(server_of(model, {"kv-cache-dtype": kind}))
    assert kind in warning
    assert "vLLM takes 1.0 for each" in warning
    assert warning in model_warnings(server_of(model, {"kv-cache-dtype": kind}), "0.32.0")


@pytest.mark.parametrize("scale", [f"{ONE}.k_scale", f"{ONE}.attn.v_scale", f"{ONE}.k_proj.output_scale", f"{ONE}.kv_scale"])
def test_weights_with_scales_in_whatever_name_are_not(scale: str, tmp_path: Path) -> None:
    model = weights(tmp_path, f"{ONE}.k_proj.weight", scale)
    assert kv_scale_warnings(server_of(model, FP8)) == []


def test_nothing_is_told_where_nothing_is_known_or_asked(tmp_path: Path) -> None:
    model = weights(tmp_path, f"{ONE}.k_proj.weight")
    assert kv_scale_warnings(server_of(model)) == []
    assert kv_scale_warnings(server_of(model, {"kv-cache-dtype": "auto"})) == []
    assert kv_scale_warnings(server_of(model, FP8 | {"calculate-kv-scales": True})) == []
    assert kv_scale_warnings(server_of(model, FP8, kind="tensorrt-llm")) == []
    assert kv_scale_warnings(server_of(model, {"kv-cache-dtype": "fp8_per_token_head"})) == []
    assert kv_scale_warnings(server_of("org/not-here", FP8, revision="9" * 40)) == []
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert kv_scale_warnings(server_of(model, FP8)) == []
