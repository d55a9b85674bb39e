"""The model that sees, on the real engine: it passes, and a copy whose vision collapsed fails the gate on pictures alone."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from infra.reference_vision import variants
from tests.directions import CONTRACT
from tests.evidence.contract.server import failing, unknown
from tests.recipes import Document, write
from vllm_qualify.engine.provision import Launch, find_engines, read_machine
from vllm_qualify.engine.server_start import await_ready, launch
from vllm_qualify.evidence.accuracy.lm_eval_process import prepare_task, running_lm_eval
from vllm_qualify.evidence.accuracy.measurements import parse_task
from vllm_qualify.evidence.contract.checks import parse_contract
from vllm_qualify.evidence.contract.measure import measure_contract
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.judge.verdict import bounds_of, measurements_of
from vllm_qualify.plan.cells import plan_cells
from vllm_qualify.plan.choice import Choice
from vllm_qualify.recipe.contract import Contract
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.loading import catalog_folder, load_recipe

MODEL = catalog_folder() / "reference-vision" / "model"
QUESTIONS = 100
pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engine")]


def recipe(folder: Path, model: Path) -> Path:
    """The catalog's recipe, of another copy of the model."""
    document: Document = YAML(typ="safe").load((catalog_folder() / "reference-vision.yaml").read_text())
    document["variants"]["bf16"]["model"] = str(model)
    for task in document["accuracy"]:
        task |= {"num_questions": QUESTIONS, "sequential": False}
        task["questions"] = {"test": str(catalog_folder() / task["questions"]["test"])}
    load = document["gpu_types"]["cpu"]["profiles"]["balanced"]["load"]
    load["prompts"] = str(catalog_folder() / load["prompts"])
    return write(document, folder / "mine.yaml")


def asked(folder: Path, model: Path, *tasks: str) -> tuple[dict[str, Measurement], dict[str, str]]:
    """Serve it as a run does, without a load: its contract of chats and pictures, and the verdicts on these tasks.

    The verdicts are by the rule of a run's, without Great Expectations, which takes as long to import as the questions take.
    """
    engines = find_engines(Launch())
    loaded = load_recipe(str(recipe(folder, model)))
    (plan,) = plan_cells(loaded, Choice(), engines, read_machine(engines.engine, "cpu"))
    contract = Contract(capabilities=["chat", "vision"], not_asked=dict.fromkeys(CONTRACT, "of other models' tests"))
    (folder / "contract").mkdir()
    rows: list[Measurement] = []
    with launch(plan.server, folder) as starting:
        server = await_ready(plan.server, starting, print)
        measure_contract(server, contract, plan.smoke.prompt, folder / "contract")
        for task in (task for task in plan.accuracy if task.name in tasks):
            into = folder / "accuracy" / task.name
            with running_lm_eval(starting, plan.server.served_model_name, task, folder / f"lm-eval-{task.name}") as lm_eval:
                run = prepare_task(server, lm_eval, into, lambda *_: None)
                run.ask(run.steps[0])
            rows += parse_task(into, task, Levels())
    kept = parse_contract(folder / "contract", contract, plan.server.served_model_name, plan.server.engine_kind)
    gates = [gate for gate in plan.gates if gate.task in tasks]
    return {row.metric: row for row in kept}, {str(gate.task): verdict(gate, rows) for gate in gates}


def verdict(gate: Gate, rows: list[Measurement]) -> str:
    (row,) = measurements_of(gate, rows)
    interval, (least, _) = bounds_of(row), gate.limits
    assert row.invalid_because is None
    assert interval is not None
    assert least is not None
    return "pass" if interval.lower >= least else "fail" if interval.upper < least else "inconclusive"


def test_the_model_that_sees_passes(tmp_path: Path) -> None:
    contract, verdicts = asked(tmp_path, MODEL, "chartqa")
    assert verdicts == {"chartqa": "pass"}
    assert (failing(contract), unknown(contract)) == (set(), set())


def test_a_collapse_of_its_vision_is_refused_while_its_text_passes(tmp_path: Path) -> None:
    contract, verdicts = asked(tmp_path, variants.collapsed(MODEL, tmp_path / "model"), "chartqa", "gsm8k")
    assert verdicts == {"chartqa": "fail", "gsm8k": "pass"}
    assert (failing(contract), unknown(contract)) == ({"vision", "vision_two", "vision_broken"}, set())
