"""Anything at all gives a valid recipe or one clear error."""

import json
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.recipe.importing.documents import (
    STRATEGIES,
    TAXONOMY,
    Document,
    imported,
    model_document,
    published_document,
    repository,
    resolved,
    written,
)
from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing import render_recipe
from vllm_qualify.recipe.loading import load_recipe

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["--seed", "--a.b", "-cc.x", "-tp", "--model", "--revision", "--host", "-O", "--no-a", "--a", "--A_b"])
words = st.one_of(
    names,
    st.builds("{}={}".format, names, st.text(max_size=8)),
    st.text(max_size=8),
    st.sampled_from(
        ["1", "-1", "1e-5", "1k", "on", "true", "null", "{}", '{"a": {"b": [1, null]}}', "[1]", "0x1", "1_0", "\n"]
    ),
    values.map(json.dumps),
)
commands = st.lists(words, max_size=6).map(lambda rest: published_document(*rest))
fuzz = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])

RICH_MODEL = model_document(
    meta__hardware={"xeon6": "verified", "h200": "verified"},
    model__base_env={"VLLM_A": "1"},
    model__docker_image={"nvidia": {"cu129": "a", "cu130": "b"}, "intel": "c"},
    model__min_vllm_version="0.12.0",
    variants__default__tp={"hopper": 2, "default": 4},
    variants__default__extra_args=["--max-num-seqs", "64"],
    variants__default__extra_env={"VLLM_B": "2"},
    variants__default__precision_hardware={"brand": "NVIDIA"},
    variants__default__default_modes={"spec": "one"},
    variants__default__hardware_overrides={"h200": {"extra_args": ["--x"], "extra_env": {"VLLM_C": "3"}}},
    variants__default__model_id="Org/A-Model-FP8",
    variants__default__supported_hardware=["h200"],
    compatible_strategies=["single_node_tp", "multi_node_tp"],
    default_strategy="single_node_dep",
    strategy_hardware={"single_node_dep": {"hopper": "supported"}},
    strategy_min_gpus={"single_node_dep": 8, "h200": {"multi_node_tp": 16}},
    strategy_overrides={"single_node_dep": {"extra_args": ["-ep"], "hardware_overrides": {"hopper": {"extra_args": ["--y"]}}}},
    hardware_overrides={"nvidia": {"extra_args": ["--z"]}},
    features={
        "spec": {"modes": {"one": {"args": ["--one"], "hardware": {"amd": "unsupported"}, "variants": ["default"]}}},
        "tools": {"args": ["--tools"], "strategies": ["single_node_dep"], "hardware_overrides": {"hopper": {"args": ["--t"]}}},
    },
    opt_in_features=["spec"],
    hardware_opt_in_features={"h100": ["tools"]},
)
RICH_REPOSITORY = {"taxonomy.yaml": TAXONOMY, "models/Org/A-Model.yaml": RICH_MODEL, **STRATEGIES}


def places_in(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys and indices that lead to each part of a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*place, key)
        yield from places_in(inner, (*place, key))


@st.composite
def mutated(draw: st.DrawFn, document: Document) -> Document:
    """The document with one to three of its parts replaced, taken away or put under another key."""
    copy: Document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(list(places_in(copy)) or [("x",)]))
        inner = reduce(getitem, parents, copy)
        how = draw(st.sampled_from(["replace", "take away", "rename"]))
        if how == "replace" or isinstance(inner, list):
            inner[last] = draw(values | st.lists(words, max_size=4) | words)
        else:
            part = inner.pop(last, None)
            if how == "rename":
                inner[draw(st.text(max_size=4))] = part
    return copy


def valid_or_one_error(path: Path, published: Path | None = None) -> None:
    """Nothing but a CallerError comes out, or a recipe that is the same once written and loaded."""
    try:
        result = imported(path, published=published)
    except CallerError:
        return
    recipe = path.parent / "recipe.yaml"
    recipe.write_text(render_recipe(result), encoding="utf-8")
    assert load_recipe(str(recipe)).recipe == result.recipe
    recipe.unlink()


@fuzz
@given(document=commands)
def test_any_command_is_a_valid_recipe_or_one_error(document: Document, tmp_path: Path) -> None:
    valid_or_one_error(written(document, tmp_path))


@fuzz
@given(
    document=mutated(
        published_document("-tp", "2", "--speculative-config", '{"method": "mtp"}', env={"VLLM_A": "1"}, worker_argv=[])
    )
)
@example(document=published_document(env={"VLLM_A": "\ud800"}))
@example(document=published_document(docker_image="a\nname: b"))
@example(document=published_document(variant="\x85"))
def test_any_mutated_json_is_a_valid_recipe_or_one_error(document: Document, tmp_path: Path) -> None:
    valid_or_one_error(written(document, tmp_path))


@fuzz
@given(content=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(content=b"&a [*a]")
@example(content=b"meta: &a {tasks: *a}")
def test_any_file_is_a_valid_recipe_or_one_error(content: bytes, tmp_path: Path) -> None:
    for name in ("h200.json", "models/Org/A-Model.yaml"):
        path = written(None, tmp_path, name)
        path.write_bytes(content)
        with pytest.raises(CallerError):
            imported(path)


@pytest.mark.thorough
@fuzz
@given(files=mutated(RICH_REPOSITORY))
@example(files=RICH_REPOSITORY)
@example(files=RICH_REPOSITORY | {"models/Org/A-Model.yaml": model_document(model__base_env={"\U00010000": "1"})})
def test_any_mutated_yaml_is_a_valid_recipe_or_one_error(files: Document, tmp_path: Path) -> None:
    for name in RICH_REPOSITORY:
        written(files.get(name), tmp_path, name)
    valid_or_one_error(tmp_path / "models/Org/A-Model.yaml")


def test_the_document_that_is_mutated_is_a_valid_recipe(tmp_path: Path) -> None:
    recipe = imported(repository(tmp_path, RICH_MODEL)).recipe
    assert resolved(recipe, "h200") == (
        "Org/A-Model-FP8",
        {"seed": 1, "max-num-seqs": 64, "data-parallel-size": 8}
        | dict.fromkeys(("x", "enable-expert-parallel", "y", "one", "t"), True),
        {"VLLM_A": "1", "VLLM_B": "2", "VLLM_C": "3"},
    )
