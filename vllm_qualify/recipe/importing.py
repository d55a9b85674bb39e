"""Import from vllm-project/recipes: a command that it publishes for a model and a GPU type, as a recipe of ours.

Two sources. The published JSON (`<org>/<repo>/hw/<gpu>.json`) has whole commands, which are translated word by word. The YAML
(`models/<org>/<model>.yaml`, with taxonomy.yaml and strategies/ beside it) has the parts of a command; they are put together
for one server on one node only, and where the JSON is at hand it is believed instead.

A server of the imported recipe gets exactly the published arguments and environment. What a recipe cannot say is refused.
"""

import io
import json
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vllm_qualify.errors import CallerError, writing
from vllm_qualify.recipe.model import LEAST_PROMPTS_PER_CLIENT, Environment, Frozen, Recipe, ServerArguments

PROFILE = "balanced"
FILTERS = ("strict-match", "flexible-extract")
"""The filters of lm-eval's gsm8k."""

# Hardware of recipes that is a GPU type of ours: the product's name in NVML tells it, and theirs is the same word.
GPU_TYPES = ("a100", "h100", "h200", "gh200", "b200", "gb200", "b300", "gb300")

# Short forms of options, from the parser of vLLM 0.32 (vllm/engine/arg_utils.py; vllm/entrypoints/launchers/cli_args.py).
SHORT_FORMS = {
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
# vLLM keeps every value of these; of all others the last one counts.
COLLECTED = ("middleware",)

# Options that vllm-qualify sets itself → what becomes of them. `model` and the revisions are read, not dropped.
_DROPPED = {
    "host": "vllm-qualify chooses where the server listens",
    "port": "vllm-qualify chooses where the server listens",
    "uds": "vllm-qualify chooses where the server listens",
    "served-model-name": "the recipe has its own served_model_name",
    "api-key": "vllm-qualify asks without a key",
    "hf-token": "set HF_TOKEN in the environment of vllm-qualify",
}
_SECRET = ("api-key", "hf-token")
_SEVERAL_NODES = "several nodes"
_REFUSED_OPTIONS = {
    "nnodes": _SEVERAL_NODES,
    "node-rank": _SEVERAL_NODES,
    "master-addr": _SEVERAL_NODES,
    "master-port": _SEVERAL_NODES,
    "headless": _SEVERAL_NODES,
    "data-parallel-address": _SEVERAL_NODES,
    "data-parallel-rank": _SEVERAL_NODES,
    "data-parallel-start-rank": _SEVERAL_NODES,
    "omni": "an omni model",
    "config": "a configuration file, whose content is not known here",
}
# What the values of these name has to be in the image.
_FILES = ("chat-template", "reasoning-parser-plugin", "tool-call-parser-plugin", "tool-parser-plugin")

_DEPLOYMENTS = {
    "multi_node": "a deployment on several nodes",
    "pd_cluster": "prefill and decode on separate servers",
    "kv_store_lb": "several servers behind a router with a shared KV store",
}
_NEGATIVE_NUMBER = re.compile(r"-[0-9]+|-[0-9]*\.[0-9]+")
# A variable of a shell, or something to fill in; words in angle brackets are also a model's own, like <think>.
_PLACEHOLDER = re.compile(
    r"\$\{?[A-Za-z_]\w*\}?|(?:^|/)path/to/|<[A-Z][A-Z0-9_ -]*>|<ip>"
    r"|<[^<>]*(?:path|your|folder|file|host|addr|port|model)[^<>]*>"
)
_LEVELS = ("0", "1", "2", "3")
_HUMAN_NUMBER = re.compile(r"([0-9]+)(\.[0-9]+)?([kKmMgGtT])")
_LONGEST_NUMBER = 18

_LENGTH, _LENGTH_MARGIN = 1024, 64
_CONCURRENCY, _WARMUPS = 64, 20
_STARTUP_TIMEOUT_S = 3600


class InexpressibleError(CallerError):
    """The source is in order and says what no recipe of ours can say."""


class Imported(Frozen):
    """A recipe with what it came from. `images` are the published ones by GPU type; no recipe names an image itself."""

    recipe: Recipe
    source: str
    images: dict[str, str] = {}
    notes: list[str] = []


def import_recipe(
    source: Path,
    *,
    exact_match_minimum: float | None,
    exact_match_filter: str | None,
    variant: str | None = None,
    published: Path | None = None,
) -> Imported:
    """A recipe with everything that `source` says, and nothing else as its server's arguments and environment.

    Args:
        source: a published JSON file; a folder `<org>/<repo>` or `<org>/<repo>/hw` of them, whose GPU types become those of one
            recipe; or a YAML file models/<org>/<model>.yaml in its repository.
        exact_match_minimum: the bound of the gate on gsm8k, above 0 and at most 1. Recipes of vllm-project/recipes have no
            scores, and a bound made up here could approve what must not pass.
        exact_match_filter: `strict-match` or `flexible-extract`, whichever fits the model.
        variant: which of the YAML's variants; `default` if not given. JSON is of one variant already.
        published: for a YAML file, the folder that holds `<org>/<repo>/hw`; if not given, `api` or `public` of its repository.

    Raises:
        CallerError: no such source, not readable, a key missing or of a wrong type, no bound or no filter.
        InexpressibleError: no recipe can say it; of a folder, only if that holds for each file. Else a note names the file.
    """
    gate = _gate(exact_match_minimum, exact_match_filter)
    try:
        imported = _imported(source, gate, variant, published)
        _check_round_trip(imported, source)
    except RecursionError as error:
        raise CallerError("nested too deeply, or in itself", "mend the file", place=str(source)) from error
    except OSError as error:
        raise CallerError(
            f"cannot be read: {error.strerror}", "check the path and its permissions", place=str(source)
        ) from error
    return imported


def write_recipe(imported: Imported, path: Path) -> None:
    """Write the recipe as YAML, with comments that say where it comes from and what is not the source's.

    Raises:
        CallerError: there is such a file already.
        HostError: it cannot be written.
    """
    if path.exists():
        raise CallerError("there is such a file already", "give another name, or move it away", place=str(path))
    with writing("recipe"):
        path.write_text(rendered(imported), encoding="utf-8")


def _imported(source: Path, gate: dict[str, Any], variant: str | None, published: Path | None) -> Imported:
    if source.suffix in (".yaml", ".yml") and not source.is_dir():
        gathered = _from_yaml(source, variant or "default", published)
    elif variant is not None:
        raise CallerError("JSON is of one variant already", "leave the variant out", place=str(source))
    else:
        gathered = _from_json(source)
    return _as_recipe(gathered, gate, source)


# ---------------------------------------------------------------------------------------------------------------------------
# Reading documents: every wrong type is one error that names file and key.


@dataclass(frozen=True)
class _Part:
    """A part of a document with its place in it. What a mapping lacks is a part that is None."""

    value: Any
    file: Path
    keys: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.file}: {'.'.join(self.keys) or '(top level)'}"

    def __getitem__(self, key: str) -> "_Part":
        return _Part(self.mapping().get(key), self.file, (*self.keys, key))

    def wrong(self, wanted: str) -> CallerError:
        there = "is missing" if self.value is None else f"is {_short(self.value)}"
        return CallerError(
            f"{wanted} is needed here, and it {there}", "take the file as recipes publishes it", place=self.place
        )

    def refused(self, what: str, remedy: str = "import another strategy or GPU type of this model") -> InexpressibleError:
        return InexpressibleError(f"a recipe cannot express {what}", remedy, place=self.place)

    def mapping(self) -> dict[str, Any]:
        """Raises CallerError if it is anything but a mapping with text as keys; None is an empty one."""
        value = {} if self.value is None else self.value
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.wrong("a mapping")
        return value

    def items(self) -> Iterator[tuple[str, "_Part"]]:
        return ((key, self[key]) for key in self.mapping())

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.wrong("a text")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            raise self.wrong("a number")
        return self.value

    def count(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < 1:
            raise self.wrong("a whole number of 1 or more")
        return self.value

    def words(self) -> list[str]:
        """A list of words; a whole number is as good as its digits. None is an empty list."""
        value = [] if self.value is None else self.value
        if not isinstance(value, list):
            raise self.wrong("a list of words")
        return [_Part(word, self.file, (*self.keys, str(index))).word() for index, word in enumerate(value)]

    def word(self) -> str:
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self.value)
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def environment(self) -> Environment:
        return {name: part.word() for name, part in self.items()}


def _read(path: Path, parse: Callable[[str], Any], form: str) -> _Part:
    try:
        return _Part(parse(path.read_text(encoding="utf-8")), path)
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror}", "check the path and its permissions", place=str(path)) from error
    # ruamel lets some errors of its own code out on documents that are none.
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        problem = " ".join(str(error).split())
        raise CallerError(f"not valid {form}: {problem}", f"give it as UTF-8 {form}", place=str(path)) from error


def _read_json(path: Path) -> _Part:
    return _read(path, json.loads, "JSON")


def _read_yaml(path: Path) -> _Part:
    return _read(path, YAML(typ="safe", pure=True).load, "YAML")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------------------------------------------------------------
# Commands: what a source says for one GPU type.


@dataclass(frozen=True)
class _Command:
    """`vllm serve` as a source has it for one GPU type. `words` come after `vllm serve`; `origin` is their place."""

    gpu_type: str
    variant: str
    words: list[str]
    environment: Environment
    image: str | None
    origin: _Part


@dataclass(frozen=True)
class _Gathered:
    """What a source has in all: a command for each GPU type, and what its reader is to know."""

    label: str
    commands: list[_Command]
    notes: list[str] = field(default_factory=list)


def _from_json(source: Path) -> _Gathered:
    if not source.is_dir():
        return _Gathered(_label(source), [_command_of_file(source)])
    folder = source / "hw" if (source / "hw").is_dir() else source
    files = sorted(folder.glob("*.json"))
    if not files:
        raise CallerError(
            "there is no published JSON in this folder",
            "give a folder <org>/<repo> with hw/<gpu>.json, one of these files, or a YAML file",
            place=str(source),
        )
    commands, notes = _those_expressible((file.name, partial(_command_of_file, file)) for file in files)
    return _Gathered(f"{_label(folder)}/*.json", commands, notes)


def _command_of_file(file: Path) -> _Command:
    return _published_command(_read_json(file))


def _those_expressible(sources: Iterable[tuple[str, Callable[[], _Command]]]) -> tuple[list[_Command], list[str]]:
    """The commands that a recipe can express, and a note for each that it cannot. Without any, the first one's error."""
    commands, errors = [], {}
    for name, command_of in sources:
        try:
            command = command_of()
            _translated(command)
        except InexpressibleError as error:
            errors[name] = error
        else:
            commands.append(command)
    if not commands and errors:
        raise next(iter(errors.values()))
    return commands, [f"left out {name}: {error.problem}" for name, error in errors.items()]


def _label(path: Path) -> str:
    """The end of a path that says the same on every machine: of a file or folder in its place, from the organization on."""
    parts = path.absolute().parts
    if path.parent.name == "hw":
        return "/".join(parts[-4:])
    in_its_place = path.name == "hw" or path.suffix in (".yaml", ".yml")
    return "/".join(parts[-3:]) if in_its_place else path.name


def _published_command(document: _Part) -> _Command:
    _check_one_command(document)
    argv = document["argv"].words()
    if argv[:2] != ["vllm", "serve"]:
        raise document["argv"].refused(f"the command {_short(' '.join(argv[:2]))}: only `vllm serve` is")
    image = document["docker_image"]
    return _Command(
        gpu_type=_gpu_type(document),
        variant="default" if document["variant"].value is None else document["variant"].text(),
        words=argv[2:],
        environment=document["env"].environment(),
        image=None if image.value is None else image.text(),
        origin=document["argv"],
    )


def _check_one_command(document: _Part) -> None:
    """Raises InexpressibleError unless it is a single server on a single node."""
    _check_deployment(document["deploy_type"])
    if document["node_count"].count() > 1:
        raise document["node_count"].refused(f"a deployment on {document['node_count'].count()} nodes")
    for key, part in document.items():
        others = key == "companions" or (key.endswith(("argv", "argvs")) and key not in ("argv", "docker_argv"))
        if others and part.value:
            raise part.refused("several commands that run together")
    if not isinstance(document["argv"].value, list) or not document["argv"].value:
        raise document["argv"].wrong("the command, a list of words,")


def _check_deployment(part: _Part) -> None:
    deployment = part.text()
    if deployment != "single_node":
        raise part.refused(f"{deployment}, {_DEPLOYMENTS.get(deployment, 'a deployment unknown here')}")


def _gpu_type(document: _Part) -> str:
    hardware = document["hardware"].text()
    if hardware not in GPU_TYPES:
        shown = document["hardware_profile"]["display_name"].value
        raise document["hardware"].refused(
            f"'{hardware}'{f' ({shown})' if isinstance(shown, str) else ''}, which is no GPU type of ours",
            f"known here: {', '.join(GPU_TYPES)}",
        )
    return hardware


# ---------------------------------------------------------------------------------------------------------------------------
# YAML: a command put together from its parts, for one server on one node.

_TENSOR_PARALLEL = "single_node_tp"
# What it takes to run the smallest floating-point formats, where a variant does not say so itself.
_ONLY_ON = {"nvfp4": {"brand": "NVIDIA", "generation": "blackwell"}, "fp4": {"brand": "NVIDIA", "generation": "blackwell"}}
_NOT_PUT_TOGETHER = "; the published JSON has this command"
_FROM_JSON = "import its published JSON"


@dataclass(frozen=True)
class _Site:
    """One hardware profile of taxonomy.yaml: what keys of a model's YAML hold for it."""

    name: str
    generation: str
    brand: str
    gpu_count: int
    memory_gb: float

    def chosen(self, by_hardware: _Part) -> _Part:
        """The entry of a mapping for its name, else its generation, its brand, or `default`."""
        keys = (self.name, self.generation, self.brand.lower(), "default")
        found = (by_hardware[key] for key in keys if by_hardware[key].value is not None)
        return next(found, _Part(None, by_hardware.file, by_hardware.keys))

    def override(self, overrides: _Part) -> _Part:
        """The entry for its generation; for NVIDIA's the one of all of them if there is none."""
        own = overrides[self.generation]
        return overrides["nvidia"] if own.value is None and self.brand == "NVIDIA" else own


def _from_yaml(source: Path, variant: str, published: Path | None) -> _Gathered:
    model, repository = _read_yaml(source), _repository(source)
    if "omni" in model["meta"]["tasks"].words():
        raise model["meta"]["tasks"].refused("an omni model", "import a text model")
    if variant not in model["variants"].mapping():
        known = ", ".join(model["variants"].mapping()) or "none"
        raise CallerError(f"there is no variant '{variant}'", f"variants: {known}", place=model["variants"].place)
    notes = [*_other_variants(model, variant), *_needed_version(model, variant)]
    roots = [published] if published else [repository / "api", repository / "public"]
    by_json = _by_json(source, model, variant, roots)
    put_together = _put_together(model, variant, repository)
    if by_json is None:
        commands, left_out = _those_expressible(put_together)
        gathered = _Gathered(f"{_label(source)}, variant {variant}", commands, [*notes, *left_out])
    else:
        label = f"{by_json.label}, variant {variant} of {_label(source)}"
        differences = _differences(by_json.commands, put_together)
        gathered = _Gathered(label, by_json.commands, [*notes, *by_json.notes, *differences])
    if not gathered.commands:
        raise model["variants"][variant].refused("a variant that is meant for no GPU type of ours", "choose another variant")
    return gathered


def _repository(source: Path) -> Path:
    folder = source.absolute().parent.parent
    if folder.name != "models":
        raise CallerError(
            "this YAML file does not lie in models/<org>/ of its repository",
            "give it where it lies, with taxonomy.yaml and strategies/ beside models/",
            place=str(source),
        )
    return folder.parent


def _other_variants(model: _Part, variant: str) -> list[str]:
    others = [name for name in model["variants"].mapping() if name != variant]
    return [f"the YAML has other variants, for recipes of their own: {', '.join(others)}"] if others else []


def _needed_version(model: _Part, variant: str) -> list[str]:
    own, common = model["variants"][variant]["min_vllm_version"], model["model"]["min_vllm_version"]
    version = own if own.value is not None else common
    return [] if version.value is None else [f"the YAML asks for vLLM {version.word()} or later"]


def _by_json(source: Path, model: _Part, variant: str, roots: list[Path]) -> _Gathered | None:
    """What the variant's JSON has, if there is any: a model of that name may as well be another variant or recipe."""
    own = model["variants"][variant]["model_id"]
    model_id = f"{source.absolute().parent.name}/{source.stem}" if variant == "default" or own.value is None else own.text()
    if model_id.startswith("/") or ".." in model_id.split("/"):
        return None
    folder = next((root / model_id for root in roots if (root / model_id / "hw").is_dir()), None)
    gathered = _from_json(folder) if folder else None
    return gathered if gathered and all(command.variant == variant for command in gathered.commands) else None


def _put_together(model: _Part, variant: str, repository: Path) -> list[tuple[str, Callable[[], _Command]]]:
    """For each GPU type that the variant is meant for, its name and how to get its command."""
    profiles = _read_yaml(repository / "taxonomy.yaml")["hardware_profiles"]
    sites = [_site(part, name) for name, part in profiles.items() if name in GPU_TYPES]
    meant = [site for site in sites if _is_meant(model, model["variants"][variant], site)]
    return [(site.name, partial(_assembled, model, variant, repository, site)) for site in meant]


def _site(part: _Part, name: str) -> _Site:
    return _Site(
        name=name,
        generation=part["generation"].text(),
        brand=part["brand"].text(),
        gpu_count=part["gpu_count"].count(),
        memory_gb=part["vram_gb"].number(),
    )


def _is_meant(model: _Part, variant: _Part, site: _Site) -> bool:
    if model["meta"]["hardware"][site.name].value == "unsupported":
        return False
    supported = variant["supported_hardware"].words()
    if supported and site.name not in supported:
        return False
    own = variant["precision_hardware"].mapping()
    wanted = own or _ONLY_ON.get(str(variant["precision"].value), {})
    there = {"brand": site.brand, "generation": site.generation}
    return all(there.get(key) == value for key, value in wanted.items())


@dataclass(frozen=True)
class _Case:
    """A model's YAML for one variant, strategy and hardware profile."""

    model: _Part
    variant_name: str
    strategy_name: str
    strategy: _Part
    site: _Site

    @property
    def variant(self) -> _Part:
        return self.model["variants"][self.variant_name]

    @property
    def own(self) -> _Part:
        """What the model has for the strategy."""
        return self.model["strategy_overrides"][self.strategy_name]


def _assembled(model: _Part, variant: str, repository: Path, site: _Site) -> _Command:
    """Raises InexpressibleError if it takes more than one server on one node, or more rules than are known here."""
    name = _strategy_name(model)
    strategy = _read_yaml(repository / "strategies" / f"{name}.yaml")
    _check_deployment(strategy["deploy_type"])
    case = _Case(model, variant, name, strategy, site)
    _check_size(case)
    model_id = case.variant["model_id"] if case.variant["model_id"].value is not None else model["model"]["model_id"]
    return _Command(
        gpu_type=site.name,
        variant=variant,
        words=[model_id.text(), *_assembled_words(case)],
        environment=_assembled_environment(case),
        image=_image(model, case.variant),
        origin=model["model"],
    )


def _strategy_name(model: _Part) -> str:
    default = model["default_strategy"]
    name = _TENSOR_PARALLEL if default.value is None else default.text()
    if name not in model["compatible_strategies"].words() or not re.fullmatch(r"[a-z0-9_]+", name):
        raise model["compatible_strategies"].refused(f"a model without {_short(name)} from YAML{_NOT_PUT_TOGETHER}", _FROM_JSON)
    if model["strategy_hardware"][name].value is not None:
        raise model["strategy_hardware"][name].refused(f"strategy_hardware from YAML{_NOT_PUT_TOGETHER}", _FROM_JSON)
    return name


def _check_size(case: _Case) -> None:
    """Raises InexpressibleError if one node has too little memory or too few GPUs."""
    site, memory = case.site, case.variant["vram_minimum_gb"]
    if memory.value is not None and memory.number() > site.memory_gb:
        raise memory.refused(f"weights of {memory.number():g} GB on one node of {site.name}, which has {site.memory_gb:g} GB")
    least = case.model["strategy_min_gpus"]
    bounds = [least[case.strategy_name], least[site.name]] if isinstance(least.value, dict) else [least]
    for bound in bounds:
        bound = bound[case.strategy_name] if isinstance(bound.value, dict) else bound
        if bound.value is not None and bound.count() > site.gpu_count:
            raise bound.refused(f"{bound.count()} GPUs on one node of {site.name}, which has {site.gpu_count}")


def _assembled_words(case: _Case) -> list[str]:
    """In the order of vllm-project/recipes, in which the last one of an option counts."""
    return [
        *case.model["model"]["base_args"].words(),
        *_extra_args(_early_layers(case)),
        *case.strategy["vllm_args"].words(),
        *(case.strategy["parallel_flag"].text(), str(_parallel_size(case))),
        *case.own["extra_args"].words(),
        *case.own["vllm_args"].words(),
        *_extra_args(_late_layers(case)),
        *_feature_args(case),
    ]


def _assembled_environment(case: _Case) -> Environment:
    parts = [
        case.model["model"]["base_env"],
        *(layer["extra_env"] for layer in _early_layers(case)),
        *(case.strategy["env"], case.own["env"], case.own["extra_env"]),
        *(layer["extra_env"] for layer in _late_layers(case)),
    ]
    return {name: value for part in parts for name, value in part.environment().items()}


def _extra_args(layers: list[_Part]) -> list[str]:
    return [word for layer in layers for word in layer["extra_args"].words()]


def _early_layers(case: _Case) -> list[_Part]:
    return [case.variant, case.variant["hardware_overrides"][case.site.name]]


def _late_layers(case: _Case) -> list[_Part]:
    """The strategy's layer for a generation takes the place of the model's and the variant's; its GPU type's adds to it."""
    of_strategy = case.site.override(case.own["hardware_overrides"])
    of_model = [case.site.override(part["hardware_overrides"]) for part in (case.model, case.variant)]
    layers = of_model if of_strategy.value is None else [of_strategy]
    return [*layers, case.own["hardware_overrides"][case.site.name]]


def _parallel_size(case: _Case) -> int:
    """All GPUs of the node. With tensor parallelism alone what variant or strategy declares, or 1 if one holds the weights."""
    site, memory = case.site, case.variant["vram_minimum_gb"]
    if case.strategy_name != _TENSOR_PARALLEL:
        return site.gpu_count
    for declared in (case.variant["tp"], case.own["tp"]):
        size = site.chosen(declared) if isinstance(declared.value, dict) else declared
        if size.value is not None:
            return min(size.count(), site.gpu_count)
    fits = memory.value is not None and memory.number() <= site.memory_gb / site.gpu_count
    return 1 if fits else site.gpu_count


def _feature_args(case: _Case) -> list[str]:
    """Of the features that are on unless chosen off, and of those that the variant turns on."""
    optional = case.model["opt_in_features"].words() + case.model["hardware_opt_in_features"][case.site.name].words()
    forced = case.variant["default_modes"].mapping()
    features = [(name, part) for name, part in case.model["features"].items() if name in forced or name not in optional]
    return [word for name, feature in features for word in _args_of(case, name, feature)]


def _args_of(case: _Case, name: str, feature: _Part) -> list[str]:
    strategies = feature["strategies"].words()
    if strategies and case.strategy_name not in strategies:
        return []
    if feature["modes"].value is not None:
        mode = _mode(case, name, feature)
        return _own_or(case.site.chosen(mode["hardware_overrides"])["args"], mode["args"])
    for key in ("companion", "hardware"):
        if feature[key].value is not None:
            raise feature[key].refused(f"a feature with {key} from YAML{_NOT_PUT_TOGETHER}", _FROM_JSON)
    return _own_or(case.site.override(feature["hardware_overrides"])["args"], feature["args"])


def _own_or(own: _Part, common: _Part) -> list[str]:
    return (common if own.value is None else own).words()


def _mode(case: _Case, name: str, feature: _Part) -> _Part:
    """The mode that the variant names, or else the feature. What falls back on another mode is left to the JSON."""
    named = [part for part in (case.variant["default_modes"][name], feature["default_mode"]) if part.value is not None]
    mode = feature["modes"][named[0].text() if named else ""]
    allowed = mode["variants"].words()
    if mode.value is None or mode["hardware"].value is not None or (allowed and case.variant_name not in allowed):
        raise feature["modes"].refused(f"a feature with such modes from YAML{_NOT_PUT_TOGETHER}", _FROM_JSON)
    return mode


def _image(model: _Part, variant: _Part) -> str | None:
    """The image that the YAML names for NVIDIA, if it names one; which one is the default, only the JSON says."""
    for part in (variant["docker_image"], model["model"]["docker_image"]):
        named = part["nvidia"] if isinstance(part.value, dict) else part
        if isinstance(named.value, str) and named.value:
            return named.value
    return None


def _differences(commands: list[_Command], put_together: list[tuple[str, Callable[[], _Command]]]) -> list[str]:
    """Notes on where the YAML says something else than the JSON, which was believed."""
    published = {command.gpu_type: command for command in commands}
    return _by_note((name, _difference(published.get(name), command_of)) for name, command_of in put_together)


def _difference(published: _Command | None, command_of: Callable[[], _Command]) -> str:
    if published is None:
        return "the YAML is meant for it, and the JSON has no command to import"
    try:
        keys = _differing(_translated(command_of()), _translated(published))
    except InexpressibleError as error:
        return f"not compared with the YAML: {error.problem}"
    return f"the YAML differs from the JSON, which was believed: {', '.join(keys)}" if keys else ""


def _differing(one: "_Translated", other: "_Translated") -> list[str]:
    found = ["the model"] if (one.model, one.revision) != (other.model, other.revision) else []
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (one.arguments, other.arguments),
        (one.command.environment, other.command.environment),
    ]
    return found + [key for left, right in pairs for key in sorted({*left, *right}) if _unlike(left, right, key)]


def _unlike(left: dict[str, Any], right: dict[str, Any], key: str) -> bool:
    return key not in left or key not in right or left[key] != right[key]


# ---------------------------------------------------------------------------------------------------------------------------
# Words to server arguments, read as vLLM's own parser reads them.


@dataclass(frozen=True)
class _Option:
    """An option of a command: `name` as written up to a dot, `long` its long form without dashes, `path` what follows."""

    name: str
    long: str
    path: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class _Translated:
    """A command in the words of a recipe."""

    command: _Command
    model: str
    revision: str | None
    arguments: ServerArguments
    notes: list[str]


def _translated(command: _Command) -> _Translated:
    """Raises InexpressibleError for an option, a value or a variable that no recipe can have."""
    origin, notes = command.origin, list[str]()
    _check_placeholders(command)
    words, options = _positional_and_options(_separated(command.words, notes), origin)
    arguments = _arguments(options, origin, notes)
    model = _model(words, arguments, origin)
    _check_options(arguments, origin)
    revision = _revision(arguments, origin, notes)
    for name in [name for name in arguments if name in _DROPPED]:
        value = arguments.pop(name)
        shown = "" if name in _SECRET else f" {_as_words(value)}".rstrip()
        notes.append(f"dropped --{name}{shown}: {_DROPPED[name]}")
    notes += [f"the image must have what --{name} {_as_words(arguments[name])} names" for name in _FILES if name in arguments]
    return _Translated(command, model, revision, arguments, notes)


def _check_placeholders(command: _Command) -> None:
    for text in [*command.words, *command.environment.values()]:
        found = _PLACEHOLDER.search(text)
        if found:
            raise command.origin.refused(f"the placeholder {_short(found.group())} in {_short(text)}", "fill it in")


def _separated(words: list[str], notes: list[str]) -> list[str]:
    """Each word by itself. Some commands have an option and its value as one word; a shell would make two of it."""
    separated = []
    for word in words:
        if re.fullmatch(r"--[A-Za-z0-9_.-]+\s+[^\s'\"\\]+", word):
            notes.append(f"{word.split()[0]} and its value are one word in the source, and two in what it means to a shell")
            separated += shlex.split(word)
        else:
            separated.append(word)
    return separated


def _positional_and_options(words: list[str], origin: _Part) -> tuple[list[str], list[_Option]]:
    """The words before the first option, and the options with the words that follow each."""
    starts = [index for index, word in enumerate(words) if _is_option(word)]
    bounds = pairwise([*starts, len(words)])
    options = [_option(words[start], words[start + 1 : end], origin) for start, end in bounds]
    return words[: starts[0]] if starts else words, options


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE_NUMBER.fullmatch(word)


def _option(word: str, values: list[str], origin: _Part) -> _Option:
    if word.startswith("-O"):
        return _optimization_level(word, values, origin)
    written, equals, value = word.partition("=")
    if equals and _is_option(value):
        raise origin.refused(f"{_short(word)}, a value that looks like an option")
    name, *path = written.split(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    elif name not in SHORT_FORMS:
        raise origin.refused(f"the short option {_short(word)}, which vLLM 0.32 does not have", "write its long form")
    long = SHORT_FORMS.get(name, name).removeprefix("--")
    given = [value, *values] if equals else values
    if (equals and values) or (path and len(given) != 1) or not all(path):
        raise origin.refused(f"the words {_short(' '.join([word, *values]))}: one value is needed")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", long):
        raise origin.refused(f"{_short(word)}, which is no `vllm serve` option")
    return _Option(name, long, tuple(path), tuple(given))


def _optimization_level(word: str, values: list[str], origin: _Part) -> _Option:
    """`-O3`, `-O=3` or `-O 3`; in earlier versions of vLLM -O took a compilation config."""
    rest = [word.removeprefix("-O").removeprefix("="), *values]
    given = [part for part in rest if part]
    if len(given) != 1 or given[0] not in _LEVELS:
        raise origin.refused(f"{_short(' '.join([word, *values]))}: -O takes a level of 0 to 3", "use -cc for the rest")
    return _Option("-O", "optimization-level", (), tuple(given))


def _arguments(options: list[_Option], origin: _Part, notes: list[str]) -> ServerArguments:
    """Every option once. As in vLLM the last one counts, dotted ones make up one mapping, and come after all others."""
    arguments: ServerArguments = {}
    mappings: dict[str, tuple[str, dict[str, JsonValue]]] = {}
    for option in options:
        if option.path:
            long, mapping = mappings.setdefault(option.name, (option.long, {}))
            _insert(mapping, option, origin)
        else:
            _give(arguments, option.long, _value(option.values), origin, notes)
    for long, mapping in mappings.values():
        _give(arguments, long, mapping, origin, notes)
    return arguments


def _give(arguments: ServerArguments, name: str, value: JsonValue, origin: _Part, notes: list[str]) -> None:
    opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
    earlier = [key for key in (name, opposite) if key in arguments]
    if earlier and name in COLLECTED:
        raise origin.refused(f"--{name} more than once, of which vLLM keeps every value")
    for key in earlier:
        del arguments[key]
        notes.append(f"--{key} is given before --{name}: vLLM takes the last one, and so does this recipe")
    arguments[name] = value


def _insert(mapping: dict[str, JsonValue], option: _Option, origin: _Part) -> None:
    *parents, last = option.path
    value = _dotted_value(option.values[0], is_list=last.endswith("+"))
    last = last.removesuffix("+")
    for key in parents:
        inner = mapping.setdefault(key, {})
        if not isinstance(inner, dict):
            raise origin.refused(f"{option.name}.{'.'.join(option.path)} inside of what is no mapping")
        mapping = inner
    before = mapping.get(last)
    if isinstance(before, dict):
        raise origin.refused(f"{option.name}.{'.'.join(option.path)} beside a dotted option inside of it")
    mapping[last] = [*before, *value] if isinstance(before, list) and isinstance(value, list) else value


def _dotted_value(text: str, is_list: bool) -> JsonValue:
    """The value of a dotted option, which vLLM reads as JSON, as a number like 80g, or as text."""
    if is_list:
        return list[JsonValue](text.split(","))
    try:
        return _finite_json(text)
    except ValueError:
        return _human_number(text)


def _human_number(text: str) -> JsonValue:
    match = _HUMAN_NUMBER.fullmatch(text.strip())
    if match is None or len(text) > _LONGEST_NUMBER:
        return text
    whole, fraction, suffix = match.groups()
    power = "kmgt".index(suffix.lower()) + 1
    if suffix.islower():
        return int(float(whole + (fraction or "")) * 1000**power)
    return text if fraction else int(whole) * 1024**power


def _value(values: tuple[str, ...]) -> JsonValue:
    """A value that vLLM's `--config` file turns into the same words again; a mapping into JSON that says the same."""
    if not values:
        return True
    if len(values) > 1:
        return [_plain_value(word) for word in values]
    try:
        parsed = _finite_json(values[0])
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) and _has_no_null(parsed) else _plain_value(values[0])


def _finite_json(text: str) -> JsonValue:
    """Raises ValueError if it is not JSON, or has a number that a recipe cannot have."""
    parsed: JsonValue = json.loads(text)
    json.dumps(parsed, allow_nan=False)
    return parsed


def _has_no_null(value: JsonValue) -> bool:
    """A recipe has no null; JSON that has one stays text."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is not None and all(map(_has_no_null, inner))


def _plain_value(word: str) -> JsonValue:
    """The number that is written just so, or the word."""
    if len(word) > _LONGEST_NUMBER:
        return word
    for number in (int, float):
        try:
            value = number(word)
        except ValueError:
            continue
        if str(value) == word and math.isfinite(value):
            return value
    return word


def _as_words(value: JsonValue) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "" if value is True else str(value)


def _model(words: list[str], arguments: ServerArguments, origin: _Part) -> str:
    given = [*words, *([arguments.pop("model")] if "model" in arguments else [])]
    if len(given) != 1 or not isinstance(given[0], str) or not given[0]:
        raise origin.refused(f"a command with {len(given)} models ({_short(given)}): the model comes first, and there is one")
    return given[0]


def _check_options(arguments: ServerArguments, origin: _Part) -> None:
    for name, what in _REFUSED_OPTIONS.items():
        if name in arguments and not (name == "nnodes" and arguments[name] == 1):
            raise origin.refused(f"--{name}: {what}")
    if arguments.get("runner") == "pooling":
        raise origin.refused("--runner pooling: a model that answers no completions", "import a model that generates text")
    transfer = json.dumps(arguments.get("kv-transfer-config", ""))
    if re.search(r"kv_producer|kv_consumer|Nixl", transfer):
        raise origin.refused(f"--kv-transfer-config: {_DEPLOYMENTS['pd_cluster']}")


def _revision(arguments: ServerArguments, origin: _Part, notes: list[str]) -> str | None:
    revision, tokenizer = arguments.pop("revision", None), arguments.pop("tokenizer-revision", None)
    if tokenizer != revision and tokenizer is not None:
        raise origin.refused("--tokenizer-revision: the tokenizer's revision is the model's")
    if revision is None:
        return None
    notes.append(f"--revision {_as_words(revision)} became the variant's revision")
    return _as_words(revision)


# ---------------------------------------------------------------------------------------------------------------------------
# The recipe.


def _gate(minimum: float | None, filter_: str | None) -> dict[str, Any]:
    """The gate on accuracy. A bound of 0 is refused: nothing fails it."""
    if minimum is None or not 0 < minimum <= 1:
        told = "which the source does not have" if minimum is None else f"above 0 and at most 1, not {minimum}"
        raise CallerError(
            f"the recipe needs the least share of gsm8k's questions to be answered exactly, {told}",
            "measure a release that you trust, or take a published score less a margin",
            place="exact_match_minimum",
        )
    if filter_ not in FILTERS:
        raise CallerError(
            f"gsm8k has no filter {_short(filter_)}" if filter_ else "the gate needs lm-eval's filter, and the source has none",
            f"one of {', '.join(FILTERS)}: the one that fits how the model answers",
            place="exact_match_filter",
        )
    return {"metric": "exact_match", "filter": filter_, "minimum": float(minimum), "unit": "fraction"}


def _as_recipe(gathered: _Gathered, gate: dict[str, Any], source: Path) -> Imported:
    served = [_translated(command) for command in gathered.commands]
    name = _name(served[0].model, source)
    names = _variant_names(served, source)
    document = {
        "name": name,
        "description": f"{served[0].model} as vllm-project/recipes serves it.",
        "served_model_name": name,
        "variants": {variant: _variant(one) for one, variant in zip(served, names, strict=True)},
        "gpu_types": _gpu_types(served, names, source),
        "smoke": {"prompt": "San Francisco is a", "max_tokens": 20},
        "accuracy": {"task": "gsm8k", "num_fewshot": 5, "num_questions": 1319},
        "gates": [gate],
    }
    return Imported(
        recipe=_validated(document, source),
        source=gathered.label,
        images={one.command.gpu_type: one.command.image for one in served if one.command.image},
        notes=[*gathered.notes, *_by_note((one.command.gpu_type, note) for one in served for note in one.notes)],
    )


def _validated(document: dict[str, Any], source: Path) -> Recipe:
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        problem = f"a recipe cannot have this at {key}: {first['msg'].removeprefix('Value error, ')}"
        raise InexpressibleError(problem, "see docs/recipes.md for what a recipe can have", place=str(source)) from error


def _name(text: str, source: Path) -> str:
    """A name by our rule from the last part of a model's."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", text.rstrip("/").rpartition("/")[2].lower())
    name = re.sub(r"^[^a-z0-9]+", "", plain)[:100]
    if not name:
        raise InexpressibleError(f"{_short(text)} has nothing that a name can be made of", "rename it", place=str(source))
    return name


def _variant_names(served: list[_Translated], source: Path) -> list[str]:
    """The source's own names of the variants; the models' where one name stands for several models."""
    weights = {(one.model, one.revision) for one in served}
    by_source = [_name(one.command.variant, source) for one in served]
    if len(set(zip(by_source, [(one.model, one.revision) for one in served], strict=True))) == len(set(by_source)):
        return by_source
    names = [_name(f"{one.model}-{one.revision}" if one.revision else one.model, source) for one in served]
    if len(set(names)) < len(weights):
        raise InexpressibleError("several models have the same name", "import their files one by one", place=str(source))
    return names


def _variant(one: _Translated) -> dict[str, Any]:
    return {"model": one.model} | ({"revision": one.revision} if one.revision else {})


def _gpu_types(served: list[_Translated], names: list[str], source: Path) -> dict[str, Any]:
    gpu_types: dict[str, Any] = {}
    for one, variant in zip(served, names, strict=True):
        if one.command.gpu_type in gpu_types:
            raise CallerError(
                f"several files are for {one.command.gpu_type}", "leave one of them in the folder", place=str(source)
            )
        gpu_types[one.command.gpu_type] = {
            "default_variant": variant,
            "server": one.arguments,
            **({"environment": one.command.environment} if one.command.environment else {}),
            "startup_timeout_s": _STARTUP_TIMEOUT_S,
            "profiles": {PROFILE: {"load": _load(one.arguments)}},
        }
    return gpu_types


def _load(arguments: ServerArguments) -> dict[str, int]:
    concurrency = _whole(arguments.get("max-num-seqs")) or _CONCURRENCY
    longest = _whole(arguments.get("max-model-len")) or math.inf
    length = int(max(1, min(_LENGTH, (longest - _LENGTH_MARGIN) // 2)))
    prompts = LEAST_PROMPTS_PER_CLIENT * concurrency
    # Warm-ups repeat one prompt. Where prefixes are cached, more than 1 % of hits would make the load's measurements invalid.
    warmups = _WARMUPS if arguments.get("no-enable-prefix-caching") is True else min(_WARMUPS, prompts // 200)
    return {
        "input_len": length,
        "output_len": length,
        "max_concurrency": concurrency,
        "num_prompts": prompts,
        "num_warmups": warmups,
    }


def _whole(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _by_note(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Each note once, with the GPU types that it holds for."""
    holding: dict[str, dict[str, None]] = {}
    for gpu_type, note in notes:
        if note:
            holding.setdefault(note, {})[gpu_type] = None
    return [f"{', '.join(gpu_types)}: {note}" for note, gpu_types in holding.items()]


# ---------------------------------------------------------------------------------------------------------------------------
# The recipe's YAML.

_COMMENTS = {
    "gpu_types": (
        "Arguments and environment are the published ones, all of them and no others. The rest of a GPU type is not the "
        "source's. The timeout is the seed recipes': compiling a large model alone can take more than half an hour. The load "
        "is plain: at max-num-seqs where that is given and else at 64 requests, with five times as many prompts; raise "
        "num_prompts if a repeat is shorter than min_duration_s. Warm-ups are few where prefixes are cached: they repeat one "
        "prompt, and more than 1 % of cache hits makes the measurements invalid. No gates on speed: the source has no numbers."
    ),
    "smoke": "Not the source's: the seed recipes' prompt.",
    "accuracy": "Not the source's: all of gsm8k, as for the seed recipes.",
    "gates": "Bound and filter were given at the import; the source has no scores.",
}


def rendered(imported: Imported) -> str:
    """The recipe as YAML with its comments."""
    header = [f"Imported from vllm-project/recipes: {imported.source}.", *_image_lines(imported.images)]
    lines = [_comment(line) for line in header] + [_comment(f"- {note}", "  ") for note in imported.notes]
    document = imported.recipe.model_dump(exclude_unset=True)
    document["gpu_types"] = {name: _default_variant_first(serving) for name, serving in document["gpu_types"].items()}
    sections = [_section(key, value) for key, value in document.items()]
    apart = [f"\n{section}" if section.count("\n") > 1 else section for section in sections]
    return "\n".join([*lines, "".join(apart)])


def _default_variant_first(serving: dict[str, Any]) -> dict[str, Any]:
    return {"default_variant": serving["default_variant"]} | serving


def _image_lines(images: dict[str, str]) -> list[str]:
    by_image: dict[str, list[str]] = {}
    for gpu_type, image in images.items():
        by_image.setdefault(image, []).append(gpu_type)
    return [f"Published image for {', '.join(gpu_types)}: {image}" for image, gpu_types in by_image.items()]


def _comment(text: str, indent: str = "") -> str:
    """Comment lines; what is not printable cannot end the comment."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.fill(
        plain, 128, initial_indent="# ", subsequent_indent=f"# {indent}", break_long_words=False, break_on_hyphens=False
    )


def _section(key: str, value: object) -> str:
    """One key of the top level with its comment."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 2**16
    text = io.StringIO()
    if key in _COMMENTS:
        text.write(f"{_comment(_COMMENTS[key])}\n")
    yaml.dump({key: value}, text)
    return text.getvalue()


def _check_round_trip(imported: Imported, source: Path) -> None:
    """Raises InexpressibleError if the YAML would not say what the recipe says, as with text that UTF-8 does not have."""
    try:
        text = rendered(imported).encode("utf-8").decode("utf-8")
        again = Recipe.model_validate(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, ValueError) as error:
        raise InexpressibleError("its text cannot be written as YAML", "mend the source", place=str(source)) from error
    if again != imported.recipe:
        raise InexpressibleError("its text does not survive being written as YAML", "mend the source", place=str(source))
