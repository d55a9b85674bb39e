"""Faults that a plugin plants in the real engine: each is refused by the gate of its path, and by no other stage."""

import pytest
from ruamel.yaml import YAML

from tests.builders.chat_model import MODEL, recipe
from tests.builders.faulty_engines import plant
from tests.qualified import COMMAND, furnished, of, run
from tests.recipes import Document, write
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.report.model import load_report

pytestmark = pytest.mark.engine
# Forms have a fault of their own beside those of the cache, and are left out beside replies that are mixed up.
RUNS: dict[str, tuple[list[str], Document]] = {
    "cache, aborts and grammars": (["cached", "aborted", "constrained"], {"num_constrained": 48}),
    "evictions and batches": (["evicted", "concurrent"], {"leave_out": {"constrained": "replies are mixed up here"}}),
}


@pytest.mark.parametrize("run_name", RUNS)
def test_each_fault_is_refused_by_the_gate_of_its_path_alone(
    run_name: str, engine: EngineEnvironment, on_a_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    faults, paths = RUNS[run_name]
    folder = tmp_path_factory.mktemp("planted")
    faulty = plant(faults, engine, folder / "engine")
    home = furnished(tmp_path_factory.mktemp("home"), tmp_path_factory)
    document: Document = YAML(typ="safe").load(recipe(folder, MODEL, {}).read_text())
    profiles = document["gpu_types"]["cpu"]["profiles"]
    profiles.pop("traffic")
    profiles["chats"]["paths"] |= paths
    done = run(home, COMMAND, "run", str(write(document, folder / "recipe.yaml")), **of(faulty), **on_a_server)
    assert done.returncode == 1, done.stdout + done.stderr
    (report_folder,) = (home / "runs").iterdir()
    gates = {gate.gate.metric: gate.verdict for gate in load_report(report_folder).judgement.gates}
    assert {name: verdict for name, verdict in gates.items() if verdict != "pass"} == {
        f"path_{fault}": "fail" for fault in faults
    }
