"""What of a recipe runs code, or opens its server: who qualifies another's recipe reads this first, and says that it may."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import JsonValue

from vllm_qualify.errors import CallerError
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.environment import why_code, why_open
from vllm_qualify.recipe.loading import MOST_CHARACTERS, catalog_folder
from vllm_qualify.recipe.recipe import LoadedRecipe, Recipe
from vllm_qualify.recipe.serving import Arguments, ByVersion, Environment, ServerArguments

_IMPORTED = "the server imports what it names"
_OF_LOGGING = "the server's logging is made from this file, which can name any code"
# By vLLM's and TensorRT-LLM's names, with dashes.
_OPTIONS = {
    "trust-remote-code": "the model's own Python code runs in the server",
    **dict.fromkeys(("tool-parser-plugin", "tool-call-parser-plugin", "reasoning-parser-plugin"), _IMPORTED),
    **dict.fromkeys(("io-processor-plugin", "logits-processors", "middleware", "model-class-overrides"), _IMPORTED),
    **dict.fromkeys(("worker-cls", "worker-extension-cls", "scheduler-cls", "inductor-passes"), _IMPORTED),
    **dict.fromkeys(("custom-tokenizer", "custom-module-dirs", "ray-worker-extension-cls"), _IMPORTED),
    **dict.fromkeys(("log-config-file", "pylogging-config-file"), _OF_LOGGING),
    **dict.fromkeys(("data-parallel-address", "master-addr"), "the server unpickles what another host sends"),
    "tool-server": "tools that it names run what the model writes",
    "cache-dir": "the server loads compiled code from this folder",
}
# vLLM's options with which its server takes requests that change it.
_OPENING_OPTIONS = {
    "enable-elastic-ep": "whoever reaches the server may change the number of its engines",
    "enable-fault-tolerance": "whoever reaches the server may pause and restart its engines",
    "profiler-config": "whoever reaches the server may have it profiled, which makes it slow",
}
# The last words of other options that take the name of a class, a module or a plugin.
_NAMES_CODE = re.compile(r"(^|-)(cls|class|plugins?|module|module-path)$")
# vLLM accepts the beginning of an option's name. These begin like one of the above, and are whole names.
_WHOLE_NAMES = ("model", "reasoning-parser", "tool-call-parser")
# Like package.module.Class. Options such as distributed-executor-backend take a known word, or this.
_QUALIFIED_NAME = re.compile(r"[^\W\d]\w*([.:][^\W\d]\w*)+")
_NOT_QUALIFIED = ("chat-template", "allowed-media-domains")

TASKS_CODE = "lm-eval runs what its task_folder says: templates, metrics and functions"
_FUNCTION = "!function"


def check_allowed(loaded: LoadedRecipe, allow_code: bool) -> None:
    """Raises CallerError if the recipe runs code or opens its server, and is neither the catalog's nor allowed to."""
    if not allow_code and not is_of_the_catalog(loaded):
        _refuse_untrusted(code_of(loaded), openings_of(loaded), "RECIPE")


def check_import_allowed(recipe: Recipe, source: Path, allow_code: bool) -> list[str]:
    """What of an imported recipe runs code or opens its server. Raises CallerError if anything does and is not allowed."""
    loaded = LoadedRecipe(recipe=recipe, folder=source.parent.absolute())
    code, openings = code_of(loaded), openings_of(loaded)
    if not allow_code:
        _refuse_untrusted(code, openings, str(source))
    return [*code, *openings]


def _refuse_untrusted(code: list[str], openings: list[str], place: str) -> None:
    """Raises CallerError if there is any."""
    said = [f"{what}: {'; '.join(lines)}" for what, lines in (("runs code", code), ("opens its server", openings)) if lines]
    if said:
        remedy = "read what it names, then add --allow-code (of a deployment: allow_code)"
        raise CallerError(f"the recipe {'; it '.join(said)}", remedy, place)


def is_of_the_catalog(loaded: LoadedRecipe) -> bool:
    """Whether the recipe came with this package: then its code is this project's own choice."""
    return loaded.folder == catalog_folder().resolve()


def code_of(loaded: LoadedRecipe) -> list[str]:
    """Each place of a recipe that runs code, with what it does; empty if the recipe is data alone."""
    recipe = loaded.recipe
    layers = [line for place, of in _all_layers(recipe) for line in code_of_server(of.server, of.environment, place)]
    folders = ((each, loaded.path(each.task_folder)) for each in recipe.accuracy if each.task_folder)
    return [*layers, *(line for each, folder in folders for line in code_of_task(each, folder))]


def openings_of(loaded: LoadedRecipe) -> list[str]:
    """Each place of a recipe that opens its server to requests that change it; empty if there is none."""
    return [line for place, of in _all_layers(loaded.recipe) for line in openings_of_server(of.server, of.environment, place)]


def openings_of_server(server: ServerArguments, environment: Environment, place: str = "") -> list[str]:
    """Each option and variable that opens a server to requests that change it, with what they may do."""
    options = (line for name, value in server.items() for line in _list_openings(name, value, f"{place}server"))
    reasons = ((name, why_open(name, value)) for name, value in environment.items())
    return [*dict.fromkeys(options), *(f"{place}environment.{name}: {why}" for name, why in reasons if why)]


def code_of_server(server: ServerArguments, environment: Environment, place: str = "") -> list[str]:
    """Each option and variable of a server that runs code, with what it does."""
    options = [line for name, value in server.items() for line in _list_code_of_option(name, value, f"{place}server")]
    reasons = ((name, why_code(name, value)) for name, value in environment.items())
    return [*dict.fromkeys(options), *(f"{place}environment.{name}: it {why}" for name, why in reasons if why)]


def code_of_task(settings: Accuracy, folder: Path | None) -> list[str]:
    """What lm-eval runs of a task's own folder; empty for a task of lm-eval."""
    if folder is None:
        return []
    place = f"accuracy.{settings.task}"
    return [f"{place}: {TASKS_CODE}", *(f"{place}: {function}" for function in _functions_in(folder))]


def _all_layers(recipe: Recipe) -> Iterator[tuple[str, Arguments | ByVersion]]:
    layers: list[tuple[str, Arguments]] = [(f"variants.{name}.", variant) for name, variant in recipe.variants.items()]
    for gpu_type, serving in recipe.gpu_types.items():
        layers.append((f"gpu_types.{gpu_type}.", serving))
        layers += [(f"gpu_types.{gpu_type}.profiles.{name}.", profile) for name, profile in serving.profiles.items()]
    for place, layer in layers:
        yield place, layer
        yield from ((f"{place}by_version.{number}.", entry) for number, entry in enumerate(layer.by_version))


# --- options


def _list_openings(name: str, value: JsonValue, place: str) -> Iterator[str]:
    """vLLM accepts the beginning of an option's name, and a part of its value after a dot."""
    written = name.partition(".")[0]
    beginning = written.replace("_", "-")
    if beginning.startswith("no-") and isinstance(value, bool):
        beginning, value = beginning.removeprefix("no-"), not value
    if value is False or value is None or value == {}:
        return
    yield from (f"{place}.{written}: {why}" for option, why in _OPENING_OPTIONS.items() if option.startswith(beginning))


def _list_code_of_option(name: str, value: JsonValue, place: str) -> list[str]:
    try:
        return list(_code_of_option(name, value, place))
    except RecursionError:
        # A thousand levels deep. The engine may read further than this check does.
        return [f"{place}.{name}: it is nested too deeply to be checked"]


def _code_of_option(name: str, value: JsonValue, place: str) -> Iterator[str]:
    """What an option runs. Its name may go into the option, as in `compilation-config.backend`."""
    written, *path = name.split(".")
    name, place = written.replace("_", "-"), f"{place}.{written}"
    if name.startswith("no-") and isinstance(value, bool):
        name, value = name.removeprefix("no-"), not value
    for key in reversed(path):
        value = {key: value}
    option = next((option for option in _OPTIONS if option.startswith(name)), None) if name not in _WHOLE_NAMES else None
    yield from _code_of_value(option or name, value, place)


def _code_of_value(name: str, value: JsonValue, place: str) -> Iterator[str]:
    if value is False or value is None or value == [] or value == {}:
        return
    if why := _OPTIONS.get(name) or (_IMPORTED if _NAMES_CODE.search(name) else None):
        yield f"{place}: {why}"
        return
    value = _parse_json_text(value)
    if name == "inductor-compile-config" and _has_text(value):
        yield f"{place}: it can name compilers and code that the server runs"
    for inner, inner_value in value.items() if isinstance(value, dict) else ():
        yield from _code_of_value(inner.replace("_", "-"), inner_value, f"{place}.{inner}")
    for inner_value in value if isinstance(value, list) else (value,):
        if isinstance(inner_value, str) and _is_code(name, inner_value):
            yield f"{place}: {_IMPORTED}"
        elif isinstance(inner_value, dict | list) and inner_value is not value:
            yield from _code_of_value(name, inner_value, place)


def _is_code(name: str, text: str) -> bool:
    if name == "method":
        return text.replace("_", "-") == "custom-class"
    return name not in _NOT_QUALIFIED and bool(_QUALIFIED_NAME.fullmatch(text))


def _parse_json_text(value: JsonValue) -> JsonValue:
    """A value that is JSON in a text is to the engine what the JSON says."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            parsed: JsonValue = json.loads(value)
        except ValueError:
            return value
        return parsed
    return value


def _has_text(value: JsonValue) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, str) or any(map(_has_text, inner))


# --- task folders


def _functions_in(folder: Path) -> Iterator[str]:
    """Each function that the folder's YAML names, in the folder or in what it includes; nothing of it is run."""
    waiting, seen = sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml")), set[Path]()
    while waiting:
        path = waiting.pop(0)
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        try:
            document = _compose_yaml(path)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            yield f"{_show_path(path, folder)} cannot be read as YAML"
            continue
        functions = dict.fromkeys(str(node.value) for node in _walk_nodes(document) if node.tag == _FUNCTION)
        yield from (f"{_show_path(path, folder)} has {_FUNCTION} {function}" for function in functions)
        waiting += [path.parent / included for included in _included_files(document)]


def _compose_yaml(path: Path) -> yaml.Node | None:
    if not path.is_file() or path.stat().st_size > MOST_CHARACTERS:
        raise ValueError
    # A node has its tag and its text: no constructor runs.
    return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)


def _show_path(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _walk_nodes(document: yaml.Node | None) -> Iterator[yaml.Node]:
    """Every node once, however often it is referred to."""
    waiting, seen = [document] if document else [], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _included_files(document: yaml.Node | None) -> list[str]:
    named = (value for key, value in document.value if key.value == "include") if isinstance(document, yaml.MappingNode) else ()
    return [node.value for value in named for node in _walk_nodes(value) if isinstance(node, yaml.ScalarNode)]
