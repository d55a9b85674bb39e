"""The catalog's recipes beyond the seeds: one for each use that production has, served as vllm-project/recipes has it.

The facts are written here by hand, from the file of vllm-project/recipes that each recipe names.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from infra.reference_chat import traces
from tests.builders.seed_recipes import SEEDS, VLLM_VERSION, arguments, recipe
from vllm_qualify.recipe.loading import catalog_folder, catalog_names, load_recipe
from vllm_qualify.recipe.serving import ServerArguments
from vllm_qualify.recipe.traces.reading import read_trace


class Published(NamedTuple):
    """What recipes publishes of a model: where, the tokens of its context, and the options of its features."""

    source: str
    context_tok: int
    features: ServerArguments
    models: set[str]


HERMES: ServerArguments = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
HARMONY: ServerArguments = {"enable-auto-tool-choice": True, "tool-call-parser": "openai"}
PUBLISHED = {
    "qwen3-32b": Published(
        "models/Qwen/Qwen3-32B.yaml", 40960, HERMES | {"reasoning-parser": "qwen3"}, {"Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8"}
    ),
    "gpt-oss-20b": Published("models/openai/gpt-oss-20b.yaml", 131072, HARMONY, {"openai/gpt-oss-20b"}),
    "gpt-oss-120b": Published("models/openai/gpt-oss-120b.yaml", 131072, HARMONY, {"openai/gpt-oss-120b"}),
    "qwen3-vl-235b": Published(
        "models/Qwen/Qwen3-VL-235B-A22B-Instruct.yaml",
        262144,
        {"mm-encoder-tp-mode": "data"},
        {"Qwen/Qwen3-VL-235B-A22B-Instruct-FP8"},
    ),
    "qwen3-next-80b": Published(
        "models/Qwen/Qwen3-Next-80B-A3B-Instruct.yaml", 262144, HERMES, {"Qwen/Qwen3-Next-80B-A3B-Instruct-FP8"}
    ),
}
PROMISES = {
    "gpt-oss-120b": ["chat", "tools"],
    "gpt-oss-20b": ["chat", "tools"],
    "nemotron-3-nano": ["chat", "tools"],
    "qwen3-32b": ["chat", "tools", "reasoning"],
    "qwen3-next-80b": ["chat", "tools"],
    "reference-chat": ["chat", "tools", "parallel_tools", "reasoning", "json_schema", "responses"],
    "reference-vision": ["chat", "vision"],
}


def test_every_recipe_of_the_catalog_is_looked_at_and_promises_what_its_parsers_are_for() -> None:
    recipes = {name: load_recipe(name).recipe for name in catalog_names()}
    assert {name for name in recipes if not name.startswith("reference")} == {*SEEDS, *PUBLISHED}
    assert {name: recipe.capabilities for name, recipe in recipes.items() if recipe.capabilities} == PROMISES


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_serves_as_its_source_publishes_it(name: str) -> None:
    ours, of = recipe(name), PUBLISHED[name]
    assert of.source in (catalog_folder() / f"{name}.yaml").read_text()
    assert {variant.model for variant in ours.variants.values()} == of.models
    for gpu_type, variant, profile in ours.cells(VLLM_VERSION):
        options = arguments(ours, gpu_type, variant, profile)
        tunables = {"tensor-parallel-size", "max-num-seqs"}
        # Ours, where tools are promised: else vLLM's first form decides for all others.
        forms: ServerArguments = {"structured-outputs-config": {"backend": "xgrammar"}} if ours.capabilities else {}
        assert {key: value for key, value in options.items() if key not in tunables} == of.features | forms | {
            "max-model-len": of.context_tok
        }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_load_shares_a_system_prompt_and_the_machine_finds_the_sizes(name: str) -> None:
    for serving in recipe(name).gpu_types.values():
        throughput, latency = serving.profiles["throughput"], serving.profiles["latency"]
        assert throughput.fit is not None
        assert throughput.fit.max_num_seqs
        assert throughput.fit.max_num_batched_tokens == [8192, 16384]
        for profile in (throughput, latency):
            assert profile.load.shares_prefixes
            assert (profile.load.longest_tok or 0) < PUBLISHED[name].context_tok


def test_the_chat_models_trace_is_what_its_code_writes(tmp_path: Path) -> None:
    traces.write(tmp_path)
    kept = catalog_folder() / "reference-chat" / "traffic.jsonl"
    assert kept.read_bytes() == (tmp_path / "traffic.jsonl").read_bytes()
    # The recipe's comment has it.
    assert round(read_trace(kept).trace.shared_share, 3) == 0.568


def test_the_long_context_is_asked_for() -> None:
    for profile in recipe("qwen3-next-80b").gpu_types["h200"].profiles.values():
        assert (profile.load.longest_tok or 0) > 32768
