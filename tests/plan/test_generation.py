"""A model's generation_config.json that caps, penalizes or samples: what is said of it, and where it is found."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.script import run_script
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import CallerError
from vllm_qualify.plan import generation
from vllm_qualify.plan.generation import MOST_BYTES, REMEDY, generation_warnings, recommended_sampling
from vllm_qualify.plan.workload import task_plan
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.loading import catalog_folder, load_recipe
from vllm_qualify.recipe.sampling import Sampling

OLD, NEW = "0.16.0", "0.33.0+cpu"
COMMIT = "a" * 40
SAMPLES = {"bos_token_id": 151643, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def plan(model: str, revision: str | None = None, **changes: Any) -> ServerPlan:
    settings = {"served_model_name": "m", "arguments": {}, "environment": {}, "startup_timeout_s": 1.0} | changes
    return ServerPlan(engine=EngineEnvironment(python=Path("python3")), model=model, revision=revision, **settings)


def saved(folder: Path, config: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "version", "said"),
    [
        ({"max_new_tokens": 512}, OLD, "max_new_tokens 512, where vLLM 0.16.0 ends every reply, whatever a request asks for"),
        (
            {"max_new_tokens": 512},
            NEW,
            "max_new_tokens 512, where replies to chats and /v1/responses without max_tokens end, while /v1/completions",
        ),
        ({"max_new_tokens": 512}, "", "max_new_tokens 512, which before vLLM 0.17 ends every reply there"),
        (SAMPLES, OLD, "temperature 0.6, top_k 20, top_p 0.95, for requests that do not set it; loads, and tasks"),
        ({"min_p": 0.1}, NEW, "min_p 0.1, for requests"),
        ({"repetition_penalty": 1.05}, OLD, "repetition_penalty 1.05, which changes every reply, scores and loads too"),
        ({"presence_penalty": 0.5}, NEW, "presence_penalty 0.5, which changes every reply"),
    ],
)
def test_each_kind_of_setting_is_told_with_effect_and_remedy(config: object, version: str, said: str, tmp_path: Path) -> None:
    (warning,) = generation_warnings(plan(saved(tmp_path / "model", config)), version)
    assert warning.startswith("the model's generation_config.json has ")
    assert said in warning
    assert warning.endswith(f"; {REMEDY}")


@pytest.mark.parametrize(
    ("config", "version"),
    [
        ({"eos_token_id": 2, "do_sample": False, "transformers_version": "5.0"}, NEW),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}, NEW),
        ({"temperature": None, "top_p": "0.9", "max_new_tokens": True}, NEW),
        ({"presence_penalty": 0.5}, OLD),
        ('{"temperature": NaN}', NEW),
    ],
)
def test_what_changes_nothing_is_not_told(config: object, version: str, tmp_path: Path) -> None:
    assert generation_warnings(plan(saved(tmp_path / "model", config)), version) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, ["temperature", "max_new_tokens"]),
        ({"generation-config": "auto"}, ["temperature", "max_new_tokens"]),
        ({"generation-config": "vllm"}, []),
        ({"generation-config": "org/another-repository"}, []),
        ({"hf-config-path": "org/another-repository"}, []),
        ({"override-generation-config": {"temperature": 0.3}}, ["max_new_tokens"]),
        ({"override-generation-config": '{"temperature": 0.3, "max_new_tokens": 9}'}, []),
        ({"override-generation-config": "no JSON"}, ["temperature", "max_new_tokens"]),
    ],
)
def test_it_is_told_of_what_the_server_reads(arguments: dict[str, Any], told: list[str], tmp_path: Path) -> None:
    model = saved(tmp_path / "model", {"temperature": 0.6, "max_new_tokens": 512})
    warnings = generation_warnings(plan(model, arguments=arguments), NEW)
    assert {name for name in ("temperature", "max_new_tokens") if any(f"has {name} " in line for line in warnings)} == set(told)


def test_a_folder_that_is_named_is_read_in_place_of_the_models(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", {"temperature": 0.6})
    named = saved(tmp_path / "other", {"top_p": 0.5})
    (warning,) = generation_warnings(plan(model, arguments={"generation-config": named}), NEW)
    assert "has top_p 0.5" in warning
    assert generation_warnings(plan(model, kind="tensorrt-llm"), "1.3") == [], "another engine reads no such file"


def test_it_is_found_in_the_hubs_cache_by_commit_and_by_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--model"
    assert generation_warnings(plan("org/model", COMMIT), NEW) == []
    saved(cached / "snapshots" / COMMIT, SAMPLES)
    assert generation_warnings(plan("org/model", "main"), NEW) == []
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    assert len(generation_warnings(plan("org/model", COMMIT), NEW)) == 1
    assert generation_warnings(plan("org/model", "main"), NEW) == generation_warnings(plan("org/model", COMMIT), NEW)


@pytest.mark.parametrize("config", ["[" * 100_000, "[]", "{", '"temperature"', " " * MOST_BYTES + "{}", "\x00"])
def test_a_file_that_is_none_is_said_to_be_none(config: str, tmp_path: Path) -> None:
    (warning,) = generation_warnings(plan(saved(tmp_path / "model", config)), NEW)
    assert warning == "the model's generation_config.json is no JSON object that vLLM could read"


# What vLLM takes of a file that has every key; the second argument is the file's folder.
TAKEN = """
import json, sys
from vllm.config import ModelConfig
made = ModelConfig(model=sys.argv[1], generation_config=sys.argv[2], skip_tokenizer_init=True)
json.dump(made.get_diff_sampling_param(), open(f"{sys.argv[2]}/taken.json", "w"))
"""


@pytest.mark.engine
def test_the_real_vllm_takes_these_settings_and_no_others_that_change_texts(engine: EngineEnvironment, tmp_path: Path) -> None:
    names = [*generation.SAMPLING, *generation.PENALTIES, generation.LENGTH]
    others = ["num_beams", "length_penalty", "typical_p", "no_repeat_ngram_size", "min_new_tokens", "max_length"]
    folder = saved(tmp_path / "own", dict.fromkeys([*names, *others], 3))
    model = str(catalog_folder() / "reference" / "model")
    run_script(engine, TAKEN, model, folder).check_returncode()
    taken = json.loads((tmp_path / "own" / "taken.json").read_text())
    assert taken.keys() - {"max_tokens"} == {*generation.SAMPLING, *generation.PENALTIES}
    assert taken["max_tokens"] == 3


@pytest.mark.parametrize(
    ("config", "arguments", "numbers"),
    [
        (SAMPLES, {}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        # transformers writes no temperature of 1, its own default
        ({"do_sample": True}, {}, {"temperature": 1.0}),
        ({"top_p": 0.8}, {}, {"temperature": 1.0, "top_p": 0.8}),
        (SAMPLES, {"override-generation-config": {"temperature": 1.0}}, {"temperature": 1.0, "top_k": 20, "top_p": 0.95}),
        ({}, {"override-generation-config": '{"temperature": 0.7}'}, {"temperature": 0.7}),
    ],
)
def test_the_models_own_sampling_is_what_a_client_gets_that_says_nothing(
    config: object, arguments: dict[str, Any], numbers: dict[str, float], tmp_path: Path
) -> None:
    server = plan(saved(tmp_path / "model", config), arguments=arguments)
    assert recommended_sampling(server, "accuracy.gsm8k.sampling").numbers == numbers


@pytest.mark.parametrize(
    ("config", "arguments", "problem"),
    [
        ({"do_sample": False, "eos_token_id": 2}, {}, "no generation_config.json that recommends how to sample"),
        ("no JSON", {}, "no generation_config.json that recommends how to sample"),
        (SAMPLES, {"generation-config": "vllm"}, "does not read the model's own generation_config.json"),
        (SAMPLES | {"top_p": 7}, {}, "has a top_p that is no number of sampling"),
        (SAMPLES | {"temperature": "hot"}, {}, "has a temperature that is no number of sampling"),
        ('{"temperature": NaN}', {}, "has a temperature that is no number of sampling"),
    ],
)
def test_who_recommends_no_sampling_is_refused(config: object, arguments: dict[str, Any], problem: str, tmp_path: Path) -> None:
    server = plan(saved(tmp_path / "model", config), arguments=arguments)
    message = rf"^accuracy\.gsm8k\.sampling: .*{re.escape(problem)}[^\n]*\n.*sampling: \{{temperature"
    with pytest.raises(CallerError, match=message):
        recommended_sampling(server, "accuracy.gsm8k.sampling")


def test_a_tasks_plan_has_the_numbers_that_are_sent(tmp_path: Path) -> None:
    recipe, server = load_recipe("reference"), plan(saved(tmp_path / "model", SAMPLES))
    planned = [
        task_plan(recipe, Accuracy(num_questions=1, sampling=sampling), server, [])
        for sampling in ("model", Sampling(temperature=0.5), None)
    ]
    assert [task.gen_kwargs for task in planned] == [{"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.5}, {}]


def test_samples_of_a_model_that_recommends_none_are_refused(tmp_path: Path) -> None:
    settings = Accuracy(num_questions=1, sampling="model", samples_per_question=2)
    with pytest.raises(CallerError, match="temperature 0, at which samples do not differ"):
        task_plan(load_recipe("reference"), settings, plan(saved(tmp_path / "model", {"temperature": 0})), [])
    task = task_plan(load_recipe("reference"), settings, plan(saved(tmp_path / "model", SAMPLES)), [])
    assert (task.repetitions, task.least_repetitions) == (2, 2)
