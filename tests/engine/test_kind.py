"""Kinds of engine: the command of each one's server, against the engine's own account of its command line."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from vllm_qualify.engine.failure import End, Sign, classify_log
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kind import KINDS, kind_in, names_of
from vllm_qualify.engine.kinds.tensorrt_llm import TENSORRT_LLM
from vllm_qualify.engine.server import CONFIG_INSIDE, MODEL_INSIDE, ServerPlan, config_text, container_of, gpu_count
from vllm_qualify.engine.watch import families
from vllm_qualify.recipe.serving import VLLM, EngineName, ServerArguments

IMAGE = EngineImage(repository="org/engine", tag="1.3.0", digest="sha256:" + "1" * 64, platform="linux/amd64")

# Options of `trtllm-serve serve` that take a value, from TensorRT-LLM's reference of that command line, which its tests hold
# against the command itself: NVIDIA/TensorRT-LLM at 029e223d, tests/unittest/api_stability/references/trtllm_serve_cli.yaml.
OF_TRTLLM_SERVE = {
    "--host",
    "--port",
    "--served_model_name",
    "--revision",
    "--hf_revision",
    "--config",
    "--extra_llm_api_options",
}


def plan(kind: EngineName, arguments: ServerArguments, revision: str | None = "0123abc") -> ServerPlan:
    return ServerPlan(
        engine=IMAGE,
        model="org/model" if revision else "/weights",
        revision=revision,
        served_model_name="tiny",
        arguments=arguments,
        environment={"NCCL_DEBUG": "WARN"},
        startup_timeout_s=60,
        gpus=[0, 1],
        kind=kind,
    )


def command(planned: ServerPlan) -> list[str]:
    return container_of(planned, Path("/run/server.yaml"), 8123, {}).arguments


def test_trtllm_serve_gets_the_model_its_address_and_its_name_as_options() -> None:
    words = command(plan(TENSORRT_LLM, {"max_batch_size": 8}))
    assert words[:3] == ["trtllm-serve", "serve", "org/model"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--host": "0.0.0.0",
        "--port": "8000",
        "--served_model_name": "tiny",
        "--revision": "0123abc",
        "--config": CONFIG_INSIDE,
    }
    assert options.keys() <= OF_TRTLLM_SERVE


def test_local_weights_have_no_revision() -> None:
    words = command(plan(TENSORRT_LLM, {}, revision=None))
    assert words[2] == MODEL_INSIDE
    assert "--revision" not in words


def test_trtllm_serve_gets_all_other_arguments_in_its_config_file_as_they_are() -> None:
    arguments: ServerArguments = {
        "max_batch_size": 8,
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 3},
    }
    read = yaml.safe_load(config_text(plan(TENSORRT_LLM, arguments), 8123))
    assert read == arguments | {"return_perf_metrics": True, "enable_iter_perf_stats": True}
    quiet = plan(TENSORRT_LLM, {"return_perf_metrics": False})
    assert quiet.config(8123)["return_perf_metrics"] is False


def test_vllm_gets_everything_in_its_config_file() -> None:
    planned = plan(VLLM, {"speculative-config": {"method": "draft_model"}})
    assert command(planned) == ["--config", CONFIG_INSIDE]
    read = yaml.safe_load(config_text(planned, 8123))
    assert read["speculative-config"] == '{"method": "draft_model"}'
    assert (read["model"], read["revision"], read["host"], read["port"]) == ("org/model", "0123abc", "0.0.0.0", 8000)


@pytest.mark.parametrize(
    ("kind", "arguments", "gpus", "trusts"),
    [
        (TENSORRT_LLM, {}, 1, False),
        (TENSORRT_LLM, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "trust_remote_code": True}, 8, True),
        (TENSORRT_LLM, {"context_parallel_size": 2, "trust-remote-code": True}, 2, False),
        (TENSORRT_LLM, {"tensor-parallel-size": 4}, 1, False),
        (VLLM, {"tensor_parallel_size": 4, "trust_remote_code": True}, 1, False),
        (VLLM, {"tensor-parallel-size": 4, "trust-remote-code": True}, 4, True),
    ],
)
def test_each_kind_has_its_own_names(kind: EngineName, arguments: ServerArguments, gpus: int, trusts: bool) -> None:
    assert gpu_count(arguments, kind) == gpus
    assert plan(kind, arguments).trust_remote_code == trusts


@pytest.mark.parametrize(
    ("packages", "kind"),
    [
        ({"vllm": "0.32.0", "torch": "2.13.0"}, VLLM),
        ({"tensorrt_llm": "1.3.0rc29", "torch": "2.11.0"}, TENSORRT_LLM),
        ({"torch": "2.13.0"}, None),
        ({}, None),
    ],
)
def test_the_kind_is_known_by_its_package(packages: dict[str, str], kind: EngineName | None) -> None:
    kind_of = kind_in(packages)
    assert (kind_of.name if kind_of else None) == kind


def test_a_plan_of_before_there_were_kinds_is_vllms() -> None:
    document = plan(VLLM, {}).model_dump(mode="json")
    del document["kind"]
    assert ServerPlan.model_validate(document).engine_kind is KINDS[VLLM]


@pytest.mark.parametrize(
    ("kind", "arguments", "most"),
    [
        (VLLM, {"max-num-seqs": 64}, 64),
        (VLLM, {"max_batch_size": 64}, None),
        (VLLM, {"max-num-seqs": True}, None),
        (TENSORRT_LLM, {"max_batch_size": 32}, 32),
        (TENSORRT_LLM, {"max-num-seqs": 32}, None),
    ],
)
def test_each_kind_has_its_own_option_for_how_many_requests_run_at_once(
    kind: EngineName, arguments: ServerArguments, most: int | None
) -> None:
    assert plan(kind, arguments).most_requests == most


def test_a_server_is_watched_by_the_names_of_its_kind() -> None:
    assert "vllm:num_requests_running" in families(KINDS[VLLM], "0.32.0")
    # it does not tell how many requests wait
    assert list(families(KINDS[TENSORRT_LLM], "1.3.0")) == []
    other = replace(KINDS[TENSORRT_LLM], counters={"running": ("other:running", "other:active"), "waiting": ("other:queue",)})
    assert set(families(other, "0.1")) == {"other:running", "other:active", "other:queue"}


def test_no_kind_has_another_ones_name_of_a_counter() -> None:
    names = [name for kind in KINDS.values() for each in kind.counters.values() for name in each]
    assert len(names) == len(set(names))
    assert names_of("succeeded") == {"vllm:request_success", "trtllm_request_success"}


def test_a_kinds_own_signs_of_a_failure_go_first() -> None:
    log = "ValueError: the scheduler of the other engine has no room"
    sign = Sign("kv-cache-too-small", re.compile("has no (?P<what>room)"), "the other engine says: no {what}")
    failure = classify_log(log, End(exit_code=1), [sign])
    assert (failure.kind, failure.problem) == ("kv-cache-too-small", "the other engine says: no room")
    assert classify_log(log, End(exit_code=1)).kind == "unknown"
