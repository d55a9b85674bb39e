"""The seed recipes, and the commands that vllm-project/recipes publishes for their models."""

import json
from functools import cache
from pathlib import Path

import pytest
from pydantic import JsonValue

from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.serving import ServerArguments

SEEDS = ("llama-3.3-70b", "llama-4-scout", "nemotron-3-nano")
HOPPER = ("h100", "h200")
BLACKWELL = ("b200", "gb200")
# Commands that vllm-project/recipes publishes for a model on a GPU type; not part of this project.
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "vllm-recipes" / "api"
needs_published = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="the commands of vllm-project/recipes are not beside this checkout"
)
# Model in a published command → recipe and variant; unquantized Llamas are none of our variants, so the default one stands in.
MODELS: dict[str, tuple[str, str | None]] = {
    "meta-llama/Llama-3.3-70B-Instruct": ("llama-3.3-70b", None),
    "nvidia/Llama-3.3-70B-Instruct-FP8": ("llama-3.3-70b", "fp8"),
    "nvidia/Llama-3.3-70B-Instruct-NVFP4": ("llama-3.3-70b", "nvfp4"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("llama-4-scout", None),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("nemotron-3-nano", "bf16"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": ("nemotron-3-nano", "fp8"),
}
COMMANDS = [
    (model, gpu_type)
    for model in MODELS
    for gpu_type in (*HOPPER, *BLACKWELL)
    if not (model.endswith("NVFP4") and gpu_type in HOPPER)
]
# Published options that are not ours, or not with that value → why.
DIFFERENCES = {
    "tensor-parallel-size": "the profile's goal decides it; published is the least that holds the model, or the whole node",
    "no-enable-prefix-caching": "tuning for a benchmark, as its own guides say; production has vLLM's default",
    "reasoning-parser": "the family's own, which vLLM has by now",
    "reasoning-parser-plugin": "names a file that no image has",
}
# Published environment names that vLLM no longer has → the option that took their place, and its value by the published one.
RENAMED: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "VLLM_USE_FLASHINFER_MOE_FP8": ("moe-backend", {"1": ("flashinfer_cutlass", "flashinfer_trtllm")}),
    "VLLM_FLASHINFER_MOE_BACKEND": ("moe-backend", {"throughput": ("flashinfer_cutlass",)}),
}
VLLM_VERSION = "0.32.0"


def options_of(argv: list[str]) -> dict[str, JsonValue]:
    """The options of a `vllm serve MODEL …` command, as a recipe writes them.

    An option without a value is true, one with several is a list; numbers and JSON are parsed.
    """
    serve, rest = argv[:3], argv[3:]
    assert serve[:2] == ["vllm", "serve"]
    assert not serve[2].startswith("-")
    given: dict[str, list[JsonValue]] = {}
    key = ""
    for word in rest:
        if word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            assert key not in given, f"--{key} is given twice"
            given[key] = [_value(value)] if equals else []
        else:
            given[key].append(_value(word))
    return {key: True if not values else values[0] if len(values) == 1 else values for key, values in given.items()}


def _value(text: str) -> JsonValue:
    try:
        parsed: JsonValue = json.loads(text)
    except ValueError:
        return text
    return parsed


@cache
def recipe(name: str) -> Recipe:
    return load_recipe(name).recipe


def arguments(recipe: Recipe, gpu_type: str, variant: str | None, profile: str) -> ServerArguments:
    """The server arguments of one cell."""
    serving = recipe.gpu_types[gpu_type]
    return serving.server | recipe.variants[variant or serving.default_variant].server | serving.profiles[profile].server
