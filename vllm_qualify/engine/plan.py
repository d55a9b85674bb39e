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
from vllm_qualify.engine.launch import Engines, Launch, client_identity
from vllm_qualify.engine.server import Engine, ServerPlan, gpu_count
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.recipe.model import (
    Accuracy,
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
)

T = TypeVar("T")

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
        """Server options and environment of a cell for a version of vLLM: GPU type, under variant, under profile."""
        layers = [layer.at(version) for layer in (self.serving, self.variant, self.profiles[profile])]
        server: ServerArguments = {}
        environment: Environment = {}
        for options, names in layers:
            server, environment = server | options, environment | names
        return server, environment


def check_choice(loaded: LoadedRecipe, choice: Choice, launch: Launch) -> None:
    """What of `select` can be told before an image is here. Raises as `select` does."""
    machine = detect(choice.gpu_type)
    if choice.gpu_type in loaded.recipe.gpu_types:
        _check_memory_limit(loaded.recipe.gpu_types[choice.gpu_type], launch.launcher)
    sees_in_a_container = launch.launcher == "docker" and machine.gpu_type == "cpu" and choice.gpu_type != "cpu"
    if not sees_in_a_container:
        select(loaded, choice, machine)
    elif choice.gpu_type:
        select(loaded, choice, None)


def select(loaded: LoadedRecipe, choice: Choice, machine: Fingerprint | None) -> Selection:
    """What of the recipe is to be qualified on this machine; without a machine, on any of the chosen GPU type.

    Raises:
        CallerError: the recipe has no such GPU type, variant or profile.
        HostError: this machine is of another GPU type, or a file that the recipe names is not there.
    """
    recipe = loaded.recipe
    gpu_type = choice.gpu_type or (machine.gpu_type if machine else "")
    serving = _pick(recipe.gpu_types, gpu_type, "GPU type", "--gpu-type")
    variant_name = choice.variant or serving.default_variant
    variant = _pick(recipe.variants, variant_name, "variant", "--variant")
    names = [choice.profile] if choice.profile else list(serving.profiles)
    profiles = {name: _pick(serving.profiles, name, "profile", "--profile") for name in names}
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
    """The plans of the chosen cells, on images that are here. Raises as `select` does, and HostError if the hub does not know
    the model, the machine has too few GPUs or too old a driver, or the engine is the wrong build for it."""
    selection = select(loaded, choice, machine)
    check_driver(machine)
    identity = engines.engine.identity()
    _check_build(identity, machine)
    release = _release(loaded, selection.variant, identity)
    client = client_identity(engines)
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
        server=server.model_copy(update={"gpus": _gpus(gpu_count(server.arguments), profile_name, machine)}),
        smoke=recipe.smoke,
        smoke_golden=variant.smoke_golden,
        accuracy=recipe.accuracy,
        questions=selection.questions,
        load=profile.load,
        gates=_gates(recipe, variant, profile),
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


def judged_by(plan: CellPlan, recipe: Recipe) -> CellPlan:
    """The plan with the gates and the golden text that `recipe` has for its cell. Raises CallerError if it does not know it."""
    cell = plan.cell
    serving = _pick(recipe.gpu_types, cell.gpu_type, "GPU type", "--recipe")
    variant = _pick(recipe.variants, cell.variant, "variant", "--recipe")
    profile = _pick(serving.profiles, cell.profile, "profile", "--recipe")
    changes = {"gates": _gates(recipe, variant, profile), "smoke_golden": variant.smoke_golden}
    return plan.model_copy(update=changes)


def _gates(recipe: Recipe, variant: Variant, profile: Profile) -> list[Gate]:
    return [*_smoke_gates(variant), *recipe.gates, *profile.gates]


def _smoke_gates(variant: Variant) -> list[Gate]:
    """Smoke always gates: a recipe cannot leave it out."""
    metrics = [*SMOKE_GATES, *(["smoke_golden"] if variant.smoke_golden is not None else [])]
    return [Gate(metric=metric, minimum=1.0, unit="bool") for metric in metrics]


def _release(loaded: LoadedRecipe, variant: Variant, engine: EngineIdentity) -> Release:
    revision = content_digest(loaded.path(variant.model)) if variant.is_local else _hub_commit(variant)
    return Release(model=variant.model, revision=revision, engine=engine)


def _check_build(engine: EngineIdentity, machine: Fingerprint) -> None:
    """vLLM's CPU build runs on a GPU host too, and would measure its CPU."""
    is_cpu_build = engine.version.endswith("+cpu")
    if is_cpu_build != (machine.gpu_type == "cpu"):
        build = "CPU" if is_cpu_build else "GPU"
        raise HostError(
            f"vLLM {engine.version} is a {build} build, and {machine.gpu_type} is to be qualified",
            "take an image, or with VLLM_QUALIFY_ENGINE an environment, with the right build of vLLM",
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
