"""A soak by the real bench: a server that leaks is caught, and one that does not passes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.benches import MODEL, client_of
from tests.builders.worlds import world_of
from tests.fakes.vllm import make_engine
from tests.report.builder import passed_report
from vllm_qualify.engine.bench import Bench, running_bench
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.provision import read_machine
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.engine.server_start import serve
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.serving import Served, watching_server
from vllm_qualify.evidence.stages.soak import SOAK as STAGE
from vllm_qualify.evidence.stages.table import parse
from vllm_qualify.judge.verdict import is_decided, surely_misses
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import gate_of
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.searches import Soak

pytestmark = pytest.mark.engine
# A soak of five requests in a second: as many as its server can answer would keep a core busy. A slope needs 15
# rounds, and on a busy machine a round takes longer.
LOAD = Load(input_len=16, output_len=4, max_concurrency=4, num_prompts=20, num_warmups=0, time_limit_s=120.0, request_rate=20.0)
SOAK = Soak(soak_min=1.6, soak_share=0.25)
GATES = [
    gate_of(metric="soak_host_memory_growth_mib_h", maximum=1500.0, unit="MiB/h"),
    gate_of(metric="soak_ttft_growth_pct_h", maximum=2000.0, unit="%/h"),
    gate_of(metric="soak_failed_share", maximum=0.05, unit="fraction"),
]


def planned(folder: Path, behaviour: str) -> CellPlan:
    """A cell whose server is a stand-in."""
    engine = EngineEnvironment(python=make_engine(folder / "engine") / "bin" / "python")
    server = ServerPlan(
        engine=engine,
        model=MODEL,
        revision=None,
        served_model_name="reference",
        arguments={"max-num-seqs": 8},
        environment={"TORCH_FAKE_VLLM": behaviour},
        startup_timeout_s=30,
    )
    plan = passed_report().plan
    cell = plan.cell.model_copy(update={"gpu_type": "cpu"})
    changes = {"server": server, "cell": cell, "load": LOAD, "soak": SOAK, "gates": GATES, "watched": True, "prompts": None}
    return plan.model_copy(update=changes | {"fingerprint": read_machine(engine, "cpu"), "baseline": None})


@pytest.fixture(scope="module")
def bench(engine: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The real engine's bench, for both servers."""
    with running_bench(client_of(engine), tmp_path_factory.mktemp("bench") / "bench.log") as each:
        yield each


def soaked(behaviour: str, bench: Bench, folder: Path) -> list[Measurement]:
    """The stage's measurements, which are the same when they are read again."""
    plan, evidence = planned(folder, behaviour), folder / "evidence"
    at_server = evidence / "serve"
    at_server.mkdir(parents=True)
    with serve(plan.server, at_server, print) as server, watching_server(server, plan, at_server):
        asking = bench.model_copy(update={"client": bench.client.model_copy(update={"url": server.url})})
        stage = STAGE.run(world_of(Served(server=server, bench=asking), plan, evidence))
    assert parse("soak", plan, evidence) == stage.measurements
    return stage.measurements


def test_a_server_that_leaks_is_caught(bench: Bench, tmp_path: Path) -> None:
    rows = soaked("leaks", bench, tmp_path)
    assert [surely_misses(gate, rows) for gate in GATES] == [True, True, False]


def test_a_server_that_does_not_leak_passes(bench: Bench, tmp_path: Path) -> None:
    """Its times depend on what else the machine does."""
    rows = soaked("healthy", bench, tmp_path)
    assert {row.metric: row.invalid_because for row in rows if row.invalid_because} == {}
    memory, _, failed = GATES
    assert not any(surely_misses(gate, rows) for gate in (memory, failed))
    assert is_decided(memory, rows)
    assert is_decided(failed, rows)
