"""Kinds of engine: the command of each one's server, against the engine's own account of its command line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders.server_plans import plan as server_plan
from vllm_qualify.engine.kinds.registry import KINDS, kind_in, names_of
from vllm_qualify.engine.kinds.tensorrt_llm import TENSORRT_LLM
from vllm_qualify.engine.server import CONFIG_INSIDE, MODEL_INSIDE, ServerPlan, config_text, container_of, gpu_count
from vllm_qualify.engine.watch import metric_families
from vllm_qualify.recipe.serving import VLLM, EngineName, ServerArguments

COMMIT = "0" * 40
# Options of `trtllm-serve serve` that take a value, from TensorRT-LLM's reference of that command line, which its tests hold
# against the command itself: NVIDIA/TensorRT-LLM at 029e223d, tests/unittest/api_stability/references/trtllm_serve_cli.yaml.
OF_TRTLLM_SERVE = {
    *("--host", "--port", "--served_model_name", "--revision", "--hf_revision", "--config", "--extra_llm_api_options")
}


def plan(kind: EngineName, arguments: ServerArguments, **others: Any) -> ServerPlan:
    return server_plan(kind=kind, arguments=arguments, **others)


def command(planned: ServerPlan) -> list[str]:
    return container_of(planned, Path("/run/server.yaml"), 8123, {}).arguments


def test_trtllm_serve_gets_the_model_its_address_and_its_name_as_options() -> None:
    words = command(plan(TENSORRT_LLM, {"max_batch_size": 8}))
    assert words[:3] == ["trtllm-serve", "serve", "some/model"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    address = {"--host": "0.0.0.0", "--port": "8000"}
    assert options == address | {"--served_model_name": "tiny", "--revision": COMMIT, "--config": CONFIG_INSIDE}
    assert options.keys() <= OF_TRTLLM_SERVE
    of_local_weights = command(plan(TENSORRT_LLM, {}, model="/weights", revision=None))
    assert of_local_weights[2] == MODEL_INSIDE
    assert "--revision" not in of_local_weights


def test_trtllm_serve_gets_all_other_arguments_in_its_config_file_as_they_are() -> None:
    speculative: ServerArguments = {"decoding_type": "Draft_Target", "max_draft_len": 3}
    arguments: ServerArguments = {"max_batch_size": 8, "speculative_config": speculative}
    read = yaml.safe_load(config_text(plan(TENSORRT_LLM, arguments), 8123))
    assert read == arguments | {"return_perf_metrics": True, "enable_iter_perf_stats": True}
    quiet = plan(TENSORRT_LLM, {"return_perf_metrics": False})
    assert quiet.config(8123)["return_perf_metrics"] is False


def test_vllm_gets_everything_in_its_config_file() -> None:
    planned = plan(VLLM, {"speculative-config": {"method": "draft_model"}})
    assert command(planned) == ["--config", CONFIG_INSIDE]
    read = yaml.safe_load(config_text(planned, 8123))
    assert read["speculative-config"] == '{"method": "draft_model"}'
    assert (read["model"], read["revision"], read["host"], read["port"]) == ("some/model", COMMIT, "0.0.0.0", 8000)


@pytest.mark.parametrize(
    ("kind", "arguments", "gpus", "trusts", "most"),
    [
        (TENSORRT_LLM, {}, 1, False, None),
        (TENSORRT_LLM, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "trust_remote_code": True}, 8, True, None),
        (TENSORRT_LLM, {"context_parallel_size": 2, "trust-remote-code": True, "max_batch_size": 32}, 2, False, 32),
        (TENSORRT_LLM, {"tensor-parallel-size": 4, "max-num-seqs": 32}, 1, False, None),
        (VLLM, {"tensor_parallel_size": 4, "trust_remote_code": True, "max_batch_size": 64}, 1, False, None),
        (VLLM, {"tensor-parallel-size": 4, "trust-remote-code": True, "max-num-seqs": 64}, 4, True, 64),
        (VLLM, {"max-num-seqs": True}, 1, False, None),
    ],
)
def test_each_kind_has_its_own_names_of_options(
    kind: EngineName, arguments: ServerArguments, gpus: int, trusts: bool, most: int | None
) -> None:
    planned = plan(kind, arguments)
    assert (gpu_count(arguments, kind), planned.trust_remote_code, planned.most_requests) == (gpus, trusts, most)


def test_the_kind_is_known_by_its_package() -> None:
    for package, kind in (("vllm", KINDS[VLLM]), ("tensorrt_llm", KINDS[TENSORRT_LLM]), ("transformers", None)):
        assert kind_in({package: "1", "torch": "2.13.0"}) is kind


def test_a_server_is_watched_by_the_names_of_its_kind() -> None:
    assert "vllm:num_requests_running" in metric_families(KINDS[VLLM], "0.32.0")
    # it does not tell how many requests wait
    assert list(metric_families(KINDS[TENSORRT_LLM], "1.3.0")) == []
    other = replace(KINDS[TENSORRT_LLM], counters={"running": ("other:running", "other:active"), "waiting": ("other:queue",)})
    assert set(metric_families(other, "0.1")) == {"other:running", "other:active", "other:queue"}


def test_no_kind_has_another_ones_name_of_a_counter() -> None:
    names = [name for kind in KINDS.values() for each in kind.counters.values() for name in each]
    assert len(names) == len(set(names))
    assert names_of("succeeded") == {"vllm:request_success", "trtllm_request_success"}
