"""Recipes for tests, made from the catalog's reference recipe."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from vllm_qualify.recipe.loading import catalog_folder

Document = dict[str, Any]


def reference() -> Document:
    """The catalog's reference recipe as a document, its paths absolute."""
    return deepcopy(_reference(catalog_folder()))


@cache
def _reference(catalog: Path) -> Document:
    document: Document = YAML(typ="safe").load((catalog / "reference.yaml").read_text())
    for variant in document["variants"].values():
        variant["model"] = _absolute(variant["model"])
        speculative = variant.get("server", {}).get("speculative-config", {})
        if "model" in speculative:
            speculative["model"] = _absolute(speculative["model"])
    questions = document["accuracy"][0]["questions"]
    for name in questions:
        questions[name] = _absolute(questions[name])
    return document


def _absolute(relative: str) -> str:
    return str((catalog_folder() / relative).resolve())


def small(folder: Path) -> Document:
    """The reference recipe with less work: 32 questions, which are one batch, 2 repeats of 20 short requests, gates to match.

    None is against a baseline. How likely 200 answers are, the demo's tests ask.
    """
    document = reference()
    accuracy = document["accuracy"][0]
    questions = Path(accuracy["questions"]["test"]).read_text().splitlines(keepends=True)
    (folder / "test.jsonl").write_text("".join(questions[:32]))
    accuracy["questions"]["test"] = str(folder / "test.jsonl")
    accuracy["num_questions"] = 32
    # 32 questions cannot show more: even 32 of 32 leave a lower bound of .923
    document["gates"] = [document["gates"][0] | {"minimum": 0.75}]
    document["likelihood"] = {"num_answers": 20}
    profile = document["gpu_types"]["cpu"]["profiles"]["balanced"]
    profile["load"] |= {
        "output_len": 16,
        "max_concurrency": 4,
        "num_prompts": 20,
        "num_warmups": 2,
        "repeats": 2,
        "most_repeats": 2,
        "min_duration_s": 0.1,
    }
    profile["gates"] = [{"metric": "output_throughput_tok_s", "minimum": 1, "unit": "tok/s"}]
    return document


def write(document: Document, path: Path) -> Path:
    YAML(typ="safe").dump(document, path)
    return path
