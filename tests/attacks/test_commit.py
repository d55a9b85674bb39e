"""A run of a branch names its commit itself: the approver asks the hub which one the branch has."""

import pytest

from tests.builders.plans import difference_from, document, engine, plans_of
from tests.recipes import Document
from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.recipe.recipe import Recipe

__all__ = ["document", "engine"]

COMMIT, OTHER = "c" * 40, "e" * 40


@pytest.mark.parametrize(
    ("named", "on_the_hub", "message"),
    [
        (COMMIT, OTHER, ""),
        (OTHER, COMMIT, "revision: not as in the recipe"),
        ("main", COMMIT, ""),
        (None, COMMIT, ""),
        ("main", OTHER, f"revision, which is {OTHER} on the hub: not as in the recipe"),
        (None, OTHER, f"revision, which is {OTHER} on the hub: not as in the recipe"),
    ],
)
def test_the_commit_is_the_recipes_or_the_one_that_its_branch_has(
    document: Document,
    engine: EngineEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    named: str | None,
    on_the_hub: str,
    message: str,
) -> None:
    """Whoever starts a run can name any commit of the model, also one that anybody proposed (`refs/pr/1`)."""
    asked: list[tuple[str, str | None]] = []

    def resolve_commit(model: str, revision: str | None, _: str) -> str:
        asked.append((model, revision))
        return on_the_hub

    monkeypatch.setattr("vllm_qualify.plan.conformity.resolve_commit", resolve_commit)
    plan = plans_of(document, engine)[0]
    release = plan.cell.release.model_copy(update={"model": "org/model", "revision": COMMIT, "files": {}})
    server = plan.server.model_copy(update={"model": "org/model", "revision": COMMIT})
    plan = plan.model_copy(update={"cell": plan.cell.model_copy(update={"release": release}), "server": server})
    variant = document["variants"][plan.cell.variant]
    variant |= {"model": "org/model"} | ({"revision": named} if named else {})
    assert difference_from(plan, Recipe.model_validate(document)) == message
    assert asked == ([] if named in (COMMIT, OTHER) else [("org/model", named)])
