"""Where a contract promises replies with a form, and nothing names their backend, a run says so before anything is measured."""

from pathlib import Path

import pytest

from tests.builders.made_servers import server_of
from vllm_qualify.plan.choice import Choice
from vllm_qualify.plan.dry_run import server_scripts
from vllm_qualify.plan.forms import form_warnings
from vllm_qualify.recipe.contract import Capability, Contract
from vllm_qualify.recipe.loading import load_recipe

UNNAMED: list[dict[str, object]] = [
    {},
    {"structured-outputs-config": {"backend": "auto"}},
    {"structured-outputs-config": {"disable_any_whitespace": False}},
    {"structured-outputs-config": '{"backend": null}'},
    {"structured-outputs-config": "[" * 100_000},
]
NAMED: list[dict[str, object]] = [
    {"structured-outputs-config": {"backend": "xgrammar"}},
    {"structured-outputs-config.backend": "guidance"},
    {"structured-outputs-config": '{"backend": "xgrammar"}'},
]


@pytest.mark.parametrize("promised", [["chat", "tools"], ["chat", "json_schema"], ["chat", "tools", "json_schema"]])
@pytest.mark.parametrize("arguments", UNNAMED)
def test_a_promise_without_a_named_backend_is_told(promised: list[Capability], arguments: dict[str, object]) -> None:
    (warning,) = form_warnings(server_of("org/model", arguments), Contract(capabilities=promised))
    assert "`structured-outputs-config: {backend: xgrammar}`" in warning
    assert " and ".join(promised[1:]) in warning
    assert "the first form after a start" in warning


@pytest.mark.parametrize("arguments", NAMED)
def test_a_named_backend_is_in_order(arguments: dict[str, object]) -> None:
    assert form_warnings(server_of("org/model", arguments), Contract(capabilities=["chat", "tools"])) == []


def test_nothing_is_told_where_no_form_is_promised() -> None:
    server = server_of("org/model")
    assert form_warnings(server, None) == []
    assert form_warnings(server, Contract(capabilities=["chat", "vision"])) == []
    assert form_warnings(server_of("org/model", kind="tensorrt-llm"), Contract(capabilities=["chat", "tools"])) == []


def test_a_dry_run_tells_it(tmp_path: Path) -> None:
    loaded = load_recipe("reference-chat")
    serving = loaded.recipe.gpu_types["cpu"]
    unnamed = {name: value for name, value in serving.server.items() if name != "structured-outputs-config"}
    bare = serving.model_copy(update={"server": unnamed})
    other = loaded.model_copy(update={"recipe": loaded.recipe.model_copy(update={"gpu_types": {"cpu": bare}})})
    for recipe, is_told in ((loaded, False), (other, True)):
        (script,) = server_scripts(recipe, Choice(gpu_type="cpu", profile="chats"), "0.32.0", None, tmp_path)
        assert ("# Warning: `capabilities` promise" in script) is is_told
