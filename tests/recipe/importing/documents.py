"""The least documents of vllm-project/recipes for tests, and what they are imported into."""

import json
from pathlib import Path
from typing import Any

from vllm_qualify.recipe.importing import Imported, import_recipe
from vllm_qualify.recipe.recipe import Recipe
from vllm_qualify.recipe.serving import Environment, ServerArguments

Document = dict[str, Any]


def imported(source: Path, variant: str | None = None, published: Path | None = None) -> Imported:
    gate: Any = {"exact_match_minimum": 0.8, "exact_match_filter": "flexible-extract"}
    return import_recipe(source, **gate, variant=variant, published=published)


def resolved(recipe: Recipe, gpu_type: str) -> tuple[str, ServerArguments, Environment]:
    """Model, server arguments and environment of the imported cell."""
    serving = recipe.gpu_types[gpu_type]
    variant, profile = recipe.variants[serving.default_variant], serving.profiles["balanced"]
    arguments = serving.server | variant.server | profile.server
    return variant.model, arguments, serving.environment | variant.environment | profile.environment


def published_document(*words: str, **changes: Any) -> Document:
    """The least that a published JSON file has."""
    document: Document = {
        "hardware": "h200",
        "variant": "fp8",
        "node_count": 1,
        "deploy_type": "single_node",
        "env": {},
        "docker_image": "vllm/vllm-openai:latest",
        "argv": ["vllm", "serve", "Org/A-Model", *words],
    }
    return {key: value for key, value in (document | changes).items() if value is not ...}


def written(document: object, folder: Path, name: str = "h200.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def import_words(folder: Path, *words: str) -> Imported:
    return imported(written(published_document(*words), folder))


# Every one of them is parsed by vLLM itself too, both ways.
TRANSLATED: list[tuple[list[str], ServerArguments]] = [
    ([], {}),
    (["--trust-remote-code"], {"trust-remote-code": True}),
    (["--max-num-seqs", "64"], {"max-num-seqs": 64}),
    (["--max-num-seqs=64"], {"max-num-seqs": 64}),
    (["--max_num_seqs", "64"], {"max-num-seqs": 64}),
    (["--max-model-len", "-1"], {"max-model-len": -1}),
    (["--max-model-len", "8k"], {"max-model-len": "8k"}),
    (["--max-model-len", "auto"], {"max-model-len": "auto"}),
    (["--gpu-memory-utilization", "0.8"], {"gpu-memory-utilization": 0.8}),
    (["--gpu-memory-utilization", "0.80"], {"gpu-memory-utilization": "0.80"}),
    (["-tp", "8", "-pp=2"], {"tensor-parallel-size": 8, "pipeline-parallel-size": 2}),
    (["-ep", "-q", "fp8"], {"enable-expert-parallel": True, "quantization": "fp8"}),
    (["-O3"], {"optimization-level": 3}),
    (["-O=1"], {"optimization-level": 1}),
    (["-O", "2"], {"optimization-level": 2}),
    (["--no-enable-prefix-caching"], {"no-enable-prefix-caching": True}),
    (["--enable-prefix-caching", "--no-enable-prefix-caching"], {"no-enable-prefix-caching": True}),
    (["--seed", "1", "--seed", "2"], {"seed": 2}),
    (["--cudagraph-capture-sizes", "1", "2", "4"], {"cudagraph-capture-sizes": [1, 2, 4]}),
    (["--allowed-origins", '["a"]'], {"allowed-origins": '["a"]'}),
    (["--compilation-config", '{"mode": 3}'], {"compilation-config": {"mode": 3}}),
    (["--limit-mm-per-prompt.video", "0"], {"limit-mm-per-prompt": {"video": 0}}),
    (
        ["-cc.pass_config.eliminate_noops=True", "-cc.cudagraph_mode=FULL"],
        {"compilation-config": {"pass_config": {"eliminate_noops": "True"}, "cudagraph_mode": "FULL"}},
    ),
    (
        ["--compilation_config.pass_config.eliminate_noops", "true"],
        {"compilation-config": {"pass_config": {"eliminate_noops": True}}},
    ),
    (["--compilation-config", '{"mode": 3}', "--compilation-config.mode", "0"], {"compilation-config": {"mode": 0}}),
    (["-cc.mode=3", "--compilation-config.cudagraph_mode=FULL"], {"compilation-config": {"cudagraph_mode": "FULL"}}),
    (["-cc.cudagraph_capture_sizes+=1,2"], {"compilation-config": {"cudagraph_capture_sizes": ["1", "2"]}}),
    (["--override-generation-config", '{"temperature": null}'], {"override-generation-config": '{"temperature": null}'}),
    (["--additional-config.a", "2k", "--additional-config.b", "2K"], {"additional-config": {"a": 2000, "b": 2048}}),
    (["--chat-template", ""], {"chat-template": ""}),
]


def _hardware(brand: str, generation: str, gpu_count: int, vram_gb: int, **others: bool) -> Document:
    return {"brand": brand, "generation": generation, "gpu_count": gpu_count, "vram_gb": vram_gb, **others}


TAXONOMY: Document = {
    "hardware_profiles": {
        "h200": _hardware("NVIDIA", "hopper", 8, 1128),
        "b200": _hardware("NVIDIA", "blackwell", 8, 1440),
        "mi300x": _hardware("AMD", "amd", 8, 1536),
        "xeon6": _hardware("Intel", "cpu", 4, 1024, restricted=True),
        "rtx_5090": _hardware("NVIDIA", "blackwell", 1, 32, restricted=True, scalable=False),
    }
}
STRATEGIES: Document = {
    "strategies/single_node_tp.yaml": {"deploy_type": "single_node", "parallel_flag": "--tensor-parallel-size"},
    "strategies/single_node_dep.yaml": {
        "deploy_type": "single_node",
        "parallel_flag": "--data-parallel-size",
        "vllm_args": ["--enable-expert-parallel"],
    },
    "strategies/multi_node_tp.yaml": {"deploy_type": "multi_node", "parallel_flag": "--tensor-parallel-size"},
}


def model_document(**changes: Any) -> Document:
    """The least that a model's YAML has; a key like `variants__default__tp` names a place in it."""
    document: Document = {
        "meta": {"tasks": ["text"]},
        "model": {"model_id": "Org/A-Model", "base_args": ["--seed", "1"]},
        "variants": {"default": {"precision": "bf16", "vram_minimum_gb": 100}},
        "compatible_strategies": ["single_node_tp"],
    }
    for path, value in changes.items():
        place = document
        *parents, last = path.split("__")
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return document


def repository(folder: Path, model: object, taxonomy: object = TAXONOMY) -> Path:
    """A repository with one model; the path of its YAML."""
    files = {"taxonomy.yaml": taxonomy, "models/Org/A-Model.yaml": model} | STRATEGIES
    for name, document in files.items():
        # JSON is YAML 1.2, and quicker to write.
        written(document, folder, name)
    return folder / "models/Org/A-Model.yaml"
