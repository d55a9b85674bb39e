"""Commands of a source, and their translation for a recipe. Parts that no recipe can have are refused here."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import JsonValue

from vllm_qualify.recipe import gpu_types
from vllm_qualify.recipe.importing.documents import InexpressibleError, Node, short
from vllm_qualify.recipe.importing.options import positional_and_arguments
from vllm_qualify.recipe.serving import Environment, ServerArguments

# The hardware names of vllm-project/recipes → our GPU types, if the product's name in NVML identifies the type.
GPU_TYPES = {hardware: each.name for each in gpu_types.GPU_TYPES for hardware in each.imported}

DEPLOYMENTS = {
    "multi_node": "a deployment on several nodes",
    "pd_cluster": "prefill and decode on separate servers",
    "kv_store_lb": "several servers behind a router with a shared KV store",
}
# Options that vllm-qualify sets itself → why they are dropped. The model, its name and its revision are used, not dropped.
_DROPPED = {
    "host": "vllm-qualify chooses where the server listens",
    "port": "vllm-qualify chooses where the server listens",
    "uds": "vllm-qualify chooses where the server listens",
    "api-key": "vllm-qualify asks without a key",
    "hf-token": "set HF_TOKEN in the environment of vllm-qualify",
}
_SECRET = ("api-key", "hf-token")
_OF_SEVERAL_NODES = ("nnodes", "node-rank", "master-addr", "master-port", "headless")
_OF_SEVERAL_SERVERS = ("data-parallel-address", "data-parallel-rank", "data-parallel-start-rank")
_REFUSED = {
    **dict.fromkeys((*_OF_SEVERAL_NODES, *_OF_SEVERAL_SERVERS), "several nodes"),
    "omni": "an omni model",
    "config": "a configuration file, whose content is not known here",
}
# The values of these options name files, which must be in the image.
_FILES = ("chat-template", "reasoning-parser-plugin", "tool-call-parser-plugin", "tool-parser-plugin")
# A shell variable, or text to fill in. Not every word in angle brackets: models have their own, like <think>.
_PLACEHOLDER = re.compile(
    r"\$\{?[A-Za-z_]\w*\}?|(?:^|/)path/to/|<[A-Z][A-Z0-9_ -]*>|<ip>"
    r"|<[^<>]*(?:path|your|folder|file|host|addr|port|model)[^<>]*>"
)


@dataclass(frozen=True)
class Command:
    """A source's `vllm serve` command for one GPU type. `words` follow `vllm serve`; `origin` is their place."""

    gpu_type: str
    variant: str
    words: list[str]
    environment: Environment
    image: str | None
    origin: Node


@dataclass(frozen=True)
class Translated:
    """A command, translated into the parts of a recipe. `served_names` are those of --served-model-name, if it is given."""

    command: Command
    model: str
    revision: str | None
    served_names: list[str]
    arguments: ServerArguments
    notes: list[str]


@dataclass(frozen=True)
class Gathered:
    """The content of a source: its name, one command for each GPU type, notes for the reader, and the oldest vLLM for it."""

    label: str
    commands: list[Translated]
    notes: list[str]
    oldest_vllm: str | None = None


def expressible(sources: Iterable[tuple[str, Callable[[], Command]]]) -> tuple[list[Translated], list[str]]:
    """The commands that a recipe can express, and a note for each that it cannot. Each source is a name and a function.

    Raises:
        InexpressibleError: no command can be expressed; this is the first one's error.
    """
    commands: dict[str, Translated] = {}
    names, errors, notes = dict[str, str](), list[InexpressibleError](), list[str]()
    for name, command_of in sources:
        try:
            one = translated(command_of())
        except InexpressibleError as error:
            errors.append(error)
            notes.append(f"left out {name}: {error.problem}")
            continue
        gpu_type = one.command.gpu_type
        if gpu_type in commands:
            notes.append(f"left out {name}: the GPU type {gpu_type} is {names[gpu_type]}'s already")
        else:
            commands[gpu_type], names[gpu_type] = one, name
    if errors and not commands:
        raise errors[0]
    return list(commands.values()), notes


def check_deployment(part: Node) -> None:
    """Raises InexpressibleError unless the deployment is `single_node`."""
    deployment = part.text()
    if deployment != "single_node":
        raise part.refused(f"{deployment}, {DEPLOYMENTS.get(deployment, 'a deployment unknown here')}")


def translated(command: Command) -> Translated:
    """The command, translated. Raises InexpressibleError for an option, a value or a placeholder that no recipe can have."""
    origin, notes = command.origin, list[str]()
    _check_placeholders(command)
    words, arguments = positional_and_arguments(command.words, origin, notes)
    model = _model(words, arguments, origin)
    _check_options(arguments, origin)
    revision = _revision(arguments, origin, notes)
    served_names = _served_names(arguments)
    for name in [name for name in _DROPPED if name in arguments]:
        value = arguments.pop(name)
        shown = "" if name in _SECRET else f" {_as_words(value)}".rstrip()
        notes.append(f"dropped --{name}{shown}: {_DROPPED[name]}")
    notes += [f"--{name} names {_as_words(arguments[name])}, which the image must have" for name in _FILES if name in arguments]
    return Translated(command, model, revision, served_names, arguments, notes)


def _check_placeholders(command: Command) -> None:
    for text in [*command.words, *command.environment.values()]:
        match = _PLACEHOLDER.search(text)
        if match:
            raise command.origin.refused(f"the placeholder {short(match.group())} in {short(text)}", "fill it in")


def _model(words: list[str], arguments: ServerArguments, origin: Node) -> str:
    given = [*words, *([arguments.pop("model")] if "model" in arguments else [])]
    if len(given) != 1 or not isinstance(given[0], str) or not given[0]:
        raise origin.refused(f"a command with {len(given)} models ({short(given)}): the model comes first, and there is one")
    return given[0]


def _check_options(arguments: ServerArguments, origin: Node) -> None:
    for name, what in _REFUSED.items():
        if name in arguments and not (name == "nnodes" and arguments[name] == 1):
            raise origin.refused(f"--{name}: {what}")
    if arguments.get("runner") == "pooling":
        raise origin.refused("--runner pooling: a model that answers no completions", "import a model that generates text")
    transfer = json.dumps(arguments.get("kv-transfer-config", ""))
    if re.search(r"kv_producer|kv_consumer|Nixl", transfer):
        raise origin.refused(f"--kv-transfer-config: {DEPLOYMENTS['pd_cluster']}")


def _revision(arguments: ServerArguments, origin: Node, notes: list[str]) -> str | None:
    revision, tokenizer = arguments.pop("revision", None), arguments.pop("tokenizer-revision", None)
    if tokenizer != revision and tokenizer is not None:
        raise origin.refused("--tokenizer-revision: the tokenizer's revision is the model's")
    if revision is None:
        return None
    notes.append(f"--revision {_as_words(revision)} became the variant's revision")
    return _as_words(revision)


def _served_names(arguments: ServerArguments) -> list[str]:
    """The published names, the model's first one first. Without a name, vLLM itself takes the model's."""
    given = arguments.pop("served-model-name", "")
    names = list(map(str, given)) if isinstance(given, list) else [_as_words(given)]
    return list(dict.fromkeys(name for name in names if name))


def _as_words(value: JsonValue) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "" if value is True else str(value)
