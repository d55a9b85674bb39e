"""Whether a plan is what a recipe gives: a plan from another machine is a claim until it was held against the recipe."""

import re
from collections.abc import Iterator

from vllm_qualify.engine.server import draft_model, with_draft, with_speculation_parsed
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.choice import Selection, pick
from vllm_qualify.plan.gates import judged_by
from vllm_qualify.plan.workload import most_clients, prompts_needed
from vllm_qualify.recipe.recipe import Profile, Recipe, Serving
from vllm_qualify.recipe.serving import EngineName, ServerArguments
from vllm_qualify.recipe.workload import Workload


def difference(plan: CellPlan, recipe: Recipe) -> str:
    """What of the plan is not the recipe's, in words; empty if nothing is.

    Not compared is what no recipe has: what a fit found, the commit behind a branch, budgets of time, files of the machine.
    """
    try:
        expected, selection = judged_by(plan, recipe), _selection(plan, recipe)
        profile = selection.profiles[plan.cell.profile]
        measured = _measured(plan, recipe, selection.serving, profile)
        different = [*_judged(plan, expected, selection), *measured, *_served(plan, selection, recipe)]
    except CallerError as error:
        return error.problem
    return f"{', '.join(different)}: not as in the recipe" if different else ""


def _selection(plan: CellPlan, recipe: Recipe) -> Selection:
    cell = plan.cell
    serving = pick(recipe.gpu_types, cell.gpu_type, "GPU type", "--recipe")
    return Selection(
        gpu_type=cell.gpu_type,
        serving=serving,
        variant_name=cell.variant,
        variant=pick(recipe.variants, cell.variant, "variant", "--recipe"),
        profiles={cell.profile: pick(serving.profiles, cell.profile, "profile", "--recipe")},
    )


def _is_commit(revision: str | None) -> bool:
    """Whether a recipe's revision is a commit of the hub, and no branch or tag."""
    return revision is not None and bool(re.fullmatch("[0-9a-f]{40}", revision))


def _judged(plan: CellPlan, expected: CellPlan, selection: Selection) -> Iterator[str]:
    for name in ("gates", "waivers", "smoke_golden", "contract", "approval", "named_anchor"):
        if getattr(plan, name) != getattr(expected, name):
            yield name.replace("_", " ")
    if plan.baseline_variant != (selection.variant.baseline or plan.cell.variant):
        yield "baseline's variant"


def _measured(plan: CellPlan, recipe: Recipe, serving: Serving, profile: Profile) -> Iterator[str]:
    if (plan.smoke, [task.settings for task in plan.accuracy]) != (recipe.smoke, recipe.accuracy):
        yield "smoke and accuracy settings"
    if any((task.recommended is None) != (task.settings.sampling != "model") for task in plan.accuracy):
        yield "sampling that the model recommends"
    scored = plan.likelihood.settings if plan.likelihood else None
    if scored != (recipe.likelihood if plan.server.engine_kind.scores_prompts else None):
        yield "likelihood settings"
    if (plan.fit, plan.sweep) != (profile.fit, profile.sweep):
        yield "fit and sweep"
    if plan.soak != profile.soak:
        yield "soak"
    if any(gate.is_over_starts for gate in plan.gates) and plan.starts != serving.starts:
        yield "starts"
    if not _is_load_of(plan, profile):
        yield "load settings"


def _is_load_of(plan: CellPlan, profile: Profile) -> bool:
    if plan.fit:
        return plan.workload is not None and _lasting(plan.workload) == _lasting(profile.load)
    if plan.load.seeded_by not in (None, plan.cell.profile):
        return False
    load = profile.load
    if load.trace and load.num_prompts is None:
        # How many requests a trace has only its file knows.
        load = load.model_copy(update={"num_prompts": plan.load.num_prompts})
    clients = load.clients(most_clients(plan.server, None))
    return clients is not None and _lasting(load.of(clients, prompts_needed(load, plan.gates))) == _lasting(plan.load)


def _lasting(load: Workload) -> dict[str, object]:
    return load.model_dump(exclude={"time_budget_s", "prompts_sha256", "seeded_by"})


def _served(plan: CellPlan, selection: Selection, recipe: Recipe) -> Iterator[str]:
    variant, server = selection.variant, plan.server
    options, environment = selection.at(plan.cell.profile, plan.cell.release.engine.version)
    fitted = plan.fit.options if plan.fit else []
    if (plan.cell.release.model, server.kind) != (variant.model, variant.engine):
        yield "model and engine"
    if _is_commit(variant.revision) and plan.cell.release.revision != variant.revision:
        yield "revision"
    if (server.served_model_name, server.aliases) != (recipe.served_model_name, recipe.aliases):
        yield "served model name"
    if server.memory_limit_gib != selection.serving.memory_limit_gib:
        yield "memory limit"
    if server.signed_by != variant.signed_by:
        yield "publisher's key"
    if _own(with_speculation_parsed(options, server.kind), server.kind, fitted) != _own(server.arguments, server.kind, fitted):
        yield "server options"
    if server.environment != environment:
        yield "environment variables"


def _own(options: ServerArguments, kind: EngineName, fitted: list[str]) -> ServerArguments:
    """The options without those that a fit found; a draft model in a folder has another path on each machine."""
    draft = draft_model(options, kind)
    if draft is not None and draft.startswith((".", "/", "~")):
        options = with_draft(options, kind, {"model": "a folder"})
    return {name: value for name, value in options.items() if name not in fitted}
