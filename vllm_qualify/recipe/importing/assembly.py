"""The YAML: a command put together from its parts, by the rules of vllm-project/recipes for one server on one node."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from vllm_qualify.recipe.importing.commands import GPU_TYPES, Command, check_deployment
from vllm_qualify.recipe.importing.documents import Node, read_yaml
from vllm_qualify.recipe.serving import Environment

_TENSOR_PARALLEL, _PREFILL_DECODE, _MULTI_NODE = "single_node_tp", "pd_cluster", "multi_node_"
_MOST_NODES = 16
_OTHERWISE = ": it takes a deployment on several nodes, or another variant"
# The hardware for the smallest floating-point formats, if a variant does not name it itself.
_ONLY_ON = {name: {"brand": "NVIDIA", "generation": "blackwell"} for name in ("nvfp4", "fp4")}


@dataclass(frozen=True)
class _Hardware:
    """One hardware profile of taxonomy.yaml: one node."""

    name: str
    generation: str
    brand: str
    gpu_count: int
    memory_gb: float
    only_if_declared: bool
    scalable: bool

    def choose_entry(self, by_hardware: Node) -> Node:
        """The entry of a mapping for its name, else for its generation, its brand, or `default`."""
        return first_given(by_hardware[key] for key in (self.name, self.generation, self.brand.lower(), "default"))

    def choose_override(self, overrides: Node) -> Node:
        """The entry for its generation; for NVIDIA hardware without one, the entry `nvidia`."""
        own = overrides[self.generation]
        return overrides["nvidia"] if not own and self.brand == "NVIDIA" else own


@dataclass(frozen=True)
class _Case:
    """A model's YAML for one variant and hardware profile."""

    model: Node
    variant_name: str
    hardware: _Hardware
    repository: Path

    @property
    def variant(self) -> Node:
        return self.model["variants"][self.variant_name]

    @cached_property
    def strategy_name(self) -> str:
        """The recommended strategy, or the first one that the hardware allows."""
        default, listed = self.model["default_strategy"], self._offered_strategies
        preferred = [default.text() if default else _TENSOR_PARALLEL, _TENSOR_PARALLEL, *listed]
        recommended = next((name for name in preferred if name in listed), _TENSOR_PARALLEL)
        if recommended in self._usable_strategies or not self._usable_strategies:
            return recommended
        return min(self._usable_strategies, key=lambda name: name == _PREFILL_DECODE)

    @property
    def scales_out(self) -> bool:
        return any(name.startswith(_MULTI_NODE) for name in self._usable_strategies)

    @cached_property
    def strategy(self) -> Node:
        if not re.fullmatch(r"[a-z0-9_]+", self.strategy_name):
            raise self.model["default_strategy"].wrong("the name of a strategy")
        return read_yaml(self.repository / "strategies" / f"{self.strategy_name}.yaml")

    @property
    def own_settings(self) -> Node:
        return self.model["strategy_overrides"][self.strategy_name]

    def least_gpus(self, strategy: str) -> tuple[int, Node]:
        """The least number of GPUs for a strategy, and its place: the higher one of the strategy's and the hardware's bound."""
        bounds = self.model["strategy_min_gpus"]
        by_hardware = bounds[self.hardware.name] if isinstance(bounds.value, dict) else bounds
        parts = [part[strategy] if isinstance(part.value, dict) else part for part in (bounds, by_hardware)]
        return max(((part.count() if part else 0, part) for part in parts), key=lambda bound: bound[0])

    @cached_property
    def _offered_strategies(self) -> list[str]:
        """The compatible strategies, and others that some hardware supports."""
        listed = self.model["compatible_strategies"].words()
        gates = self.model["strategy_hardware"].items()
        granted = [name for name, by_hardware in gates if "supported" in by_hardware.mapping().values()]
        return [*listed, *(name for name in granted if name not in listed)]

    @cached_property
    def _usable_strategies(self) -> list[str]:
        return [name for name in self._offered_strategies if self._is_usable(name)]

    def _is_usable(self, strategy: str) -> bool:
        gate = self.hardware.choose_entry(self.model["strategy_hardware"][strategy])
        if (gate.value == "unsupported") if gate else strategy not in self.model["compatible_strategies"].words():
            return False
        several_nodes = strategy.startswith(_MULTI_NODE) or strategy == _PREFILL_DECODE
        gpus = self.hardware.gpu_count * (_MOST_NODES if several_nodes else 1)
        return (self.hardware.scalable or not several_nodes) and gpus >= self.least_gpus(strategy)[0]


def assemble_commands(model: Node, variant: str, repository: Path) -> list[tuple[str, Callable[[], Command]]]:
    """For each GPU type of ours that the variant supports: the name of the hardware, and a function that gives its command.

    The function raises InexpressibleError if the command needs more than one server on one node.
    """
    profiles = sorted(read_yaml(repository / "taxonomy.yaml")["hardware_profiles"].items(), key=lambda item: item[0])
    every = [
        _Hardware(
            name=name,
            generation=part["generation"].text(),
            brand=part["brand"].text(),
            gpu_count=part["gpu_count"].count(),
            memory_gb=part["vram_gb"].number(),
            only_if_declared=part["restricted"].value is True,
            scalable=part["scalable"].value is not False,
        )
        for name, part in profiles
        if name in GPU_TYPES
    ]
    meant = [hardware for hardware in every if _is_meant(model, model["variants"][variant], hardware)]
    return [(one.name, partial(_make_command, _Case(model, variant, one, repository))) for one in meant]


def _is_meant(model: Node, variant: Node, hardware: _Hardware) -> bool:
    declared = model["meta"]["hardware"].mapping()
    if declared.get(hardware.name) == "unsupported" or (hardware.only_if_declared and hardware.name not in declared):
        return False
    supported = variant["supported_hardware"].words()
    if supported and hardware.name not in supported:
        return False
    wanted = variant["precision_hardware"].mapping() or _ONLY_ON.get(str(variant["precision"].value), {})
    there = {"brand": hardware.brand, "generation": hardware.generation}
    return all(there.get(key) == value for key, value in wanted.items())


def _make_command(case: _Case) -> Command:
    _check_size(case)
    check_deployment(case.strategy["deploy_type"])
    model = case.model["model"]
    return Command(
        gpu_type=GPU_TYPES[case.hardware.name],
        variant=case.variant_name,
        words=[first_given((case.variant["model_id"], model["model_id"])).text(), *filter(None, _command_words(case))],
        environment=_join_environment(case),
        image=_choose_image(case),
        origin=model,
    )


def _check_size(case: _Case) -> None:
    """Raises InexpressibleError if the model needs more memory or GPUs than one node has, and other ways to serve it exist."""
    hardware, memory = case.hardware, case.variant["vram_minimum_gb"]
    if memory and memory.number() > hardware.memory_gb and (case.scales_out or not hardware.scalable):
        there = f"one node of {hardware.name}, which has {hardware.memory_gb:g} GB{_OTHERWISE}"
        raise memory.refusal(f"weights of {memory.number():g} GB on {there}")
    least, place = case.least_gpus(case.strategy_name)
    if least > hardware.gpu_count:
        raise place.refusal(f"{least} GPUs on one node of {hardware.name}, which has {hardware.gpu_count}{_OTHERWISE}")


def _command_words(case: _Case) -> list[str]:
    """The command's words, in the order of vllm-project/recipes: an option's last value counts. Empty words are left out."""
    return [
        *case.model["model"]["base_args"].words(),
        *_extra_args(_early_layers(case)),
        *case.strategy["vllm_args"].words(),
        *(case.strategy["parallel_flag"].text(), str(_parallel_size(case))),
        *case.own_settings["extra_args"].words(),
        *case.own_settings["vllm_args"].words(),
        *_extra_args(_late_layers(case)),
        *_feature_args(case),
    ]


def _join_environment(case: _Case) -> Environment:
    parts = [
        case.model["model"]["base_env"],
        *(layer["extra_env"] for layer in _early_layers(case)),
        *(case.strategy["env"], case.own_settings["env"], case.own_settings["extra_env"]),
        *(layer["extra_env"] for layer in _late_layers(case)),
    ]
    return {name: value for part in parts for name, value in part.environment().items()}


def _extra_args(layers: list[Node]) -> list[str]:
    return [word for layer in layers for word in layer["extra_args"].words()]


def _early_layers(case: _Case) -> list[Node]:
    return [case.variant, case.variant["hardware_overrides"][case.hardware.name]]


def _late_layers(case: _Case) -> list[Node]:
    """The strategy's layer for a generation replaces those of the model and the variant; that for the GPU type is added."""
    of_strategy = case.hardware.choose_override(case.own_settings["hardware_overrides"])
    of_model = [case.hardware.choose_override(part["hardware_overrides"]) for part in (case.model, case.variant)]
    layers = [of_strategy] if of_strategy else of_model
    return [*layers, case.own_settings["hardware_overrides"][case.hardware.name]]


def _parallel_size(case: _Case) -> int:
    """All GPUs of the node; with tensor parallelism alone, the declared number, or 1 if one GPU holds the weights."""
    hardware, memory = case.hardware, case.variant["vram_minimum_gb"]
    if case.strategy_name != _TENSOR_PARALLEL:
        return hardware.gpu_count
    for declared in (case.variant["tp"], case.own_settings["tp"]):
        size = hardware.choose_entry(declared) if isinstance(declared.value, dict) else declared
        if size:
            # A CPU has as many ranks as declared: the count in taxonomy.yaml does not limit it.
            return size.count() if hardware.generation == "cpu" else min(size.count(), hardware.gpu_count)
    fits = memory and 0 < memory.number() <= hardware.memory_gb / hardware.gpu_count
    return 1 if fits else hardware.gpu_count


def _feature_args(case: _Case) -> Iterator[str]:
    """The arguments of the features that are on by default, and of those that the variant turns on."""
    optional = case.model["opt_in_features"].words() + case.model["hardware_opt_in_features"][case.hardware.name].words()
    forced = case.variant["default_modes"].mapping()
    for name, feature in case.model["features"].items():
        if name in optional and name not in forced:
            continue
        strategies = feature["strategies"].words()
        if strategies and case.strategy_name not in strategies:
            continue
        if feature["companion"]:
            raise feature["companion"].refusal("a feature that needs another command beside the server")
        if feature["modes"]:
            mode = _choose_mode(case, name, feature)
            own = case.hardware.choose_entry(mode["hardware_overrides"])
        else:
            mode, own = feature, case.hardware.choose_override(feature["hardware_overrides"])
        yield from first_given((own["args"], mode["args"])).words()


def _choose_mode(case: _Case, name: str, feature: Node) -> Node:
    """The mode for this variant and hardware: the one that the variant names, else the feature's default, else the first."""
    modes = dict[str, Node]()
    for key, mode in feature["modes"].items():
        variants = mode["variants"].words()
        on_hardware = (mode["hardware"][name].value for name in (case.hardware.generation, case.hardware.name))
        if (not variants or case.variant_name in variants) and "unsupported" not in on_hardware:
            modes[key] = mode
    named = (case.variant["default_modes"][name], feature["default_mode"])
    return first_given([*(modes[part.text()] for part in named if part and part.text() in modes), *modes.values()])


def _choose_image(case: _Case) -> str | None:
    """The image that the YAML names, if any. Only the JSON has the default image."""
    brand = "intel" if case.hardware.generation == "cpu" else case.hardware.brand.lower()
    exact = case.variant["hardware_overrides"][case.hardware.name]["docker_image"]
    named = [_image_for(brand, part["docker_image"]) for part in (case.variant, case.model["model"])]
    return next((image for image in (exact.value, *named) if isinstance(image, str) and image), None)


def _image_for(brand: str, part: Node) -> object:
    """The image for a brand. An image without a brand is NVIDIA's. NVIDIA's image may depend on the version of CUDA."""
    by_cuda = isinstance(part.value, dict) and bool({"cu129", "cu130"} & part.value.keys())
    if isinstance(part.value, dict) and not by_cuda:
        part = part[brand]
    elif brand != "nvidia":
        return None
    return first_given((part["cu130"], part["cu129"])).value if isinstance(part.value, dict) else part.value


def first_given(parts: Iterable[Node]) -> Node:
    """The first part that has a value; else a part without a value."""
    every = list(parts)
    return next((part for part in every if part), every[-1] if every else Node(None, Path()))
