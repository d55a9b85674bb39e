"""The plan of a cell's server."""

from pathlib import Path

from vllm_qualify.engine.confinement import inherited_by_engines
from vllm_qualify.engine.environment import content_digest
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.launchers import LauncherName
from vllm_qualify.engine.launchers.registry import LAUNCHERS
from vllm_qualify.engine.server import Engine, ServerPlan, draft_model, with_draft, with_speculation_parsed
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.choice import Selection, check_model_at
from vllm_qualify.recipe.load import Workload
from vllm_qualify.recipe.recipe import LoadedRecipe, Serving
from vllm_qualify.recipe.serving import EngineName, ServerArguments

# How a path to a model begins in a recipe; other models are the hub's.
PATHS = ("./", "../", "/", "~")


def server_plan(
    loaded: LoadedRecipe, selection: Selection, profile: str, engine: Engine, version: str, revision: str | None
) -> ServerPlan:
    """The server of a cell on a version of vLLM. Its GPUs are chosen later.

    Raises CallerError if a setting belongs to another launcher, or speculative decoding is no mapping; HostError if the folder
    of its draft model is not there.
    """
    serving, variant = selection.serving, selection.variant
    check_memory_limit(serving, engine.launcher)
    server, environment = selection.arguments_of(profile, version)
    server = with_speculation_parsed(server, variant.engine)
    inherited = {name: value for name, value in inherited_by_engines().items() if name not in environment}
    draft = draft_folder(loaded, server, variant.engine)
    return ServerPlan(
        engine=engine,
        model=str(loaded.path(variant.model)) if variant.is_local else variant.model,
        revision=None if variant.is_local else revision,
        served_model_name=loaded.recipe.served_model_name,
        arguments=with_draft(server, variant.engine, {"model": str(draft)}) if draft else server,
        environment=environment,
        startup_timeout_s=serving.startup_timeout_s,
        memory_limit_gib=serving.memory_limit_gib,
        kind=variant.engine,
        draft_digest=content_digest(draft) if draft else None,
        signed_by=variant.signed_by,
        aliases=loaded.recipe.aliases,
        inherited={} if LAUNCHERS[engine.launcher].from_image else inherited,
    )


def draft_folder(loaded: LoadedRecipe, arguments: ServerArguments, kind: EngineName) -> Path | None:
    """The folder of a draft model that is given as a path. Raises HostError if there is no model in it."""
    model = draft_model(arguments, kind)
    if model is None or not model.startswith(PATHS):
        return None
    folder = loaded.path(model)
    check_model_at(folder, "the `model` of speculative-config")
    return folder


def check_memory_limit(serving: Serving, launcher: LauncherName) -> None:
    if serving.memory_limit_gib and not LAUNCHERS[launcher].from_image:
        problem = "memory_limit_gib limits a container, and the server is to be a process"
        raise CallerError(problem, "add --launcher docker, or leave it out of the recipe", "memory_limit_gib")


def undrafted_of(server: ServerPlan, load: Workload, machine: Fingerprint) -> tuple[ServerPlan | None, bool]:
    """The server without its speculative decoding, and whether the machine has no room for both, so that they take turns.

    It has GPUs of its own if there are enough. There is none without speculative decoding, or for a load that does not depend
    on it: requests at a rate or in turns.
    """
    option = server.engine_kind.speculative
    if option not in server.arguments or load.is_open or load.turns > 1:
        return None, False
    free = [gpu for gpu in machine.devices if gpu not in server.gpus]
    in_turn = len(free) < len(server.gpus)
    changes = {
        "arguments": {name: value for name, value in server.arguments.items() if name != option},
        "gpus": server.gpus if in_turn else free[: len(server.gpus)],
        "draft_digest": None,
        "parts": [part for part in server.parts if part.option != option],
    }
    return server.model_copy(update=changes), in_turn
