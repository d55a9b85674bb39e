"""What a recipe says of the texts that are scored, what a plan makes of it, and what is refused."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.builders.comparisons import server_plan
from tests.recipes import Document, reference, write
from vllm_qualify.errors import CallerError, HostError, RecipeError
from vllm_qualify.plan.workload import likelihood_plan
from vllm_qualify.recipe.accuracy import Likelihood
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import LoadedRecipe

ANSWERS = {"metric": "answer_nll_nat_per_tok", "max_nll_increase": 0.01, "unit": "nat/tok"}
TEXTS = {"metric": "text_top1_share", "min_top1_agreement": 0.9, "unit": "fraction"}


def recipe_with(folder: Path, gate: Document, likelihood: Document | None) -> LoadedRecipe:
    document = reference() | {"gates": [gate], "likelihood": likelihood}
    return load_recipe(str(write(document, folder / "mine.yaml")))


@pytest.mark.parametrize(
    ("gate", "likelihood", "message"),
    [
        (ANSWERS, None, "needs 'likelihood', which says what is scored"),
        (TEXTS, {}, "needs 'likelihood.texts', a file of texts"),
        (ANSWERS, {"num_answers": 0}, "greater than or equal to 1"),
        (ANSWERS, {"texts": ""}, "at least 1 character"),
        (ANSWERS, {"time_limit_s": 0}, "greater than 0"),
        (ANSWERS, {"text": "texts.jsonl"}, "unknown key"),
    ],
)
def test_a_recipe_that_does_not_say_what_is_scored_is_refused(
    gate: Document, likelihood: Document | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CallerError, match=message):
        recipe_with(tmp_path, gate, likelihood)


def test_answers_need_no_settings(tmp_path: Path) -> None:
    assert recipe_with(tmp_path, ANSWERS, {}).recipe.likelihood == Likelihood(num_answers=500, texts=None)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    return recipe_with(tmp_path, TEXTS, {"texts": "texts.jsonl"})


def test_texts_are_pinned_by_their_content(loaded: LoadedRecipe, tmp_path: Path) -> None:
    content = (json.dumps({"text": "One\u2028line."}, ensure_ascii=False) + "\n").encode()
    (tmp_path / "texts.jsonl").write_bytes(content)
    plan = likelihood_plan(loaded, loaded.recipe.likelihood, server_plan(), [])
    assert plan is not None
    assert (plan.texts, plan.texts_sha256) == (tmp_path / "texts.jsonl", hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it has no text"),
        ('{"text": "a"}\n\n', 'line 2 is no {"text": "…"}'),
        *((f"{line}\n", "line 1 is no") for line in ('{"text": ""}', '{"text": 7}', '{"prompt": "a"}', "a text")),
    ],
)
def test_a_file_that_is_not_of_texts_is_refused(content: str, message: str, loaded: LoadedRecipe, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(content)
    with pytest.raises(CallerError, match=message) as raised:
        likelihood_plan(loaded, loaded.recipe.likelihood, server_plan(), [])
    assert raised.value.place == str(tmp_path / "texts.jsonl")


def test_a_file_that_is_not_there_is_reported(loaded: LoadedRecipe) -> None:
    with pytest.raises(HostError, match="no texts at") as raised:
        likelihood_plan(loaded, loaded.recipe.likelihood, server_plan(), [])
    assert "mend likelihood.texts" in raised.value.remedy


def test_tensorrt_llm_gives_no_likelihoods(loaded: LoadedRecipe) -> None:
    """A gate that needs them is the recipe's error, before anything starts; without one, or without the key, none are asked."""
    server = server_plan().model_copy(update={"kind": "tensorrt-llm"})
    with pytest.raises(RecipeError, match=r"TensorRT-LLM does not give the likelihood .* answer_nll_nat_per_tok") as raised:
        likelihood_plan(loaded, Likelihood(), server, [gate_of(**ANSWERS)])
    assert raised.value.place == "likelihood"
    assert likelihood_plan(loaded, Likelihood(), server, []) is None
    assert likelihood_plan(loaded, None, server_plan(), []) is None
