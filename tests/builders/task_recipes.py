"""Recipes that ask tasks of lm-eval, and what is said of them."""

from pathlib import Path
from typing import Any

from tests.recipes import Document, write
from vllm_qualify.drift.check import Checked
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import LoadedRecipe

SCORE = {"metric": "exact_match", "filter": "flexible-extract", "minimum": 0.5, "unit": "fraction"}
GSM8K = {"task": "gsm8k", "num_questions": 1319}


def made(server: dict[str, Any], accuracy: list[Document], gates: list[Document]) -> Document:
    load = {"input_len": 64, "output_len": 16, "num_warmups": 4}
    speed = {"metric": "output_throughput_tok_s", "minimum": 2, "unit": "tok/s"}
    return {
        "name": "made",
        "description": "a made recipe.",
        "served_model_name": "made",
        "variants": {"bf16": {"model": "org/model"}},
        "gpu_types": {
            "h100": {
                "default_variant": "bf16",
                "server": {"max-model-len": 2048, "max-num-seqs": 16} | server,
                "profiles": {"balanced": {"load": load, "gates": [speed]}},
            }
        },
        "smoke": {"prompt": "The capital of France is"},
        "accuracy": accuracy,
        "gates": gates,
    }


def loaded(folder: Path, document: Document) -> LoadedRecipe:
    return load_recipe(str(write(document, folder / "made.yaml")))


def problems(given: Checked) -> list[tuple[str, str]]:
    return [(each.finding.kind, each.finding.told) for each in given.problems]
