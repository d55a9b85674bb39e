"""The sources: published JSON, a whole command for each GPU type, and a model's YAML, with its JSON if there is any."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.importing import assembly
from vllm_qualify.recipe.importing.commands import (
    GPU_TYPES,
    Command,
    Gathered,
    Translated,
    check_deployment,
    express_commands,
    translate_command,
)
from vllm_qualify.recipe.importing.documents import InexpressibleError, Node, read_json, read_yaml
from vllm_qualify.recipe.loading import short

# The end of a path that is the same on every machine.
_IN_ITS_PLACE = re.compile(
    r"[^/]+/[^/]+/(hw(/[^/]+\.json|/[^/]+/strategies/[^/]+)?|strategies/[^/]+)$|models/[^/]+/[^/]+\.ya?ml$"
)
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


def gathered_json(source: Path, variant: str | None = None) -> Gathered:
    """The command of a file, or the commands of a folder `<org>/<repo>` or `<org>/<repo>/hw`.

    A model's own file `<org>/<repo>.json` has its command under `recommended_command`. For a folder, `variant` chooses one
    variant's commands. There may be none. Raises CallerError if it is not there or not of this form, InexpressibleError if no
    recipe can express it; for a folder, if this holds for every file.
    """
    if not source.is_dir():
        document = read_json(source)
        recommended = document["recommended_command"]
        return Gathered(_label(source), [translate_command(_read_command(recommended if recommended else document))], [])
    folder = source / "hw" if (source / "hw").is_dir() else source
    documents = {file.name: read_json(file) for file in sorted(folder.glob("*.json"))}
    if not documents:
        remedy = "give a folder <org>/<repo> with hw/<gpu>.json, one of these files, or a YAML file"
        raise CallerError("there is no published JSON in this folder", remedy, str(source))
    # For hardware that is too small for a variant, the file has the command of another variant.
    others = [name for name, document in documents.items() if variant not in (None, document["variant"].value)]
    asked = ((name, partial(_read_command, document)) for name, document in documents.items() if name not in others)
    commands, notes = express_commands(asked)
    notes += [f"left out {name}: it has the variant {short(documents[name]['variant'].value)}" for name in others]
    return Gathered(f"{_label(folder)}/*.json", commands, notes)


def _label(path: Path) -> str:
    """The path, starting at the organization. Only the file name if the file is not in its usual place."""
    match = _IN_ITS_PLACE.search(path.absolute().as_posix())
    return match.group() if match else path.name


def _read_command(document: Node) -> Command:
    """Raises InexpressibleError unless the document has one command for one node."""
    check_deployment(document["deploy_type"])
    nodes, hardware, command = document["node_count"], document["hardware"], document["argv"]
    if nodes.count() > 1:
        raise nodes.refusal(f"a deployment on {nodes.count()} nodes")
    for key, part in document.items():
        others = key == "companions" or (key.endswith(("argv", "argvs")) and key not in ("argv", "docker_argv"))
        if others and part.value:
            raise part.refusal("several commands that run together")
    if not isinstance(command.value, list) or not command.value:
        raise command.wrong("the command, a list of words,")
    words = command.words()
    if words[:2] != ["vllm", "serve"]:
        raise command.refusal(f"the command {short(' '.join(words[:2]))}: only `vllm serve` is")
    if hardware.text() not in GPU_TYPES:
        shown = document["hardware_profile"]["display_name"].value
        product = f" ({shown})" if isinstance(shown, str) else ""
        known = f"known here: {', '.join(GPU_TYPES)}"
        raise hardware.refusal(f"'{hardware.text()}'{product}, which is not a known GPU type", known)
    return Command(
        gpu_type=GPU_TYPES[hardware.text()],
        variant=document["variant"].text() if document["variant"] else "default",
        words=words[2:],
        environment=document["env"].environment(),
        image=document["docker_image"].text() if document["docker_image"] else None,
        origin=command,
    )


def gathered_yaml(source: Path, variant: str, published: Path | None) -> Gathered:
    """The variant's commands: the published ones if there are any, with notes where the YAML differs.

    Raises as `gathered_json`, and CallerError if there is no such variant.
    """
    model, folder = read_yaml(source), source.absolute().parent.parent
    if folder.name != "models":
        problem = "this YAML file does not lie in models/<org>/ of its repository"
        remedy = "give it where it lies, with taxonomy.yaml and strategies/ beside models/"
        raise CallerError(problem, remedy, str(source))
    _check_tasks(model["meta"]["tasks"])
    if variant not in model["variants"].mapping():
        known = ", ".join(model["variants"].mapping()) or "none"
        raise CallerError(f"there is no variant '{variant}'", f"variants: {known}", model["variants"].place)
    asked = assembly.first_given(part["min_vllm_version"] for part in (model["variants"][variant], model["model"]))
    oldest = asked.word() if asked else ""
    notes = list(_make_notes(model, variant, oldest))
    released = oldest if _RELEASE.fullmatch(oldest) else None
    by_yaml = assembly.assemble_commands(model, variant, folder.parent)
    by_json = _gather_published(source, model, variant, published)
    if by_json:
        differences = by_note((name, _describe_difference(by_json.commands, GPU_TYPES[name], of)) for name, of in by_yaml)
        label = f"{by_json.label}, variant {variant} of {_label(source)}"
        return Gathered(label, by_json.commands, [*notes, *by_json.notes, *differences], released)
    commands, left_out = express_commands(by_yaml)
    if not commands:
        raise model["variants"][variant].refusal("a variant that is meant for no GPU type of ours", "choose another variant")
    return Gathered(f"{_label(source)}, variant {variant}", commands, [*notes, *left_out], released)


def by_note(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Each note once, with the names that it holds for. Empty notes are left out."""
    holding: dict[str, dict[str, None]] = {}
    for name, note in notes:
        if note:
            holding.setdefault(note, {})[name] = None
    return [f"{', '.join(names)}: {note}" for note, names in holding.items()]


def _check_tasks(tasks: Node) -> None:
    if "omni" in tasks.words():
        raise tasks.refusal("an omni model", "import a text model")
    if tasks.words() == ["embedding"]:
        raise tasks.refusal("an embedding model: it answers no completions", "import a model that generates text")


def _make_notes(model: Node, variant: str, oldest_vllm: str) -> Iterator[str]:
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


def _gather_published(source: Path, model: Node, variant: str, published: Path | None) -> Gathered | None:
    """The commands of the variant's JSON, if there are any. A model with that name may also be another variant or recipe."""
    own = model["variants"][variant]["model_id"]
    organization = source.absolute().parent
    model_id = own.text() if own and variant != "default" else f"{organization.name}/{source.stem}"
    if model_id.startswith("/") or ".." in model_id.split("/"):
        return None
    roots = [published] if published else [organization.parent.parent / name for name in ("api", "public")]
    folder = next((root / model_id for root in roots if (root / model_id / "hw").is_dir()), None)
    gathered = gathered_json(folder, variant) if folder else None
    return gathered if gathered and gathered.commands else None


def _describe_difference(commands: list[Translated], gpu_type: str, command_of: Callable[[], Command]) -> str:
    """A note where the YAML differs from the JSON, which is used; empty if they agree, or neither has a command."""
    published = next((one for one in commands if one.command.gpu_type == gpu_type), None)
    try:
        own = translate_command(command_of())
    except InexpressibleError as error:
        return f"not compared with the YAML: {error.problem}" if published else ""
    if published is None:
        return "the YAML is meant for it, and the JSON has no command to import"
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"the model": (own.model, own.revision)}, {"the model": (published.model, published.revision)}),
        (own.arguments, published.arguments),
        (own.command.environment, published.command.environment),
    ]
    # No value is None.
    keys = [key for left, right in pairs for key in sorted({*left, *right}) if left.get(key) != right.get(key)]
    return f"the YAML differs from the JSON, which is used, in {', '.join(keys)}" if keys else ""
