"""What of a recipe is chosen: GPU type, variant and profiles."""

from pathlib import Path
from typing import TypeVar

from vllm_qualify.engine import hub
from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.errors import CallerError, HostError
from vllm_qualify.plan.workload import check_files, task_plan
from vllm_qualify.recipe.recipe import LoadedRecipe, Profile, Recipe, Serving
from vllm_qualify.recipe.serving import Environment, ServerArguments, Variant
from vllm_qualify.recipe.values import Frozen

T = TypeVar("T")

# NCCL's variable for what it logs, and the values with which it logs its channels.
DEBUG, TELLING = "NCCL_DEBUG", ("INFO", "TRACE")


class Choice(Frozen):
    """Which cells of a recipe to qualify; None means the machine's GPU type, the default variant, every profile.

    `revision` replaces the recipe's revision of a model of the hub.
    """

    gpu_type: str | None = None
    variant: str | None = None
    profile: str | None = None
    revision: str | None = None


class Selection(Frozen):
    """What the recipe has for a choice. It is made without reading weights or asking the hub."""

    gpu_type: str
    serving: Serving
    variant_name: str
    variant: Variant
    profiles: dict[str, Profile]

    def arguments_of(self, profile: str, version: str) -> tuple[ServerArguments, Environment]:
        """Server options and environment of a cell for a version of vLLM.

        The variant overrides the GPU type, and the profile overrides both. For another kind of engine only the variant counts.
        Raises CallerError if the variant is not for this version, or NCCL is stopped from logging what `network` needs.
        """
        if not self.variant.of_vllm:
            return self.variant.server, self._with_nccl_log(self.variant.environment)
        if self.variant.vllm and not self.variant.fits_version(version):
            problem = f"the variant '{self.variant_name}' is for vLLM {self.variant.vllm}, and this is {version}"
            raise CallerError(problem, "choose another variant, or an engine of such a version", "--variant")
        layers = [layer.for_version(version) for layer in (self.serving, self.variant, self.profiles[profile])]
        server: ServerArguments = {}
        environment: Environment = {}
        for options, names in layers:
            server, environment = server | options, environment | names
        return server, self._with_nccl_log(environment)

    def _with_nccl_log(self, environment: Environment) -> Environment:
        """The environment, with which NCCL logs the network that it uses, if the recipe has `network`."""
        if self.serving.network is None:
            return environment
        variables = {DEBUG: "INFO"} | environment
        if variables[DEBUG].upper() not in TELLING:
            problem = f"with `network: {self.serving.network}` NCCL must log its channels, which {variables[DEBUG]} does not"
            raise CallerError(problem, "leave it out: it is INFO then", f"environment.{DEBUG}")
        return variables


def select(loaded: LoadedRecipe, choice: Choice, machine: Fingerprint | None) -> Selection:
    """The part of the recipe to qualify on this machine; without `machine`, on any machine of the chosen GPU type.

    Raises CallerError if the recipe has no such GPU type, variant or profile, or they do not fit together; HostError if this
    machine is of another GPU type, or a file that the recipe names is not there.
    """
    recipe = loaded.recipe
    gpu_type = choice.gpu_type or (machine.gpu_type if machine else "")
    serving = pick(recipe.gpu_types, gpu_type, "GPU type", "--gpu-type")
    variant_name = choice.variant or serving.default_variant
    variant = pick(recipe.variants, variant_name, "variant", "--variant")
    if choice.revision is not None:
        if variant.is_local:
            raise CallerError("the model is a folder, which has no revisions", "leave the revision out", "revision")
        variant = variant.model_copy(update={"revision": choice.revision})
    _check_fits(recipe, variant_name, gpu_type)
    profiles = _choose_profiles(serving, variant_name, variant, choice.profile)
    if machine and gpu_type != machine.gpu_type:
        problem = f"the recipe is to be qualified on {gpu_type}, and this machine is {machine.gpu_type} ({machine.name})"
        raise HostError(problem, f"run it on a host with {gpu_type}", "check")
    if variant.is_local:
        check_model_at(loaded.path(variant.model), "`model`")
    for settings in recipe.accuracy:
        task_plan(loaded, settings, None, [])
    check_files(loaded, profiles.values())
    return Selection(gpu_type=gpu_type, serving=serving, variant_name=variant_name, variant=variant, profiles=profiles)


def pick(among: dict[str, T], name: str, what: str, option: str) -> T:
    if name not in among:
        raise CallerError(f"the recipe has no {what} '{name}'", f"it has: {', '.join(among)}", option)
    return among[name]


def commit_of(loaded: LoadedRecipe, choice: Choice) -> str | None:
    """The current commit of a choice's model, None for a local folder. `choice` names a GPU type. Raises as `select`."""
    variant = select(loaded, choice, None).variant
    return None if variant.is_local else hub.resolve_commit(variant.model, variant.revision, "check")


def _check_fits(recipe: Recipe, variant_name: str, gpu_type: str) -> None:
    variant = recipe.variants[variant_name]
    if not variant.fits_gpu_type(gpu_type):
        others = [name for name, other in recipe.variants.items() if other.fits_gpu_type(gpu_type)]
        problem = f"the variant '{variant_name}' is for {', '.join(variant.gpu_types)}, and not for {gpu_type}"
        raise CallerError(problem, f"choose one for {gpu_type}: {', '.join(others)}", "--variant")


def _choose_profiles(serving: Serving, variant_name: str, variant: Variant, chosen: str | None) -> dict[str, Profile]:
    """The chosen profile, or all that the variant is for."""
    if chosen is None:
        profiles = {name: profile for name, profile in serving.profiles.items() if variant.fits_profile(name)}
    else:
        profiles = {chosen: pick(serving.profiles, chosen, "profile", "--profile")}
    if not profiles or not all(map(variant.fits_profile, profiles)):
        problem = f"the variant '{variant_name}' is for the profiles {', '.join(variant.profiles)}"
        raise CallerError(problem, "choose one of them that the GPU type has, or another variant", "--profile")
    return profiles


def check_model_at(folder: Path, what: str) -> None:
    if not (folder / "config.json").is_file():
        problem, remedy = f"no model at {folder}: it has no config.json", f"restore the folder, or mend {what} in the recipe"
        raise HostError(problem, remedy, "check")
