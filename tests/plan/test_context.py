"""Requests longer than the server takes are refused before it is started."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.builders.plans import difference_from, document, engine, only, plans_of
from tests.recipes import Document
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.load import LoadSettings
from vllm_qualify.recipe.recipe import Profile, Recipe
from vllm_qualify.recipe.searches import Sweep

__all__ = ["document", "engine"]

LOAD = {"input_len": 32_768, "output_len": 256, "max_concurrency": 1, "num_prompts": 14, "num_warmups": 0}
SHORT = LOAD | {"input_len": 32}


def planned(document: Document, engine: EngineEnvironment, folder: Path, config: Any, server: Document) -> CellPlan:
    document["gpu_types"]["cpu"]["profiles"]["latency"] = {"load": LOAD, "server": server}
    (folder / "bf16" / "config.json").write_text(json.dumps(config))
    return only(plans_of(document, engine, choice=Choice(profile="latency")))


@pytest.mark.parametrize(
    ("config", "server", "says"),
    [
        ({}, {"max-model-len": 33_023}, "max-model-len is 33,023"),
        ({}, {"max-model-len": "33k"}, "max-model-len is 33,000"),
        ({}, {"max-model-len": "32K"}, "max-model-len is 32,768"),
        ({"max_position_embeddings": 2048}, {}, "max_position_embeddings of the model's config.json is 2,048"),
        (
            {"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            {},
            "max_position_embeddings of the model's config.json is 2,048",
        ),
    ],
)
def test_a_context_that_the_server_does_not_take_is_refused(
    document: Document, engine: EngineEnvironment, tmp_path: Path, config: Document, server: Document, says: str
) -> None:
    message = f"gpu_types.cpu.profiles.latency.load: the longest request has 33,024 tokens, prompt and reply, and {says}\n"
    with pytest.raises(CallerError, match=f"^{re.escape(message)}"):
        planned(document, engine, tmp_path, config, server)


@pytest.mark.parametrize(
    ("config", "server"),
    [
        ({}, {"max-model-len": 33_024}),
        ({}, {"max-model-len": "33.024k"}),
        ({}, {"max-model-len": "33K"}),
        ({}, {"max-model-len": "auto"}),
        ({}, {}),
        ({"max_position_embeddings": 131_072}, {}),
        # The option goes before the model: vLLM itself says whether it is too much for it.
        ({"max_position_embeddings": 2048}, {"max-model-len": 33_024}),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 32.0}}, {}),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "yarn", "factor": 32.0}}, {}),
        ({"max_position_embeddings": "2048"}, {}),
        ({"max_position_embeddings": -1}, {}),
        ([], {}),
    ],
)
def test_a_context_that_it_may_take_is_left_to_it(
    document: Document, engine: EngineEnvironment, tmp_path: Path, config: Any, server: Document
) -> None:
    assert planned(document, engine, tmp_path, config, server).load.input_len == 32_768


# Traces: what a plan says of them before anything starts.


def with_trace(
    document: Document, engine: EngineEnvironment, folder: Path, rows: list[Document], *gates: Document, **load: Any
) -> CellPlan:
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"trace": str(folder / "trace.jsonl"), "window": "whole", "num_warmups": 0, **load}
    profile = {"load": settings, "server": {"max-model-len": 1000}, "gates": list(gates)}
    document["gpu_types"]["cpu"]["profiles"]["latency"] = profile
    return only(plans_of(document, engine, choice=Choice(profile="latency")))


def rows_of(count: int, every_s: float = 1.0, **last: Any) -> list[Document]:
    rows: list[Document] = [{"arrival_s": at * every_s, "input_tok": 500, "output_tok": 100} for at in range(count)]
    return [*rows[:-1], rows[-1] | last]


@pytest.mark.parametrize(("settings", "count"), [({}, 7), ({"num_prompts": 3}, 3)])
def test_a_trace_of_a_plan_is_all_of_its_file_or_its_first_requests(
    document: Document, engine: EngineEnvironment, tmp_path: Path, settings: dict[str, int], count: int
) -> None:
    plan = with_trace(document, engine, tmp_path, rows_of(7), **settings)
    assert (plan.load.num_prompts, plan.load.is_open, plan.prompts) == (count, True, tmp_path / "trace.jsonl")
    assert difference_from(plan, Recipe.model_validate(document)) == ""


@pytest.mark.parametrize(
    ("rows", "load", "message"),
    [
        (rows_of(7, input_tok=901), {}, "the request in line 7 has 1,001 tokens, prompt and reply, and max-model-len is 1,000"),
        (rows_of(7), {"num_prompts": 8}, "it has 7 requests, and the load asks 8"),
        (rows_of(7, 10.0), {"time_limit_s": 60.0}, "its requests take 60 s to send, and time_limit_s is 60"),
        (rows_of(7, arrival_s=0.5), {}, "line 7: its time is 0.5 s, before that of the request before it"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused(
    document: Document, engine: EngineEnvironment, tmp_path: Path, rows: list[Document], load: Document, message: str
) -> None:
    with pytest.raises(CallerError) as raised:
        with_trace(document, engine, tmp_path, rows, **load)
    assert raised.value.problem == message


def test_a_trace_too_short_for_its_gates_is_refused(document: Document, engine: EngineEnvironment, tmp_path: Path) -> None:
    gate = {"metric": "ttft_p90_ms", "maximum": 500.0, "unit": "ms"}
    with pytest.raises(CallerError, match="it has 7 requests, and the gates need 44"):
        with_trace(document, engine, tmp_path, rows_of(7), gate)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"window": "steady"}, "set 'window: whole'"),
        ({"output_len": 8}, "leave 'output_len' and 'request_rate' out"),
        ({"request_rate": 2.0}, "leave 'output_len' and 'request_rate' out"),
        ({"api": "chat"}, "leave 'api' out"),
        ({"input_len": 8}, "one of the three"),
        ({"length_spread": 0.5}, "leave it out with 'prompts' or 'trace'"),
        ({"max_concurrency": 8}, "'trace' sends requests whether or not others have ended"),
        ({"trace_speed": 0.0}, "greater than 0"),
    ],
)
def test_what_contradicts_a_trace_is_refused(load: Document, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LoadSettings.model_validate({"trace": "t.jsonl", "window": "whole", "num_warmups": 0} | load)


def test_a_speed_is_of_a_trace() -> None:
    with pytest.raises(ValidationError, match="'trace_speed' is of a trace"):
        LoadSettings(input_len=8, output_len=8, num_warmups=0, trace_speed=2.0)


OF_TURNS: Document = {"input_len": 50, "output_len": 10, "api": "chat", "turns": 4, "window": "whole"}
OF_TURNS |= {"num_warmups": 0, "max_concurrency": 3}


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"api": "completions"}, "'turns' are of chats with random prompts and clients"),
        ({"request_rate": 2.0, "max_concurrency": None}, "'turns' are of chats with random prompts and clients"),
        ({"input_len": None, "prompts": "p.jsonl"}, "'turns' are of chats with random prompts and clients"),
        ({"window": "steady"}, "set 'window: whole'"),
        ({"num_prompts": 14}, "num_prompts must be a multiple of turns, and 12 or more"),
        ({"num_prompts": 8}, "num_prompts must be a multiple of turns, and 12 or more"),
        ({"turns": 0}, "greater than or equal to 1"),
    ],
)
def test_what_contradicts_turns_is_refused(load: Document, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LoadSettings.model_validate(OF_TURNS | load)


def test_a_load_of_chats_has_whole_chats_and_its_longest_request_is_the_last_turn() -> None:
    settings = LoadSettings.model_validate(OF_TURNS | {"shared_prefix_len": 100})
    assert settings.longest_tok == 100 + 4 * (50 + 10)
    # 5 for each client are 15, and for the percentile 101: both in whole chats.
    assert [settings.make_load(None, least).num_prompts for least in (1, 101)] == [16, 104]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweep": {"concurrencies": [1, 2]}}, "sweep has loads of its own, without turns"),
        ({"soak_min": 1}, "soak has loads of its own, without turns"),
        ({"fit": {"max_num_batched_tokens": [256, 512]}}, "fit has loads of its own, without turns"),
    ],
)
def test_other_loads_of_a_profile_have_no_turns(changes: Document, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Profile.model_validate({"load": OF_TURNS} | changes)


def test_a_gate_on_later_turns_needs_turns(document: Document) -> None:
    gate = {"metric": "later_turns_ttft_p50_ms", "maximum": 500.0, "unit": "ms"}
    profile = document["gpu_types"]["cpu"]["profiles"]["latency"]
    profile |= {"load": OF_TURNS, "gates": [gate]}
    assert Recipe.model_validate(document)
    profile["load"] = OF_TURNS | {"turns": 1}
    with pytest.raises(ValidationError, match="a gate on later_turns_ttft_p50_ms needs chats of several 'turns'"):
        Recipe.model_validate(document)


def test_the_times_of_turns_are_not_searched_for() -> None:
    with pytest.raises(ValidationError, match="is not a latency of a load"):
        Sweep(slo={"later_turns_ttft_p50_ms": 5.0})


def of_long_contexts(document: Document, task: str, most: object, **settings: Any) -> Document:
    document["accuracy"] = [{"task": task, "num_questions": 10} | settings]
    document["gates"] = [{"metric": "string_match_all", "task": task, "filter": "none", "minimum": 0.9, "unit": "fraction"}]
    document["gpu_types"]["cpu"]["profiles"] = {"latency": {"load": SHORT, "server": {"max-model-len": most}}}
    return document


def test_a_task_of_a_longer_context_than_the_server_takes_is_refused(document: Document, engine: EngineEnvironment) -> None:
    document = of_long_contexts(document, "long_8192", 8191)
    message = "accuracy.long_8192: long_8192 has 8,192 tokens, prompt and reply, and max-model-len is 8,191\n"
    with pytest.raises(CallerError, match=f"^{re.escape(message)}"):
        plans_of(document, engine, choice=Choice(profile="latency"))


def test_a_task_of_a_context_that_the_server_takes_is_planned_and_one_of_ones_own_may_have_such_a_name(
    document: Document, engine: EngineEnvironment, tmp_path: Path
) -> None:
    cases: list[tuple[int, Document, object]] = [(8192, {}, 8192), (1024, {"task_folder": str(tmp_path)}, None)]
    for most, settings, context_tok in cases:
        document = of_long_contexts(document, "long_8192", most, **settings)
        (task,) = only(plans_of(document, engine, choice=Choice(profile="latency"))).accuracy
        assert task.settings.context_tok == context_tok
        assert context_tok is None or task.settings.long_reply_tok == 128
