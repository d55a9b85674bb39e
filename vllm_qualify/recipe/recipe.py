"""A whole recipe: how one model is served on each GPU type, how it is checked and measured, and which gates it must pass.

All models are strict: unknown keys, wrong types, NaN and infinities are refused, and nothing is converted silently.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.accuracy import LEAST_REPETITIONS, Accuracy, Likelihood, Smoke
from vllm_qualify.recipe.contract import Capabilities, Capability, OwnSchemas, checks_of
from vllm_qualify.recipe.gates import Gate, Gates, MaxLossSinceAnchor, Waiver
from vllm_qualify.recipe.load import LoadSettings
from vllm_qualify.recipe.metrics import (
    GOODPUT,
    GPU_GROWTH,
    METRICS,
    PER_GPU,
    PREFIX_HIT_SHARE,
    REORDERED,
    TEXT_NLL,
    TEXT_TOP1,
    TURN_TTFTS,
    path_metric,
)
from vllm_qualify.recipe.paths import can_sleep, names_backend
from vllm_qualify.recipe.presets import with_presets
from vllm_qualify.recipe.roles import Settings
from vllm_qualify.recipe.searches import ProfileStages, Soak
from vllm_qualify.recipe.serving import Arguments, Variant
from vllm_qualify.recipe.values import (
    Count,
    CountOrZero,
    Frozen,
    Gibibytes,
    Name,
    Positive,
    PositiveShare,
    Seconds,
    Text,
    expand_user,
)

# More starts of a server would hardly make a verdict more certain, and each takes minutes.
MOST_STARTS = 16


class Approval(Frozen):
    """How reports that passed become approvals. Deployments trust approvals."""

    automatic: bool = Field(
        False,
        description="approve at once where every gate was judged and passed without a waiver, and a key to sign with is given;"
        " else a person decides",
    )
    valid_days: int = Field(
        90,
        ge=1,
        le=3650,
        description="from the decision until the approval expires; a waiver that it rests on can end it earlier",
    )


class Profile(Arguments, ProfileStages):
    """A serving goal: its tunables over the GPU type's arguments, its workload and its gates."""

    load: LoadSettings = Field(description="the workload")
    soak_min: Positive | None = Field(
        None, description="how long the server is soaked at part load, in minutes, after its loads"
    )
    soak_share: PositiveShare = Field(
        0.5, description="the part of the load's clients, or of its rate, with which it is soaked"
    )
    gates: Gates = Field([], description="gates of this profile, beside those of the recipe")

    @property
    def soak(self) -> Soak | None:
        return Soak(soak_min=self.soak_min, soak_share=self.soak_share) if self.soak_min else None

    @model_validator(mode="after")
    def _stages_have_a_load(self) -> Self:
        if self.soak_min and self.load.trace:
            raise ValueError("a soak sends its requests evenly, and a trace has times of its own: give it another profile")
        if not self.soak_min and "soak_share" in self.model_fields_set:
            raise ValueError("soak_share is of a soak: give soak_min, its minutes")
        set_too = [name for name in (self.fit.options if self.fit else []) if name in self.server]
        if set_too:
            raise ValueError(f"fit finds {', '.join(set_too)}, and the server sets it too: leave one of the two out")
        searching = [name for name in ("sweep", "fit") if getattr(self, name)]
        if self.load.turns > 1 and (searching or self.soak_min):
            raise ValueError(f"{(*searching, 'soak')[0]} has loads of its own, without turns: give it a profile of its own")
        if self.load.is_open and searching:
            remedy = "give it a profile of its own, without the rate"
            raise ValueError(f"{searching[0]} searches with clients, and the load has times of its own: {remedy}")
        if self.fit and self.fit.max_num_seqs and self.load.longest_tok is None:
            raise ValueError("fit finds max_num_seqs for random prompts only, whose length is known: give it under 'server'")
        if self.fit and self.fit.max_num_seqs and self.load.num_prompts and not self.load.max_concurrency:
            raise ValueError("fit finds max_num_seqs, which the clients follow: leave load.num_prompts out, which follows them")
        return self


class Serving(Arguments):
    """How the model is served on one GPU type."""

    default_variant: Name = Field(description="one of `variants`; `--variant` chooses another")
    warm_starts: CountOrZero = Field(
        0, description="how often the server is started once more after the load, now that its caches are full"
    )
    starts: Count = Field(
        16,
        le=MOST_STARTS,
        description="how often the server is started at most, where gates compare with a baseline: starts of one build differ."
        " Most releases are decided after 3 to 6. A run that becomes a baseline is mostly started 3 to 5 times",
    )
    price_usd_gpu_hour: Positive | None = Field(
        None, description="what one GPU costs an hour; `--price-usd-gpu-hour` replaces it"
    )
    network: Literal["infiniband"] | None = Field(
        None, description="what NCCL must use between nodes; it is read from the server's log"
    )
    startup_timeout_s: Seconds = Field(1800.0, description="from the launch to the first completion that came back")
    memory_limit_gib: Gibibytes | None = Field(
        None, description="limit of the container's host memory; only with `--launcher docker`"
    )
    profiles: dict[Name, Profile] = Field(min_length=1, description="`throughput`, `balanced`, `latency`, or any other name")


class NamedAnchor(Frozen):
    """The run that a cell is held against for good: an approved one of the cell of its baseline, instead of the first."""

    run: Text = Field(description="an approved run that was made to be a baseline")
    gpu_type: Name = Field(description="of the cell")
    variant: Name = Field(description="of the cell")
    profile: Name = Field(description="of the cell")


def _check_distinct(names: list[str], problem: str) -> None:
    """Raises ValueError if a name is there twice; `problem` has its place."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(problem.format(", ".join(twice)))


def _check_known(place: str, names: list[str], known: Collection[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{place} names {', '.join(unknown)}, which the recipe does not have: {', '.join(sorted(known))}")


def _check_has_baseline(gate: MaxLossSinceAnchor, gates: Collection[Gate]) -> None:
    """A gate against the anchor asks no question more: those that are asked must do for it."""
    score = (gate.metric, gate.task, gate.filter)
    of_score = (other for other in gates if (other.metric, other.task, other.filter) == score)
    beside = next((other for other in of_score if other.against == "answers"), None)
    if beside is None:
        raise ValueError(f"the gate on {gate.label} needs one with max_loss on the same score beside it")
    if gate.max_loss_since_anchor < min(beside.bounds):
        raise ValueError(f"max_loss_since_anchor of {gate.label} must be max_loss or more: no more questions are asked for it")


def _check_can_be_judged(gate: Gate, profile: Profile, place: str) -> None:
    """Raises ValueError if nothing in the profile measures what the gate is on, or too few requests do."""
    load, metric = profile.load, gate.metric
    least = load.least_prompts(metric)
    if load.num_prompts is not None and load.num_prompts < least:
        raise ValueError(f"{place}.load.num_prompts must be {least} or more for the gate on {gate.label}")
    if metric == GOODPUT and load.slo is None:
        raise ValueError(f"a gate on {GOODPUT} needs the workload's 'slo'")
    if metric == PREFIX_HIT_SHARE and not load.shares_prefixes:
        needed = "prompts that begin alike: 'shared_prefix_len', 'prompts', 'trace' or 'api: chat'"
        raise ValueError(f"a gate on {PREFIX_HIT_SHARE} needs {needed}")
    if metric in TURN_TTFTS and load.turns == 1:
        raise ValueError(f"a gate on {metric} needs chats of several 'turns'")
    if METRICS[metric].stage == "soak" and not profile.soak:
        raise ValueError(f"the gate on {metric} needs 'soak_min', the minutes of the soak, in {place}")


class Recipe(Frozen):
    """A whole recipe. `gates` hold for every cell; a profile adds its own."""

    name: Name = Field(description="first part of the cell's id, and of the report's place in the store")
    description: Text = Field(description="one sentence for people")
    served_model_name: Text = Field(description="the name under which the server offers the model")
    aliases: list[Text] = Field(
        [],
        description="more names under which the server offers the model. The smoke test and the contract hold it to all of"
        " them. TensorRT-LLM takes none",
    )
    variants: dict[Name, Variant] = Field(min_length=1, description="the sets of weights")
    gpu_types: dict[Name, Serving] = Field(
        min_length=1,
        description="how the model is served on each GPU type: `h100`, `h200`, `b200`, …, `cpu`, as NVML reports them",
    )
    smoke: Smoke = Field(description="the fixed prompt")
    contract: bool | None = Field(
        None,
        description="whether each server is asked for the API's contract; every check of it is then a gate. By default vLLM's"
        " are; TensorRT-LLM's only with `true` or `capabilities`",
    )
    capabilities: Capabilities = Field(
        [],
        description="what every server offers beyond completions. Each promise adds its checks to the contract. All need"
        " `chat` beside them, and `parallel_tools` needs `tools`",
    )
    json_schemas: OwnSchemas = Field(
        [], description="schemas of your own, up to 8, which the contract asks for, where `capabilities` promise `json_schema`"
    )
    accuracy: Annotated[list[Accuracy], BeforeValidator(with_presets)] = Field(
        min_length=1, description="the lm-eval tasks. `preset: chat` in place of one stands for the tasks of that preset"
    )
    likelihood: Likelihood | None = Field(None, description="texts whose likelihood is compared with the baseline's")
    gates: Gates = Field(min_length=1, description="gates of every cell")
    waivers: list[Waiver] = Field([], description="gates that need not be passed for some time")
    anchors: list[NamedAnchor] = Field(
        [], description="anchors of cells; of any other cell it is the first baseline that was approved"
    )
    approval: Approval = Field(Approval(), description="who turns a report that passed into an approval, and for how long")

    @model_validator(mode="after")
    def _variants_fit(self) -> Self:
        """A name that no cell has is a typing error. It would silently exclude a cell that the author wanted."""
        for gpu_type, serving in self.gpu_types.items():
            if serving.default_variant not in self.variants:
                place = f"gpu_types.{gpu_type}.default_variant '{serving.default_variant}'"
                raise ValueError(f"{place} is not among the variants: {', '.join(self.variants)}")
        profiles = {name for serving in self.gpu_types.values() for name in serving.profiles}
        for name, variant in self.variants.items():
            _check_known(f"variants.{name}.gpu_types", variant.gpu_types, self.gpu_types)
            _check_known(f"variants.{name}.profiles", variant.profiles, profiles)
            _check_known(f"variants.{name}.baseline", [variant.baseline] if variant.baseline else [], self.variants)
            if not any(variant_of_cell == name for _, variant_of_cell, _ in self.cells()):
                raise ValueError(f"variants.{name} has no cell: its profiles are not those of its GPU types")
        for gpu_type, serving in self.gpu_types.items():
            if not any(cell[:2] == (gpu_type, serving.default_variant) for cell in self.cells()):
                raise ValueError(f"gpu_types.{gpu_type}.default_variant '{serving.default_variant}' is not for {gpu_type}")
        return self

    @model_validator(mode="after")
    def _servers_can_have_it(self) -> Self:
        _check_distinct([self.served_model_name, *self.aliases], "aliases: {} is a name of the model more than once")
        like_options = [name for name in self.aliases if name.startswith("-")]
        if like_options:
            raise ValueError(f"aliases: '{like_options[0]}' begins with a dash, so the engine would read it as an option")
        other = next((variant.engine for variant in self.variants.values() if not variant.of_vllm), None)
        if self.aliases and other:
            raise ValueError(f"aliases: a server of {other} has one name, and a variant of this recipe is for it")
        asked = [(f"{gpu_type}.profiles.{name}", profile.paths) for gpu_type, name, profile in self._profiles()]
        busy = [place for place, paths in asked if paths and paths.must_be_proven]
        if other and busy:
            problem = f"gpu_types.{busy[0]}.paths needs salts for the cache, and the likelihoods of tokens by their ids"
            raise ValueError(f"{problem}, which {other} does not take: leave it out")
        promises = {"": self.capabilities} | {f"variants.{name}.": each.capabilities for name, each in self.variants.items()}
        place = next((f"{place}capabilities" for place, promised in promises.items() if promised), None)
        if self.contract is False and place:
            raise ValueError(f"{place} are checked by the API's contract: leave them out, or 'contract: false'")
        if self.json_schemas and not any("json_schema" in (promised or []) for promised in promises.values()):
            raise ValueError("json_schemas needs json_schema among the capabilities")
        return self

    @model_validator(mode="after")
    def _gates_have_questions(self) -> Self:
        tasks = [accuracy.task for accuracy in self.accuracy]
        _check_distinct(tasks, "accuracy has the task {} more than once")
        for gate in [*self.gates, *(gate for *_, profile in self._profiles() for gate in profile.gates)]:
            stage = METRICS[gate.metric].stage
            if stage == "accuracy" and gate.task is None and len(tasks) > 1:
                raise ValueError(f"the gate on {gate.label} must name its 'task', one of {', '.join(tasks)}")
            if stage == "accuracy" and gate.task is not None and gate.task not in tasks:
                raise ValueError(f"the gate on {gate.label} names a task that accuracy does not have: {', '.join(tasks)}")
            asked = [each for each in self.accuracy if gate.against == "answers" and gate.task in (None, each.task)]
            if asked and asked[0].most_repetitions < LEAST_REPETITIONS:
                problem = f"accuracy of {asked[0].task}: most_repetitions must be {LEAST_REPETITIONS} or more"
                raise ValueError(f"{problem} for a gate with {gate.form()}, whose baseline is asked so often at least")
            if stage == "likelihood" and self.likelihood is None:
                raise ValueError(f"the gate on {gate.label} needs 'likelihood', which says what is scored")
            if gate.metric in (TEXT_NLL, TEXT_TOP1) and self.likelihood and self.likelihood.texts is None:
                raise ValueError(f"the gate on {gate.label} needs 'likelihood.texts', a file of texts")
        return self

    @model_validator(mode="after")
    def _gates_fit_their_profiles(self) -> Self:
        for gpu_type, name, profile in self._profiles():
            place, gates = f"gpu_types.{gpu_type}.profiles.{name}", self.gates_of(profile)
            _check_distinct([gate.label for gate in gates], "more than one gate on {}")
            for gate in gates:
                _check_can_be_judged(gate, profile, place)
                if gpu_type == "cpu" and gate.metric in (GPU_GROWTH, *PER_GPU):
                    raise ValueError(f"{place} has no GPU for the gate on {gate.metric}")
                if isinstance(gate, MaxLossSinceAnchor):
                    _check_has_baseline(gate, gates)
        return self

    @model_validator(mode="after")
    def _anchors_and_waivers_are_of_cells(self) -> Self:
        """A waiver with a typing error would silently have no effect."""
        anchored = [(anchor.gpu_type, anchor.variant, anchor.profile) for anchor in self.anchors]
        for cell in anchored:
            self._check_cell(cell, "an anchor")
            if anchored.count(cell) > 1:
                raise ValueError(f"{'/'.join(cell)} has more than one anchor")
        for waiver in self.waivers:
            self._check_cell((waiver.gpu_type, waiver.variant, waiver.profile), f"the waiver of {waiver.gate}")
            serving = self.gpu_types[waiver.gpu_type]
            profile = serving.profiles[waiver.profile]
            variant = self.variants[waiver.variant]
            promised, paths = self.capabilities_of(variant), self.path_checks_of(variant, serving, profile)
            labels = [*(gate.label for gate in self.gates_of(profile)), *paths]
            asked = [] if self.contract is False else checks_of(promised)
            if waiver.gate not in (*labels, *(check.name for check in asked)):
                problem = f"there is no gate '{waiver.gate}' to be waived; there are: {'; '.join(labels)}"
                raise ValueError(f"{problem}; and each check of the contract that is asked")
        return self

    def _profiles(self) -> Iterator[tuple[str, str, Profile]]:
        """GPU type, name and settings of every profile."""
        for gpu_type, serving in self.gpu_types.items():
            yield from ((gpu_type, name, profile) for name, profile in serving.profiles.items())

    def _check_cell(self, cell: tuple[str, str, str], what: str) -> None:
        if cell not in set(self.cells()):
            raise ValueError(f"{what} is for {'/'.join(cell)}, which the recipe does not have")

    def capabilities_of(self, variant: Variant) -> list[Capability]:
        """What a variant's server offers beyond completions."""
        return self.capabilities if variant.capabilities is None else variant.capabilities

    def stages_of(self, variant: Variant, profile: Profile) -> dict[str, Settings | None]:
        """What is asked of each stage that a profile may ask for. An engine that takes no paths is not asked for them."""
        asked = profile.asked_stages
        return asked if variant.of_vllm else asked | {"paths": None}

    def path_checks_of(self, variant: Variant, serving: Serving, profile: Profile) -> list[str]:
        """The metrics of the paths that gate by themselves."""
        paths = profile.paths if variant.of_vllm else None
        if paths is None:
            return []
        promised, layers = self.capabilities_of(variant), (serving, variant, profile)
        settings = [of for layer in layers for of in (layer, *layer.by_version)]
        options, variables = dict[str, JsonValue](), dict[str, str]()
        for of in settings:
            options |= of.server
            variables |= of.environment
        reorders = serving.warm_starts and paths.reorders(promised) and not any(names_backend(of.server) for of in settings)
        taken = paths.taken(promised, sleeps=can_sleep(options, variables))
        return [path_metric(path) for path in [*taken, *([REORDERED] if reorders else [])]]

    def gates_of(self, profile: Profile) -> list[Gate]:
        """The gates of the recipe and of one of its profiles, each score with its task."""
        only = self.accuracy[0].task
        return [
            gate.model_copy(update={"task": only}) if METRICS[gate.metric].stage == "accuracy" and not gate.task else gate
            for gate in [*self.gates, *profile.gates]
        ]

    def cells(self, version: str | None = None) -> Iterator[tuple[str, str, str]]:
        """GPU type, variant and profile of every possible cell: for a version of vLLM if given, else for any version."""
        for gpu_type, serving in self.gpu_types.items():
            for name, variant in self.variants.items():
                if variant.fits_gpu_type(gpu_type) and (version is None or variant.fits_version(version)):
                    yield from ((gpu_type, name, profile) for profile in serving.profiles if variant.fits_profile(profile))


class LoadedRecipe(Frozen):
    """A recipe, and the folder that its relative paths start from."""

    recipe: Recipe
    folder: Path

    def path(self, relative: str) -> Path:
        """An absolute path for a path written in the recipe. Raises CallerError if no file system has such a path."""
        if "\0" in relative:
            raise CallerError(f"{relative!r} is no path", "mend the path in the recipe", "RECIPE")
        return (self.folder / expand_user(relative)).resolve()
