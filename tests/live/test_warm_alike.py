"""Two real servers are warmed up alike by the real bench, and what that leaves is what a load in turns must have."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders.benches import MODEL, client_of
from tests.builders.loads import load_server
from tests.recipes import reference
from vllm_qualify.engine.bench import Bench, running_bench
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import Server, ServerPlan
from vllm_qualify.engine.server_start import serve
from vllm_qualify.evidence.load.client import UNFOLLOWED, Driven, driven_by, measure_load
from vllm_qualify.evidence.load.result import BESIDE
from vllm_qualify.evidence.load.warm_up import warm_up_problems
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.serving import ServerArguments
from vllm_qualify.recipe.traces.trace import Request, Trace

pytestmark = pytest.mark.engine
ARGUMENTS: ServerArguments = {"max-num-seqs": 8}
USUAL: dict[str, Any] = {"output_len": 4, "num_warmups": 2, "repeats": 1, "most_repeats": 1, "min_duration_s": 0.001}
OPEN: dict[str, Any] = {**USUAL, "max_concurrency": 1, "num_prompts": 20, "request_rate": 40.0}
CLOSED: dict[str, Any] = {**USUAL, "max_concurrency": 4, "num_prompts": 20}
TRACE = Trace.from_requests(16, [Request(at / 40, 16 + at, 4, (at, at + 1, at + 2)) for at in range(20)])


@pytest.fixture(scope="module")
def servers(engine: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder, on_cpu = tmp_path_factory.mktemp("servers"), reference()["gpu_types"]["cpu"]
    about = {"engine": engine, "model": MODEL, "revision": None, "served_model_name": "reference"}
    about |= {"arguments": on_cpu["server"] | ARGUMENTS, "environment": on_cpu["environment"], "startup_timeout_s": 300}
    plan = ServerPlan.model_validate(about)
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    with serve(plan, one, print) as first, serve(plan, other, print) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def benches(
    engine: EngineEnvironment, servers: list[Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Bench]]:
    folder = tmp_path_factory.mktemp("benches")
    first, second = (client_of(engine, server.url) for server in servers)
    with running_bench(first, folder / "first.log") as one, running_bench(second, folder / "second.log") as other:
        yield [one, other]


LOADS = {
    "clients": Load(input_len=16, **CLOSED),
    "spread, with a prefix": Load(input_len=16, shared_prefix_len=8, length_spread=0.5, **CLOSED),
    "rate": Load(input_len=16, **OPEN),
    "prompts": Load(prompts="prompts.jsonl", **CLOSED),
    "trace": Load.model_validate(
        {**USUAL, "trace": "trace.jsonl", "output_len": 0, "max_concurrency": 1, "num_prompts": 20, "window": "whole"}
        | {"prompts_sha256": TRACE.digest}
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_what_a_warm_up_of_both_leaves_is_what_a_load_in_turns_must_have(
    name: str, servers: list[Server], benches: list[Bench], tmp_path: Path
) -> None:
    settings, file = LOADS[name], tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "How many are {number} and 3?"}}\n' for number in range(20)))
    folder = tmp_path / "load"
    folder.mkdir()

    def driven(server: Server, bench: Bench) -> Driven:
        if settings.trace:
            return Driven(server, bench, trace=TRACE)
        return driven_by(server, bench, settings, file if settings.prompts else None)

    ours, beside = (driven(server, bench) for server, bench in zip(servers, benches, strict=True))
    measure_load(ours, settings, folder, lambda *_: None, UNFOLLOWED, beside)
    for side in (folder, folder / BESIDE):
        assert warm_up_problems(side, settings, load_server(ARGUMENTS)) == []
