"""From a recipe to plans: each cell with all that determines how it is served, checked, measured and judged."""

import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from vllm_qualify.engine.environment import EngineIdentity, Launcher, content_digest
from vllm_qualify.engine.gpu import Fingerprint, check_driver, detect
from vllm_qualify.engine.image import EngineImage
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.launch import Engines, Launch, check_kind, client_identity
from vllm_qualify.engine.server import Engine, ServerPlan, gpu_count
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.metrics import NCCL_INFINIBAND
from vllm_qualify.recipe.model import (
    VLLM,
    Accuracy,
    EngineName,
    Environment,
    Frozen,
    Gate,
    Load,
    LoadedRecipe,
    Name,
    Profile,
    Recipe,
    ServerArguments,
    Serving,
    Smoke,
    Variant,
    covers,
)

T = TypeVar("T")

# NCCL's variable for what it logs, and those of its values with which it logs its channels.
DEBUG, TELLING = "NCCL_DEBUG", ("INFO", "TRACE")
SMOKE_GATES = ("smoke_model_identity", "smoke_finish_reason", "smoke_usage", "smoke_determinism")


class Release(Frozen):
    """A model at a revision (a hub commit, or the digest of a local folder's content) with an engine."""

    model: str
    revision: str
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


class CellPlan(Frozen):
    """Everything one qualification of one cell is going to do; written to the run's folder before anything starts.

    `client` and `client_image` are of the load client where it does not run beside the server, in the same engine.
    """

    run_id: str
    cell: Cell
    fingerprint: Fingerprint
    server: ServerPlan
    smoke: Smoke
    smoke_golden: str | None
    accuracy: Accuracy
    questions: tuple[Path, Path] | None
    load: Load
    gates: list[Gate]
    client_image: EngineImage | None = None
    client: EngineIdentity | None = None

    @property
    def labels(self) -> dict[str, str]:
        """What a container of this cell is known by."""
        return {"run": self.run_id, "cell": self.cell.id}


class Choice(Frozen):
    """Which cells of a recipe to qualify; None takes the machine's GPU type, the default variant, every profile."""

    gpu_type: str | None = None
    variant: str | None = None
    profile: str | None = None


def new_run_id() -> str:
    """Sorts by time and never repeats."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


class Selection(Frozen):
    """A choice, resolved: what the recipe has for it. Made without reading weights or asking the hub."""

    gpu_type: str
    serving: Serving
    variant_name: str
    variant: Variant
    profiles: dict[str, Profile]
    questions: tuple[Path, Path] | None

    def at(self, profile: str, version: str) -> tuple[ServerArguments, Environment]:
        """Server options and environment of a cell for a version of vLLM: GPU type, under variant, under profile.

        Of another kind of engine they are the variant's alone.

        Raises:
            CallerError: the variant is not for this version, or NCCL is told not to log what `network` needs.
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
        """With what makes NCCL log which network it uses, where that is asked for."""
        if self.serving.network is None:
            return environment
        told = {DEBUG: "INFO"} | environment
        if told[DEBUG].upper() not in TELLING:
            problem = f"with `network: {self.serving.network}` NCCL must log its channels, which {told[DEBUG]} does not"
            raise CallerError(problem, "leave it out: it is INFO then", f"environment.{DEBUG}")
        return told


def check_choice(loaded: LoadedRecipe, choice: Choice, launch: Launch) -> None:
    """What of `select` can be told before an image is here. Raises as `select` does."""
    machine = detect(choice.gpu_type)
    if choice.gpu_type in loaded.recipe.gpu_types:
        _check_memory_limit(loaded.recipe.gpu_types[choice.gpu_type], launch.launcher)
    sees_in_a_container = launch.launcher == "docker" and machine.gpu_type == "cpu" and choice.gpu_type != "cpu"
    if sees_in_a_container and not choice.gpu_type:
        return
    selection = select(loaded, choice, None if sees_in_a_container else machine)
    check_kind(selection.variant.engine, launch.launcher, bool(launch.client_image))


def select(loaded: LoadedRecipe, choice: Choice, machine: Fingerprint | None) -> Selection:
    """What of the recipe is to be qualified on this machine; without a machine, on any of the chosen GPU type.

    Raises:
        CallerError: the recipe has no such GPU type, variant or profile, or they do not go together.
        HostError: this machine is of another GPU type, or a file that the recipe names is not there.
    """
    recipe = loaded.recipe
    gpu_type = choice.gpu_type or (machine.gpu_type if machine else "")
    serving = _pick(recipe.gpu_types, gpu_type, "GPU type", "--gpu-type")
    variant_name = choice.variant or serving.default_variant
    variant = _pick(recipe.variants, variant_name, "variant", "--variant")
    _check_fits(recipe, variant_name, gpu_type)
    profiles = _profiles(serving, variant_name, variant, choice.profile)
    if machine and gpu_type != machine.gpu_type:
        raise HostError(
            f"the recipe is to be qualified on {gpu_type}, and this machine is {machine.gpu_type} ({machine.name})",
            f"run it on a host with {gpu_type}",
            "check",
        )
    _check_local_model(loaded, variant)
    return Selection(
        gpu_type=gpu_type,
        serving=serving,
        variant_name=variant_name,
        variant=variant,
        profiles=profiles,
        questions=_questions(loaded),
    )


def plan_cells(loaded: LoadedRecipe, choice: Choice, engines: Engines, machine: Fingerprint) -> list[CellPlan]:
    """The plans of the chosen cells, on images that are here.

    Raises:
        CallerError: as `select` and `check_kind`, or an image holds another engine than the variant's.
        HostError: as `select`, or the hub does not know the model, the machine has too few GPUs or too old a driver, or the
            engine is the wrong build for it.
    """
    selection = select(loaded, choice, machine)
    check_kind(selection.variant.engine, engines.engine.launcher, engines.client is not None)
    check_driver(machine)
    identity, client = engines.engine.identity(), client_identity(engines)
    _check_holds(identity, selection.variant.engine, "--image")
    if client is not None:
        _check_holds(client, VLLM, "--client-image")
    _check_build(identity, machine)
    release = _release(loaded, selection.variant, identity)
    return [_plan(loaded, selection, release, engines, client, machine, profile) for profile in selection.profiles]


def server_plan(
    loaded: LoadedRecipe,
    selection: Selection,
    profile: str,
    engine: Engine,
    version: str,
    revision: str | None,
) -> ServerPlan:
    """The server of a cell on a version of vLLM, its GPUs still to be chosen. Raises CallerError for a setting of another
    launcher."""
    serving, variant = selection.serving, selection.variant
    _check_memory_limit(serving, engine.launcher)
    server, environment = selection.at(profile, version)
    return ServerPlan(
        engine=engine,
        model=str(loaded.path(variant.model)) if variant.is_local else variant.model,
        revision=None if variant.is_local else revision,
        served_model_name=loaded.recipe.served_model_name,
        arguments=server,
        environment=environment,
        startup_timeout_s=serving.startup_timeout_s,
        memory_limit_gib=serving.memory_limit_gib,
        kind=variant.engine,
    )


def _check_memory_limit(serving: Serving, launcher: Launcher) -> None:
    if serving.memory_limit_gib and launcher != "docker":
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
    profile = selection.profiles[profile_name]
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
        server=server.model_copy(update={"gpus": _gpus(gpu_count(server.arguments, server.kind), profile_name, machine)}),
        smoke=recipe.smoke,
        smoke_golden=variant.smoke_golden,
        accuracy=recipe.accuracy,
        questions=selection.questions,
        load=profile.load,
        gates=_gates(recipe, selection.serving, variant, profile),
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
    """The plan with the gates and the golden text that `recipe` has for its cell. Raises CallerError if it does not know it."""
    cell = plan.cell
    serving = _pick(recipe.gpu_types, cell.gpu_type, "GPU type", "--recipe")
    variant = _pick(recipe.variants, cell.variant, "variant", "--recipe")
    profile = _pick(serving.profiles, cell.profile, "profile", "--recipe")
    changes = {"gates": _gates(recipe, serving, variant, profile), "smoke_golden": variant.smoke_golden}
    return plan.model_copy(update=changes)


def _gates(recipe: Recipe, serving: Serving, variant: Variant, profile: Profile) -> list[Gate]:
    return [*_smoke_gates(variant), *_network_gates(serving), *recipe.gates, *profile.gates]


def _network_gates(serving: Serving) -> list[Gate]:
    return [] if serving.network is None else [Gate(metric=NCCL_INFINIBAND, minimum=1.0, unit="bool")]


def _smoke_gates(variant: Variant) -> list[Gate]:
    """Smoke always gates: a recipe cannot leave it out."""
    metrics = [*SMOKE_GATES, *(["smoke_golden"] if variant.smoke_golden is not None else [])]
    return [Gate(metric=metric, minimum=1.0, unit="bool") for metric in metrics]


def _release(loaded: LoadedRecipe, variant: Variant, engine: EngineIdentity) -> Release:
    revision = content_digest(loaded.path(variant.model)) if variant.is_local else _hub_commit(variant)
    return Release(model=variant.model, revision=revision, engine=engine)


def _check_holds(engine: EngineIdentity, wanted: EngineName, option: str) -> None:
    kind, found = KINDS[wanted], f"{KINDS[engine.kind].title} {engine.version}"
    if engine.kind != wanted:
        raise CallerError(f"{kind.title} is needed, and this is {found}", f"name one like {kind.example_image}", option)
    if kind.least_version and not covers(f">={kind.least_version}", engine.version):
        raise CallerError(
            f"{kind.title} {kind.least_version} or newer is needed, and this is {found}", "name a newer one", option
        )


def _check_build(engine: EngineIdentity, machine: Fingerprint) -> None:
    """vLLM's CPU build runs on a GPU host too, and would measure its CPU."""
    is_cpu_build = engine.version.endswith("+cpu")
    if is_cpu_build != (machine.gpu_type == "cpu"):
        build = "CPU" if is_cpu_build else "GPU"
        raise HostError(
            f"{KINDS[engine.kind].title} {engine.version} is a {build} build, and {machine.gpu_type} is to be qualified",
            "take an image, or with VLLM_QUALIFY_ENGINE an environment, with the right build of it",
            "check",
        )


def _questions(loaded: LoadedRecipe) -> tuple[Path, Path] | None:
    questions = loaded.recipe.accuracy.questions
    if questions is None:
        return None
    test, shots = loaded.path(questions.test), loaded.path(questions.shots)
    for path in (test, shots):
        if not path.is_file():
            raise HostError(f"no questions at {path}", "restore the file, or mend accuracy.questions in the recipe", "check")
    return test, shots


def _check_local_model(loaded: LoadedRecipe, variant: Variant) -> None:
    folder = loaded.path(variant.model)
    if variant.is_local and not (folder / "config.json").is_file():
        raise HostError(
            f"no model at {folder}: it has no config.json", "restore the folder, or mend `model` in the recipe", "check"
        )


def _hub_commit(variant: Variant) -> str:
    """The commit behind a branch, a tag or the default branch."""
    try:
        commit = HfApi().model_info(variant.model, revision=variant.revision).sha
    except (HfHubHTTPError, OSError) as error:
        raise HostError(
            f"the hub did not resolve {variant.model} at {variant.revision or 'its default branch'}: {error}",
            "check the name, the revision, HF_TOKEN for a gated model, and that the hub can be reached",
            "check",
        ) from error
    if commit is None:
        raise HostError(f"the hub gave no commit for {variant.model}", "try again", "check")
    return commit
