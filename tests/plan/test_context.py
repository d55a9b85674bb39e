"""Requests longer than the server takes are refused before it is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.test_plan import CPU, document, engine, loaded, only
from tests.recipes import Document
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.launch import Engines
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice

__all__ = ["document", "engine"]

LOAD = {"input_len": 32_768, "output_len": 256, "max_concurrency": 1, "num_prompts": 14, "num_warmups": 0}


def planned(document: Document, engine: EngineEnvironment, folder: Path, config: Any, server: Document) -> CellPlan:
    document["gpu_types"]["cpu"]["profiles"]["latency"] = {"load": LOAD, "server": server}
    (folder / "bf16" / "config.json").write_text(json.dumps(config))
    return only(plan_cells(loaded(document), Choice(profile="latency"), Engines(engine=engine), CPU))


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
    with pytest.raises(CallerError) as raised:
        planned(document, engine, tmp_path, config, server)
    assert raised.value.problem == f"the longest request has 33,024 tokens, prompt and reply, and {says}"
    assert raised.value.place == "gpu_types.cpu.profiles.latency.load"


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
