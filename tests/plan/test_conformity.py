"""A plan that came from another machine, held against the recipe that this machine has."""

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from tests.builders.plans import H200, difference_from, document, engine, gpu_engine, plans_of
from tests.recipes import Document
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.plan.cell import CellPlan, LikelihoodPlan
from vllm_qualify.plan.cells import plan_fitted, within_budget
from vllm_qualify.plan.gates import judged_by
from vllm_qualify.recipe.accuracy import Likelihood
from vllm_qualify.recipe.contract import Contract
from vllm_qualify.recipe.gates import Waiver
from vllm_qualify.recipe.load import LoadSettings
from vllm_qualify.recipe.recipe import Approval, Recipe
from vllm_qualify.recipe.roles import EFFORT, WORK, role_of
from vllm_qualify.recipe.sampling import Sampling
from vllm_qualify.recipe.searches import Fit, ProfileStages, Soak, Sweep

__all__ = ["document", "engine", "gpu_engine"]

Change = Callable[[CellPlan], dict[str, object]]


def test_what_the_recipe_gives_does_not_differ(document: Document, engine: EngineEnvironment) -> None:
    recipe = Recipe.model_validate(document)
    cells = plans_of(document, engine)
    assert len(cells) == 2
    assert {difference_from(plan, recipe) for plan in cells} == {""}


def test_nor_on_a_gpu(document: Document, gpu_engine: EngineEnvironment) -> None:
    assert [difference_from(plan, Recipe.model_validate(document)) for plan in plans_of(document, gpu_engine, H200)] == [""]


def test_a_budget_of_time_and_a_fit_are_no_difference(document: Document, engine: EngineEnvironment) -> None:
    profile = document["gpu_types"]["cpu"]["profiles"]["latency"]
    profile["fit"] = {"max_num_seqs": True}
    recipe = Recipe.model_validate(document)
    for plan in plans_of(document, engine):
        assert difference_from(within_budget(plan, 60.0), recipe) == ""
    plan = plans_of(document, engine)[0]
    server = plan.server.model_copy(update={"arguments": plan.server.arguments | {"max-num-seqs": 77}})
    assert difference_from(plan.model_copy(update={"server": server}), recipe) == ""


def test_what_a_fit_finds_is_held_to_what_it_may_try(document: Document, gpu_engine: EngineEnvironment) -> None:
    """A host could judge a toy load by the gates of the real one, or more GPUs than the fit offers."""
    profile = document["gpu_types"]["h200"]["profiles"]["balanced"]
    profile["fit"] = {"max_num_seqs": True, "tensor_parallel_sizes": [1, 2]}
    profile["load"] = {"input_len": 400, "output_len": 50, "num_warmups": 0}
    recipe = Recipe.model_validate(document)
    machine = H200.model_copy(update={"count": 8, "devices": list(range(8))})
    (plan,) = plans_of(document, gpu_engine, machine)
    found = plan_fitted(plan, {"max-num-seqs": 8, "tensor-parallel-size": 2})
    assert (difference_from(plan, recipe), difference_from(found, recipe)) == ("", "")
    toy = found.load.model_copy(update={"input_len": 1, "output_len": 1})
    assert difference_from(found.model_copy(update={"load": toy}), recipe).startswith("load settings")
    wider = plan_fitted(plan, {"max-num-seqs": 8, "tensor-parallel-size": 8})
    assert difference_from(wider, recipe).startswith("what the fit found")


def test_a_run_that_was_measured_for_more_gates_is_no_difference(document: Document, engine: EngineEnvironment) -> None:
    """As after `rejudge` by a recipe that has no gates against a baseline any more."""
    plan = plans_of(document, engine)[0]
    document["gates"] = [gate for gate in document["gates"] if not gate.keys() & {"max_loss", "max_nll_increase"}]
    recipe = Recipe.model_validate(document)
    assert difference_from(judged_by(plan, recipe), recipe) == ""


GREEDY = Sampling(temperature=0)
OF_CELL = {"gpu_type": "cpu", "variant": "bf16", "profile": "latency"}
WAIVER = Waiver(gate="contract_seed", owner="Mallory", reason="a host says so", expires=date(2100, 1, 1), **OF_CELL)
LOAD = {"input_len": 8, "output_len": 4, "num_warmups": 0}


def tasks(plan: CellPlan, **changes: object) -> dict[str, object]:
    return {"accuracy": [task.model_copy(update=changes) for task in plan.accuracy]}


def served(plan: CellPlan, **changes: object) -> dict[str, object]:
    return {"server": plan.server.model_copy(update=changes)}


def released(plan: CellPlan) -> dict[str, object]:
    release = plan.cell.release.model_copy(update={"model": "evil/model"})
    return {"cell": plan.cell.model_copy(update={"release": release})}


CHANGES: list[tuple[Change, str]] = [
    (lambda plan: {"gates": plan.gates[1:]}, "gates: not as"),
    (lambda plan: {"gates": plan.gates[:-1]}, "gates: not as"),
    (lambda _: {"approval": Approval(automatic=True, valid_days=3650)}, "approval: not as"),
    (lambda plan: {"smoke": plan.smoke.model_copy(update={"prompt": "1"})}, "smoke and accuracy settings"),
    (lambda _: {"starts": 1}, "starts: not as"),
    (lambda _: {"soak": Soak(soak_min=1.0, soak_share=0.5)}, "soak: not as"),
    (lambda _: {"accuracy": []}, "smoke and accuracy settings"),
    (lambda plan: tasks(plan, recommended=GREEDY), "sampling that the model recommends"),
    (lambda _: {"likelihood": None}, "likelihood settings"),
    (lambda _: {"likelihood": LikelihoodPlan(settings=Likelihood(num_answers=1))}, "likelihood settings"),
    (lambda _: {"fit": Fit(max_num_seqs=True)}, "fit"),
    (lambda _: {"sweep": Sweep(concurrencies=[1])}, "sweep"),
    (lambda _: {"smoke_golden": " 13"}, "smoke golden"),
    (lambda _: {"drawn": ""}, "prompts that are drawn"),
    (lambda _: {"contract": None}, "contract: not as"),
    (lambda _: {"contract": Contract(time_limit_s=7.0)}, "contract: not as"),
    (lambda _: {"contract": Contract(not_asked={"contract_stop": "it fails"})}, "contract: not as"),
    (lambda _: {"contract": Contract(capabilities=["chat"])}, "contract: not as"),
    (lambda _: {"waivers": [WAIVER]}, "waivers"),
    (lambda _: {"watched": False}, "checks during the load"),
    (lambda _: {"warms_alike": True}, "checks during the load"),
    (lambda plan: {"beside": plan.server}, "checks during the load"),
    (lambda plan: {"undrafted": plan.server}, "server without drafts"),
    (lambda _: {"undrafted_in_turn": True}, "server without drafts"),
    (lambda _: {"warm_starts": 7}, "warm starts"),
    (lambda _: {"workload": LoadSettings(**LOAD)}, "workload of a fit"),
    (lambda plan: tasks(plan, sequential=False), "how tasks are asked"),
    (lambda plan: tasks(plan, order=""), "how tasks are asked"),
    (lambda plan: tasks(plan, repetitions=1), "how tasks are asked"),
    (lambda plan: tasks(plan, num_concurrent=1), "how tasks are asked"),
    (lambda plan: tasks(plan, folder=Path("/elsewhere")), "how tasks are asked"),
    (lambda plan: served(plan, gpus=[0]), "number of GPUs"),
    (lambda plan: {"load": plan.load.model_copy(update={"num_prompts": 5})}, "load settings"),
    (lambda plan: {"load": plan.load.model_copy(update={"seeded_by": "another"})}, "load settings"),
    (lambda plan: {"load": plan.load.model_copy(update={"seeded_by": None})}, "load settings"),
    (lambda plan: served(plan, arguments=plan.server.arguments | {"max-model-len": 7}), "server options"),
    (lambda plan: served(plan, environment={"VLLM_X": "1"}), "environment variables"),
    (lambda plan: served(plan, signed_by="another"), "publisher's key"),
    (lambda _: {"named_anchor": "20260301T080000Z-0a1b2c"}, "named anchor"),
    (lambda _: {"baseline_variant": "regressed"}, "baseline's variant"),
    (released, "model and engine"),
    (lambda plan: served(plan, served_model_name="another"), "served model name"),
    (lambda plan: served(plan, aliases=["another"]), "served model name"),
    (lambda plan: served(plan, memory_limit_gib=1.0), "memory limit"),
    (lambda plan: {"cell": plan.cell.model_copy(update={"profile": "easy"})}, "the recipe has no profile 'easy'"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_a_host_changed_is_reported(document: Document, engine: EngineEnvironment, change: Change, message: str) -> None:
    plan = plans_of(document, engine)[0]
    assert difference_from(plan.model_copy(update=change(plan)), Recipe.model_validate(document)).startswith(message)


def test_every_field_of_a_plan_that_a_recipe_says_was_changed_so(document: Document, engine: EngineEnvironment) -> None:
    """A new field that no host may change needs its line in the list above. Those of a profile's stages are all held alike."""
    plan = plans_of(document, engine)[0]
    changed = {name for change, _ in CHANGES for name in change(plan)}
    said = {name for name in CellPlan.model_fields if role_of(CellPlan, name) in (WORK, EFFORT)}
    assert changed & ProfileStages.model_fields.keys()
    assert said - ProfileStages.model_fields.keys() - changed == set()


COMMIT, OTHER = "c" * 40, "e" * 40


def test_a_hub_that_does_not_answer_is_the_difference(
    document: Document, engine: EngineEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    plan = plans_of(document, engine)[0]
    release = plan.cell.release.model_copy(update={"model": "org/model", "revision": COMMIT, "files": {}})
    server = plan.server.model_copy(update={"model": "org/model", "revision": COMMIT})
    plan = plan.model_copy(update={"cell": plan.cell.model_copy(update={"release": release}), "server": server})
    document["variants"][plan.cell.variant] |= {"model": "org/model"}
    assert "the hub did not resolve org/model" in difference_from(plan, Recipe.model_validate(document))


def _write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


QUESTION, OTHER_QUESTION = '{"question": "1 + 1?", "answer": "#### 2"}\n', '{"question": "0?", "answer": "#### 0"}\n'
TEXT, OTHER_TEXT = '{"text": "abc"}\n', '{"text": "a"}\n'


@pytest.mark.parametrize(
    ("name", "text", "other", "message"),
    [
        ("bf16/config.json", '{"name": "bf16"}', '{"name": "another"}', "files of the model"),
        ("questions.jsonl", QUESTION, OTHER_QUESTION, "questions of gsm8k"),
        ("texts.jsonl", TEXT, OTHER_TEXT, "texts that are scored"),
        ("prompts.jsonl", '{"prompt": "a"}\n' * 20, '{"prompt": "b"}\n' * 20, "prompts of the load"),
    ],
)
def test_files_are_compared_by_their_content(
    document: Document, engine: EngineEnvironment, tmp_path: Path, name: str, text: str, other: str, message: str
) -> None:
    """A host has its own files under the names that a recipe has."""
    path = _write(tmp_path, name, text)
    if name == "questions.jsonl":
        document["accuracy"][0]["questions"] = {"test": path}
    if name == "texts.jsonl":
        document["likelihood"] = {"texts": path}
    if name == "prompts.jsonl":
        load = document["gpu_types"]["cpu"]["profiles"]["latency"]["load"]
        document["gpu_types"]["cpu"]["profiles"]["latency"]["load"] = {
            key: value for key, value in load.items() if key != "input_len"
        } | {"prompts": path}
    plan, recipe = plans_of(document, engine)[0], Recipe.model_validate(document)
    assert difference_from(plan, recipe) == ""
    _write(tmp_path, name, other)
    assert difference_from(plan, recipe) == f"{message}: not as in the recipe"
    Path(path).unlink()
    assert path.rpartition("/")[2] in difference_from(plan, recipe)


def test_a_load_at_a_rate_is_that_of_the_recipe(document: Document, engine: EngineEnvironment) -> None:
    profile = document["gpu_types"]["cpu"]["profiles"]["latency"]
    profile["load"] = {"input_len": 8, "output_len": 4, "num_warmups": 0, "request_rate": 2.0}
    recipe, plan = Recipe.model_validate(document), plans_of(document, engine)[0]
    assert difference_from(plan, recipe) == ""
    slower = plan.load.model_copy(update={"request_rate": 1.0})
    assert difference_from(plan.model_copy(update={"load": slower}), recipe).startswith("load settings")


@pytest.mark.parametrize(("window", "now"), [("whole", "second chunk"), ("steady", None)])
def test_a_load_of_chats_counts_their_tokens_as_planned_now(
    document: Document, engine: EngineEnvironment, window: str, now: str | None
) -> None:
    """A host could leave the key out: then a role that comes at once is counted as the first token."""
    load = document["gpu_types"]["cpu"]["profiles"]["latency"]["load"]
    document["gpu_types"]["cpu"]["profiles"]["latency"]["load"] = load | {"api": "chat", "window": window}
    recipe, plan = Recipe.model_validate(document), plans_of(document, engine)[0]
    assert plan.load.counted_from == now
    for counted_from in ("first chunk", "second chunk", None):
        counted = plan.load.model_copy(update={"counted_from": counted_from})
        told = difference_from(plan.model_copy(update={"load": counted}), recipe)
        assert told.startswith("" if counted_from == now else "how chats are counted (run it again with this version): not as")
        assert bool(told) == (counted_from != now)
