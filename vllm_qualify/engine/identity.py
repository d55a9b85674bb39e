"""Whether an engine serves what its plan names: its own words, after it has parsed every option, are compared with the plan."""

import os
from pathlib import PurePosixPath

from vllm_qualify.engine.confinement import hub_cache
from vllm_qualify.engine.kinds.base import Identity
from vllm_qualify.engine.server import HF_HOME_INSIDE, STAGE, ServerPlan, draft_model
from vllm_qualify.errors import RecipeError


def check_identity(plan: ServerPlan, log: str) -> None:
    """Compare what the engine's log says that it serves with the plan. A kind whose log does not say it is not checked.

    Raises:
        RecipeError: the engine serves something else, or its log does not say what.
    """
    identities = plan.engine_kind.identities
    if identities is None:
        return
    found = identities(log)
    if not found:
        problem = (
            f"{plan.engine_kind.title} did not say in its log what it serves, so nothing shows that it is the plan's model"
        )
        remedy = "let it log at level INFO: leave VLLM_LOGGING_LEVEL and other logging variables out of the recipe"
        raise RecipeError(problem, remedy, STAGE, kind="serves-unknown")
    expected = _expected(plan)
    wrong = list(dict.fromkeys(told for each in found for told in _differences(plan, each, expected)))
    if wrong:
        problem = f"{plan.engine_kind.title} does not serve what the plan names: {'; '.join(wrong)}"
        remedy = "look for a server option or a variable in the recipe that changes it, and take it out"
        raise RecipeError(problem, remedy, STAGE, kind="serves-another")


def _expected(plan: ServerPlan) -> Identity:
    tokenizer = plan.served_arguments.get("tokenizer")
    return {
        "model": plan.served_from,
        "draft": draft_model(plan.served_arguments, plan.kind),
        "tokenizer": tokenizer if isinstance(tokenizer, str) else plan.served_from,
        "revision": plan.revision,
        "tokenizer_revision": plan.revision,
        "trust_remote_code": str(plan.trust_remote_code),
    }


def _differences(plan: ServerPlan, told: Identity, expected: Identity) -> list[str]:
    same = {name: told[name] == expected[name] for name in expected}
    # A model with a draft head of its own is its own draft model.
    has_own_head = expected["draft"] is None and told["draft"] is not None
    models = {**expected, "draft": expected["model"]} if has_own_head else expected
    for name, commit in (("model", plan.revision), ("tokenizer", plan.revision), ("draft", "*")):
        same[name] = told[name] == models[name] or _is_cached(plan, told[name], models[name], commit)
    return [f"its {name} is {told[name]}, not {expected[name]}" for name, is_same in same.items() if not is_same]


def _is_cached(plan: ServerPlan, told: str | None, model: str | None, commit: str | None) -> bool:
    """Whether it is the folder in the cache of the hub by which vLLM names a model when it is offline."""
    if told is None or model is None or commit is None:
        return False
    here = os.environ.get("HF_HUB_CACHE") or str(hub_cache() / "hub")
    cache = PurePosixPath(f"{HF_HOME_INSIDE}/hub" if plan.in_container else here)
    return PurePosixPath(told).match(str(cache / f"models--{model.replace('/', '--')}" / "snapshots" / commit))
