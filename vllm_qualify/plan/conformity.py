"""Whether a plan is what a recipe gives: a plan from another machine is a claim until it was held against the recipe."""

import re
from collections.abc import Iterator
from typing import Any

from vllm_qualify.engine.server import draft_model, gpu_count, with_draft, with_speculation_parsed
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.plan.choice import Selection
from vllm_qualify.plan.gates import judging_of, select_cell, starts_of
from vllm_qualify.plan.server import undrafted_of
from vllm_qualify.plan.workload import most_clients, num_concurrent, prompts_needed, repetitions_of
from vllm_qualify.recipe.load import Workload
from vllm_qualify.recipe.recipe import Profile, Recipe, Serving
from vllm_qualify.recipe.roles import EFFORT, PLACE, WORK, part
from vllm_qualify.recipe.searches import Fit
from vllm_qualify.recipe.serving import EngineName, ServerArguments


def difference(plan: CellPlan, recipe: Recipe) -> str:
    """What of the plan is not the recipe's, in words; empty if nothing is.

    Not compared is what no recipe has (`FOUND`, and what a fit found, the commit behind a branch, files of the machine), and a
    budget of time, which the caller may give.
    """
    try:
        selection = select_cell(plan.cell, recipe)
        judging = judging_of(recipe, selection, plan.cell.profile)
        different = [name.replace("_", " ") for name, value in judging.items() if getattr(plan, name) != value]
        if plan.baseline_variant != (selection.variant.baseline or plan.cell.variant):
            different.append("baseline's variant")
        different += _compare_measuring(plan, recipe, selection.serving, selection.profiles[plan.cell.profile])
        different += [*_compare_server(plan, selection, recipe), *_compare_checks(plan)]
    except CallerError as error:
        return error.problem
    return f"{', '.join(different)}: not as in the recipe" if different else ""


def _compare_measuring(plan: CellPlan, recipe: Recipe, serving: Serving, profile: Profile) -> Iterator[str]:
    if (plan.smoke, [task.settings for task in plan.accuracy]) != (recipe.smoke, recipe.accuracy):
        yield "smoke and accuracy settings"
    if any(not _is_asked_as_planned(plan, task) for task in plan.accuracy):
        yield "how tasks are asked"
    if any((task.recommended is None) != (task.settings.sampling != "model") for task in plan.accuracy):
        yield "sampling that the model recommends"
    scored = plan.likelihood.settings if plan.likelihood else None
    if plan.likelihood and (plan.likelihood.texts_sha256 is None) != (plan.likelihood.settings.texts is None):
        yield "texts that are scored"
    if scored != (recipe.likelihood if plan.server.engine_kind.scores_prompts else None):
        yield "likelihood settings"
    yield from (name for name, settings in profile.asked_stages.items() if plan.asked_stages[name] != settings)
    if plan.workload and not plan.fit:
        yield "workload of a fit"
    if plan.soak != profile.soak:
        yield "soak"
    # A plan that is judged by another recipe may have been measured for more gates, and so more often.
    if plan.starts < starts_of(serving, plan.gates):
        yield "starts"
    if plan.warm_starts != serving.warm_starts:
        yield "warm starts"
    if not _is_load_of(plan, profile):
        yield "load settings"


def _is_asked_as_planned(plan: CellPlan, task: TaskPlan) -> bool:
    """Whether a task is asked as its settings and the gates say: as often or more, as many at one time, from its own files.

    A run that becomes a baseline asks everything.
    """
    settings, files = task.settings, (task.questions is not None, task.folder is not None)
    return (
        task.sequential == (settings.sequential and not plan.establishes)
        and task.repetitions >= repetitions_of(settings, plan.gates)
        and task.num_concurrent == num_concurrent(settings, plan.server)
        and files == (settings.questions is not None, settings.task_folder is not None)
    )


def _compare_checks(plan: CellPlan) -> Iterator[str]:
    """Which of the checks that hold for every load are left out, and whether the load is compared with what it should be."""
    if not plan.watched or plan.warms_alike != (plan.beside is not None):
        yield "checks during the load"
    if (plan.undrafted, plan.undrafted_in_turn) != undrafted_of(plan.server, plan.load, plan.fingerprint):
        yield "server without drafts"


def _is_load_of(plan: CellPlan, profile: Profile) -> bool:
    if plan.fit and (plan.workload is None or _recipe_settings(plan.workload) != _recipe_settings(profile.load)):
        return False
    load = profile.load
    if load.trace and load.num_prompts is None:
        # How many requests a trace has only its file knows.
        load = load.model_copy(update={"num_prompts": plan.load.num_prompts})
    clients = load.count_clients(most_clients(plan.server, plan.fit))
    if clients is None or plan.load.seeded_by != plan.cell.profile:
        return False
    expected = load.make_load(clients, prompts_needed(load, plan.gates))
    return _recipe_settings(expected) == _recipe_settings(plan.load)


def _recipe_settings(load: Workload) -> dict[str, Any]:
    """What of a load a recipe says. The content of its file is not in a recipe, and a caller may replace the budget of time."""
    return part(load, WORK, EFFORT, PLACE) | {"prompts_sha256": None, "seeded_by": None, "time_budget_s": None}


def _compare_server(plan: CellPlan, selection: Selection, recipe: Recipe) -> Iterator[str]:
    variant, server = selection.variant, plan.server
    options, environment = selection.arguments_of(plan.cell.profile, plan.cell.release.engine.version)
    fitted = plan.fit.options if plan.fit else []
    if (plan.cell.release.model, server.kind) != (variant.model, variant.engine):
        yield "model and engine"
    # A branch or a tag has another commit from time to time.
    if re.fullmatch("[0-9a-f]{40}", variant.revision or "") and plan.cell.release.revision != variant.revision:
        yield "revision"
    if (server.served_model_name, server.aliases) != (recipe.served_model_name, recipe.aliases):
        yield "served model name"
    if server.memory_limit_gib != selection.serving.memory_limit_gib:
        yield "memory limit"
    if server.signed_by != variant.signed_by:
        yield "publisher's key"
    options = with_speculation_parsed(options, server.kind)
    if _recipe_options(options, server.kind, fitted) != _recipe_options(server.arguments, server.kind, fitted):
        yield "server options"
    if server.environment != environment:
        yield "environment variables"
    if len(server.gpus) != (0 if plan.cell.gpu_type == "cpu" else gpu_count(server.arguments, server.kind)):
        yield "number of GPUs"
    if plan.fit and not _is_found_by(plan.fit, server.arguments):
        yield "what the fit found"


def _is_found_by(fit: Fit, arguments: ServerArguments) -> bool:
    """Whether the options are among those that a fit tries. Only the machine tells how many sequences it holds."""
    tried = {"tensor-parallel-size": fit.tensor_parallel_sizes, "max-num-batched-tokens": fit.max_num_batched_tokens}
    return all(name not in arguments or arguments[name] in sizes for name, sizes in tried.items() if sizes)


def _recipe_options(options: ServerArguments, kind: EngineName, fitted: list[str]) -> ServerArguments:
    """The options without those that a fit found; a draft model in a folder has another path on each machine."""
    draft = draft_model(options, kind)
    if draft is not None and draft.startswith((".", "/", "~")):
        options = with_draft(options, kind, {"model": "a folder"})
    return {name: value for name, value in options.items() if name not in fitted}
