"""Values nested too deeply, and paths that no file system has: an engine may refuse them, and nothing here ends by them."""

from pathlib import Path

import pytest

from tests.builders.made_servers import server_of
from tests.builders.task_recipes import GSM8K, SCORE, loaded, made
from vllm_qualify.drift.candidate import find_candidate
from vllm_qualify.drift.check import check_recipe
from vllm_qualify.engine.server import config_text
from vllm_qualify.errors import CallerError
from vllm_qualify.evidence.accuracy.checked_tasks import with_tasks
from vllm_qualify.plan.choice import Choice
from vllm_qualify.plan.workload import likelihood_plan, limit_of

DEEP = "[" * 100_000
OPTIONS = (
    *("structured-outputs-config", "limit-mm-per-prompt", "override-generation-config", "compilation-config"),
    *("compilation-config.pass_config", "hf-overrides", "kv-transfer-config"),
)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_deep_text_is_checked_as_any_other(option: str, tmp_path: Path) -> None:
    document = made({option: DEEP}, [GSM8K], [SCORE]) | {"capabilities": ["chat", "vision", "json_schema"]}
    recipe, choice = loaded(tmp_path, document), Choice()
    candidate = find_candidate("0.32.0", None, None, lambda _: None)
    checked = with_tasks(check_recipe(recipe, choice, candidate, tmp_path / "cache"), recipe, choice)
    (server,) = checked.servers.values()
    assert option.partition(".")[0] in config_text(server, 8000)


def test_a_deep_text_of_drafts_is_refused(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, made({"speculative-config": DEEP}, [GSM8K], [SCORE]))
    candidate = find_candidate("0.32.0", None, None, lambda _: None)
    with pytest.raises(CallerError, match="is not a JSON object"):
        check_recipe(recipe, Choice(), candidate, tmp_path / "cache")


def test_a_deep_line_of_a_file_of_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(DEEP + "\n")
    document = made({}, [GSM8K], [SCORE]) | {"likelihood": {"texts": "texts.jsonl"}}
    recipe = loaded(tmp_path, document)
    with pytest.raises(CallerError, match="line 1 is no"):
        likelihood_plan(recipe, recipe.recipe.likelihood, server_of("org/model"), [])


def test_a_deep_configuration_says_no_length(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    assert limit_of(server_of(tmp_path)) is None


@pytest.mark.parametrize("key", ["questions", "task_folder"])
def test_a_path_that_no_file_system_has_is_refused(key: str, tmp_path: Path) -> None:
    given = {"test": "a\0b"} if key == "questions" else "a\0b"
    recipe = loaded(tmp_path, made({}, [GSM8K | {key: given}], [SCORE]))
    candidate = find_candidate("0.32.0", None, None, lambda _: None)
    with pytest.raises(CallerError, match="is no path"):
        check_recipe(recipe, Choice(), candidate, tmp_path / "cache")
