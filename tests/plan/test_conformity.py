"""A plan that came from another machine, held against the recipe that this machine has."""

from collections.abc import Callable

import pytest

from tests.plan.test_plan import CPU, H200, document, engine, gpu_engine, loaded
from tests.recipes import Document
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.launch import Engines
from vllm_qualify.plan.cell import CellPlan, LikelihoodPlan
from vllm_qualify.plan.cells import plan_cells, within_budget
from vllm_qualify.plan.choice import Choice
from vllm_qualify.plan.conformity import difference
from vllm_qualify.recipe.contract import Contract
from vllm_qualify.recipe.recipe import Approval, Recipe
from vllm_qualify.recipe.sampling import Sampling
from vllm_qualify.recipe.workload import Likelihood, Soak

__all__ = ["document", "engine", "gpu_engine"]

Change = Callable[[CellPlan], dict[str, object]]


def plans(document: Document, engine: EngineEnvironment, machine: Fingerprint = CPU) -> list[CellPlan]:
    return plan_cells(loaded(document), Choice(), Engines(engine=engine), machine)


def test_what_the_recipe_gives_does_not_differ(document: Document, engine: EngineEnvironment) -> None:
    recipe = Recipe.model_validate(document)
    cells = plans(document, engine)
    assert len(cells) == 2
    assert {difference(plan, recipe) for plan in cells} == {""}


def test_nor_on_a_gpu(document: Document, gpu_engine: EngineEnvironment) -> None:
    assert [difference(plan, Recipe.model_validate(document)) for plan in plans(document, gpu_engine, H200)] == [""]


def test_a_plan_of_an_older_version_asked_the_prompts_of_its_seed_alone(document: Document, engine: EngineEnvironment) -> None:
    for plan in plans(document, engine):
        older = plan.load.model_copy(update={"seeded_by": None})
        assert difference(plan.model_copy(update={"load": older}), Recipe.model_validate(document)) == ""


def test_a_budget_of_time_and_a_fit_are_no_difference(document: Document, engine: EngineEnvironment) -> None:
    profile = document["gpu_types"]["cpu"]["profiles"]["latency"]
    profile["fit"] = {"max_num_seqs": True}
    recipe = Recipe.model_validate(document)
    for plan in plans(document, engine):
        assert difference(within_budget(plan, 60.0), recipe) == ""
    plan = plans(document, engine)[0]
    server = plan.server.model_copy(update={"arguments": plan.server.arguments | {"max-num-seqs": 77}})
    assert difference(plan.model_copy(update={"server": server}), recipe) == ""


GREEDY = Sampling(temperature=0)


def served(plan: CellPlan, **changes: object) -> dict[str, object]:
    return {"server": plan.server.model_copy(update=changes)}


def released(plan: CellPlan) -> dict[str, object]:
    release = plan.cell.release.model_copy(update={"model": "evil/model"})
    return {"cell": plan.cell.model_copy(update={"release": release})}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: {"gates": plan.gates[1:]}, "gates: not as"),
        (lambda plan: {"gates": plan.gates[:-1]}, "gates: not as"),
        (lambda _: {"approval": Approval(automatic=True, valid_days=3650)}, "approval: not as"),
        (lambda plan: {"smoke": plan.smoke.model_copy(update={"prompt": "1"})}, "smoke and accuracy settings"),
        (lambda _: {"starts": 1}, "starts: not as"),
        (lambda _: {"soak": Soak(soak_min=1.0, soak_share=0.5)}, "soak: not as"),
        (lambda _: {"accuracy": []}, "smoke and accuracy settings"),
        (
            lambda plan: {"accuracy": [task.model_copy(update={"recommended": GREEDY}) for task in plan.accuracy]},
            "sampling that the model recommends",
        ),
        (lambda _: {"likelihood": None}, "likelihood settings"),
        (lambda _: {"likelihood": LikelihoodPlan(settings=Likelihood(num_answers=1))}, "likelihood settings"),
        (lambda plan: {"load": plan.load.model_copy(update={"num_prompts": 5})}, "load settings"),
        (lambda plan: {"load": plan.load.model_copy(update={"seeded_by": "another"})}, "load settings"),
        (lambda plan: served(plan, arguments=plan.server.arguments | {"max-model-len": 7}), "server options"),
        (lambda plan: served(plan, environment={"VLLM_X": "1"}), "environment variables"),
        (lambda plan: served(plan, signed_by="another"), "publisher's key"),
        (lambda _: {"named_anchor": "20260301T080000Z-0a1b2c"}, "named anchor"),
        (lambda _: {"baseline_variant": "regressed"}, "baseline's variant"),
        (released, "model and engine"),
        (lambda plan: served(plan, served_model_name="another"), "served model name"),
        (lambda plan: served(plan, aliases=["another"]), "served model name"),
        (lambda plan: served(plan, memory_limit_gib=1.0), "memory limit"),
        (lambda _: {"baseline_variant": "worse"}, "baseline's variant"),
        (lambda plan: {"cell": plan.cell.model_copy(update={"profile": "easy"})}, "the recipe has no profile 'easy'"),
    ],
)
def test_what_a_host_changed_is_reported(document: Document, engine: EngineEnvironment, change: Change, message: str) -> None:
    plan = plans(document, engine)[0]
    assert difference(plan.model_copy(update=change(plan)), Recipe.model_validate(document)).startswith(message)


def test_a_commit_of_the_recipe_is_the_one_that_was_served(document: Document, engine: EngineEnvironment) -> None:
    """A branch can mean any commit; whoever starts a run cannot choose another one than a recipe that names it."""
    plan = plans(document, engine)[0]
    (variant,) = (each for name, each in document["variants"].items() if name == plan.cell.variant)
    for revision, message in ((plan.cell.release.revision, ""), ("main", ""), ("e" * 40, "revision: not as in the recipe")):
        variant["revision"] = revision
        assert difference(plan, Recipe.model_validate(document)) == message


def test_a_contract_that_is_left_out_or_is_asked_for_in_part_is_reported(document: Document, engine: EngineEnvironment) -> None:
    recipe = Recipe.model_validate(document)
    plan = plans(document, engine)[0]
    assert difference(plan, recipe) == ""
    changes = (
        None,
        Contract(time_limit_s=7.0),
        Contract(not_asked={"contract_stop": "it fails"}),
        Contract(capabilities=["chat"]),
    )
    for contract in changes:
        assert "contract: not as" in difference(plan.model_copy(update={"contract": contract}), recipe)


def test_a_promise_that_is_left_out_is_reported(document: Document, engine: EngineEnvironment) -> None:
    promising = document | {"capabilities": ["chat", "tools"]}
    plan, recipe = plans(promising, engine)[0], Recipe.model_validate(promising)
    assert difference(plan, recipe) == ""
    assert plan.contract is not None
    fewer = plan.contract.model_copy(update={"capabilities": ["chat"]})
    assert "contract: not as" in difference(plan.model_copy(update={"contract": fewer}), recipe)


def test_a_load_at_a_rate_is_that_of_the_recipe(document: Document, engine: EngineEnvironment) -> None:
    profile = document["gpu_types"]["cpu"]["profiles"]["latency"]
    profile["load"] = {"input_len": 8, "output_len": 4, "num_warmups": 0, "request_rate": 2.0}
    recipe = Recipe.model_validate(document)
    plan = plans(document, engine)[0]
    assert difference(plan, recipe) == ""
    slower = plan.load.model_copy(update={"request_rate": 1.0})
    assert difference(plan.model_copy(update={"load": slower}), recipe).startswith("load settings")
