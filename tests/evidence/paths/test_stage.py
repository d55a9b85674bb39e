"""The paths of a profile: its gates, what it is refused for, and whether a host may leave any out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from tests.builders.plans import difference_from, document, engine, plans_of
from tests.recipes import Document
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.measurement import valid
from vllm_qualify.evidence.paths.constrained import FormAsking
from vllm_qualify.evidence.paths.measure import How
from vllm_qualify.evidence.stages.paths import NOT_TAKEN, make_asker
from vllm_qualify.evidence.stages.stage import MACHINE
from vllm_qualify.evidence.stages.table import TABLE, wanted_stages
from vllm_qualify.plan.gates import judged_by
from vllm_qualify.recipe.metrics import AWAKE, PATH_METRICS, PATHS, path_metric
from vllm_qualify.recipe.paths import UNASKED, Paths
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
    assert difference_from(plan, recipe) == ""
    for change in ({"leave_out": {"cached": "because"}}, {"num_prompts": 16}, {"reply_tok": 1}, {"num_aborts": 1}):
        assert "paths" in difference_from(plan.model_copy(update={"paths": plan.paths.model_copy(update=change)}), recipe)
    assert "paths" in difference_from(plan.model_copy(update={"paths": None}), recipe)
    gates = [gate for gate in plan.gates if gate.label != "path_cached"]
    assert "gates" in difference_from(plan.model_copy(update={"gates": gates}), recipe)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"leave_out": {"cold": "it is slow"}}, "cold"),
        ({"leave_out": {"cached": ""}}, "at least 1 character"),
        ({"num_prompts": 4}, "greater than or equal to 16"),
        ({"reply_tok": 0}, "greater than or equal to 1"),
        ({"cached": False}, "Extra inputs"),
        ({"most_form_tok": 1000}, "less than or equal to 512"),
    ],
)
def test_what_paths_cannot_be(document: Document, settings: Document, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Recipe.model_validate(with_paths(document, **settings))


def test_tensorrt_llm_takes_no_paths(document: Document) -> None:
    document["variants"]["bf16"] = {"engine": "tensorrt-llm", "model": "org/model", "gpu_types": ["cpu"]}
    with pytest.raises(ValidationError, match=r"paths needs salts for the cache"):
        Recipe.model_validate(with_paths(document))
    recipe = Recipe.model_validate(with_paths(document, must_be_proven=False))
    variant, serving = recipe.variants["bf16"], recipe.gpu_types["cpu"]
    profile = serving.profiles["latency"]
    assert (recipe.stages_of(variant, profile)["paths"], recipe.path_checks_of(variant, serving, profile)) == (None, [])


def test_a_profile_that_says_nothing_takes_the_paths_that_can_be_proven(document: Document, engine: EngineEnvironment) -> None:
    profiles = document["gpu_types"]["cpu"]["profiles"]
    for profile in profiles.values():
        profile.pop("paths", None)
    profiles["latency"]["paths"] = False
    plans = {plan.cell.profile: plan for plan in plans_of(document, engine)}
    latency, *others = (plans.pop("latency"), *plans.values())
    assert latency.paths is None
    assert not any(gate.label.startswith("path_") for gate in latency.gates)
    assert others
    for plan in others:
        assert plan.paths == UNASKED
        assert {gate.label for gate in plan.gates if plan.need_not_be_proven(gate)} == {
            path_metric(path) for path in PATHS if path != AWAKE
        }


@pytest.mark.parametrize(
    ("option", "variable", "is_taken"), [(True, "1", True), (False, "1", False), (True, "0", False), (True, None, False)]
)
def test_a_server_that_can_be_put_to_sleep_is(
    document: Document, engine: EngineEnvironment, option: bool, variable: str | None, is_taken: bool
) -> None:
    """By the profile's options over those of the GPU type, and where requests for that are taken at all."""
    serving = document["gpu_types"]["cpu"]
    serving["server"] = serving.get("server", {}) | {"enable-sleep-mode": not option}
    profile = serving["profiles"]["latency"]
    profile["server"] = profile.get("server", {}) | {"enable-sleep-mode": option}
    if variable is not None:
        serving["environment"] = serving.get("environment", {}) | {"VLLM_SERVER_DEV_MODE": variable}
    plan = next(plan for plan in plans_of(with_paths(document), engine) if plan.cell.profile == "latency")
    gates = [gate.label for gate in plan.gates if gate.label.startswith("path_")]
    asker = make_asker(plan, [], How(salt="salt", questions_per_prompt=1, asking=FormAsking()))
    assert ("path_awake" in gates, "awake" in asker.taken) == (is_taken, is_taken)
    left_out = with_paths(document, leave_out={"awake": "nobody puts it to sleep"})
    assert "path_awake" not in {gate.label for plan in plans_of(left_out, engine) for gate in plan.gates}


def test_a_key_with_nothing_behind_it_could_mean_both(document: Document) -> None:
    document["gpu_types"]["cpu"]["profiles"]["latency"]["paths"] = None
    with pytest.raises(ValidationError, match="say 'false' to take no paths"):
        Recipe.model_validate(document)


def test_what_was_not_measured_is_not_judged_by_another_recipe(document: Document, engine: EngineEnvironment) -> None:
    """So a run from before can be judged again, with a waiver say. Its plan is not the recipe's, which conformity tells."""
    before = next(plan for plan in plans_of(document, engine) if plan.cell.profile == "latency")
    recipe = Recipe.model_validate(with_paths(document))
    again = judged_by(before, recipe)
    assert not any(gate.metric in PATH_METRICS for gate in again.gates)
    assert "paths" in difference_from(again, recipe)
    measured = next(plan for plan in plans_of(document, engine) if plan.paths)
    lenient = Recipe.model_validate(with_paths(document, must_be_proven=False))
    assert all(judged_by(measured, lenient).need_not_be_proven(gate) for gate in measured.gates if gate.metric in PATH_METRICS)


def test_a_server_that_ended_is_a_fault_whatever_was_asked_for(
    document: Document, engine: EngineEnvironment, tmp_path: Path
) -> None:
    plan = next(plan for plan in plans_of(with_paths(document, must_be_proven=False), engine) if plan.paths)
    world: Any = SimpleNamespace(plan=plan, evidence=tmp_path, served=SimpleNamespace(server=Mock()))
    assert TABLE["paths"].measure(world, tmp_path) == []
    assert "cannot be asked again" in (tmp_path / NOT_TAKEN).read_text()
    world.served.server.check_alive.side_effect = HostError("the server was killed", "see its log", "serve")
    with pytest.raises(HostError, match="was killed"):
        TABLE["paths"].measure(world, tmp_path)
    world.plan = plan.model_copy(update={"paths": Paths()})
    world.served.server.check_alive.side_effect = None
    with pytest.raises(HostError, match="cannot be asked again"):
        TABLE["paths"].measure(world, tmp_path)


def test_a_stage_of_no_known_machine_is_not_only_unproven(
    document: Document, engine: EngineEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = next(plan for plan in plans_of(with_paths(document, must_be_proven=False), engine) if plan.paths)
    failed = valid("path_cached", 0.0, "paths/cached/replies.jsonl", sample_count=64)
    monkeypatch.setattr(TABLE["paths"], "parse", lambda *_: [failed])
    (tmp_path / "paths").mkdir()
    (tmp_path / "paths" / MACHINE).write_text("{}")
    (row,) = TABLE["paths"].measurements(plan, tmp_path)
    assert (row.value, row.is_unproven) == (None, False)


@pytest.mark.parametrize(("value", "is_promised"), [(None, False), ("0", False), ("1", True)])
def test_batch_invariance_is_what_the_recipe_says(
    document: Document, engine: EngineEnvironment, value: str | None, is_promised: bool
) -> None:
    document["gpu_types"]["cpu"]["environment"] = {"VLLM_BATCH_INVARIANT": value} if value else {}
    plan = next(plan for plan in plans_of(with_paths(document), engine) if plan.paths)
    assert make_asker(plan, [], How(salt="s", questions_per_prompt=1, asking=FormAsking())).is_invariant == is_promised


def test_without_prompts_all_is_invalid(document: Document, engine: EngineEnvironment, tmp_path: Path) -> None:
    plan = next(plan for plan in plans_of(with_paths(document), engine) if plan.paths)
    rows = TABLE["paths"].parse(plan, tmp_path)
    assert {row.value for row in rows} == {None}
    assert {gate.metric for gate in plan.gates if "path_" in gate.metric} <= {row.metric for row in rows}
