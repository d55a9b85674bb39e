"""A text of JSON that is nested too deeply is a value that an engine may refuse, and never a fault of this project."""

from pathlib import Path

import pytest

from tests.builders.task_recipes import GSM8K, SCORE, loaded, made
from vllm_qualify.drift.candidate import find_candidate
from vllm_qualify.drift.check import check_recipe
from vllm_qualify.engine.server import config_text
from vllm_qualify.errors import CallerError
from vllm_qualify.evidence.accuracy.checked_tasks import with_tasks
from vllm_qualify.plan.choice import Choice

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
