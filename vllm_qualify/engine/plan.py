"""Make plans from a recipe: each cell's plan has all that determines how it is served, checked, measured and judged."""

import hashlib
import json
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from vllm_qualify.engine import hub
from vllm_qualify.engine.environment import EngineIdentity, content_digest, content_of, digest_of
from vllm_qualify.engine.gpu import Fingerprint, check_driver, detect
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.launch import Engines, Launch, check_kind, identity_of
from vllm_qualify.engine.launchers import LauncherName
from vllm_qualify.engine.launchers.registry import LAUNCHERS
from vllm_qualify.engine.server import Engine, ServerPlan, draft_model, gpu_count, with_draft, with_speculation_parsed
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.gates import Gate, Minimum, Waiver
from vllm_qualify.recipe.metrics import NCCL_INFINIBAND
from vllm_qualify.recipe.recipe import Approval, LoadedRecipe, Profile, Recipe, Serving
from vllm_qualify.recipe.serving import VLLM, EngineName, Environment, ServerArguments, Variant, covers
from vllm_qualify.recipe.values import Frozen, Name
from vllm_qualify.recipe.workload import Accuracy, Fit, Load, LoadSettings, Smoke, Sweep

T = TypeVar("T")

# NCCL's variable for what it logs, and the values with which it logs its channels.
DEBUG, TELLING = "NCCL_DEBUG", ("INFO", "TRACE")
# Questions asked at once: as many as the server runs at once, if the recipe says so, and no more than a client can send.
CONCURRENT_BY_DEFAULT, MOST_CONCURRENT = 64, 256
# How a path to a model begins in a recipe; other models are the hub's.
PATHS = ("./", "../", "/", "~")
SMOKE_GATES = ("smoke_model_identity", "smoke_finish_reason", "smoke_usage", "smoke_determinism")


class Release(Frozen):
    """A model at a revision (a hub commit, or the digest of a local folder's content) with an engine.

    `files` has the SHA-256 of each file of a local folder. It is empty for a model of the hub, whose commit has them.
    """

    model: str
    revision: str
    files: dict[str, str] = {}
    engine: EngineIdentity


class Cell(Frozen):
    """The unit that is qualified and approved."""

    recipe: Name
    release: Release
    variant: Name
    gpu_type: Name
    profile: Name

    @property
    def id(self) -> str:
        return f"{self.recipe}/{self.variant}/{self.gpu_type}/{self.profile}"


class TaskPlan(Frozen):
    """One lm-eval task of a cell: its settings, completed for the cell's server and this machine.

    All its questions are asked at most `repetitions` times: more than once only if they are compared with a baseline's. With
    `sequential` it may end after any block of questions.
    """

    settings: Accuracy
    num_concurrent: int
    repetitions: int = 1
    sequential: bool = False
    questions: tuple[Path, Path] | None = None
    folder: Path | None = None

    @property
    def name(self) -> str:
        return self.settings.task


class Baseline(Frozen):
    """The run that a cell is compared with, and what must be the same for that.

    `folder` is where the run is, if not in the store.
    """

    run_id: str
    folder: Path | None = None
    cell: Cell
    fingerprint: Fingerprint
    client_version: str
    accuracy: list[Accuracy]
    load: Load


class CellPlan(Frozen):
    """Everything that one qualification of one cell will do; written to the run's folder before anything starts.

    - `client` and `client_image` are those of the load client, if it does not run beside the server in the same engine.
    - `beside` is the baseline's server, if this machine can serve it too: then their loads are measured in turns.
    - A run that `establishes` is made to be the baseline of later runs.
    - `server` and `load` have the result of `fit` only when it was found; the load then follows from `workload`.
    - `prompts` is the workload's file.
    - `undrafted` is the server without its speculative decoding. Both are measured, if the machine has room for both.
    - `pulled_s` is how long the pull of the image took; None without a pull.
    - With `watched`, which all new plans have, a load counts only with the samples that were taken during it.
    - `unasked` is what the engine could not say when it was asked whether it accepts the server's plan.
    """

    run_id: str
    cell: Cell
    fingerprint: Fingerprint
    server: ServerPlan
    smoke: Smoke
    smoke_golden: str | None
    accuracy: list[TaskPlan]
    load: Load
    prompts: Path | None = None
    sweep: Sweep | None = None
    fit: Fit | None = None
    workload: LoadSettings | None = None
    warm_starts: int = 0
    price_usd_gpu_hour: float | None = None
    undrafted: ServerPlan | None = None
    pulled_s: float | None = None
    watched: bool = False
    unasked: list[str] = []
    gates: list[Gate]
    waivers: list[Waiver] = []
    approval: Approval = Approval()
    baseline_variant: Name
    baseline: Baseline | None = None
    establishes: bool = False
    beside: ServerPlan | None = None
    client_image: EngineImage | None = None
    client: EngineIdentity | None = None

    @property
    def labels(self) -> dict[str, str]:
        """The labels of this cell's containers."""
        return {"run": self.run_id, "cell": self.cell.id}

    @property
    def client_version(self) -> str:
        """The version of `vllm bench serve` that measures the load."""
        return (self.client or self.cell.release.engine).version

    @property
    def baseline_cell(self) -> str:
        """The id of the cell whose run is the baseline."""
        return self.cell.model_copy(update={"variant": self.baseline_variant}).id

    @property
    def compared_with(self) -> Baseline:
        """The baseline. Raises ValueError for a cell that has none."""
        if self.baseline is None:
            raise ValueError("the run has no baseline")
        return self.baseline

    @property
    def comparing(self) -> list[Gate]:
        """The gates against the baseline."""
        return [gate for gate in self.gates if gate.is_against_baseline]

    @property
    def is_speculative(self) -> bool:
        return self.server.engine_kind.speculative in self.server.arguments

    @property
    def judged(self) -> list[Gate]:
        """The gates that decide. A run that is made to be a baseline has only those that need none."""
        return [gate for gate in self.gates if not (self.establishes and gate.is_against_baseline)]


class Choice(Frozen):
    """Which cells of a recipe to qualify; None means the machine's GPU type, the default variant, every profile.

    `revision` replaces the recipe's revision of a model of the hub.
    """

    gpu_type: str | None = None
    variant: str | None = None
    profile: str | None = None
    revision: str | None = None


def new_run_id() -> str:
    """A new id. Ids sort by time and never repeat."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


class Selection(Frozen):
    """What the recipe has for a choice. It is made without reading weights or asking the hub."""

    gpu_type: str
    serving: Serving
    variant_name: str
    variant: Variant
    profiles: dict[str, Profile]

    def at(self, profile: str, version: str) -> tuple[ServerArguments, Environment]:
        """Server options and environment of a cell for a version of vLLM.

        The variant overrides the GPU type, and the profile overrides both. For another kind of engine only the variant counts.

        Raises:
            CallerError: the variant is not for this version, or the environment stops NCCL from logging what `network` needs.
        """
        if not self.variant.of_vllm:
            return self.variant.server, self._told(self.variant.environment)
        if self.variant.vllm and not self.variant.fits_version(version):
            problem = f"the variant '{self.variant_name}' is for vLLM {self.variant.vllm}, and this is {version}"
            raise CallerError(problem, "choose another variant, or an engine of such a version", "--variant")
        layers = [layer.at(version) for layer in (self.serving, self.variant, self.profiles[profile])]
        server: ServerArguments = {}
        environment: Environment = {}
        for options, names in layers:
            server, environment = server | options, environment | names
        return server, self._told(environment)

    def _told(self, environment: Environment) -> Environment:
        """The environment, with which NCCL logs the network that it uses, if the recipe has `network`."""
        if self.serving.network is None:
            return environment
        told = {DEBUG: "INFO"} | environment
        if told[DEBUG].upper() not in TELLING:
            problem = f"with `network: {self.serving.network}` NCCL must log its channels, which {told[DEBUG]} does not"
            raise CallerError(problem, "leave it out: it is INFO then", f"environment.{DEBUG}")
        return told


def check_choice(loaded: LoadedRecipe, choice: Choice, launch: Launch) -> Selection | None:
    """The checks of `select` that need no image. None if only a container sees the GPUs. Raises as `select` does."""
    machine = detect(choice.gpu_type)
    if choice.gpu_type in loaded.recipe.gpu_types:
        _check_memory_limit(loaded.recipe.gpu_types[choice.gpu_type], launch.launcher)
    from_image = LAUNCHERS[launch.launcher].from_image
    sees_in_a_container = from_image and machine.gpu_type == "cpu" and choice.gpu_type != "cpu"
    if sees_in_a_container and not choice.gpu_type:
        return None
    selection = select(loaded, choice, None if sees_in_a_container else machine)
    check_kind(selection.variant.engine, launch.launcher, bool(launch.client_image))
    return selection


def select(loaded: LoadedRecipe, choice: Choice, machine: Fingerprint | None) -> Selection:
    """The part of the recipe to qualify on this machine; without `machine`, on any machine of the chosen GPU type.

    Raises:
        CallerError: the recipe has no such GPU type, variant or profile, or they do not fit together.
        HostError: this machine is of another GPU type, or a file that the recipe names is not there.
    """
    recipe = loaded.recipe
    gpu_type = choice.gpu_type or (machine.gpu_type if machine else "")
    serving = _pick(recipe.gpu_types, gpu_type, "GPU type", "--gpu-type")
    variant_name = choice.variant or serving.default_variant
    variant = _at_revision(_pick(recipe.variants, variant_name, "variant", "--variant"), choice.revision)
    _check_fits(recipe, variant_name, gpu_type)
    profiles = _profiles(serving, variant_name, variant, choice.profile)
    if machine and gpu_type != machine.gpu_type:
        raise HostError(
            f"the recipe is to be qualified on {gpu_type}, and this machine is {machine.gpu_type} ({machine.name})",
            f"run it on a host with {gpu_type}",
            "check",
        )
    _check_local_model(loaded, variant)
    for settings in recipe.accuracy:
        _task_plan(loaded, settings, None, [])
    return Selection(
        gpu_type=gpu_type,
        serving=serving,
        variant_name=variant_name,
        variant=variant,
        profiles=profiles,
    )


def plan_cells(loaded: LoadedRecipe, choice: Choice, engines: Engines, machine: Fingerprint) -> list[CellPlan]:
    """The plans of the chosen cells, for engines that are here.

    Raises:
        CallerError: as `select` and `check_kind`, or an image holds another engine than the variant's.
        HostError: as `select`, or the hub does not know the model, the machine has too few GPUs or too old a driver, or the
            engine is the wrong build for it.
    """
    selection = select(loaded, choice, machine)
    check_kind(selection.variant.engine, engines.engine.launcher, engines.client is not None)
    check_driver(machine)
    identity, client = identity_of(engines.engine), identity_of(engines.client) if engines.client else None
    _check_holds(identity, selection.variant.engine, "--image")
    if client is not None:
        _check_holds(client, VLLM, "--client-image")
    _check_build(identity, machine)
    release = _release(loaded, selection.variant, identity)
    return [_plan(loaded, selection, release, engines, client, machine, profile) for profile in selection.profiles]


def within(plan: CellPlan, time_budget_s: float | None) -> CellPlan:
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
        same = (group for group in groups if not plan.fit and not group[0].fit and group[0].server == plan.server)
        group = next(same, None)
        if group is None:
            groups.append([plan])
        else:
            group.append(plan)
    return groups


def server_plan(
    loaded: LoadedRecipe,
    selection: Selection,
    profile: str,
    engine: Engine,
    version: str,
    revision: str | None,
) -> ServerPlan:
    """The server of a cell on a version of vLLM. Its GPUs are chosen later.

    Raises:
        CallerError: a setting belongs to another launcher, or speculative decoding is no mapping.
        HostError: the folder of its draft model is not there.
    """
    serving, variant = selection.serving, selection.variant
    _check_memory_limit(serving, engine.launcher)
    server, environment = selection.at(profile, version)
    server = with_speculation_parsed(server, variant.engine)
    draft = _draft(loaded, server, variant.engine)
    return ServerPlan(
        engine=engine,
        model=str(loaded.path(variant.model)) if variant.is_local else variant.model,
        revision=None if variant.is_local else revision,
        served_model_name=loaded.recipe.served_model_name,
        arguments=with_draft(server, variant.engine, str(draft)) if draft else server,
        environment=environment,
        startup_timeout_s=serving.startup_timeout_s,
        memory_limit_gib=serving.memory_limit_gib,
        kind=variant.engine,
        draft_digest=content_digest(draft) if draft else None,
    )


def _draft(loaded: LoadedRecipe, arguments: ServerArguments, kind: EngineName) -> Path | None:
    """The folder of a draft model that is given as a path. Raises HostError if there is no model in it."""
    model = draft_model(arguments, kind)
    if model is None or not model.startswith(PATHS):
        return None
    folder = loaded.path(model)
    _check_model_at(folder, "the `model` of speculative-config")
    return folder


def _check_memory_limit(serving: Serving, launcher: LauncherName) -> None:
    if serving.memory_limit_gib and not LAUNCHERS[launcher].from_image:
        problem = "memory_limit_gib limits a container, and the server is to be a process"
        raise CallerError(problem, "add --launcher docker, or leave it out of the recipe", "memory_limit_gib")


def _plan(
    loaded: LoadedRecipe,
    selection: Selection,
    release: Release,
    engines: Engines,
    client: EngineIdentity | None,
    machine: Fingerprint,
    profile_name: str,
) -> CellPlan:
    recipe, variant = loaded.recipe, selection.variant
    server = server_plan(loaded, selection, profile_name, engines.engine, release.engine.version, release.revision)
    profile, serving = selection.profiles[profile_name], selection.serving
    gates = _gates(recipe, serving, variant, profile)
    server = server.model_copy(update={"gpus": _gpus(gpu_count(server.arguments, server.kind), profile_name, machine)})
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
        smoke_golden=variant.smoke_golden,
        accuracy=[_task_plan(loaded, settings, server, gates) for settings in recipe.accuracy],
        load=_load(loaded, profile, gates, server, f"gpu_types.{selection.gpu_type}.profiles.{profile_name}.load"),
        prompts=_prompts(loaded, profile.load),
        sweep=profile.sweep,
        fit=profile.fit,
        workload=profile.load if profile.fit else None,
        warm_starts=serving.warm_starts,
        price_usd_gpu_hour=serving.price_usd_gpu_hour,
        undrafted=_undrafted(server, machine),
        watched=True,
        gates=gates,
        baseline_variant=variant.baseline or selection.variant_name,
        waivers=_waivers(recipe, selection.gpu_type, selection.variant_name, profile_name),
        approval=recipe.approval,
        client_image=engines.client,
        client=client,
    )


def _gpus(needed: int, profile: str, machine: Fingerprint) -> list[int]:
    """The cell's GPUs: the machine's first ones of its type."""
    if machine.gpu_type == "cpu":
        return []
    if needed > len(machine.devices):
        problem = f"profile '{profile}' takes {needed} GPUs, and this machine has {len(machine.devices)} {machine.gpu_type}"
        raise HostError(problem, "choose a profile with --profile, or run it on a larger host", "check")
    return machine.devices[:needed]


def _pick(among: dict[str, T], name: str, what: str, option: str) -> T:
    if name not in among:
        raise CallerError(f"the recipe has no {what} '{name}'", f"it has: {', '.join(among)}", option)
    return among[name]


def _at_revision(variant: Variant, revision: str | None) -> Variant:
    if revision is None:
        return variant
    if variant.is_local:
        raise CallerError("the model is a folder, which has no revisions", "leave the revision out", "revision")
    return variant.model_copy(update={"revision": revision})


def commit_of(loaded: LoadedRecipe, choice: Choice) -> str | None:
    """The current commit of a choice's model, None for a local folder. `choice` names a GPU type. Raises as `select`."""
    selection = select(loaded, choice, None)
    return None if selection.variant.is_local else _commit(selection.variant)


def _commit(variant: Variant) -> str:
    return hub.commit_of(variant.model, variant.revision, "check")


def _check_fits(recipe: Recipe, variant_name: str, gpu_type: str) -> None:
    variant = recipe.variants[variant_name]
    if not variant.fits_gpu_type(gpu_type):
        others = [name for name, other in recipe.variants.items() if other.fits_gpu_type(gpu_type)]
        problem = f"the variant '{variant_name}' is for {', '.join(variant.gpu_types)}, and not for {gpu_type}"
        raise CallerError(problem, f"choose one for {gpu_type}: {', '.join(others)}", "--variant")


def _profiles(serving: Serving, variant_name: str, variant: Variant, chosen: str | None) -> dict[str, Profile]:
    """The chosen profile, or all that the variant is for."""
    if chosen is None:
        found = {name: profile for name, profile in serving.profiles.items() if variant.fits_profile(name)}
    else:
        found = {chosen: _pick(serving.profiles, chosen, "profile", "--profile")}
    if not found or not all(map(variant.fits_profile, found)):
        problem = f"the variant '{variant_name}' is for the profiles {', '.join(variant.profiles)}"
        raise CallerError(problem, "choose one of them that the GPU type has, or another variant", "--profile")
    return found


def judged_by(plan: CellPlan, recipe: Recipe) -> CellPlan:
    """The plan with the gates, the waivers, the golden text and the rule of approval that `recipe` has for its cell.

    Raises:
        CallerError: the recipe does not have the cell.
    """
    cell = plan.cell
    serving = _pick(recipe.gpu_types, cell.gpu_type, "GPU type", "--recipe")
    variant = _pick(recipe.variants, cell.variant, "variant", "--recipe")
    profile = _pick(serving.profiles, cell.profile, "profile", "--recipe")
    changes = {
        "gates": _gates(recipe, serving, variant, profile),
        "waivers": _waivers(recipe, cell.gpu_type, cell.variant, cell.profile),
        "smoke_golden": variant.smoke_golden,
        "approval": recipe.approval,
    }
    return plan.model_copy(update=changes)


def _waivers(recipe: Recipe, gpu_type: str, variant: str, profile: str) -> list[Waiver]:
    cell = (gpu_type, variant, profile)
    return [waiver for waiver in recipe.waivers if (waiver.gpu_type, waiver.variant, waiver.profile) == cell]


def _gates(recipe: Recipe, serving: Serving, variant: Variant, profile: Profile) -> list[Gate]:
    return [*_smoke_gates(variant), *_network_gates(serving), *recipe.gates_of(profile)]


def _network_gates(serving: Serving) -> list[Gate]:
    return [] if serving.network is None else [Minimum(metric=NCCL_INFINIBAND, minimum=1.0, unit="bool")]


def _smoke_gates(variant: Variant) -> list[Gate]:
    """The gates on smoke, which a recipe cannot leave out."""
    metrics = [*SMOKE_GATES, *(["smoke_golden"] if variant.smoke_golden is not None else [])]
    return [Minimum(metric=metric, minimum=1.0, unit="bool") for metric in metrics]


def _release(loaded: LoadedRecipe, variant: Variant, engine: EngineIdentity) -> Release:
    files = content_of(loaded.path(variant.model)) if variant.is_local else {}
    revision = digest_of(files) if variant.is_local else _commit(variant)
    return Release(model=variant.model, revision=revision, files=files, engine=engine)


def _check_holds(engine: EngineIdentity, wanted: EngineName, option: str) -> None:
    kind, found = KINDS[wanted], f"{KINDS[engine.kind].title} {engine.version}"
    if engine.kind != wanted:
        raise CallerError(f"{kind.title} is needed, and this is {found}", f"name one like {kind.example_image}", option)
    if kind.least_version and not covers(f">={kind.least_version}", engine.version):
        raise CallerError(
            f"{kind.title} {kind.least_version} or newer is needed, and this is {found}", "name a newer one", option
        )


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


def _task_plan(loaded: LoadedRecipe, settings: Accuracy, server: ServerPlan | None, gates: list[Gate]) -> TaskPlan:
    """Raises HostError if a file or folder that the settings name is not there."""
    files = settings.questions
    questions = (loaded.path(files.test), loaded.path(files.shots)) if files else None
    for path in questions or ():
        if not path.is_file():
            raise HostError(f"no questions at {path}", "restore the file, or mend accuracy.questions in the recipe", "check")
    folder = loaded.path(settings.task_folder) if settings.task_folder else None
    if folder and not folder.is_dir():
        raise HostError(f"no tasks at {folder}", "restore the folder, or mend accuracy.task_folder in the recipe", "check")
    compared = any(gate.task == settings.task and gate.against == "answers" for gate in gates)
    return TaskPlan(
        settings=settings,
        num_concurrent=_num_concurrent(settings, server),
        repetitions=settings.most_repetitions if compared else 1,
        sequential=settings.sequential,
        questions=questions,
        folder=folder,
    )


def _num_concurrent(settings: Accuracy, server: ServerPlan | None) -> int:
    most = server.most_requests if server else None
    return settings.num_concurrent or min(most or CONCURRENT_BY_DEFAULT, MOST_CONCURRENT)


def _load(loaded: LoadedRecipe, profile: Profile, gates: list[Gate], server: ServerPlan, place: str) -> Load:
    """Raises CallerError if the number of clients is unknown, or prompts are too few; HostError without the file of prompts."""
    clients, option = profile.load.max_concurrency or _most_clients(server, profile.fit), server.engine_kind.concurrency
    if clients is None:
        raise CallerError(
            "nobody says how many clients there are",
            f"give max_concurrency, or the server its {option}, which it follows",
            f"{place}.max_concurrency",
        )
    try:
        load = profile.load.of(clients, _least_prompts(profile.load, gates))
    except ValidationError as error:
        raise CallerError(
            f"{profile.load.num_prompts} prompts are too few for {clients} clients, as many as the server's {option}",
            f"leave it out, or mend it: {error.errors()[0]['msg'].removeprefix('Value error, ')}",
            f"{place}.num_prompts",
        ) from error
    prompts = _prompts(loaded, profile.load)
    return load.model_copy(update={"prompts_sha256": _digest_of(prompts, load)}) if prompts else load


def _most_clients(server: ServerPlan, fit: Fit | None) -> int | None:
    """As many as the server runs at once; a default while a fit has yet to find that number."""
    return server.most_requests or (CONCURRENT_BY_DEFAULT if fit and fit.max_num_seqs else None)


def _least_prompts(settings: LoadSettings, gates: list[Gate]) -> int:
    return max((settings.least_prompts(gate.metric) for gate in gates), default=1)


def _prompts(loaded: LoadedRecipe, settings: LoadSettings) -> Path | None:
    return loaded.path(settings.prompts) if settings.prompts else None


def _digest_of(prompts: Path, load: Load) -> str:
    """Raises HostError without the file; CallerError if a line has no prompt, or prompts would come twice."""
    if not prompts.is_file():
        raise HostError(f"no prompts at {prompts}", "restore the file, or mend load.prompts in the recipe", "check")
    body = prompts.read_bytes()
    # Split as bytes: in a text other characters end a line too.
    lines = body.splitlines()
    for number, line in enumerate(lines, start=1):
        if not _is_prompt(line):
            problem, remedy = f'line {number} is no {{"prompt": "…"}}', "write one JSON object in each line"
            raise CallerError(problem, remedy, str(prompts))
    if len(lines) < load.num_prompts:
        problem = f"it has {len(lines)} prompts, and the load asks {load.num_prompts}: some would come twice"
        raise CallerError(problem, "add prompts, or lower num_prompts", str(prompts))
    return hashlib.sha256(body).hexdigest()


def _is_prompt(line: bytes) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("prompt"), str) and bool(found["prompt"])


def _undrafted(server: ServerPlan, machine: Fingerprint) -> ServerPlan | None:
    """The server without its speculative decoding, on other GPUs. None if it has none, or there is no room for both."""
    option = server.engine_kind.speculative
    if option not in server.arguments:
        return None
    free = [gpu for gpu in machine.devices if gpu not in server.gpus]
    if machine.gpu_type != "cpu" and len(free) < len(server.gpus):
        return None
    arguments = {name: value for name, value in server.arguments.items() if name != option}
    return server.model_copy(update={"arguments": arguments, "gpus": free[: len(server.gpus)], "draft_digest": None})


def fitted(plan: CellPlan, found: ServerArguments) -> CellPlan:
    """The plan with the server options that a fit found, and all that follows from them. Raises HostError for too few GPUs."""
    arguments = plan.server.arguments | found
    gpus = _gpus(gpu_count(arguments, plan.server.kind), plan.cell.profile, plan.fingerprint)
    server = plan.server.model_copy(update={"arguments": arguments, "gpus": gpus})
    clients = _most_clients(server, plan.fit)
    load = plan.workload.of(clients, _least_prompts(plan.workload, plan.gates)) if plan.workload else plan.load
    changes = {
        "server": server,
        "load": load.model_copy(update={"prompts_sha256": plan.load.prompts_sha256}),
        "undrafted": _undrafted(server, plan.fingerprint),
        "accuracy": [
            task.model_copy(update={"num_concurrent": _num_concurrent(task.settings, server)}) for task in plan.accuracy
        ],
    }
    return plan.model_copy(update=changes)


def _check_local_model(loaded: LoadedRecipe, variant: Variant) -> None:
    if variant.is_local:
        _check_model_at(loaded.path(variant.model), "`model`")


def _check_model_at(folder: Path, what: str) -> None:
    if not (folder / "config.json").is_file():
        problem, remedy = f"no model at {folder}: it has no config.json", f"restore the folder, or mend {what} in the recipe"
        raise HostError(problem, remedy, "check")
