"""Whether an engine serves what its plan names: its own words, after it has parsed every option, are compared with the plan."""

from pathlib import PurePosixPath

from vllm_qualify.engine.hub import cache_folder, folder_name
from vllm_qualify.engine.kinds.base import Identity
from vllm_qualify.engine.server import HF_HOME_INSIDE, STAGE, ServerPlan, draft_model
from vllm_qualify.errors import RecipeError


def check_identity(plan: ServerPlan, log: str, *, in_any_cache: bool = False) -> None:
    """Compare what the engine's log says that it serves with the plan. A kind whose log does not say it is not checked.

    A model of the hub must lie in this machine's cache; with `in_any_cache`, for the log of another machine, in any. Raises
    RecipeError if the engine serves something else, or its log does not say what.
    """
    identities = plan.engine_kind.identities
    if identities is None:
        return
    logged = identities(log)
    if not logged:
        title = plan.engine_kind.title
        problem = f"{title} did not say in its log what it serves, so nothing shows that it is the plan's model"
        remedy = "let it log at level INFO: leave VLLM_LOGGING_LEVEL and other logging variables out of the recipe"
        raise RecipeError(problem, remedy, STAGE, kind="serves-unknown")
    tokenizer = plan.served_arguments.get("tokenizer")
    expected = {
        "model": plan.served_from,
        "draft": draft_model(plan.served_arguments, plan.kind),
        "tokenizer": tokenizer if isinstance(tokenizer, str) else plan.served_from,
        "revision": plan.revision,
        "tokenizer_revision": plan.tokenizer_revision,
        "trust_remote_code": str(plan.trust_remote_code),
    }
    own_cache = PurePosixPath(f"{HF_HOME_INSIDE}/hub" if plan.in_container else cache_folder())
    cache = None if in_any_cache else own_cache
    wrong = list(dict.fromkeys(difference for each in logged for difference in _find_differences(plan, each, expected, cache)))
    if wrong:
        problem = f"{plan.engine_kind.title} does not serve what the plan names: {'; '.join(wrong)}"
        remedy = "look for a server option or a variable in the recipe that changes it, and take it out"
        raise RecipeError(problem, remedy, STAGE, kind="serves-another")


def _find_differences(plan: ServerPlan, logged: Identity, expected: Identity, cache: PurePosixPath | None) -> list[str]:
    same = {name: logged[name] == expected[name] for name in expected}
    # A model with a draft head of its own is its own draft model.
    has_own_head = expected["draft"] is None and logged["draft"] is not None
    models = {**expected, "draft": expected["model"]} if has_own_head else expected
    drafted = plan.part(plan.engine_kind.speculative)
    of_draft = drafted.revision if drafted else plan.revision
    commits = {"model": plan.revision, "tokenizer": plan.tokenizer_revision, "draft": of_draft}
    for name, commit in commits.items():
        same[name] = logged[name] == models[name] or _is_cached(logged[name], models[name], commit, cache)
    return [f"its {name} is {logged[name]}, not {expected[name]}" for name, is_same in same.items() if not is_same]


def _is_cached(logged: str | None, model: str | None, commit: str | None, cache: PurePosixPath | None) -> bool:
    """Whether it is the folder in a cache of the hub, this one or any, by which vLLM names a model when it is offline."""
    if logged is None or model is None or commit is None:
        return False
    folder = PurePosixPath(folder_name(model), "snapshots", commit)
    return logged == str(cache / folder) if cache else PurePosixPath(logged).parts[-3:] == folder.parts
