"""A recipe that names one model and would have another one served, or code trusted that nobody was asked about."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.builders.fake_servers import plan_for, silent
from tests.builders.served_models import captured, plan_of
from tests.qualified import COMMAND, furnished, of, run
from tests.recipes import small, write
from vllm_qualify.drift.candidate import candidate_of
from vllm_qualify.drift.check import check_recipe
from vllm_qualify.drift.finding import check_server, unnamed_options
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import with_speculation_parsed
from vllm_qualify.engine.server_identity import check_identity
from vllm_qualify.engine.server_start import serve
from vllm_qualify.errors import CallerError, RecipeError
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.loading import catalog_folder, load_recipe
from vllm_qualify.recipe.serving import ServerArguments
from vllm_qualify.recipe.tables import table_of

ARGUMENTS: TypeAdapter[ServerArguments] = TypeAdapter(ServerArguments)


# --- options within values


@pytest.mark.parametrize(
    "value",
    [
        ["x", "--model", "EVIL", "--trust-remote-code"],
        ["--trust-remote-code"],
        "--trust-remote-code",
        "--revision=main",
        "-O3",
        "-",
        "--",
        "-1x",
    ],
)
def test_a_value_that_a_parser_reads_as_an_option_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="begins with a dash"):
        ARGUMENTS.validate_python({"sleep-preserve-parameter-names": value})


@pytest.mark.parametrize("value", [-1, "-1", "-0.5", "-1e-3", "-.5", ["-1", "2"], "a-b", {"a": ["--model"]}])
def test_a_number_and_a_word_with_a_dash_inside_are_values(value: Any) -> None:
    assert ARGUMENTS.validate_python({"seed": value}) == {"seed": value}


@pytest.mark.parametrize(
    "name", ["model", "model.x", "served_model_name", "revision", "tokenizer-revision.a", "config", "api-key"]
)
def test_what_we_set_cannot_be_set_also_by_a_field_of_it(name: str) -> None:
    with pytest.raises(ValidationError, match="is set by vllm-qualify"):
        ARGUMENTS.validate_python({name: "EVIL"})


def test_a_draft_model_cannot_be_hidden_in_a_field_of_its_own() -> None:
    with pytest.raises(CallerError, match="is one field of speculative-config"):
        with_speculation_parsed({"speculative-config.model": "EVIL"}, "vllm")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [({"seed": [1, "EVIL"]}, "spare-value"), ({"revisio": "main"}, "unknown-option"), ({"mode": "EVIL"}, "unknown-option")],
)
def test_a_second_value_and_the_beginning_of_a_name_are_problems(arguments: ServerArguments, kind: str) -> None:
    """vLLM's parser takes a second value for the model, and the beginning of a name for the option."""
    assert [finding.kind for finding in check_server(arguments, {}, table_of("0.32.0")) if finding.is_problem] == [kind]


def test_an_option_that_no_key_names_is_a_problem() -> None:
    (finding,) = unnamed_options(["model-tag"])
    assert finding.is_problem
    assert "--model-tag is set, and no key of the recipe names it" in finding.told


@pytest.mark.engine
def test_vllms_own_parser_tells_what_no_key_names(engine: EngineEnvironment, tmp_path: Path) -> None:
    """One question for all: vLLM is imported as often for one of them."""
    cases = {
        "listed": ({"seed": [1, "EVIL"]}, "--model-tag is set"),
        "cut": ({"revisio": "main"}, "--revision is set"),
        "trusted": ({"trust-remote": True}, "--trust-remote-code is set"),
    }
    document = small(tmp_path)
    serving = document["gpu_types"]["cpu"]
    balanced = serving["profiles"].pop("balanced")
    for profile, (arguments, _) in cases.items():
        serving["profiles"][profile] = balanced | {"server": balanced["server"] | arguments}
    loaded = load_recipe(str(write(document, tmp_path / "recipe.yaml")))
    candidate, choice = candidate_of(engine, engine.identity()), Choice(gpu_type="cpu", variant="bf16")
    checked = check_recipe(loaded, choice, candidate, tmp_path, allow_code=True)
    for profile, (_, message) in cases.items():
        of_it = [each.finding.told for each in checked.problems if f"reference/bf16/cpu/{profile}" in each.cells]
        assert any(message in told for told in of_it), checked.problems


# --- another model behind the name


def test_what_vllm_said_agrees_with_the_plan() -> None:
    check_identity(plan_of(), captured())


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"model": "/models/other"}, "its model is /models/tiny, not /models/other"),
        ({"arguments": {"tokenizer": "/models/other"}}, "its tokenizer is /models/tiny, not /models/other"),
        ({"revision": "a" * 40}, f"its revision is None, not {'a' * 40}"),
        ({"arguments": {"trust-remote-code": True}}, "its trust_remote_code is False, not True"),
        ({"arguments": {"speculative-config": {"model": "/d"}}}, "its draft is None, not /d"),
    ],
)
def test_each_difference_from_the_plan_is_reported(others: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)) as raised:
        check_identity(plan_of(**others), captured())
    assert raised.value.kind == "serves-another"


def test_a_log_that_does_not_say_it_is_no_proof() -> None:
    quiet = "\n".join(line for line in captured().splitlines() if "Initializing a V" not in line)
    with pytest.raises(RecipeError, match="did not say in its log what it serves") as raised:
        check_identity(plan_of(), quiet)
    assert raised.value.kind == "serves-unknown"


def engines_line() -> str:
    (line,) = (line for line in captured().splitlines() if "Initializing a V" in line)
    return line


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_line_that_a_recipe_had_printed_does_not_stand_for_the_engines(where: str) -> None:
    """Every line of the form must agree, so that one that lies changes nothing."""
    real = engines_line()
    lie = real.replace("/models/tiny", "/models/named")
    log = f"{lie}\n{real}" if where == "before" else f"{real}\n{lie}"
    for model in ("/models/named", "/models/tiny"):
        with pytest.raises(RecipeError, match="does not serve what the plan names"):
            check_identity(plan_of(model=model), log)


def test_what_stands_within_a_message_is_no_line_of_the_engine() -> None:
    message = engines_line().partition("] ")[2]
    before = "(APIServer pid=1) INFO 11-23 05:00:00 [api_utils.py:286] non-default args: "
    inside = f"{before}{{'served_model_name': ['{message}']}}"
    with pytest.raises(RecipeError, match="did not say"):
        check_identity(plan_of(), inside)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
SNAPSHOT = f"models--org--name/snapshots/{COMMIT}"


@pytest.mark.parametrize(
    ("folder", "is_fine"),
    [
        (f"/hub/hub/{SNAPSHOT}", True),
        (f"/elsewhere/{SNAPSHOT}", False),
        (f"/hub/hub/{SNAPSHOT}/..", False),
        (f"/hub/hub/models--org--name/snapshots/{'f' * 40}", False),
        (f"/hub/hub/models--org--other/snapshots/{COMMIT}", False),
    ],
)
def test_offline_only_the_caches_snapshot_is_the_model(folder: str, is_fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/hub")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    log = captured().replace("/models/tiny", folder).replace("revision=None", f"revision={COMMIT}")
    plan = plan_of(model="org/name", revision=COMMIT)
    if is_fine:
        check_identity(plan, log)
        return
    with pytest.raises(RecipeError, match="its model is"):
        check_identity(plan, log)


@pytest.mark.parametrize("piece", ["model='", "'\\", "Initializing a V1 LLM engine (", "revision=a, ", "x=1, "])
def test_a_hostile_log_is_read_in_seconds(piece: str) -> None:
    head = engines_line().partition("model=")[0]
    for start in ("", head, f"{head}model='/m', speculative_config=None, tokenizer='/m', "):
        with pytest.raises(RecipeError):
            check_identity(plan_of(), start + piece * (1_000_000 // len(piece)))


def test_a_server_that_serves_another_model_never_gets_ready(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "healthy")
    plan = plan.model_copy(update={"environment": {**plan.environment, "TORCH_FAKE_VLLM_SERVES": "/models/other"}})
    with pytest.raises(RecipeError, match="does not serve what the plan names"), serve(plan, tmp_path, silent):
        pass


@pytest.mark.engine
@pytest.mark.usefixtures("prefect_server")
def test_the_real_vllm_that_is_sent_to_another_model_is_found_out(
    engine: EngineEnvironment, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A variable of the host has vLLM read another folder for the model's name: the one of the regressed weights."""
    home, model = furnished(tmp_path_factory.mktemp("home"), tmp_path_factory), catalog_folder() / "reference"
    shutil.copytree(model / "regressed", tmp_path / "elsewhere")
    redirect = tmp_path / "redirect.json"
    redirect.write_text(json.dumps({str(model / "model"): str(tmp_path / "elsewhere")}))
    recipe = str(write(small(tmp_path), tmp_path / "recipe.yaml"))
    host = {
        "VLLM_MODEL_REDIRECT_PATH": str(redirect),
        # A path in a variable of the host is opened to the server, or the redirection would end in "permission denied".
        "VLLM_CONFIG_ROOT": str(tmp_path / "elsewhere"),
        **of(engine),
    }
    done = run(home, COMMAND, "run", recipe, **host)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "class: serves-another" in done.stderr
    assert f"its model is {tmp_path / 'elsewhere'}" in done.stderr
    assert not list((home / "store").glob("reports/**/manifest.json"))
