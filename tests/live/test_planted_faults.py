"""Faults that a plugin plants in the real engine: each is refused by the gate of its path, and by no other stage."""

from typing import NamedTuple

import pytest
from ruamel.yaml import YAML

from tests.builders.chat_model import MODEL, Server, recipe
from tests.builders.faulty_engines import plant
from tests.qualified import COMMAND, furnished, of, run
from tests.recipes import Document, write
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.report.model import load_report

pytestmark = pytest.mark.engine


class PlantedRun(NamedTuple):
    """What is planted, the paths that refuse it, and what of the recipe is another."""

    faults: list[str]
    refusing: list[str]
    paths: Document
    is_started_again: bool = False
    """and no option names the backend of forms: then vLLM itself has a fault"""


# Forms have a fault of their own beside those of the cache, and are left out beside replies that are mixed up. Without salts no
# other path can be proven, but what hang-ups leave is seen. A server that keeps their blocks cannot empty its cache to sleep.
RUNS = {
    "cache and grammars": PlantedRun(["cached", "constrained", "sleeps"], ["cached", "constrained"], {}),
    "evictions, batches and sleep": PlantedRun(
        ["evicted", "concurrent", "awake"],
        ["evicted", "concurrent", "awake"],
        {"leave_out": {"constrained": "replies are mixed up here"}},
    ),
    "salts, streams, aborts and orders": PlantedRun(
        ["shared", "lost", "aborted"],
        ["cold", "constrained", "aborted", "reordered"],
        {"leave_out": dict.fromkeys(["cached", "evicted", "concurrent"], "nothing is cold here")},
        is_started_again=True,
    ),
}

# With the recipe's short blocks the contract's requests share some, and its checks of calls see a corrupt cache as well.
LONG_BLOCKS: Server = {"block-size": 128, "num-gpu-blocks-override": 256}


@pytest.mark.parametrize("run_name", RUNS)
def test_each_fault_is_refused_by_the_gate_of_its_path_alone(
    run_name: str, engine: EngineEnvironment, on_a_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    planted = RUNS[run_name]
    folder = tmp_path_factory.mktemp("planted")
    faulty = plant(planted.faults, engine, folder / "engine")
    home = furnished(tmp_path_factory.mktemp("home"), tmp_path_factory)
    document: Document = YAML(typ="safe").load(recipe(folder, MODEL, LONG_BLOCKS).read_text())
    serving = document["gpu_types"]["cpu"]
    if planted.is_started_again:
        serving["server"].pop("structured-outputs-config")
        serving["warm_starts"] = 1
    else:
        serving["server"]["enable-sleep-mode"] = True
        serving["environment"] = serving.get("environment", {}) | {"VLLM_SERVER_DEV_MODE": "1"}
    profiles = serving["profiles"]
    profiles.pop("traffic")
    # So many that a fault of one in a few is among them, and with the others beside them 12 to 20 requests are under way. Long
    # other prompts leave blocks of other places in a text, which change more answers.
    more = {"num_prompts": 48, "reply_tok": 16, "num_concurrent": 8, "num_aborts": 24, "filler_tok": 1024}
    profiles["chats"]["paths"] |= more | {"num_constrained": 48, "most_form_tok": 128} | planted.paths
    # Fewer questions are enough to show that nothing else refuses.
    document["accuracy"][0] |= {"num_questions": 100, "sequential": False}
    document["gates"][0] |= {"minimum": 0.7}
    # Whoever reaches a server that can be put to sleep may change it.
    command = (COMMAND, "run", str(write(document, folder / "recipe.yaml")), "--allow-code")
    done = run(home, *command, **of(faulty), **on_a_server)
    assert done.returncode == 1, done.stdout + done.stderr
    (report_folder,) = (home / "runs").iterdir()
    gates = {gate.gate.metric: gate for gate in load_report(report_folder).judgement.gates}
    assert ("path_awake" in gates) != planted.is_started_again
    refused = [f"path_{path}" for path in planted.refusing]
    if planted.is_started_again:
        # vLLM's own fault, which the contract shows, too.
        refused.append("contract_json_schema_all_of")
    assert {name: gate.verdict for name, gate in gates.items() if gate.verdict != "pass"} == dict.fromkeys(refused, "fail")
    if planted.is_started_again:
        # vLLM's backend for schemas with multiples takes no calls of tools.
        assert "HTTP 500" in gates["path_reordered"].because
