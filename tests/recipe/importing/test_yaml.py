"""YAML: what is put together from it, and what its JSON beside it does."""

from pathlib import Path

import pytest

from tests.recipe.importing.documents import Document, imported, model_document, published_document, repository, written
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing.documents import InexpressibleError

EXPERTS: Document = {"data-parallel-size": 8, "enable-expert-parallel": True}
TP, SPEC = "strategy_overrides__single_node_tp", "features__spec__modes__"
OLDEST, IMAGE = "model__min_vllm_version", "model__docker_image"
SEVERAL = "multi_node, a deployment on several nodes"
DEFAULT, HARDWARE = "variants__default__", "strategy_hardware__"
BOTH = {"compatible_strategies": ["single_node_tp", "multi_node_tp"]}
VERIFIED = {"meta__hardware": {"rtx_5090": "verified"}}


def tp(size: int) -> Document:
    return {"tensor-parallel-size": size}


@pytest.mark.parametrize(
    ("changes", "h200", "b200"),
    [
        ({}, tp(1), tp(1)),
        ({"variants__default__vram_minimum_gb": 150}, tp(8), tp(1)),
        ({"variants__default__tp": 2}, tp(2), tp(2)),
        ({"variants__default__tp": 99}, tp(8), tp(8)),
        ({f"{TP}__tp": {"hopper": 4, "default": 2}}, tp(4), tp(2)),
        (
            {"hardware_overrides__nvidia__extra_args": ["--seed", "2"], "hardware_overrides__hopper__extra_args": ["--x"]},
            tp(1) | {"x": True},
            tp(1) | {"seed": 2},
        ),
        (
            {
                "hardware_overrides__hopper__extra_args": ["--x"],
                f"{TP}__hardware_overrides__hopper__extra_args": ["--y"],
                f"{TP}__hardware_overrides__b200__extra_args": ["--z"],
            },
            tp(1) | {"y": True},
            tp(1) | {"z": True},
        ),
        (
            {
                "features__a__args": ["--a"],
                "features__a__hardware_overrides__blackwell__args": ["--of-blackwell"],
                "features__b__args": ["--b"],
                "opt_in_features": ["b"],
                "features__c__args": ["--c"],
                "features__c__strategies": ["pd_cluster"],
                "features__d__args": ["--d"],
                "hardware_opt_in_features__b200": ["d"],
            },
            tp(1) | {"a": True, "d": True},
            tp(1) | {"of-blackwell": True},
        ),
        (
            {
                "default_strategy": "single_node_dep",
                "compatible_strategies": ["single_node_dep"],
                "strategy_overrides__single_node_dep__extra_args": ["--x"],
                f"{TP}__extra_args": ["--y"],
            },
            EXPERTS | {"x": True},
            EXPERTS | {"x": True},
        ),
        (
            {
                "features__spec__default_mode": "one",
                f"{SPEC}one": {"args": ["--one"], "hardware_overrides": {"hopper": {"args": ["--hopper"]}}},
                f"{SPEC}two": {"args": ["--two"]},
            },
            tp(1) | {"hopper": True},
            tp(1) | {"one": True},
        ),
        (
            {
                "features__spec": {"modes": {"two": {"args": ["--two"], "variants": ["default"]}}},
                "opt_in_features": ["spec"],
                "variants__default__default_modes__spec": "two",
            },
            tp(1) | {"two": True},
            tp(1) | {"two": True},
        ),
        (
            {
                "features__spec__default_mode": "one",
                f"{SPEC}one": {"args": ["--one"], "hardware": {"hopper": "unsupported"}},
                f"{SPEC}two": {"args": ["--two"], "variants": ["fp8"]},
                f"{SPEC}three": {"args": ["--three"], "hardware": {"b200": "unsupported"}},
            },
            tp(1) | {"three": True},
            tp(1) | {"one": True},
        ),
        ({f"{SPEC}one": {"args": ["--one"], "variants": ["fp8"]}}, tp(1), tp(1)),
        (
            {
                "compatible_strategies": ["pd_cluster", "single_node_tp", "single_node_dep"],
                "strategy_hardware__single_node_tp__hopper": "unsupported",
                "default_strategy": "other",
            },
            EXPERTS,
            tp(1),
        ),
        ({"model__base_args": ["--seed", "1", "", "--x"]}, tp(1) | {"x": True}, tp(1) | {"x": True}),
    ],
)
def test_yaml_is_put_together_by_gpu_type(changes: Document, h200: Document, b200: Document, tmp_path: Path) -> None:
    recipe = imported(repository(tmp_path, model_document(**changes))).recipe
    assert recipe.gpu_types["h200"].server == {"seed": 1} | h200
    assert recipe.gpu_types["b200"].server == {"seed": 1} | b200


def test_cpus_have_as_many_ranks_as_the_yaml_asks_for(tmp_path: Path) -> None:
    document = model_document(meta__hardware={"xeon6": "verified"}, variants__default__tp={"cpu": 6, "default": 99})
    recipe = imported(repository(tmp_path, document)).recipe
    sizes = {name: serving.server["tensor-parallel-size"] for name, serving in recipe.gpu_types.items()}
    assert sizes == {"b200": 8, "h200": 8, "cpu": 6}


def test_a_later_layer_of_yaml_goes_over_an_earlier_one(tmp_path: Path) -> None:
    layers = {
        "model__base_env": {"VLLM_A": 1, "VLLM_B": "base"},
        "variants__default__extra_env": {"VLLM_B": "variant", "VLLM_C": "variant"},
        "variants__default__hardware_overrides__h200__extra_env": {"VLLM_C": "h200"},
        "hardware_overrides__hopper__extra_env": {"VLLM_D": "hopper"},
        "variants__default__extra_args": ["--seed", "2"],
    }
    serving = imported(repository(tmp_path, model_document(**layers))).recipe.gpu_types["h200"]
    assert serving.environment == {"VLLM_A": "1", "VLLM_B": "variant", "VLLM_C": "h200", "VLLM_D": "hopper"}
    assert serving.server["seed"] == 2


@pytest.mark.parametrize(
    ("changes", "meant"),
    [
        ({"meta__hardware": {"h200": "unsupported"}}, ["b200"]),
        ({"variants__default__supported_hardware": ["h200"]}, ["h200"]),
        ({"variants__default__precision": "nvfp4"}, ["b200"]),
        ({f"{DEFAULT}precision": "nvfp4", f"{DEFAULT}precision_hardware": {"brand": "NVIDIA"}}, ["h200", "b200"]),
        ({f"{DEFAULT}vram_minimum_gb": 1200, **BOTH}, ["b200"]),
        ({"variants__default__vram_minimum_gb": 2000}, ["h200", "b200"]),
        ({"meta__hardware": {"xeon6": "verified", "rtx_5090": "verified"}}, ["h200", "b200", "cpu"]),
        ({**VERIFIED, f"{DEFAULT}vram_minimum_gb": 30}, ["h200", "b200", "geforce-rtx-5090"]),
        ({"default_strategy": "multi_node_tp", "strategy_hardware__multi_node_tp__hopper": "supported"}, ["b200"]),
        ({"strategy_min_gpus": {"multi_node_tp": 99, "single_node_tp": 8, "h200": 16}}, ["b200"]),
        ({"strategy_min_gpus": {"h200": {"single_node_tp": 16}}}, ["b200"]),
    ],
)
def test_yaml_has_the_gpu_types_that_the_variant_is_meant_for(changes: Document, meant: list[str], tmp_path: Path) -> None:
    recipe = imported(repository(tmp_path, model_document(**changes))).recipe
    assert set(recipe.gpu_types) == set(meant)


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"meta__tasks": ["omni", "text"]}, "meta.tasks", "an omni model"),
        ({"meta__tasks": ["embedding"]}, "meta.tasks", "an embedding model"),
        ({"compatible_strategies": ["multi_node_tp"]}, None, SEVERAL),
        ({"default_strategy": "multi_node_tp", "compatible_strategies": ["multi_node_tp"]}, None, SEVERAL),
        ({f"{HARDWARE}multi_node_tp__nvidia": "supported", f"{HARDWARE}single_node_tp__nvidia": "unsupported"}, None, SEVERAL),
        ({"strategy_min_gpus": 16}, "strategy_min_gpus", "16 GPUs on one node of b200, which has 8"),
        ({"strategy_min_gpus__single_node_tp": 9}, "strategy_min_gpus.single_node_tp", "9 GPUs on one node"),
        ({f"{DEFAULT}vram_minimum_gb": 2000, **BOTH}, "variants.default.vram_minimum_gb", "weights of 2000 GB on one node"),
        ({"features__kv__companion": {"command": "x"}}, "features.kv.companion", "another command beside the server"),
        ({"variants__default__supported_hardware": ["mi300x"]}, "variants.default", "meant for no GPU type of ours"),
        ({"model__base_args": ["--omni"]}, "model", "--omni: an omni model"),
    ],
)
def test_yaml_that_cannot_be_put_together_is_refused_by_name(
    changes: Document, key: str | None, message: str, tmp_path: Path
) -> None:
    path = repository(tmp_path, model_document(**changes))
    with pytest.raises(InexpressibleError) as refusal:
        imported(path)
    assert message in refusal.value.problem
    assert refusal.value.place == (f"{path}: {key}" if key else f"{tmp_path / 'strategies/multi_node_tp.yaml'}: deploy_type")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"meta": []}, "meta"),
        ({"variants": None}, "variants"),
        ({"variants": {"default": 1}}, "variants.default"),
        ({"variants": {1: {}}}, "variants"),
        ({"model__base_args": "--seed 1"}, "model.base_args"),
        ({"model__base_args": [True]}, "model.base_args.0"),
        ({"model__model_id": None}, "model.model_id"),
        ({"model__base_env": {"A": 0.5}}, "model.base_env.A"),
        ({"variants__default__tp": "2"}, "variants.default.tp"),
        ({"variants__default__vram_minimum_gb": "big"}, "variants.default.vram_minimum_gb"),
        ({"features__a": ["--x"]}, "features.a"),
    ],
)
def test_yaml_of_another_form_is_one_error_with_file_and_key(changes: Document, key: str, tmp_path: Path) -> None:
    path = repository(tmp_path, model_document(**changes))
    with pytest.raises(CallerError) as error:
        imported(path)
    assert (type(error.value), error.value.place) == (CallerError, f"{path}: {key}")


def test_a_taxonomy_of_another_form_or_an_unknown_variant_is_named(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="variants: default"):
        imported(repository(tmp_path, model_document()), "fp4")
    path = repository(tmp_path, model_document(), {"hardware_profiles": {"h200": {"brand": "NVIDIA"}}})
    with pytest.raises(CallerError) as error:
        imported(path)
    assert error.value.place == f"{tmp_path / 'taxonomy.yaml'}: hardware_profiles.h200.generation"


@pytest.mark.parametrize(
    ("changes", "images"),
    [
        ({}, {}),
        ({IMAGE: "a"}, {"h200": "a", "b200": "a"}),
        ({IMAGE: "a", f"{DEFAULT}docker_image": {"intel": "b"}}, {"h200": "a", "b200": "a", "cpu": "b"}),
        ({IMAGE: {"nvidia": {"cu129": "a", "cu130": "b"}}}, {"h200": "b", "b200": "b"}),
        ({IMAGE: {"cu129": "a"}}, {"h200": "a", "b200": "a"}),
        ({"variants__default__hardware_overrides__xeon6__docker_image": "a"}, {"cpu": "a"}),
    ],
)
def test_images_that_the_yaml_names_are_reported(changes: Document, images: dict[str, str], tmp_path: Path) -> None:
    document = model_document(meta__hardware={"xeon6": "verified"}, **changes)
    assert imported(repository(tmp_path, document)).images == images


def test_json_of_yaml_that_cannot_be_put_together_is_used(tmp_path: Path) -> None:
    path = repository(tmp_path, model_document(compatible_strategies=["multi_node_tp"]))
    written(published_document("-ep", variant="default"), tmp_path / "api/Org/A-Model/hw")
    result = imported(path)
    assert result.recipe.gpu_types["h200"].server == {"enable-expert-parallel": True}
    assert [note.partition(":")[0] for note in result.notes if "not compared with the YAML" in note] == ["h200"]


def test_json_of_another_variant_is_not_the_yamls(tmp_path: Path) -> None:
    """Where two recipes have a model of one name, the JSON by that name is only one's."""
    path = repository(tmp_path, model_document(variants__fp8__model_id="Org/Other"))
    written(published_document(variant="default"), tmp_path / "api/Org/Other/hw")
    assert "json" not in imported(path, "fp8").source


def test_of_a_folders_json_only_the_variants_own_is_the_yamls(tmp_path: Path) -> None:
    """Hardware that is too small for a variant has another one's command in its place."""
    path = repository(tmp_path, model_document(meta__hardware={"rtx_5090": "verified"}))
    folder = tmp_path / "api/Org/A-Model/hw"
    written(published_document("--seed", "1", "-tp", "1", variant="default"), folder)
    written(published_document(hardware="rtx_5090", variant="int4"), folder, "rtx_5090.json")
    result = imported(path)
    assert list(result.recipe.gpu_types) == ["h200"]
    assert "left out rtx_5090.json: it has the variant 'int4'" in result.notes
    assert "b200: the YAML is meant for it, and the JSON has no command to import" in result.notes


@pytest.mark.parametrize(
    ("changes", "vllm", "note"),
    [
        ({}, None, ""),
        ({OLDEST: "0.20.1"}, ">=0.20.1", ""),
        ({OLDEST: "0.20.1", IMAGE: "vllm/vllm-openai:v0.25.0"}, ">=0.20.1", ""),
        ({IMAGE: "vllm/vllm-openai:v0.25.0"}, ">=0.25.0", ""),
        ({OLDEST: "0.20.1", "variants__default__min_vllm_version": "0.22"}, ">=0.22", ""),
        ({OLDEST: "nightly"}, None, "the YAML asks for vLLM nightly, which is no released version"),
        ({OLDEST: "0.20.1, !=0.21"}, None, "the YAML asks for vLLM 0.20.1, !=0.21, which is no released version"),
    ],
)
def test_the_oldest_vllm_is_the_variants_range(changes: Document, vllm: str | None, note: str, tmp_path: Path) -> None:
    result = imported(repository(tmp_path, model_document(**changes)))
    assert result.recipe.variants["default"].vllm == vllm
    assert [each for each in result.notes if "vLLM" in each] == ([note] if note else [])


def test_keys_that_are_unknown_here_are_named(tmp_path: Path) -> None:
    changes = {
        "routing": 1,
        "model__speed": 2,
        "variants__default__kv_budget": 3,
        "variants__other__kv_budget": 3,
        "features__tools__args": [],
        "features__tools__after": 4,
        f"{TP}__hint": 5,
    }
    result = imported(repository(tmp_path, model_document(**changes)))
    (note,) = (each for each in result.notes if "unknown here" in each)
    assert note.endswith(
        ": routing, model.speed, variants.default.kv_budget, features.tools.after, strategy_overrides.single_node_tp.hint"
    )


# --- variables that no recipe may set


@pytest.mark.parametrize("name", ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "PYTHONNOUSERSITE", "HSA_NO_SCRATCH_RECLAIM"])
def test_a_switch_that_no_recipe_may_set_is_left_out_and_named(name: str, tmp_path: Path) -> None:
    result = imported(repository(tmp_path, model_document(model__base_env={name: "1", "VLLM_A": "2"})))
    assert {gpu_type: serving.environment for gpu_type, serving in result.recipe.gpu_types.items()} == {
        "b200": {"VLLM_A": "2"},
        "h200": {"VLLM_A": "2"},
    }
    (note,) = (note for note in result.notes if name in note)
    assert note == f"b200, h200: left out the variable {name} ('1'): no recipe may set it, so the server does not have it"


@pytest.mark.parametrize(
    "environment",
    [
        *({name: "/some/where"} for name in ("LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "HTTPS_PROXY", "SOME_NAME")),
        *({name: "1"} for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "HF_ENDPOINT", "HOME")),
        *({name: "1"} for name in ("VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH", "VLLM_USAGE_STATS_SERVER")),
        {"SOME_API_KEY": "1"},
    ],
    ids=str,
)
def test_a_variable_that_names_a_place_or_changes_what_is_served_is_refused(environment: Document, tmp_path: Path) -> None:
    with pytest.raises(InexpressibleError) as refusal:
        imported(repository(tmp_path, model_document(model__base_env=environment)))
    assert next(iter(environment)) in refusal.value.problem
