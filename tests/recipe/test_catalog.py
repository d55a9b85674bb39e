"""The catalog's recipes beyond the seeds: one for each use that production has, served as vllm-project/recipes has it.

The facts are written here by hand, from the file of vllm-project/recipes that each recipe names.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from infra.reference_chat import traces
from tests.builders.seed_recipes import SEEDS, VLLM_VERSION, arguments, recipe
from tests.engine.script import run_script
from vllm_qualify.drift.candidate import find_candidate
from vllm_qualify.drift.check import check_recipe
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.loading import catalog_folder, catalog_names, load_recipe
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.serving import ServerArguments
from vllm_qualify.recipe.tables import known_versions
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


def test_a_recipe_promises_what_its_parsers_are_for() -> None:
    recipes = {name: load_recipe(name).recipe for name in catalog_names()}
    assert {name: recipe.capabilities for name, recipe in recipes.items() if recipe.capabilities} == PROMISES


def test_every_recipe_of_the_catalog_is_looked_at() -> None:
    assert set(catalog_names()) - {name for name in catalog_names() if name.startswith("reference")} == {*SEEDS, *PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_serves_as_its_source_publishes_it(name: str) -> None:
    ours, of = recipe(name), PUBLISHED[name]
    assert of.source in (catalog_folder() / f"{name}.yaml").read_text()
    assert {variant.model for variant in ours.variants.values()} == of.models
    for gpu_type, variant, profile in ours.cells(VLLM_VERSION):
        options = arguments(ours, gpu_type, variant, profile)
        tunables = {"tensor-parallel-size", "max-num-seqs"}
        assert {key: value for key, value in options.items() if key not in tunables} == of.features | {
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


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("version", ["0.12.0", VLLM_VERSION, known_versions()[-1]])
def test_a_version_takes_a_recipe_by_its_table(name: str, version: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    candidate = find_candidate(version, None, None, lambda _line: None)
    assert check_recipe(load_recipe(name), Choice(), candidate, tmp_path_factory.mktemp("answers")).fits


@pytest.mark.engine
def test_the_engine_has_every_parser_that_a_recipe_names(engine: EngineEnvironment) -> None:
    """By the registries of the real vLLM: its option parser takes any name."""
    for kind, option in (("tool", "tool-call-parser"), ("reasoning", "reasoning-parser")):
        names = {str(value) for name in (*SEEDS, *PUBLISHED) for value in _values(recipe(name), option)}
        assert names <= _registered(engine, kind)


def _values(of: Recipe, option: str) -> set[object]:
    every = (arguments(of, *cell) for cell in of.cells(VLLM_VERSION))
    return {options[option] for options in every if option in options}


def _registered(engine: EngineEnvironment, kind: str) -> set[str]:
    managers = {
        "tool": "from vllm.tool_parsers import ToolParserManager as M; names = M.list_registered()",
        "reasoning": "from vllm.reasoning import ReasoningParserManager as M; names = M.list_registered()",
    }
    code = f"{managers[kind]}; import json; print('NAMES', json.dumps(sorted(names)))"
    done = run_script(engine, code)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("NAMES "))
    return set(yaml.safe_load(line.removeprefix("NAMES ")))
