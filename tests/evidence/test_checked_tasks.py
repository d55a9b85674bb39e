"""Before a server starts: whether lm-eval has the tasks of a recipe, and the filters and scores of its gates."""

from pathlib import Path

import pytest

from tests.builders.task_recipes import GSM8K, SCORE, loaded, made, problems
from tests.recipes import Document
from tests.report.builder import passed_report
from vllm_qualify.drift.candidate import find_candidate
from vllm_qualify.drift.check import Checked, check_recipe
from vllm_qualify.errors import CallerError
from vllm_qualify.evidence.accuracy import task_files
from vllm_qualify.evidence.accuracy.checked_tasks import check_planned_tasks, check_recipes_tasks, with_tasks
from vllm_qualify.evidence.accuracy.task_files import UntoldError
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.loading import catalog_names, load_recipe
from vllm_qualify.recipe.recipe import LoadedRecipe

EVERY = Choice()


def checked(recipe: LoadedRecipe, cache: Path, choice: Choice = EVERY) -> Checked:
    candidate = find_candidate("0.32.0", None, None, lambda _: None)
    return with_tasks(check_recipe(recipe, choice, candidate, cache), recipe, choice)


WRONG: list[tuple[Document, Document, str, str]] = [
    (GSM8K | {"task": "gsm8kk"}, SCORE, "unknown-task", "has no task gsm8kk; the nearest is gsm8k"),
    (
        GSM8K,
        SCORE | {"filter": "flexible_extract"},
        "unknown-filter",
        "gsm8k has no filter flexible_extract; it has strict-match, flexible-extract; the nearest is flexible-extract",
    ),
    (GSM8K, SCORE | {"metric": "acc"}, "unknown-score", "gsm8k gives no answer the score acc; it gives exact_match"),
    # A group, and a task of this project's.
    (GSM8K | {"task": "mmlu"}, SCORE | {"metric": "acc"}, "unknown-filter", "mmlu has no filter flexible-extract; it has none"),
    (
        GSM8K | {"task": "long_1024", "max_gen_toks": 64},
        SCORE | {"filter": "none"},
        "unknown-score",
        "long_1024 gives no answer the score exact_match; it gives string_match_all",
    ),
]


@pytest.mark.parametrize(("task", "gate", "kind", "told"), WRONG, ids=str)
def test_what_lm_eval_does_not_have_is_a_problem(task: Document, gate: Document, kind: str, told: str, tmp_path: Path) -> None:
    recipe = loaded(tmp_path, made({}, [task], [gate]))
    ((found, said),) = problems(checked(recipe, tmp_path / "cache"))
    assert found == kind
    assert told in said
    with pytest.raises(CallerError) as early:
        check_recipes_tasks(recipe, recipe.recipe.gpu_types["h100"].profiles.values())
    assert told in early.value.problem


@pytest.mark.parametrize(
    ("task", "gate"),
    [
        (GSM8K, SCORE),
        (GSM8K | {"task": "mmlu"}, SCORE | {"metric": "acc", "filter": "none"}),
        (GSM8K | {"task": "long_1024", "max_gen_toks": 64}, SCORE | {"metric": "string_match_all", "filter": "none"}),
        (GSM8K, {"metric": "truncated_answers", "maximum": 0.1, "unit": "fraction"}),
    ],
    ids=str,
)
def test_what_lm_eval_has_is_none(task: Document, gate: Document, tmp_path: Path) -> None:
    recipe = loaded(tmp_path, made({"max-model-len": 8192}, [task], [gate]))
    assert problems(checked(recipe, tmp_path / "cache")) == []
    check_recipes_tasks(recipe, recipe.recipe.gpu_types["h100"].profiles.values())


UNCOUNTED_BESIDE_A_WHOLE = (
    "whether gsm8k's prompts with 5 examples fit beside replies of 2,048 tokens: max-model-len is 2,048, and the task's data is"
    " not read here"
)
UNCOUNTED = (
    "whether gsm8k's prompts with 5 examples fit beside replies of 256 tokens: max-model-len is 512, and the task's data is not"
    " read here"
)


@pytest.mark.parametrize(
    ("server", "task", "unknown"),
    [
        ({"max-model-len": 512}, GSM8K, [UNCOUNTED]),
        # vLLM 0.32 cuts such a reply to the room that a prompt leaves.
        ({}, GSM8K | {"max_gen_toks": 2048}, [UNCOUNTED_BESIDE_A_WHOLE]),
        ({"max-model-len": "4k"}, GSM8K, []),
        ({"max-model-len": "auto"}, GSM8K, []),
        ({"max-model-len": 1024}, GSM8K | {"num_fewshot": 0}, []),
    ],
    ids=str,
)
def test_whether_prompts_fit_into_a_short_context_is_told_as_unknown(
    server: Document, task: Document, unknown: list[str], tmp_path: Path
) -> None:
    given = checked(loaded(tmp_path, made(server, [task], [SCORE])), tmp_path / "cache")
    assert [line for line in given.unknown if "fit" in line] == unknown
    assert problems(given) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_gen_toks": 2049}, "gsm8k may have 2,049 tokens, and max-model-len is 2,047: no room is left for a prompt"),
        # Its own length.
        ({"task": "mmlu_pro"}, "a reply to mmlu_pro may have 2,048 tokens"),
    ],
)
def test_replies_longer_than_the_context_are_a_problem(settings: Document, told: str, tmp_path: Path) -> None:
    gate = SCORE | {"filter": "custom-extract"} if "task" in settings else SCORE
    given = checked(loaded(tmp_path, made({"max-model-len": 2047}, [GSM8K | settings], [gate])), tmp_path / "cache")
    ((kind, said),) = problems(given)
    assert kind == "context-too-short"
    assert told in said


def test_tasks_of_other_engines_are_checked_too(tmp_path: Path) -> None:
    """Of a profile that another engine alone has, nothing else is known here."""
    document = made({}, [GSM8K], [SCORE])
    document["variants"]["bf16"]["profiles"] = ["balanced"]
    document["variants"]["other"] = {"model": "org/model", "engine": "tensorrt-llm", "profiles": ["throughput"]}
    fast = document["gpu_types"]["h100"]["profiles"]["balanced"]
    gate = SCORE | {"filter": "strict"}
    document["gpu_types"]["h100"]["profiles"]["throughput"] = fast | {"gates": [gate]}
    recipe = loaded(tmp_path, document)
    ((problem),) = checked(recipe, tmp_path / "cache").problems
    assert problem.cells == ["made/other/h100/throughput"]
    assert "gsm8k has no filter strict;" in problem.finding.told
    assert checked(recipe, tmp_path / "cache", Choice(variant="bf16")).problems == []


def test_a_problem_names_its_cells_alone(tmp_path: Path) -> None:
    document = made({}, [GSM8K], [SCORE])
    fast = document["gpu_types"]["h100"]["profiles"]["balanced"]
    other = {"metric": "exact_match", "filter": "strict", "minimum": 0.5, "unit": "fraction"}
    document["gpu_types"]["h100"]["profiles"]["other"] = fast | {"gates": [other]}
    ((problem),) = checked(loaded(tmp_path, document), tmp_path / "cache").problems
    assert problem.cells == ["made/bf16/h100/other"]
    assert problem.finding.told.endswith("the nearest is strict-match")


def test_what_the_files_do_not_say_is_unknown_and_no_problem(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text("task: own\nclass: !function own.Task\n")
    task = {"task": "own", "num_questions": 4, "task_folder": "tasks"}
    recipe = loaded(tmp_path, made({}, [task], [SCORE]))
    given = checked(recipe, tmp_path / "cache")
    told = "whether lm-eval can ask own, with the filters and scores that the gates name: own is a class of Python code"
    assert told in given.unknown
    # It runs code, and that is all.
    assert {kind for kind, _ in problems(given)} == {"runs-code"}
    check_recipes_tasks(recipe, recipe.recipe.gpu_types["h100"].profiles.values())


def test_planned_tasks_are_checked_too() -> None:
    plan = passed_report().plan
    assert check_planned_tasks([plan]) == []
    (task, *_) = plan.accuracy
    mistaken = task.model_copy(update={"settings": task.settings.model_copy(update={"task": "gsm8kk"})})
    with pytest.raises(CallerError, match="has no task gsm8kk; the nearest is gsm8k"):
        check_planned_tasks([plan.model_copy(update={"accuracy": [mistaken]})])


def test_without_lm_eval_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UntoldError("lm-eval is not installed here")

    monkeypatch.setattr(task_files, "describe", refuse)
    given = checked(loaded(tmp_path, made({}, [GSM8K], [SCORE])), tmp_path / "cache")
    assert any(line.endswith("lm-eval is not installed here") for line in given.unknown)


@pytest.mark.parametrize("name", catalog_names())
def test_the_catalogs_tasks_are_all_known(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    given = checked(recipe, tmp_path / "cache")
    assert problems(given) == []
    assert [line for line in given.unknown if "lm-eval can ask" in line] == []
    for serving in recipe.recipe.gpu_types.values():
        check_recipes_tasks(recipe, serving.profiles.values())
