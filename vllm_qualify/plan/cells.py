"""Make plans from a recipe: each cell's plan has all that determines how it is served, checked, measured and judged."""

import secrets
from datetime import UTC, datetime

from vllm_qualify.engine.confinement import isolation_problem
from vllm_qualify.engine.environment import EngineIdentity, content_of, digest_of
from vllm_qualify.engine.gpu import Fingerprint, check_driver, detect
from vllm_qualify.engine.hub import Repository, find_repository
from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.landlock import can_confine
from vllm_qualify.engine.launchers.registry import LAUNCHERS
from vllm_qualify.engine.provision import Engines, Launch, check_kind, identity_of
from vllm_qualify.engine.server import gpu_count
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.plan import workload
from vllm_qualify.plan.cell import Cell, CellPlan, Release
from vllm_qualify.plan.choice import Choice, Selection, select
from vllm_qualify.plan.forms import form_warnings
from vllm_qualify.plan.gates import judging_of, starts_of
from vllm_qualify.plan.kv_scales import model_warnings
from vllm_qualify.plan.parts import with_parts
from vllm_qualify.plan.server import check_memory_limit, server_plan, undrafted_of
from vllm_qualify.plan.workload import most_clients
from vllm_qualify.recipe.code import code_of_server, code_of_task
from vllm_qualify.recipe.load import NOT_OF_RECIPE
from vllm_qualify.recipe.recipe import LoadedRecipe
from vllm_qualify.recipe.serving import VLLM, EngineName, ServerArguments, covers


def new_run_id() -> str:
    """A new id. Ids sort by time and never repeat."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def check_choice(loaded: LoadedRecipe, choice: Choice, launch: Launch) -> Selection | None:
    """The checks of `select` that need no image. None if only a container sees the GPUs. Raises as `select` does."""
    machine = detect(choice.gpu_type)
    if choice.gpu_type in loaded.recipe.gpu_types:
        check_memory_limit(loaded.recipe.gpu_types[choice.gpu_type], launch.launcher)
    sees_in_a_container = LAUNCHERS[launch.launcher].from_image and machine.gpu_type == "cpu" and choice.gpu_type != "cpu"
    if sees_in_a_container and not choice.gpu_type:
        return None
    selection = select(loaded, choice, None if sees_in_a_container else machine)
    check_kind(selection.variant.engine, launch.launcher, bool(launch.client_image))
    return selection


def plan_cells(loaded: LoadedRecipe, choice: Choice, engines: Engines, machine: Fingerprint) -> list[CellPlan]:
    """The plans of the chosen cells, for engines that are here.

    Raises CallerError as `select` and `check_kind`, or if an image holds another engine than the variant's; HostError as
    `select`, or if the hub does not know the model, the machine has too few GPUs or too old a driver, or the engine is the
    wrong build for it.
    """
    selection = select(loaded, choice, machine)
    check_kind(selection.variant.engine, engines.engine.launcher, engines.client is not None)
    check_driver(machine)
    identity, client = identity_of(engines.engine), identity_of(engines.client) if engines.client else None
    _check_holds(identity, selection.variant.engine, "--image")
    if client is not None:
        _check_holds(client, VLLM, "--client-image")
    _check_build(identity, machine)
    variant = selection.variant
    model = None if variant.is_local else find_repository(variant.model, variant.revision, "check")
    files = {} if model else content_of(loaded.path(variant.model))
    revision = model.commit if model else digest_of(files)
    release = Release(model=variant.model, revision=revision, files=files, engine=identity)
    return [_plan_cell(loaded, selection, release, model, engines, client, machine, profile) for profile in selection.profiles]


def within_budget(plan: CellPlan, time_budget_s: float | None) -> CellPlan:
    """The plan with this budget for its load, or None for no budget, instead of the recipe's; also for the load after a fit."""
    budget = {"time_budget_s": time_budget_s}
    workload = plan.workload and plan.workload.model_copy(update=budget)
    return plan.model_copy(update={"load": plan.load.model_copy(update=budget), "workload": workload})


def sharing_a_server(plans: list[CellPlan]) -> list[list[CellPlan]]:
    """Group the cells by server, in the order of each group's first cell. Each server is started once.

    The result of a fit is known only later: a cell with a fit has a server for itself.
    """
    groups: list[list[CellPlan]] = []
    for plan in plans:
        shared = [group for group in groups if not plan.fit and not group[0].fit and group[0].server == plan.server]
        if shared:
            shared[0].append(plan)
        else:
            groups.append([plan])
    return groups


def _plan_cell(
    loaded: LoadedRecipe,
    selection: Selection,
    release: Release,
    model: Repository | None,
    engines: Engines,
    client: EngineIdentity | None,
    machine: Fingerprint,
    profile_name: str,
) -> CellPlan:
    recipe, variant = loaded.recipe, selection.variant
    server = server_plan(loaded, selection, profile_name, engines.engine, release.engine.version, release.revision)
    profile, serving = selection.profiles[profile_name], selection.serving
    judging = judging_of(recipe, selection, profile_name)
    gates = judging["gates"]
    gpus = _choose_gpus(gpu_count(server.arguments, server.kind), profile_name, machine)
    server = with_parts(server.model_copy(update={"gpus": gpus}), model)
    planned = [workload.task_plan(loaded, settings, server, gates) for settings in recipe.accuracy]
    accuracy = [task.model_copy(update={"order": _draw()}) for task in planned]
    place = f"gpu_types.{selection.gpu_type}.profiles.{profile_name}.load"
    undrafted, in_turn = undrafted_of(server, profile.load, machine)
    return CellPlan(
        run_id=new_run_id(),
        cell=Cell(
            recipe=recipe.name,
            release=release,
            variant=selection.variant_name,
            gpu_type=selection.gpu_type,
            profile=profile_name,
        ),
        fingerprint=machine,
        server=server,
        smoke=recipe.smoke,
        drawn=_draw(),
        accuracy=accuracy,
        likelihood=workload.likelihood_plan(loaded, recipe.likelihood, server, gates),
        load=workload.load_plan(loaded, profile_name, profile, gates, server, place),
        prompts=workload.workload_file(loaded, profile.load),
        soak=profile.soak,
        **recipe.stages_of(variant, profile),
        workload=profile.load if profile.fit else None,
        warm_starts=serving.warm_starts,
        starts=starts_of(serving, gates),
        price_usd_gpu_hour=serving.price_usd_gpu_hour,
        undrafted=undrafted,
        undrafted_in_turn=in_turn,
        watched=True,
        warnings=[*model_warnings(server, release.engine.version), *form_warnings(server, judging["contract"])],
        code=[
            *code_of_server(server.arguments, server.environment),
            *(line for task in accuracy for line in code_of_task(task.settings, task.folder)),
        ],
        baseline_variant=variant.baseline or selection.variant_name,
        client_image=engines.client,
        client=client,
        **judging,
    )


def _draw() -> str:
    """What is drawn for one run, so that no model can know beforehand what it will be asked."""
    return secrets.token_hex(16)


def unconfined_code(plan: CellPlan) -> str:
    """Whose code would run unconfined on this machine; empty if nobody's. lm-eval runs here, also beside a container."""
    return _code_outside(plan, plan.fingerprint.confined, can_confine())


def unisolated_code(plan: CellPlan) -> str:
    """The same of code that would have no namespaces of its own."""
    return _code_outside(plan, plan.fingerprint.isolated, not isolation_problem())


def _code_outside(plan: CellPlan, is_server_within: bool, is_task_within: bool) -> str:
    if plan.foreign_code and not is_server_within:
        return "code of the model or of the recipe"
    return "code of a task" if any(task.folder for task in plan.accuracy) and not is_task_within else ""


def _choose_gpus(needed: int, profile: str, machine: Fingerprint) -> list[int]:
    """The cell's GPUs: the machine's first ones of its type."""
    if machine.gpu_type == "cpu":
        return []
    if needed > len(machine.devices):
        problem = f"profile '{profile}' takes {needed} GPUs, and this machine has {len(machine.devices)} {machine.gpu_type}"
        raise HostError(problem, "choose a profile with --profile, or run it on a larger host", "check")
    return machine.devices[:needed]


def _check_holds(engine: EngineIdentity, wanted: EngineName, option: str) -> None:
    kind, given = KINDS[wanted], f"{KINDS[engine.kind].title} {engine.version}"
    if engine.kind != wanted:
        raise CallerError(f"{kind.title} is needed, and this is {given}", f"name one like {kind.example_image}", option)
    if kind.least_version and not covers(f">={kind.least_version}", engine.version):
        problem = f"{kind.title} {kind.least_version} or newer is needed, and this is {given}"
        raise CallerError(problem, "name a newer one", option)


def _check_build(engine: EngineIdentity, machine: Fingerprint) -> None:
    """Check the build: vLLM's CPU build runs on a GPU host too, but would measure its CPU."""
    is_cpu_build = engine.version.endswith("+cpu")
    if is_cpu_build != (machine.gpu_type == "cpu"):
        build = "CPU" if is_cpu_build else "GPU"
        raise HostError(
            f"{KINDS[engine.kind].title} {engine.version} is a {build} build, and {machine.gpu_type} is to be qualified",
            "take an image, or with VLLM_QUALIFY_ENGINE an environment, with the right build of it",
            "check",
        )


def plan_fitted(plan: CellPlan, options: ServerArguments) -> CellPlan:
    """The plan with the server options that a fit found, and all that follows from them. Raises HostError for too few GPUs."""
    arguments = plan.server.arguments | options
    gpus = _choose_gpus(gpu_count(arguments, plan.server.kind), plan.cell.profile, plan.fingerprint)
    server = plan.server.model_copy(update={"arguments": arguments, "gpus": gpus})
    load, settings = plan.load, plan.workload
    if settings:
        load = settings.make_load(most_clients(server, plan.fit), workload.prompts_needed(settings, plan.gates))
    undrafted, in_turn = undrafted_of(server, load, plan.fingerprint)
    changes = {
        "server": server,
        "undrafted": undrafted,
        "undrafted_in_turn": in_turn,
        "load": load.model_copy(update={name: getattr(plan.load, name) for name in NOT_OF_RECIPE}),
        "accuracy": [
            task.model_copy(update={"num_concurrent": workload.num_concurrent(task.settings, server)}) for task in plan.accuracy
        ],
    }
    return plan.model_copy(update=changes)
