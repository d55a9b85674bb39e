"""A first recipe of models of many families: kinds, contexts and parsers as a person says them, and each recipe checked."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.builders.families import NAMES, make_family, make_model, read_family
from tests.engine.hub import hub_of
from tests.recipe.importing.documents import model_document, repository
from tests.recipes import Document, write
from vllm_qualify.drift.candidate import find_candidate
from vllm_qualify.drift.check import check_recipe
from vllm_qualify.drift.draft import ReadModel, Wish, draft_recipe, read_model, write_draft
from vllm_qualify.drift.parsers import Answer, Reading, ask_parsers
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.hub import fetch_small
from vllm_qualify.errors import CallerError, HubError
from vllm_qualify.evidence.accuracy.checked_tasks import with_tasks
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.drafting.parts import Host
from vllm_qualify.recipe.drafting.traffic import Slo, Traffic
from vllm_qualify.recipe.gpu_types import MEMORY_GB
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import Recipe

WRITING = [name for name in NAMES if "refused" not in read_family(name)["expected"]]
REFUSED = [name for name in NAMES if name not in WRITING]
# Only there all of them fit.
LARGEST = Host("gb300", MEMORY_GB["gb300"])
CPU = Host("cpu", 16.0, has_bf16=False)


def silent(_line: str) -> None:
    pass


def wish(model: str | Path, *hosts: Host, **changes: Any) -> Wish:
    given = Wish(str(model), hosts or (LARGEST, CPU), Traffic(), Slo({}), None, None, f"vllm-qualify recipe new {model}")
    return given._replace(**changes)


def drafted(asked: Wish, *said: str) -> Recipe:
    """The recipe without an engine. Each of these texts stands in one of its lines, as comments are wrapped."""
    text = draft_recipe(asked, None, silent)
    flat = " ".join(line.strip().removeprefix("# ") for line in text.splitlines())
    assert [each for each in said if each not in flat] == [], text
    assert max(map(len, text.splitlines())) <= 128 + len(asked.model)
    return Recipe.model_validate(YAML(typ="safe", pure=True).load(text))


def told_of(asked: Wish) -> list[str]:
    lines: list[str] = []
    draft_recipe(asked, None, lines.append)
    return lines


# --- by the model's own files


def test_there_are_models_of_25_families() -> None:
    assert len(WRITING) >= 25
    assert len(REFUSED) >= 4


@pytest.mark.parametrize("name", WRITING)
def test_each_family_is_what_a_person_says_it_is(name: str, tmp_path: Path) -> None:
    model = read_model(str(make_family(name, tmp_path)), None)
    expected = read_family(name)["expected"]
    assert {
        "chats": model.told is not None,
        "thinks": bool(model.told and model.told.thoughts),
        "sees": model.shape.sees,
        "context_tok": model.shape.context_tok,
        "weights": model.shape.weights,
        "needs_code": bool(model.shape.needs_code),
    } == {"needs_code": False} | {
        key: expected[key] for key in ("chats", "thinks", "sees", "context_tok", "weights", "needs_code") if key in expected
    }


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_writes_no_text_is_refused_with_its_kind(name: str, tmp_path: Path) -> None:
    with pytest.raises(CallerError) as raised:
        draft_recipe(wish(make_family(name, tmp_path)), None, silent)
    assert f"the model {read_family(name)['expected']['refused']}" in str(raised.value)
    assert "name a model that completes texts or chats" in raised.value.remedy


@pytest.mark.parametrize("name", WRITING)
def test_each_recipe_fits_by_the_table_and_asks_the_model_as_it_is_used(name: str, tmp_path: Path) -> None:
    file, expected = tmp_path / "mine.yaml", read_family(name)["expected"]
    file.write_text(draft_recipe(wish(make_family(name, tmp_path), output=file), None, silent))
    loaded, candidate = load_recipe(str(file)), find_candidate("0.32.0", None, None, silent)
    checked = with_tasks(check_recipe(loaded, Choice(), candidate, tmp_path, None, True), loaded, Choice())
    assert checked.problems == []
    (task,) = loaded.recipe.accuracy
    assert (task.task, task.api) == ("gsm8k", "chat" if expected["chats"] else "completions")
    assert loaded.recipe.gates[0].metric == "exact_match"
    assert all(gate.is_against_baseline for gate in loaded.recipe.gates)
    assert ("chat" in loaded.recipe.capabilities) == expected["chats"]
    assert ("vision" in loaded.recipe.capabilities) == expected["sees"]
    # No engine was asked.
    assert not {"tools", "reasoning"} & {*loaded.recipe.capabilities}
    assert loaded.recipe.variants[expected["weights"]].model == f"./{name}"


def test_what_was_not_decided_is_said(tmp_path: Path) -> None:
    asked = wish(make_family("qwen3", tmp_path))
    reason = "no engine was asked which parser reads it; --python or --image names one"
    drafted(asked, f"No tools among the capabilities: {reason}.", f"No reasoning among the capabilities: {reason}.")
    assert "no engine was asked" in told_of(asked)[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek-v3", "the chat template shows the model no tools"),
        ("phi-4-mini", "the chat template renders no call of a tool"),
    ],
)
def test_calls_that_no_server_could_promise_are_not_promised(name: str, said: str, tmp_path: Path) -> None:
    drafted(wish(make_family(name, tmp_path)), f"No tools among the capabilities: {said}")


def test_a_template_that_takes_arguments_as_text_alone_is_named(tmp_path: Path) -> None:
    document = read_family("deepseek-v3")
    document["template"] = "{{ tools | tojson }}" + document["template"]
    drafted(wish(make_model(document, tmp_path / "it")), "takes the arguments of a call as text alone")


def test_a_folder_without_a_tokenizer_is_warned_of(tmp_path: Path) -> None:
    model = make_family("gpt2", tmp_path)
    (model / "tokenizer.json").unlink()
    assert "has no file of a tokenizer" in told_of(wish(model))[0]


# --- traffic and promises


def test_traffic_and_promises_are_the_users(tmp_path: Path) -> None:
    traffic, slo = Traffic(2000, 300, 32), Slo({"ttft_p99_ms": 800.0, "tpot_p50_ms": 40.0})
    recipe = drafted(
        wish(make_family("qwen3", tmp_path), LARGEST, traffic=traffic, slo=slo), "your traffic", "what you promise"
    )
    profile = recipe.gpu_types["gb300"].profiles["balanced"]
    assert (profile.load.input_len, profile.load.output_len, profile.load.max_concurrency) == (2000, 300, 32)
    # A p99 needs 459 requests that are counted, and half of them are not sure to be.
    assert profile.load.num_prompts == 918
    assert [(gate.metric, gate.bounds) for gate in profile.gates] == [("ttft_p99_ms", [800.0]), ("tpot_p50_ms", [40.0])]


def test_without_them_stand_ins_are_named_and_nothing_is_promised(tmp_path: Path) -> None:
    recipe = drafted(wish(make_family("qwen3", tmp_path), LARGEST), "a stand-in, not your traffic", "recipe bounds RUN")
    profile = recipe.gpu_types["gb300"].profiles["balanced"]
    assert (profile.load.input_len, profile.load.output_len, profile.load.max_concurrency) == (1024, 256, 64)
    assert profile.gates == []
    assert all(gate.is_against_baseline for gate in recipe.gates)


def test_a_rate_has_no_clients_and_gates_no_throughput(tmp_path: Path) -> None:
    traffic = Traffic(100, 50, rate=2.5)
    recipe = drafted(wish(make_family("qwen3", tmp_path), LARGEST, traffic=traffic))
    load = recipe.gpu_types["gb300"].profiles["balanced"].load
    assert (load.request_rate, load.max_concurrency) == (2.5, None)
    assert "output_throughput_tok_s" not in [gate.metric for gate in recipe.gates]


def test_traffic_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="a request of 1,100 tokens, prompt and reply, and the model's context is 1,024"):
        drafted(wish(make_family("gpt2", tmp_path), traffic=Traffic(1000, 100, 1)))


def test_a_short_context_has_short_stand_ins_and_fewer_examples(tmp_path: Path) -> None:
    recipe = drafted(wish(make_family("gpt2", tmp_path), LARGEST))
    load = recipe.gpu_types["gb300"].profiles["balanced"].load
    assert (load.input_len or 0) + load.output_len <= 1024
    assert recipe.accuracy[0].num_fewshot == 0


def test_a_gpu_type_that_is_too_small_is_left_out_with_the_reckoning(tmp_path: Path) -> None:
    h100 = Host("h100", MEMORY_GB["h100"])
    model = make_family("deepseek-r1", tmp_path)
    recipe = drafted(wish(model, h100, Host("h200", MEMORY_GB["h200"])), "Left out: h100: 689 GB of weights and ")
    assert (list(recipe.gpu_types), recipe.gpu_types["h200"].server["tensor-parallel-size"]) == (["h200"], 8)
    with pytest.raises(CallerError, match="do not fit into 1 to 8 GPUs of 80 GB in a number that divides its 128 heads"):
        drafted(wish(model, h100))


# --- hostile names


@pytest.mark.parametrize(
    "name", ["a: b", "x\ny: 1", "'quoted'", "{a: [b]}", "# comment", "- list", "\u2028line", "&a *b", "\x85n"]
)
def test_a_name_with_yaml_in_it_stays_a_name(name: str, tmp_path: Path) -> None:
    model = tmp_path / name
    make_family("smollm2", tmp_path).rename(model)
    recipe = drafted(wish(model, CPU))
    (variant,) = recipe.variants.values()
    assert variant.model == str(model)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", recipe.name)


def test_a_template_cannot_write_into_the_recipe(tmp_path: Path) -> None:
    document = read_family("qwen3")
    document["config"]["rope_scaling"] = {"rope_type": "a\ngates: []", "factor": 2.0}
    document["generation"]["temperature"] = "0.5\nname: other"
    recipe = drafted(wish(make_model(document, tmp_path / "mine"), CPU))
    assert recipe.name == "mine"


def test_a_folder_that_says_nothing_lends_its_parents_name(tmp_path: Path) -> None:
    make_family("smollm2", tmp_path / "smol-one").rename(tmp_path / "smol-one" / "model")
    assert drafted(wish(tmp_path / "smol-one" / "model", CPU)).name == "smol-one"


# --- the hub, and what is published


def test_a_repository_of_the_hub_is_read_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    files = {path.name: path.read_bytes() for path in make_family("qwen2.5", tmp_path).iterdir()}
    with hub_of({"org/Qwen-Mine": files | {"model.safetensors": b"0" * 5_000_000}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{hub.address}")
        recipe = drafted(wish("org/Qwen-Mine", LARGEST), "0.005 GB of weights, by its .safetensors files")
        assert not [asked.path for asked in hub.asked if asked.path.endswith(".safetensors")]
    assert (recipe.name, recipe.variants["bf16"].model) == ("qwen-mine", "org/Qwen-Mine")


def test_a_file_of_the_hub_that_is_too_large_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with hub_of({"org/large": {"config.json": b"{}", "tokenizer.json": b"0" * 101}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{hub.address}")
        with pytest.raises(HubError, match=r"tokenizer\.json of org/large has 101 bytes"):
            fetch_small("org/large", None, "MODEL", ["config.json", "tokenizer.json"], 100)
        assert not [asked.path for asked in hub.asked if "resolve" in asked.path]


def test_a_name_that_is_no_model_is_refused() -> None:
    with pytest.raises(CallerError, match="there is no folder"):
        drafted(wish("nowhere"))


PUBLISHED = ["--max-model-len", "9000", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"]


def published_wish(folder: Path, *words: str) -> Wish:
    """Of a model of the hub's name that is published with these words."""
    document = model_document(model__base_args=list(words))
    published = repository(folder / "recipes", document)
    family = read_family("qwen2.5")
    family["config"]["_name_or_path"] = document["model"]["model_id"]
    return wish(make_model(family, folder / "it"), Host("h200", 141.0), published=published.parents[2])


def test_the_published_recipe_is_taken_where_there_is_one(tmp_path: Path) -> None:
    asked = published_wish(tmp_path, *PUBLISHED)
    recipe = drafted(asked, "as vllm-project/recipes (Org/A-Model.yaml) publishes it", "tool-call-parser: hermes # not tried")
    assert recipe.gpu_types["h200"].server["max-model-len"] == 9000
    assert recipe.capabilities == ["chat", "tools", "json_schema"]
    other = wish(make_family("gpt2", tmp_path), LARGEST, published=asked.published)
    assert "has nothing for" in " ".join(told_of(other))
    with pytest.raises(CallerError, match="there is no folder models in"):
        drafted(asked._replace(published=tmp_path / "it"))


@pytest.mark.parametrize(
    ("reads", "promised", "said"),
    [
        (["hermes", "xlam"], True, "tried: it reads what the chat template writes"),
        (["xlam"], False, "but tried: vLLM 1.0 reads"),
    ],
)
def test_a_published_parser_is_held_against_what_the_engine_reads(
    reads: list[str], promised: bool, said: str, tmp_path: Path
) -> None:
    asked = published_wish(tmp_path, *PUBLISHED)
    reading = {name: Reading(reads=0 if name in reads else None, made_by="", why="") for name in ("hermes", "xlam")}
    text = write_draft(asked, read_model(asked.model, None), Answer(version="1.0", tools=reading, reasoning={}), silent)
    assert said in text
    recipe = Recipe.model_validate(YAML(typ="safe", pure=True).load(text))
    assert ("tools" in recipe.capabilities, recipe.gpu_types["h200"].server["tool-call-parser"]) == (promised, "hermes")


# --- by the real engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ReadModel]:
    folder = tmp_path_factory.mktemp("families")
    return {name: read_model(str(make_family(name, folder)), None) for name in WRITING}


@pytest.fixture(scope="module")
def answers(engine: EngineEnvironment, models: dict[str, ReadModel]) -> dict[str, Answer]:
    """What the engine's own parsers say of each model, asked in one start."""
    questions = {name: question for name, model in models.items() if (question := model.question)}
    candidate = find_candidate(None, None, str(engine.python.parents[1]), silent)
    return dict(zip(questions, ask_parsers(candidate, list(questions.values())), strict=True))


@pytest.fixture(scope="module")
def recipes(models: dict[str, ReadModel], answers: dict[str, Answer]) -> dict[str, Recipe]:
    texts = {name: write_draft(wish(name, LARGEST), model, answers.get(name), silent) for name, model in models.items()}
    return {name: Recipe.model_validate(YAML(typ="safe", pure=True).load(text)) for name, text in texts.items()}


@pytest.mark.engine
@pytest.mark.parametrize("name", WRITING)
def test_each_familys_parsers_are_those_that_a_person_names(name: str, recipes: dict[str, Recipe]) -> None:
    recipe, expected = recipes[name], read_family(name)["expected"]
    for serving in recipe.gpu_types.values():
        for option, named in (("tool-call-parser", expected["tools"]), ("reasoning-parser", expected["reasoning"])):
            assert serving.server.get(option) in (named or [None])
    assert ("tools" in recipe.capabilities, "reasoning" in recipe.capabilities) == (
        bool(expected["tools"]),
        bool(expected["reasoning"]),
    )


@pytest.mark.engine
def test_the_engine_takes_every_server(recipes: dict[str, Recipe], engine: EngineEnvironment, tmp_path: Path) -> None:
    """One start of the engine judges all: as variants of one recipe, each with all arguments of its own server."""
    document: Document = {
        "name": "all",
        "description": "Every family.",
        "served_model_name": "all",
        "variants": {},
        "gpu_types": {"gb300": {"default_variant": WRITING[0]}},
        "smoke": {"prompt": "a"},
        "accuracy": [{"num_questions": 10, "num_fewshot": 0}],
        "gates": [{"metric": "exact_match", "filter": "strict-match", "max_loss": 0.5, "unit": "fraction"}],
    }
    load = {"input_len": 8, "output_len": 8, "max_concurrency": 1, "num_warmups": 1}
    document["gpu_types"]["gb300"]["profiles"] = {"balanced": {"load": load}}
    for name, recipe in recipes.items():
        (variant,), serving = recipe.variants.values(), recipe.gpu_types["gb300"]
        server = serving.server | serving.profiles["balanced"].server
        document["variants"][name] = {"model": variant.model, "server": server}
    file = write(document, tmp_path / "all.yaml")
    # Kimi's tokenizer is code that comes with it, which is not here.
    options = ["--allow-code", "--json", "--python", str(engine.python.parents[1])]
    command = [sys.executable, "-m", "vllm_qualify", "recipe", "check", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert (answer["vllm"].partition("+")[0], len(answer["cells"])) == ("0.32.0", len(WRITING))
    assert [each for each in answer["findings"] if each["is_problem"]] == []
    # An engine without torchvision does not look at models that see.
    seeing = {read_family(name)["config"]["architectures"][0] for name in WRITING if read_family(name)["expected"]["sees"]}
    unjudged = [line for line in answer["unknown"] if not any(f"['{each}'] failed to be inspected" in line for each in seeing)]
    assert unjudged == []


@pytest.mark.engine
@pytest.mark.usefixtures("engine")
def test_the_command_drafts_a_recipe_that_the_engine_takes(tmp_path: Path) -> None:
    shutil.copytree(make_family("qwen3", tmp_path / "made"), tmp_path / "Mine-8B")
    command = [sys.executable, "-m", "vllm_qualify", "recipe"]
    made = subprocess.run(
        [*command, "new", "Mine-8B", "--gpu-type", "cpu", "--gpu-type", "h100", "--output", "mine.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    assert "next: vllm-qualify recipe check mine.yaml" in made.stderr
    checked = subprocess.run(
        [*command, "check", "mine.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (checked.returncode, "2 cells: fits" in checked.stdout) == (0, True), checked.stdout + checked.stderr
    recipe = load_recipe(str(tmp_path / "mine.yaml")).recipe
    assert (recipe.name, recipe.variants["fp8"].model) == ("mine-8b", "./Mine-8B")
    assert recipe.capabilities == ["chat", "tools", "json_schema", "reasoning"]
