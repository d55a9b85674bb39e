"""The paths of a profile: its gates, what it is refused for, and whether a host may leave any out."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.builders.plans import document, engine, plans_of
from tests.recipes import Document
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.evidence.stages.table import TABLE, wanted_stages
from vllm_qualify.plan.conformity import difference
from vllm_qualify.recipe.recipe import Recipe

__all__ = ["document", "engine"]


def with_paths(document: Document, **settings: object) -> Document:
    document["gpu_types"]["cpu"]["profiles"]["latency"]["paths"] = settings
    return document


def test_each_path_that_is_taken_is_a_gate(document: Document, engine: EngineEnvironment) -> None:
    left_out = {"evicted": "the cache is too large", "aborted": "a proxy keeps connections"}
    plans = {plan.cell.profile: plan for plan in plans_of(with_paths(document, leave_out=left_out), engine)}
    gates = [gate.label for gate in plans["latency"].gates if gate.label.startswith("path_")]
    assert gates == ["path_cold", "path_cached", "path_concurrent"]
    assert "paths" in wanted_stages(plans["latency"])
    assert all("paths" not in wanted_stages(plan) for name, plan in plans.items() if name != "latency")


@pytest.mark.parametrize(
    ("capabilities", "is_asked"), [([], False), (["chat"], False), (["chat", "tools"], True), (["chat", "json_schema"], True)]
)
def test_replies_are_held_to_forms_where_the_model_promises_them(
    document: Document, engine: EngineEnvironment, capabilities: list[str], is_asked: bool
) -> None:
    document["capabilities"] = capabilities
    plan = next(plan for plan in plans_of(with_paths(document), engine) if plan.paths)
    assert ("path_constrained" in {gate.label for gate in plan.gates}) == is_asked
    left_out = next(
        plan for plan in plans_of(with_paths(document, leave_out={"constrained": "no grammar"}), engine) if plan.paths
    )
    assert "path_constrained" not in {gate.label for gate in left_out.gates}


def test_a_path_is_waived_like_another_gate_where_it_is_taken(document: Document) -> None:
    cell = {"gpu_type": "cpu", "variant": "bf16", "profile": "latency"}
    waiver = cell | {"gate": "path_evicted", "owner": "o@example.org", "reason": "known", "expires": "2030-01-01"}
    document["waivers"] = [waiver]
    assert Recipe.model_validate(with_paths(document)).waivers[0].gate == "path_evicted"
    with pytest.raises(ValidationError, match="there is no gate 'path_evicted' to be waived"):
        Recipe.model_validate(with_paths(document, leave_out={"evicted": "no cache"}))


def test_a_host_leaves_out_no_path_and_asks_no_fewer_prompts(document: Document, engine: EngineEnvironment) -> None:
    recipe = Recipe.model_validate(with_paths(document))
    plan = next(plan for plan in plans_of(document, engine) if plan.paths)
    assert plan.paths is not None
    assert difference(plan, recipe) == ""
    for change in ({"leave_out": {"cached": "because"}}, {"num_prompts": 16}, {"reply_tok": 1}, {"num_aborts": 1}):
        assert "paths" in difference(plan.model_copy(update={"paths": plan.paths.model_copy(update=change)}), recipe)
    assert "paths" in difference(plan.model_copy(update={"paths": None}), recipe)
    gates = [gate for gate in plan.gates if gate.label != "path_cached"]
    assert "gates" in difference(plan.model_copy(update={"gates": gates}), recipe)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"leave_out": {"cold": "it is slow"}}, "cold"),
        ({"leave_out": {"cached": ""}}, "at least 1 character"),
        ({"num_prompts": 4}, "greater than or equal to 16"),
        ({"reply_tok": 0}, "greater than or equal to 1"),
        ({"cached": False}, "Extra inputs"),
    ],
)
def test_what_paths_cannot_be(document: Document, settings: Document, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Recipe.model_validate(with_paths(document, **settings))


def test_tensorrt_llm_takes_no_paths(document: Document) -> None:
    document["variants"]["bf16"] = {"engine": "tensorrt-llm", "model": "org/model", "gpu_types": ["cpu"]}
    with pytest.raises(ValidationError, match=r"paths needs salts for the cache"):
        Recipe.model_validate(with_paths(document))


def test_without_prompts_all_is_invalid(document: Document, engine: EngineEnvironment, tmp_path: Path) -> None:
    plan = next(plan for plan in plans_of(with_paths(document), engine) if plan.paths)
    rows = TABLE["paths"].parse(plan, tmp_path)
    assert {row.value for row in rows} == {None}
    assert {gate.metric for gate in plan.gates if "path_" in gate.metric} <= {row.metric for row in rows}
