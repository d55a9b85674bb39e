"""Recipes: what is refused, and the message."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.recipes import Document, reference, write
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.load import OPEN_LOAD_CLIENTS, LoadSettings
from vllm_qualify.recipe.loading import catalog_folder, catalog_names, load_recipe
from vllm_qualify.recipe.metrics import GPU_GROWTH, METRICS
from vllm_qualify.recipe.recipe import LoadedRecipe, Profile, Recipe
from vllm_qualify.recipe.searches import Fit
from vllm_qualify.recipe.serving import ByVersion, Variant


@pytest.mark.parametrize("name", catalog_names())
def test_every_recipe_of_the_catalog_is_valid_and_its_files_are_there(name: str) -> None:
    loaded = load_recipe(name)
    assert loaded.recipe.name == name
    for variant in loaded.recipe.variants.values():
        if variant.is_local:
            assert (loaded.path(variant.model) / "config.json").is_file()
    for accuracy in loaded.recipe.accuracy:
        if questions := accuracy.questions:
            assert loaded.path(questions.test).is_file()
            assert questions.shots is None or loaded.path(questions.shots).is_file()


def changed(path: str, value: Any) -> Document:
    """The reference recipe with one key set, or removed if `value` is `...`."""
    document = reference()
    *parents, last = path.split(".")
    place: Any = document
    for parent in parents:
        place = place[int(parent)] if parent.isdigit() else place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


CPU = "gpu_types.cpu"
PROFILE = f"{CPU}.profiles.balanced"
LOAD, SWEEP, FIT, GATES = (f"{PROFILE}.{key}" for key in ("load", "sweep", "fit", "gates"))
ACCURACY, SCORES = "accuracy.0", "accuracy.0.published"
OF_FILE: Document = {"prompts": "prompts.jsonl", "output_len": 8, "num_warmups": 0}
SCORE: Document = {"score": 0.9, "source": "card"}
TOP = "(top level)"
COLD: Document = {"sampling": {"temperature": 0}}
BY_CHAT: Document = {"api": "chat", "num_questions": 8}
LONG: Document = BY_CHAT | {"task": "long_4096"}
OF_TRACE: Document = {"trace": "trace.jsonl", "num_warmups": 0, "window": "whole"}
OF_P99: Document = {"metric": "ttft_p99_ms", "maximum": 500, "unit": "ms"}
OF_HITS: Document = {"metric": "prefix_hit_share", "minimum": 0.5, "unit": "fraction"}
OF_GPU: Document = {"metric": "output_throughput_tok_s_gpu", "minimum": 1, "unit": "tok/s/GPU"}
OF_GOODPUT: Document = {"metric": "goodput_req_s", "minimum": 1, "unit": "req/s"}
OF_SOAK: Document = {"metric": "soak_host_memory_growth_mib_h", "maximum": 50, "unit": "MiB/h"}
OF_GPU_SOAK = OF_SOAK | {"metric": GPU_GROWTH}
FOLLOWING: Document = {"input_len": 8, "output_len": 8, "num_warmups": 0}
FITTED: Document = {"fit": {"max_num_seqs": True}}


@pytest.mark.parametrize(
    ("path", "value", "place", "message"),
    [
        (SCORES, [{"score": 0.9}], f"{SCORES}.0.source", "Field required"),
        (SCORES, [{"score": 0.9, "source": " "}], f"{SCORES}.0.source", "say where it is from"),
        (SCORES, [SCORE | {"score": 90}], f"{SCORES}.0.score", "less than or equal to 1"),
        (SCORES, [SCORE | {"metric": "exact_mach"}], f"{SCORES}.0.metric", "no score 'exact_mach': take exact_match, acc, "),
        (SCORES, [SCORE | {"metric": "ttft_p50_ms"}], f"{SCORES}.0.metric", "there is no score 'ttft_p50_ms'"),
        (SCORES, [{"source": "card"}], f"{SCORES}.0.score", "Field required"),
        ("accuracy.0.num_fewshots", 5, "accuracy.0.num_fewshots", "unknown key"),
        ("capabilities", ["chat", "vison"], "capabilities.1", "Input should be 'chat', 'tools', 'parallel_tools'"),
        ("capabilities", "chat", "capabilities", "Input should be a valid list"),
        ("capabilities", ["tools"], "capabilities", "tools needs chat beside it"),
        ("capabilities", ["parallel_tools", "chat"], "capabilities", "parallel_tools needs tools beside it"),
        ("capabilities", ["chat", "tools", "chat"], "capabilities", "chat is there more than once"),
        ("variants.bf16.capabilities", ["vision"], "variants.bf16.capabilities", "vision needs chat beside it"),
        ("contract", "maybe", "contract", "valid boolean"),
        (f"{LOAD}.max_concurency", 5, f"{LOAD}.max_concurency", "max_concurrency"),
        ("smoke.prompt", ..., "smoke.prompt", "required"),
        ("accuracy.0.num_fewshot", "5", "accuracy.0.num_fewshot", "valid integer, got '5'"),
        ("accuracy.0.num_fewshot", True, "accuracy.0.num_fewshot", "valid integer"),
        ("accuracy.0.reasoning_effort", "low", ACCURACY, "'reasoning_effort' is of chats: set 'api: chat'"),
        ("accuracy.0.system_prompt", "Be brief.", ACCURACY, "'system_prompt' is of chats"),
        ("accuracy.0.chat_template_kwargs", {"enable_thinking": True}, ACCURACY, "'chat_template_kwargs' is of chats"),
        ("accuracy", [BY_CHAT | {"chat_template_kwargs": {"tokenize": False}}], ACCURACY, "tokenize is the server's own"),
        ("accuracy.0.samples_per_question", 2, ACCURACY, "give 'sampling' with a temperature above 0"),
        ("accuracy", [BY_CHAT | COLD | {"samples_per_question": 2}], ACCURACY, "give 'sampling' with a temperature above 0"),
        ("accuracy", [BY_CHAT | {"sampling": "model", "samples_per_question": 11}], ACCURACY, "is more than 'most_repe"),
        ("accuracy", [BY_CHAT | {"reasoning_effort": "some"}], "accuracy.0.reasoning_effort", "'none', 'minimal', 'low'"),
        *(
            ("accuracy.0.task", task, ACCURACY, "name it long_512 to long_10000000")
            for task in ("long_0", "long_511", "long_04096", f"long_{'9' * 30}")
        ),
        ("accuracy", [LONG | {"max_gen_toks": 3777}], ACCURACY, "a reply of 3,777 tokens leave less than 320"),
        ("accuracy", [LONG | {"questions": {"test": "test.jsonl"}}], ACCURACY, "long_4096 makes its own questions"),
        (f"{LOAD}.max_concurrency", 0, f"{LOAD}.max_concurrency", "greater than or equal to 1, got 0"),
        (f"{LOAD}.num_prompts", 79, LOAD, "at least 5 times max_concurrency, so 80"),
        (f"{LOAD}.num_prompts", 0, f"{LOAD}.num_prompts", "greater than or equal to 1, got 0"),
        (f"{LOAD}.output_len", ..., LOAD, "give 'output_len'"),
        (f"{LOAD}.num_warmups", -1, f"{LOAD}.num_warmups", "greater than or equal to 0"),
        (f"{LOAD}.length_spread", 1.0, f"{LOAD}.length_spread", "less than 1, got 1"),
        (f"{LOAD}.length_spread", -0.1, f"{LOAD}.length_spread", "greater than or equal to 0"),
        (f"{LOAD}.input_len", ..., LOAD, "give 'input_len' for random prompts, 'prompts' for those of a file, or 'trace'"),
        (f"{LOAD}.prompts", "prompts.jsonl", LOAD, "one of the three"),
        (LOAD, OF_FILE | {"length_spread": 0.1}, LOAD, "'length_spread' is of random prompts"),
        (LOAD, OF_FILE | {"shared_prefix_len": 8}, LOAD, "'shared_prefix_len' is of random prompts"),
        (f"{LOAD}.prompts_sha256", "0", f"{LOAD}.prompts_sha256", "unknown key"),
        (f"{LOAD}.api", "responses", f"{LOAD}.api", "'completions' or 'chat'"),
        (f"{LOAD}.slo", {}, f"{LOAD}.slo", "give at least one of ttft_ms, tpot_ms and e2el_ms"),
        (f"{LOAD}.slo", {"ttft_ms": 0}, f"{LOAD}.slo.ttft_ms", "greater than 0"),
        (SWEEP, {}, SWEEP, "give 'concurrencies', or an 'slo' to be met, or both"),
        (SWEEP, {"search": ["concurrency"]}, SWEEP, "give 'concurrencies', or an 'slo'"),
        (SWEEP, {"concurrencies": [4, 2]}, f"{SWEEP}.concurrencies", "the smallest first"),
        (SWEEP, {"concurrencies": [2, 2]}, f"{SWEEP}.concurrencies", "each number once"),
        (SWEEP, {"concurrencies": [0]}, f"{SWEEP}.concurrencies.0", "greater than or equal to 1"),
        (SWEEP, {"slo": {"ttft_p95_ms": 1}}, SWEEP, "slo.ttft_p95_ms is not a latency of a load; known:"),
        (SWEEP, {"slo": {"goodput_req_s": 1}}, SWEEP, "slo.goodput_req_s is not a latency of a load"),
        (SWEEP, {"slo": {"startup_s": 1}}, SWEEP, "slo.startup_s is not a latency of a load"),
        (SWEEP, {"slo": {"ttft_p99_ms": 0}}, f"{SWEEP}.slo.ttft_p99_ms", "greater than 0"),
        (SWEEP, {"concurrencies": [1], "search": ["rate"]}, f"{SWEEP}.search.0", "'request_rate'"),
        (SWEEP, {"concurrencies": [1], "resolution": 0.6}, f"{SWEEP}.resolution", "less than or equal to 0.5"),
        (SWEEP, {"concurrencies": [1], "resolution": 0}, f"{SWEEP}.resolution", "greater than or equal to"),
        (FIT, {}, FIT, "give 'tensor_parallel_sizes', 'max_num_seqs' or 'max_num_batched_tokens'"),
        (FIT, {"max_num_seqs": False}, FIT, "give 'tensor_parallel_sizes', 'max_num_seqs' or"),
        (FIT, {"max_num_seqs": 8}, f"{FIT}.max_num_seqs", "valid boolean"),
        (FIT, {"tensor_parallel_sizes": [2, 1]}, f"{FIT}.tensor_parallel_sizes", "the smallest first"),
        (FIT, {"tensor_parallel_sizes": [1, 1]}, f"{FIT}.tensor_parallel_sizes", "each number once"),
        (FIT, {"max_num_batched_tokens": [2048]}, FIT, "give two or more, or write the one under 'server'"),
        (FIT, {"max_num_batched_tokens": [4, 2]}, f"{FIT}.max_num_batched_tokens", "the smallest first"),
        (FIT, {"max_num_seqs": True}, PROFILE, "fit finds max-num-seqs, and the server sets it too"),
        (PROFILE, FITTED | {"load": OF_FILE}, PROFILE, "fit finds max_num_seqs for random prompts only"),
        (PROFILE, FITTED | {"load": FOLLOWING | {"num_prompts": 400}}, PROFILE, "follow: leave load.num_prompts out"),
        (f"{CPU}.warm_starts", -1, f"{CPU}.warm_starts", "greater than or equal to 0"),
        (f"{CPU}.warm_starts", 1.5, f"{CPU}.warm_starts", "valid integer"),
        (f"{CPU}.starts", 0, f"{CPU}.starts", "greater than or equal to 1"),
        (f"{CPU}.starts", 17, f"{CPU}.starts", "less than or equal to 16"),
        (f"{CPU}.price_usd_gpu_hour", 0, f"{CPU}.price_usd_gpu_hour", "greater than 0"),
        (f"{CPU}.memory_limit_gib", 0.01, f"{CPU}.memory_limit_gib", "greater than or equal to 0.0625"),
        (GATES, [OF_P99], TOP, f"{LOAD}.num_prompts must be 918 or more for the gate on ttft_p99_ms"),
        (GATES, [OF_HITS], TOP, "a gate on prefix_hit_share needs prompts that begin alike"),
        (f"{PROFILE}.soak_min", 0, f"{PROFILE}.soak_min", "greater than 0"),
        (f"{PROFILE}.soak_share", 0.5, PROFILE, "soak_share is of a soak: give soak_min"),
        (PROFILE, {"load": OF_TRACE, "soak_min": 1}, PROFILE, "a trace has times of its own: give it another profile"),
        (GATES, [OF_SOAK], TOP, "the gate on soak_host_memory_growth_mib_h needs 'soak_min'"),
        (PROFILE, {"load": FOLLOWING, "soak_min": 1, "gates": [OF_GPU_SOAK]}, TOP, f"has no GPU for the gate on {GPU_GROWTH}"),
        (GATES, [OF_GPU], TOP, "has no GPU for the gate on output_throughput_tok_s_gpu"),
        (GATES, [OF_GOODPUT], TOP, "the workload's 'slo'"),
        ("gates.0.minimum", 1.5, "gates.0", "between 0 and 1"),
        *(("gates.0.minimum", bound, "gates.0.minimum", "finite number") for bound in (math.nan, math.inf)),
        ("gates.0.unit", "percent", "gates.0", "'fraction', not 'percent'"),
        ("gates.0.filter", ..., "gates.0", "names lm-eval's filter"),
        ("gates", [], "gates", "at least 1 item"),
        ("variants.bf16.environment", {"HF_TOKEN": "hf_x"}, "variants.bf16.environment.HF_TOKEN", "names a secret"),
        ("gpu_types.cpu.server.port", 8000, "gpu_types.cpu.server.port", "set by vllm-qualify"),
        ("gpu_types.cpu.server.--dtype", "auto", "gpu_types.cpu.server.--dtype", "without the leading dashes"),
        ("gpu_types.cpu.default_variant", "fp8", TOP, "not among the variants: bf16, draft, ngram, regressed"),
        ("gpu_types.cpu.startup_timeout_s", -1, "gpu_types.cpu.startup_timeout_s", "greater than 0"),
        ("name", "Reference Model", "name", "lower-case"),
        ("gpu_types.cpu.network", "ethernet", "gpu_types.cpu.network", "'infiniband'"),
        ("gates", [{"metric": "nccl_infiniband", "minimum": 1, "unit": "bool"}], "gates.0", "gates by itself where"),
    ],
)
def test_a_mistake_is_one_error_with_file_key_path_and_what_is_allowed(
    tmp_path: Path, path: str, value: Any, place: str, message: str
) -> None:
    file = write(changed(path, value), tmp_path / "mine.yaml")
    with pytest.raises(CallerError) as raised:
        load_recipe(str(file))
    assert raised.value.place == f"{file}: {place}"
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mapping"),
        ("- a\n- b\n", "mapping"),
        ("name: a\nname: b\n", "duplicate key"),
        ("name: [1, 2\n", "not valid YAML"),
        ("name: !!python/object:os.system {}\n", "YAML"),
        ("a: &a [*a]\n", "a value contains itself"),
        ("\t- x", "YAML"),
        ("name: \x00", "YAML"),
    ],
)
def test_text_that_is_no_recipe_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(CallerError, match=message):
        load_recipe(str(file))


def test_a_recipe_that_is_not_there_names_the_catalog(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="reference"):
        load_recipe("refrence")
    for path in (str(tmp_path / "none.yaml"), "~\0x/none.yaml", "~\ud800/none.yaml"):
        with pytest.raises(CallerError, match="no recipe"):
            load_recipe(path)


def _paths(document: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    return [prefix, *(path for key, value in inner for path in _paths(value, (*prefix, key)))]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.thorough
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_recipe_with_anything_anywhere_is_valid_or_one_clear_error(tmp_path: Path, data: st.DataObject) -> None:
    document: Any = reference()
    *parents, last = data.draw(st.sampled_from(_paths(document)[1:]))
    place = document
    for key in parents:
        place = place[key]
    place[last] = data.draw(ANYTHING)
    file = write(document, tmp_path / "fuzzed.yaml")
    try:
        assert isinstance(load_recipe(str(file)), LoadedRecipe)
    except CallerError as error:
        assert (error.place.startswith(str(file)), bool(error.problem), bool(error.remedy)) == (True, True, True)  # noqa: PT017


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "fuzzed.yaml"
    file.write_text(text, newline="")
    with pytest.raises(CallerError):
        load_recipe(str(file))


# Likelihoods are compared only.
ABSOLUTE = [metric for metric in METRICS.values() if metric.stage != "likelihood"]


@pytest.mark.parametrize("metric", ABSOLUTE, ids=lambda metric: metric.name)
def test_every_metric_takes_a_gate_on_its_good_side_only(metric: Any) -> None:
    good, bad = ("minimum", "maximum") if metric.direction == "higher" else ("maximum", "minimum")
    about = {"metric": metric.name, "unit": metric.unit, "filter": "none" if metric.is_score else None}
    assert gate_of(**{**about, good: 1.0}).bound == 1.0
    with pytest.raises(ValueError, match=f"give '{good}'"):
        gate_of(**{**about, bad: 1.0})


def test_paths_start_from_the_recipes_folder() -> None:
    assert load_recipe("reference").path("./reference/model") == (catalog_folder() / "reference/model").resolve()


# --- what differs by version

MOE_FP8 = "VLLM_USE_FLASHINFER_MOE_FP8"
LAYERED = Variant(
    model="org/model",
    server={"moe-backend": "flashinfer_cutlass", "max-model-len": 2560},
    environment={"NCCL_DEBUG": "WARN"},
    by_version=[
        ByVersion(vllm="<0.13", without=["moe-backend"], environment={MOE_FP8: "1"}, server={"max-model-len": 2048}),
        ByVersion(vllm=">=0.12,<0.14", server={"max-model-len": 1024}),
    ],
)


@pytest.mark.parametrize(
    ("version", "length", "has_backend"),
    [
        ("0.11.2", 2048, False),
        ("0.12.0", 1024, False),
        ("0.12.0+cpu", 1024, False),
        ("0.13.0", 1024, True),
        ("0.13.0rc1", 1024, True),
        ("0.14.0.dev12+g0123abc", 2560, True),
        ("0.32.0", 2560, True),
    ],
)
def test_each_range_that_covers_the_version_changes_what_stands_beside_it(version: str, length: int, has_backend: bool) -> None:
    server, environment = LAYERED.for_version(version)
    assert server["max-model-len"] == length
    assert ("moe-backend" in server) == has_backend
    assert (MOE_FP8 in environment) == (not has_backend)
    assert environment["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize("text", ["0.12", "newest", "", ">=x"])
def test_what_is_no_range_of_versions_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        ByVersion(vllm=text)


# --- where a variant can be served at all

TRT: Document = {"engine": "tensorrt-llm"}
TWO_TYPES: Document = {
    "h200": {"default_variant": "fp8", "profiles": {"balanced": {"load": {}}, "latency": {"load": {}}}},
    "b200": {"default_variant": "nvfp4", "profiles": {"balanced": {"load": {}}}},
}


def limited(variant: Document, **variants: Document) -> Document:
    """A recipe for H200 and B200 with the variants fp8 and nvfp4, the latter as given."""
    document = reference()
    load = document["gpu_types"]["cpu"]["profiles"]["balanced"]["load"]
    document["gpu_types"] = {
        gpu_type: serving | {"profiles": {name: {"load": load} for name in serving["profiles"]}}
        for gpu_type, serving in TWO_TYPES.items()
    }
    fp8: Document = {"model": "org/fp8"}
    document["variants"] = {"fp8": fp8, "nvfp4": {"model": "org/nvfp4"} | variant, **variants}
    return document


@pytest.mark.parametrize(
    ("variant", "version", "cells"),
    [
        ({}, None, [("h200", "balanced"), ("h200", "latency"), ("b200", "balanced")]),
        ({"gpu_types": ["b200"]}, None, [("b200", "balanced")]),
        ({"profiles": ["balanced"]}, None, [("h200", "balanced"), ("b200", "balanced")]),
        ({"gpu_types": ["b200"], "vllm": ">=0.15"}, None, [("b200", "balanced")]),
        ({"gpu_types": ["b200"], "vllm": ">=0.15"}, "0.14.1", []),
        ({"gpu_types": ["b200"], "vllm": ">=0.15"}, "0.15.0rc1", [("b200", "balanced")]),
        ({"gpu_types": ["b200"], "vllm": ">=0.15"}, "0.32.0+cpu", [("b200", "balanced")]),
    ],
)
def test_cells_are_those_that_the_variant_is_for(variant: Document, version: str | None, cells: list[tuple[str, str]]) -> None:
    recipe = Recipe.model_validate(limited(variant))
    planned = list(recipe.cells(version))
    assert [(gpu_type, profile) for gpu_type, name, profile in planned if name == "nvfp4"] == cells
    assert len([cell for cell in planned if cell[1] == "fp8"]) == 3


def test_another_engines_cells_are_at_no_version_of_vllm() -> None:
    recipe = Recipe.model_validate(limited(TRT | {"server": {"max_batch_size": 8}}))
    assert {variant for _, variant, _ in recipe.cells()} == {"fp8", "nvfp4"}
    assert {variant for _, variant, _ in recipe.cells("0.32.0")} == {"fp8"}


ED25519 = """-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAeAf+oXlDOZs2lWf3i0NZIbGMbyw7KtXmy5+DJLS4p+U=
-----END PUBLIC KEY-----
"""


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (limited({"gpu_types": ["b300"]}), "variants.nvfp4.gpu_types names b300, which the recipe does not have: b200, h200"),
        (limited({"profiles": ["batch"]}), "variants.nvfp4.profiles names batch, which the recipe does not have"),
        (limited({"gpu_types": ["h200"]}), "gpu_types.b200.default_variant 'nvfp4' is not for b200"),
        (limited({"profiles": ["latency"]}), "gpu_types.b200.default_variant 'nvfp4' is not for b200"),
        (limited({}, draft={"model": "org/fp8", "gpu_types": ["b200"], "profiles": ["latency"]}), "variants.draft has no cell"),
        (limited({"vllm": "newest"}), "'newest' is not a range of versions"),
        (limited({"gpu_types": ["B200"]}), "lower-case"),
        (limited({"engine": "no-such-engine"}), "'vllm'"),
        (limited(TRT | {"vllm": ">=0.15"}), "'vllm' is about versions of vLLM"),
        (limited(TRT | {"by_version": [{"vllm": ">=0.15"}]}), "'by_version' is about versions of vLLM"),
        (limited(TRT | {"server": {"served_model_name": "x"}}), "'served_model_name' is set by vllm-qualify"),
        (limited({"signed_by": "key"}), "not a public key in PEM"),
        (limited({"signed_by": ED25519}), "not a key on the curves P-256, P-384 or P-521"),
        (limited({"server": {"max_model_len": 8}}), "write max_model_len as max-model-len"),
        (limited({"by_version": [{"vllm": "<1", "server": {"max_model_len": 8}}]}), "write max_model_len as max-model-len"),
        (limited({"server": {"a_b.c_d": 8}}), "write a_b.c_d as a-b.c_d"),
        (limited({"by_version": [{"vllm": "<1", "without": ["moe"]}]}), "0.without names moe, which the keys beside it do not"),
        (limited(TRT) | {"aliases": ["a"]}, "a server of tensorrt-llm has one name"),
        (changed("aliases", ["a", "a"]), "aliases: a is a name of the model more than once"),
        (changed("aliases", [reference()["served_model_name"]]), "is a name of the model more than once"),
        (changed("aliases", ["--api-key"]), "aliases: '--api-key' begins with a dash, so the engine would read it as an"),
        (changed("aliases", [""]), "at least 1 character"),
    ],
)
def test_a_variant_or_alias_that_does_not_fit_its_recipe_is_refused(tmp_path: Path, document: Document, message: str) -> None:
    with pytest.raises(CallerError) as raised:
        load_recipe(str(write(document, tmp_path / "mine.yaml")))
    assert message in raised.value.problem


# --- workloads


def test_a_file_of_prompts_takes_the_place_of_their_length() -> None:
    load = LoadSettings.model_validate(OF_FILE | {"max_concurrency": 4, "num_prompts": 20})
    assert (load.input_len, load.prompts, load.longest_tok) == (None, "prompts.jsonl", None)


def test_a_gate_on_a_percentile_needs_no_number_of_prompts_where_it_follows() -> None:
    document = changed(f"{LOAD}.num_prompts", ...)
    document["gpu_types"]["cpu"]["profiles"]["balanced"]["gates"] = [OF_P99]
    assert Recipe.model_validate(document).gpu_types["cpu"].profiles["balanced"].load.num_prompts is None


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ({"input_len": 96, "output_len": 32}, 128),
        ({"input_len": 96, "output_len": 32, "length_spread": 0.25}, 120 + 40),
        ({"input_len": 96, "output_len": 32, "length_spread": 0.25, "shared_prefix_len": 200}, 200 + 120 + 40),
        ({"input_len": 10, "output_len": 10, "length_spread": 0.01}, 11 + 11),
    ],
)
def test_the_longest_request_has_the_most_tokens_of_both(lengths: Document, tokens: int) -> None:
    assert LoadSettings.model_validate(FOLLOWING | lengths).longest_tok == tokens


AT_A_RATE: Document = {"input_len": 8, "output_len": 4, "num_warmups": 0, "request_rate": 8.0, "min_duration_s": 10.0}


@pytest.mark.parametrize(
    ("load", "served", "least", "clients", "prompts"),
    [
        (FOLLOWING, 8, 1, 8, 40),
        (FOLLOWING, 8, 88, 8, 88),
        (FOLLOWING | {"max_concurrency": 4}, 8, 1, 4, 20),
        (FOLLOWING | {"max_concurrency": 4}, None, 1, 4, 20),
        (FOLLOWING | {"num_prompts": 40}, 8, 88, 8, 40),
        # A load at a rate lasts as long as it must.
        (AT_A_RATE, 64, 1, OPEN_LOAD_CLIENTS, 100),
        (AT_A_RATE | {"burstiness": 0.25}, 64, 1, OPEN_LOAD_CLIENTS, 100),
        (AT_A_RATE, 64, 918, OPEN_LOAD_CLIENTS, 918),
        (AT_A_RATE | {"num_prompts": 12}, 64, 1, OPEN_LOAD_CLIENTS, 12),
        (AT_A_RATE | {"min_duration_s": 0.01}, 64, 1, OPEN_LOAD_CLIENTS, 1),
    ],
)
def test_what_a_load_leaves_open_follows(load: Document, served: int | None, least: int, clients: int, prompts: int) -> None:
    settled = LoadSettings.model_validate(load).make_load(served, least)
    assert (settled.max_concurrency, settled.num_prompts) == (clients, prompts)
    assert (settled.is_open, settled.request_rate) == ("request_rate" in load, load.get("request_rate"))


@pytest.mark.parametrize(("most", "looks"), [(10, [5, 6, 7, 8, 9, 10]), (5, [5]), (3, [5])])
def test_gates_are_looked_at_after_each_repeat_from_the_first_look_on(most: int, looks: list[int]) -> None:
    assert list(LoadSettings.model_validate(FOLLOWING | {"repeats": 5, "most_repeats": most}).looks) == looks


OF_2048: Document = {"max_concurrency": 1024, "num_prompts": 2048}
WHOLE: Document = {"window": "whole"}


@pytest.mark.parametrize(
    ("load", "served", "message"),
    [
        ({}, None, "give max_concurrency, or the server its max-num-seqs"),
        ({"num_prompts": 39}, 8, "at least 5 times max_concurrency, so 40 or more"),
        (OF_2048, None, "so 5120 or more; or set `window: whole`"),
        (OF_2048 | WHOLE | {"num_prompts": 1023}, None, r"at least max_concurrency, so 1024 or more [^;]*$"),
    ],
)
def test_a_load_that_does_not_follow_is_refused(load: Document, served: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadSettings.model_validate(FOLLOWING | load).make_load(served, 1)


def test_a_whole_run_needs_a_prompt_for_each_client_and_for_a_percentile_none_that_are_cut_off() -> None:
    assert LoadSettings.model_validate(FOLLOWING | OF_2048 | WHOLE).make_load(None, 1).num_prompts == 2048
    steady, whole = (LoadSettings.model_validate(FOLLOWING | window) for window in ({}, WHOLE))
    assert [each.least_prompts("ttft_p99_ms") for each in (steady, whole)] == [918, 459]


def test_a_fit_names_the_options_that_it_finds() -> None:
    assert Fit(max_num_seqs=True).options == ["max-num-seqs"]
    both = Fit(tensor_parallel_sizes=[1, 2], max_num_batched_tokens=[2048, 4096])
    assert both.options == ["tensor-parallel-size", "max-num-batched-tokens"]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"max_concurrency": 4}, "leave 'max_concurrency' out"),
        ({"request_rate": None, "burstiness": 0.5}, "give 'request_rate' too"),
        ({"request_rate": 0.0}, "greater than 0"),
        ({"request_rate": -1.0}, "greater than 0"),
        ({"request_rate": math.nan}, "finite number"),
        ({"request_rate": math.inf}, "finite number"),
        ({"burstiness": 0.0}, "greater than 0"),
        ({"burstiness": math.inf}, "finite number"),
    ],
)
def test_a_rate_that_is_none_is_refused(load: Document, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        LoadSettings.model_validate(AT_A_RATE | load)


@pytest.mark.parametrize("search", [{"sweep": {"concurrencies": [1, 2]}}, {"fit": {"max_num_seqs": True}}])
def test_nothing_is_searched_with_clients_under_a_load_that_has_none(search: Document) -> None:
    with pytest.raises(ValidationError, match="the load has times of its own: give it a profile of its own"):
        Profile.model_validate({"load": AT_A_RATE, **search})
