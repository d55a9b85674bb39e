"""A model's YAML, together with its published JSON if that is available."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing.assembly import assembled
from vllm_qualify.recipe.importing.commands import GPU_TYPES, Command, Gathered, Translated, expressible, translated
from vllm_qualify.recipe.importing.documents import InexpressibleError, Node, read_yaml
from vllm_qualify.recipe.importing.published import gathered_json, label

# The keys of vllm-project/recipes that are read here, or that say nothing of a server's command, by their place.
_KNOWN = {
    "": (
        *("meta", "model", "dependencies", "features", "opt_in_features", "variants", "compatible_strategies"),
        *("kv_offload_support", "hardware_overrides", "strategy_overrides", "guide", "omni", "strategy_min_gpus"),
        *("default_strategy", "strategy_hardware", "hardware_notes", "hardware_opt_in_features"),
    ),
    "model": (
        *("model_id", "min_vllm_version", "architecture", "parameter_count", "active_parameters", "context_length"),
        *("base_args", "base_env", "docker_image", "install", "docker_source", "nightly_required", "supports_dcp"),
        "flashinfer_autotune",
    ),
    "variants.*": (
        *("precision", "vram_minimum_gb", "description", "extra_args", "model_id", "hardware_overrides", "label"),
        *("supported_hardware", "precision_hardware", "extra_env", "tp", "default_modes", "min_vllm_version", "docker_image"),
    ),
    "features.*": (
        *("description", "args", "default_mode", "modes", "hardware_overrides", "hardware", "strategies", "label", "companion"),
    ),
    "strategy_overrides.*": (
        *("tp", "hardware_overrides", "prefill", "decode", "extra_args", "env", "vllm_args", "extra_env", "router"),
        "pool_modes",
    ),
}
_RELEASE = re.compile(r"\d+(\.\d+)+")


def gathered_yaml(source: Path, variant: str, published: Path | None) -> Gathered:
    """The variant's commands: the published ones if there are any, with notes where the YAML differs.

    Raises:
        CallerError: not readable, a key missing or of a wrong type, no such variant.
        InexpressibleError: no recipe can express a command for any GPU type.
    """
    model, repository = read_yaml(source), _repository(source)
    _check_tasks(model["meta"]["tasks"])
    if variant not in model["variants"].mapping():
        known = ", ".join(model["variants"].mapping()) or "none"
        raise CallerError(f"there is no variant '{variant}'", f"variants: {known}", place=model["variants"].place)
    oldest = _oldest_vllm(model, variant)
    notes = list(_notes(model, variant, oldest))
    oldest = oldest if oldest and _RELEASE.fullmatch(oldest) else None
    by_yaml = assembled(model, variant, repository)
    by_json = _by_json(source, model, variant, [published] if published else [repository / "api", repository / "public"])
    if by_json:
        differences = by_note((name, _difference(by_json.commands, GPU_TYPES[name], of)) for name, of in by_yaml)
        return Gathered(
            f"{by_json.label}, variant {variant} of {label(source)}",
            by_json.commands,
            [*notes, *by_json.notes, *differences],
            oldest,
        )
    commands, left_out = expressible(by_yaml)
    if not commands:
        raise model["variants"][variant].refused("a variant that is meant for no GPU type of ours", "choose another variant")
    return Gathered(f"{label(source)}, variant {variant}", commands, [*notes, *left_out], oldest)


def by_note(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Each note once, with the names that it holds for. Empty notes are left out."""
    holding: dict[str, dict[str, None]] = {}
    for name, note in notes:
        if note:
            holding.setdefault(note, {})[name] = None
    return [f"{', '.join(names)}: {note}" for note, names in holding.items()]


def _check_tasks(tasks: Node) -> None:
    if "omni" in tasks.words():
        raise tasks.refused("an omni model", "import a text model")
    if tasks.words() == ["embedding"]:
        raise tasks.refused("an embedding model: it answers no completions", "import a model that generates text")


def _repository(source: Path) -> Path:
    folder = source.absolute().parent.parent
    if folder.name != "models":
        raise CallerError(
            "this YAML file does not lie in models/<org>/ of its repository",
            "give it where it lies, with taxonomy.yaml and strategies/ beside models/",
            place=str(source),
        )
    return folder.parent


def _oldest_vllm(model: Node, variant: str) -> str | None:
    own = model["variants"][variant]["min_vllm_version"]
    version = own if own else model["model"]["min_vllm_version"]
    return version.word() if version else None


def _notes(model: Node, variant: str, oldest_vllm: str | None) -> Iterator[str]:
    others = [name for name in model["variants"].mapping() if name != variant]
    if others:
        yield f"the YAML has other variants, for recipes of their own: {', '.join(others)}"
    if oldest_vllm and not _RELEASE.fullmatch(oldest_vllm):
        yield f"the YAML asks for vLLM {oldest_vllm}, which is no released version"
    if unknown := list(_unknown_keys(model, variant)):
        yield f"the YAML has keys that are unknown here, and nothing was made of them: {', '.join(unknown)}"


def _unknown_keys(model: Node, variant: str) -> Iterator[str]:
    """The places of keys that vllm-project/recipes has come to have since; of the variants, this one's."""
    for place, known in _KNOWN.items():
        name, _, of_each = place.partition(".")
        outer = model[name] if name else model
        parts = [part for key, part in outer.items() if name != "variants" or key == variant] if of_each else [outer]
        for part in parts:
            yield from (".".join([*part.keys, key]) for key in part.mapping() if key not in known)


def _by_json(source: Path, model: Node, variant: str, roots: list[Path]) -> Gathered | None:
    """The commands of the variant's JSON, if there are any. A model with that name may also be another variant or recipe."""
    own = model["variants"][variant]["model_id"]
    model_id = own.text() if own and variant != "default" else f"{source.absolute().parent.name}/{source.stem}"
    if model_id.startswith("/") or ".." in model_id.split("/"):
        return None
    folder = next((root / model_id for root in roots if (root / model_id / "hw").is_dir()), None)
    gathered = gathered_json(folder, variant) if folder else None
    return gathered if gathered and gathered.commands else None


def _difference(commands: list[Translated], gpu_type: str, command_of: Callable[[], Command]) -> str:
    """A note where the YAML differs from the JSON, which is used; empty if they agree, or neither has a command."""
    published = next((one for one in commands if one.command.gpu_type == gpu_type), None)
    try:
        own = translated(command_of())
    except InexpressibleError as error:
        return f"not compared with the YAML: {error.problem}" if published else ""
    if published is None:
        return "the YAML is meant for it, and the JSON has no command to import"
    keys = _differing(own, published)
    return f"the YAML differs from the JSON, which is used, in {', '.join(keys)}" if keys else ""


def _differing(one: Translated, other: Translated) -> list[str]:
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"the model": (one.model, one.revision)}, {"the model": (other.model, other.revision)}),
        (one.arguments, other.arguments),
        (one.command.environment, other.command.environment),
    ]
    return [key for left, right in pairs for key in sorted({*left, *right}) if _unlike(left, right, key)]


def _unlike(left: dict[str, Any], right: dict[str, Any], key: str) -> bool:
    return key not in left or key not in right or left[key] != right[key]
