"""The seed recipes: what the catalog promises of them, and that they serve as vllm-project/recipes publishes it."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from pydantic import JsonValue

from tests.builders.seed_recipes import (
    BLACKWELL,
    COMMANDS,
    DIFFERENCES,
    HOPPER,
    MODELS,
    PUBLISHED,
    RENAMED,
    SEEDS,
    VLLM_VERSION,
    arguments,
    needs_published,
    options_of,
    recipe,
)
from vllm_qualify.recipe.loading import catalog_names
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.serving import Environment

# The bound on Llama 3.3 70B's strict-match, .6293 in the guide.
STRICT = 0.597
# Variants of Llama 3.3 70B with a draft model on vLLM → that model.
DRAFTS = {
    "fp8-draft-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "fp8-draft-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "fp8-draft-8b": "meta-llama/Llama-3.1-8B-Instruct",
}


def environment(recipe: Recipe, gpu_type: str, variant: str | None) -> Environment:
    serving = recipe.gpu_types[gpu_type]
    return serving.environment | recipe.variants[variant or serving.default_variant].environment


def published(model: str, gpu_type: str) -> Any:
    return json.loads((PUBLISHED / model / "hw" / f"{gpu_type}.json").read_text(encoding="utf-8"))


def differing(model: str, gpu_type: str) -> set[str]:
    """Published options that some profile of ours lacks or sets otherwise."""
    name, variant = MODELS[model]
    theirs = options_of(published(model, gpu_type)["argv"])
    keys = set()
    for profile in recipe(name).gpu_types[gpu_type].profiles:
        ours = arguments(recipe(name), gpu_type, variant, profile)
        keys |= {key for key, value in theirs.items() if key not in ours or ours[key] != value}
    return keys


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_recipe_has_every_gpu_type_and_profile_and_nvfp4_on_blackwell_alone(name: str) -> None:
    assert recipe(name).name == name
    assert list(recipe(name).gpu_types) == [*HOPPER, *BLACKWELL]
    for gpu_type, serving in recipe(name).gpu_types.items():
        of_llama = {"h200": ["single-stream", "drafted"], "b200": ["guide"], "gb200": ["guide"]}.get(gpu_type, [])
        # A tray of GB200s has four GPUs, and only the guides of the Llamas have a latency profile for eight.
        on_eight = ["latency-8"] if name.startswith("llama") and gpu_type != "gb200" else []
        others = [*(of_llama if name == "llama-3.3-70b" else []), *on_eight]
        assert set(serving.profiles) == {"throughput", "balanced", "latency", *others}
    with_nvfp4 = {gpu_type for gpu_type, variant, _ in recipe(name).cells(VLLM_VERSION) if variant.endswith("nvfp4")}
    assert with_nvfp4 == (set(BLACKWELL) if "nvfp4" in recipe(name).variants else set())


@pytest.mark.parametrize(
    ("name", "model", "other", "blackwell"),
    [
        ("llama-3.3-70b", "nvidia/Llama-3.3-70B-Instruct", "nvfp4", "nvfp4"),
        ("llama-4-scout", "nvidia/Llama-4-Scout-17B-16E-Instruct", "nvfp4", "nvfp4"),
        ("nemotron-3-nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", "bf16", "fp8"),
    ],
)
def test_weights_and_the_default_by_gpu_type(name: str, model: str, other: str, blackwell: str) -> None:
    models = {precision: f"{model}-{precision.upper()}" for precision in ("fp8", other)}
    variants = recipe(name).variants
    plain = {variant: entry for variant, entry in variants.items() if entry.of_vllm and variant not in DRAFTS}
    assert {variant: entry.model for variant, entry in plain.items()} == models
    assert {entry.model for entry in variants.values()} == set(models.values())
    defaults = {gpu_type: serving.default_variant for gpu_type, serving in recipe(name).gpu_types.items()}
    assert defaults == dict.fromkeys(HOPPER, "fp8") | dict.fromkeys(BLACKWELL, blackwell)


@pytest.mark.parametrize("name", SEEDS)
def test_size_and_batch_follow_the_profiles_goal_and_the_load_the_server(name: str) -> None:
    for gpu_type, variant, profile in recipe(name).cells(VLLM_VERSION):
        ours = arguments(recipe(name), gpu_type, variant, profile)
        size, batch = ours["tensor-parallel-size"], ours["max-num-seqs"]
        if profile == "balanced":
            assert (size, batch) == (2, 128)
        elif profile in ("latency", "latency-8"):
            assert (size, batch) == (8 if profile == "latency-8" else 4, 8)
        elif profile in ("single-stream", "drafted"):
            assert (size, batch) == (1, 8)
        else:
            # FP8 weights of Scout are for two GPUs, and those of Llama 3.3 70B too large for one H100.
            on_two = (name == "llama-4-scout" and variant == "fp8") or (name, gpu_type) == ("llama-3.3-70b", "h100")
            assert size == (2 if on_two else 1)
        load = recipe(name).gpu_types[gpu_type].profiles[profile].load.make_load(None, 1)
        single = profile in ("single-stream", "drafted")
        assert (load.input_len, load.output_len) == ((500, 200) if single else (1024, 1024))
        assert ours["max-model-len"] == {"llama-3.3-70b": 131072, "llama-4-scout": 131072, "nemotron-3-nano": 262144}[name]
        assert load.max_concurrency == (1 if single else 512 if profile == "guide" else batch)
        assert load.num_prompts >= 5 * load.max_concurrency
        assert load.num_warmups > 0


@pytest.mark.parametrize("name", catalog_names())
def test_nothing_that_serves_a_benchmark_alone_is_in_a_recipe_for_gpus(name: str) -> None:
    for gpu_type, variant, profile in recipe(name).cells():
        options = {key.replace("_", "-") for key in _all_keys(arguments(recipe(name), gpu_type, variant, profile))}
        switches = {"no-enable-prefix-caching", "no-enable-chunked-prefill", "enforce-eager", "disable-log-requests"}
        assert gpu_type == "cpu" or not options & (switches | {"enable-block-reuse", "load-format", "ignore-eos"})
        assert "VLLM_SERVER_DEV_MODE" not in environment(recipe(name), gpu_type, variant)


def _all_keys(options: dict[str, JsonValue]) -> set[str]:
    inner = [value for value in options.values() if isinstance(value, dict)]
    return {*options, *(key for each in inner for key in _all_keys(each))}


@pytest.mark.parametrize("name", catalog_names())
def test_no_profile_asks_the_prompts_of_another_one_on_the_same_server(name: str) -> None:
    """A server is shared by cells that are served alike, and remembers what it was asked."""
    for serving in recipe(name).gpu_types.values():
        loads = [(profile.load.make_load(8, 1), each) for each, profile in serving.profiles.items()]
        seeds = sorted(load.model_copy(update={"seeded_by": each}).bench_seed(1) for load, each in loads)
        assert all(after - before >= 5000 for before, after in pairwise(seeds))


def test_nemotrons_parsers_are_those_of_production() -> None:
    for gpu_type, variant, profile in recipe("nemotron-3-nano").cells(VLLM_VERSION):
        ours = arguments(recipe("nemotron-3-nano"), gpu_type, variant, profile)
        assert ours["enable-auto-tool-choice"] is True
        assert (ours["tool-call-parser"], ours["reasoning-parser"]) == ("qwen3_coder", "nemotron_v3")
    for serving in recipe("nemotron-3-nano").gpu_types.values():
        assert "reasoning-parser" not in serving.for_version("0.17.0")[0]
        assert serving.for_version("0.17.1")[0]["reasoning-parser"] == "nemotron_v3"


@pytest.mark.parametrize(
    ("name", "filter_", "bound"),
    [
        ("llama-3.3-70b", "flexible-extract", 0.895),
        ("llama-4-scout", "flexible-extract", 0.862),
        ("nemotron-3-nano", "strict-match", 0.61),
    ],
)
def test_all_of_gsm8k_is_asked_and_gated_on_the_filter_that_fits_the_model(name: str, filter_: str, bound: float) -> None:
    first, *by_chat = recipe(name).accuracy
    assert (first.task, first.num_fewshot, first.num_questions, first.api) == ("gsm8k", 5, 1319, "completions")
    assert {task.api for task in by_chat} == {"chat"}
    gated = [gate for gate in recipe(name).gates if gate.task not in ("mmlu_pro", "chartqa", "bfcl")]
    absolute, *others = [gate for gate in gated if not (name == "llama-3.3-70b" and gate.bound == STRICT)]
    assert (absolute.metric, absolute.filter, absolute.bound) == ("exact_match", filter_, bound)
    against = {(gate.metric, gate.filter, gate.bound) for gate in others if gate.is_against_baseline}
    speed = {("output_throughput_tok_s", None, 0.025), ("tpot_p50_ms", None, 0.025)}
    assert against == {("exact_match", filter_, 0.0075), *speed}


@pytest.mark.parametrize("name", ["llama-4-scout", "qwen3-vl-235b"])
def test_a_model_that_sees_is_gated_on_pictures_with_a_baseline_or_without(name: str) -> None:
    (asked,) = (task for task in recipe(name).accuracy if task.task == "chartqa")
    assert (asked.api, asked.stop, asked.num_questions) == ("chat", [], 2000)
    gates = {(gate.metric, gate.filter, gate.bound) for gate in recipe(name).gates if gate.task == "chartqa"}
    seen = {("relaxed_accuracy", "none", 0.6), ("relaxed_accuracy", "none", 0.015)}
    assert gates == {*seen, ("truncated_answers", None, 0.05)}


@pytest.mark.parametrize("name", [name for name in catalog_names() if not name.startswith("reference")])
def test_a_model_that_calls_tools_is_gated_on_its_calls(name: str) -> None:
    found = recipe(name)
    asked = [task for task in found.accuracy if task.task == "bfcl"]
    gates = {(gate.metric, gate.filter, gate.bound) for gate in found.gates if gate.task == "bfcl"}
    if "tools" not in found.capabilities:
        assert (asked, gates) == ([], set())
        return
    assert [(task.api, task.stop, task.num_questions) for task in asked] == [("chat", [], 1240)]
    assert gates == {("acc", "ast", 0.5), ("acc", "ast", 0.02)}
    for gpu_type, variant, profile in found.cells(VLLM_VERSION):
        ours = arguments(found, gpu_type, variant, profile)
        assert ours["enable-auto-tool-choice"] is True
        assert ours["tool-call-parser"]


@pytest.mark.parametrize("name", SEEDS)
def test_it_is_gated_as_it_is_used_too(name: str) -> None:
    (asked,) = (task for task in recipe(name).accuracy if task.task == "mmlu_pro")
    assert (asked.api, asked.stop) == ("chat", [])
    gates = {(gate.metric, gate.filter, gate.bound) for gate in recipe(name).gates if gate.task == "mmlu_pro"}
    assert gates == {("exact_match", "custom-extract", 0.015), ("truncated_answers", None, 0.05)}
    for serving in recipe(name).gpu_types.values():
        assert int(str(serving.server["max-model-len"])) > (asked.max_gen_toks or 256) + 8192


@pytest.mark.parametrize(("variant", "draft"), DRAFTS.items())
def test_a_draft_model_is_pinned_and_serves_one_request_at_a_time_on_one_h200(variant: str, draft: str) -> None:
    llama = recipe("llama-3.3-70b")
    assert [cell for cell in llama.cells() if cell[1] == variant] == [("h200", variant, "drafted")]
    config = arguments(llama, "h200", variant, "drafted")["speculative-config"]
    assert isinstance(config, dict)
    assert (config["method"], config["model"]) == ("draft_model", draft)
    assert re.fullmatch("[0-9a-f]{40}", str(config["revision"]))


def test_a_draft_must_make_the_server_faster_under_the_load_of_the_same_model_without_it() -> None:
    llama = recipe("llama-3.3-70b")
    profiles = llama.gpu_types["h200"].profiles
    drafted, single = profiles["drafted"], profiles["single-stream"]
    assert (drafted.server, drafted.load) == (single.server, single.load)
    assert [(gate.metric, gate.bound) for gate in drafted.gates] == [("speculative_speedup", 1.0)]
    # A server without a draft has no speedup to be gated.
    assert {variant for _, variant, profile in llama.cells() if profile == "drafted"} == set(DRAFTS)


def test_tensorrt_llm_serves_the_same_with_and_without_the_drafts() -> None:
    variants = {name: entry for name, entry in recipe("llama-3.3-70b").variants.items() if not entry.of_vllm}
    assert list(variants) == ["trtllm-fp8", *(f"trtllm-{variant}" for variant in DRAFTS)]
    plain = variants["trtllm-fp8"]
    single = recipe("llama-3.3-70b").gpu_types["h200"].profiles["single-stream"]
    assert (plain.server["max_batch_size"], plain.server["tensor_parallel_size"]) == (single.server["max-num-seqs"], 1)
    for variant, draft in DRAFTS.items():
        entry = variants[f"trtllm-{variant}"]
        assert (entry.model, entry.gpu_types, entry.profiles) == (plain.model, ["h200"], ["single-stream"])
        assert entry.server == plain.server | {
            "disable_overlap_scheduler": True,
            "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": draft},
        }


@pytest.mark.parametrize(
    ("version", "async_scheduling"),
    [("0.14.1", None), ("0.15.0", False), ("0.15.1", False), ("0.16.0", True), ("0.32.0", True)],
)
def test_async_scheduling_goes_with_a_draft_model_from_the_version_that_can(
    version: str, async_scheduling: bool | None
) -> None:
    llama = recipe("llama-3.3-70b")
    drafts = [cell for cell in llama.cells(version) if cell[1] in DRAFTS]
    assert len(drafts) == (0 if async_scheduling is None else len(DRAFTS))
    for gpu_type, variant, profile in drafts:
        serving = llama.gpu_types[gpu_type]
        layers = (serving, llama.variants[variant], serving.profiles[profile])
        merged = {name: value for layer in layers for name, value in layer.for_version(version)[0].items()}
        assert merged["async-scheduling"] is async_scheduling


@needs_published
@pytest.mark.parametrize(("model", "gpu_type"), COMMANDS)
def test_published_options_and_environment_are_ours(model: str, gpu_type: str) -> None:
    assert differing(model, gpu_type) <= set(DIFFERENCES)
    name, variant = MODELS[model]
    ours = environment(recipe(name), gpu_type, variant)
    theirs = published(model, gpu_type)["env"]
    for variable, value in theirs.items():
        if variable not in RENAMED:
            assert ours.get(variable) == value
            continue
        option, values = RENAMED[variable]
        assert variable not in ours
        for profile in recipe(name).gpu_types[gpu_type].profiles:
            assert arguments(recipe(name), gpu_type, variant, profile)[option] in values[value]


@needs_published
def test_every_published_command_for_these_models_is_compared_and_every_listed_difference_occurs() -> None:
    hardware = (*HOPPER, *BLACKWELL)
    files = [(model, file.stem) for model in MODELS for file in (PUBLISHED / model / "hw").glob("*.json")]
    assert sorted(pair for pair in files if pair[1] in hardware) == sorted(COMMANDS)
    assert {option for command in COMMANDS for option in differing(*command)} == set(DIFFERENCES)
    assert {variable for command in COMMANDS for variable in published(*command)["env"]} == set(RENAMED)
