"""Whether a plan is what a recipe gives: a plan from another machine is a claim until it was held against the recipe."""

import re
from collections.abc import Iterator
from typing import Any

from vllm_qualify.engine.environment import content_digest
from vllm_qualify.engine.hub import resolve_commit
from vllm_qualify.engine.server import MODEL, draft_model, gpu_count, with_draft, with_speculation_parsed
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.plan.choice import Selection, check_model_at, pick
from vllm_qualify.plan.gates import judging_of, select_cell, starts_of
from vllm_qualify.plan.generation import recommended_sampling
from vllm_qualify.plan.parts import with_parts
from vllm_qualify.plan.server import draft_folder, undrafted_of
from vllm_qualify.plan.workload import (
    choose_first_chunk,
    likelihood_plan,
    load_digest,
    most_clients,
    num_concurrent,
    prompts_needed,
    repetitions_of,
    task_plan,
)
from vllm_qualify.recipe.load import NOT_OF_RECIPE, Workload
from vllm_qualify.recipe.recipe import LoadedRecipe, Profile, Recipe, Serving
from vllm_qualify.recipe.roles import EFFORT, PLACE, WORK, part
from vllm_qualify.recipe.searches import Fit
from vllm_qualify.recipe.serving import EngineName, ServerArguments


def difference(plan: CellPlan, loaded: LoadedRecipe) -> str:
    """What of the plan is not the recipe's, in words; empty if nothing is.

    Files are compared by their content, and a branch by the commit that the hub has for it now. Not compared is what only the
    host knows (`FOUND`, and what a fit found), and a budget of time, which the caller may give. Where this machine lacks a file
    or the hub does not answer, that is the difference.
    """
    recipe = loaded.recipe
    try:
        selection = select_cell(plan.cell, recipe)
        judging = judging_of(recipe, selection, plan.cell.profile)
        different = [name.replace("_", " ") for name, value in judging.items() if getattr(plan, name) != value]
        if plan.baseline_variant != (selection.variant.baseline or plan.cell.variant):
            different.append("baseline's variant")
        different += _compare_measuring(plan, recipe, selection.serving, selection.profiles[plan.cell.profile])
        different += [*_compare_server(plan, selection, recipe), *_compare_checks(plan)]
        if plan.cell.recipe != recipe.name:
            different.append("recipe's name")
        if not different:
            # Only now is it worth reading files, and asking the hub.
            different += [*_compare_data(plan, loaded), *_compare_release(plan, loaded, selection)]
    except (CallerError, HostError) as error:
        return error.problem
    return f"{', '.join(different)}: not as in the recipe" if different else ""


def difference_of_settings(plan: CellPlan, loaded: LoadedRecipe) -> str:
    """What of a plan's measurement and server is not the recipe's, in words; empty if nothing is.

    Gates and waivers may differ, and no files of the model are read: see `difference`.
    """
    recipe = loaded.recipe
    try:
        selection = select_cell(plan.cell, recipe)
        different = [] if plan.cell.recipe == recipe.name else ["recipe's name"]
        profile = selection.profiles[plan.cell.profile]
        different += _compare_measuring(plan, recipe, selection.serving, profile)
        different += _compare_server(plan, selection, recipe)
        if not different:
            different += _compare_data(plan, loaded)
    except (CallerError, HostError) as error:
        return error.problem
    return f"{', '.join(different)}: not as in the recipe" if different else ""


def counts_chats_as_now(plan: CellPlan) -> bool:
    """Whether a plan of now would take the same chunk of a chat for its first token.

    An older plan does not say the chunk. A host could leave it out of a new one, and so choose how its chats are counted.
    """
    return plan.load.counted_from == choose_first_chunk(plan.load, plan.server)


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
    asked = recipe.stages_of(recipe.variants[plan.cell.variant], profile)
    yield from (name for name, settings in asked.items() if plan.asked_stages[name] != settings)
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
    if not counts_chats_as_now(plan):
        yield "how chats are counted (run it again with this version)"


def _is_asked_as_planned(plan: CellPlan, task: TaskPlan) -> bool:
    """Whether a task is asked as its settings and the gates say: as often or more, as many at one time, from its own files.

    Its order was drawn. A run that becomes a baseline asks everything.
    """
    settings, files = task.settings, (task.questions is not None, task.folder is not None)
    return (
        task.sequential == (settings.sequential and not plan.establishes)
        and task.repetitions >= repetitions_of(settings, plan.gates)
        and task.num_concurrent == num_concurrent(settings, plan.server)
        and bool(task.order)
        and files == (settings.questions is not None, settings.task_folder is not None)
    )


def _compare_checks(plan: CellPlan) -> Iterator[str]:
    """Which of the checks that hold for every load are left out, and whether the load is compared with what it should be."""
    if not plan.watched or plan.warms_alike != (plan.beside is not None):
        yield "checks during the load"
    if not plan.drawn:
        yield "prompts that are drawn"
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


def _compare_data(plan: CellPlan, loaded: LoadedRecipe) -> Iterator[str]:
    """The files of questions, texts and prompts, by their content. Raises CallerError, HostError."""
    for task in plan.accuracy:
        own = task_plan(loaded, task.settings, None, [])
        if (task.questions_digests, task.folder_digest) != (own.questions_digests, own.folder_digest):
            yield f"questions of {task.name}"
        if task.recommended and task.recommended != recommended_sampling(plan.server, f"accuracy.{task.name}.sampling"):
            yield "sampling that the model recommends"
    if plan.likelihood:
        scored = likelihood_plan(loaded, plan.likelihood.settings, plan.server, plan.gates)
        if scored is None or scored.texts_sha256 != plan.likelihood.texts_sha256:
            yield "texts that are scored"
    profile = pick(loaded.recipe.gpu_types, plan.cell.gpu_type, "GPU type", "--recipe").profiles[plan.cell.profile]
    if plan.load.prompts_sha256 != load_digest(loaded, profile.load):
        yield "prompts of the load"


def _compare_release(plan: CellPlan, loaded: LoadedRecipe, selection: Selection) -> Iterator[str]:
    """The weights and all else that shapes replies, by commits and by content. Raises CallerError, HostError."""
    variant, server, revision = selection.variant, plan.server, plan.cell.release.revision
    if variant.is_local:
        check_model_at(loaded.path(variant.model), "`model`")
        if revision != content_digest(loaded.path(variant.model)):
            yield "files of the model"
    elif _is_commit(variant.revision):
        if revision != variant.revision:
            yield "revision"
    elif revision != (now := resolve_commit(variant.model, variant.revision, "check")):
        yield f"revision, which is {now} on the hub"
    options, _ = selection.arguments_of(plan.cell.profile, plan.cell.release.engine.version)
    draft = draft_folder(loaded, with_speculation_parsed(options, server.kind), server.kind)
    if server.draft_digest != (content_digest(draft) if draft else None):
        yield "files of the draft model"
    # A draft model in a folder has another path on each machine.
    pinned = [part for part in server.parts if part.option != MODEL and part.revision != server.draft_digest]
    own = with_parts(server.model_copy(update={"parts": [], "draft_digest": None}), None).parts
    if pinned != own:
        yield "commits and files that options name"


def _is_commit(revision: str | None) -> bool:
    """Whether a recipe names a commit: a branch or a tag has another one from time to time."""
    return bool(re.fullmatch("[0-9a-f]{40}", revision or ""))


def _recipe_settings(load: Workload) -> dict[str, Any]:
    """What of a load a recipe says. A caller may replace the budget of time."""
    return part(load, WORK, EFFORT, PLACE) | dict.fromkeys(NOT_OF_RECIPE) | {"time_budget_s": None}


def _compare_server(plan: CellPlan, selection: Selection, recipe: Recipe) -> Iterator[str]:
    variant, server = selection.variant, plan.server
    options, environment = selection.arguments_of(plan.cell.profile, plan.cell.release.engine.version)
    fitted = plan.fit.options if plan.fit else []
    if (plan.cell.release.model, server.kind) != (variant.model, variant.engine):
        yield "model and engine"
    if (server.served_model_name, server.aliases) != (recipe.served_model_name, recipe.aliases):
        yield "served model name"
    if server.memory_limit_gib != selection.serving.memory_limit_gib:
        yield "memory limit"
    if server.startup_timeout_s != selection.serving.startup_timeout_s:
        yield "time limit of a start"
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
