"""Commands of a source, and their translation for a recipe. Parts that no recipe can have are refused here."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import JsonValue

from vllm_qualify.recipe import gpu_types
from vllm_qualify.recipe.importing.documents import InexpressibleError, Node
from vllm_qualify.recipe.importing.options import positional_and_arguments
from vllm_qualify.recipe.loading import short
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
    **dict.fromkeys(("host", "port", "uds"), "vllm-qualify chooses where the server listens"),
    "api-key": "vllm-qualify asks without a key",
    "hf-token": "set HF_TOKEN in the environment of vllm-qualify",
}
_SECRET = ("api-key", "hf-token")
_REFUSED = {
    **dict.fromkeys(("nnodes", "node-rank", "master-addr", "master-port", "headless"), "several nodes"),
    **dict.fromkeys(("data-parallel-address", "data-parallel-rank", "data-parallel-start-rank"), "several nodes"),
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


def express_commands(sources: Iterable[tuple[str, Callable[[], Command]]]) -> tuple[list[Translated], list[str]]:
    """The commands that a recipe can express, and a note for each that it cannot. Each source is a name and a function.

    Raises InexpressibleError, that of the first one, if no command can be expressed.
    """
    commands, names = dict[str, Translated](), dict[str, str]()
    errors, notes = list[InexpressibleError](), list[str]()
    for name, command_of in sources:
        try:
            one = translate_command(command_of())
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
        raise part.refusal(f"{deployment}, {DEPLOYMENTS.get(deployment, 'a deployment unknown here')}")


def translate_command(command: Command) -> Translated:
    """The command, translated. Raises InexpressibleError for an option, a value or a placeholder that no recipe can have."""
    origin, notes = command.origin, list[str]()
    for text in [*command.words, *command.environment.values()]:
        if placeholder := _PLACEHOLDER.search(text):
            raise origin.refusal(f"the placeholder {short(placeholder.group())} in {short(text)}", "fill it in")
    words, arguments = positional_and_arguments(command.words, origin, notes)
    models = [*words, *([arguments.pop("model")] if "model" in arguments else [])]
    if len(models) != 1 or not isinstance(models[0], str) or not models[0]:
        raise origin.refusal(f"a command with {len(models)} models ({short(models)}): the model comes first, and there is one")
    _check_options(arguments, origin)
    revision = _take_revision(arguments, origin, notes)
    # Without a name, vLLM itself takes the model's.
    served = arguments.pop("served-model-name", "")
    served_names = dict.fromkeys(map(str, served) if isinstance(served, list) else [_as_words(served)])
    for name in [name for name in _DROPPED if name in arguments]:
        value = arguments.pop(name)
        shown = "" if name in _SECRET else f" {_as_words(value)}".rstrip()
        notes.append(f"dropped --{name}{shown}: {_DROPPED[name]}")
    notes += [f"--{name} names {_as_words(arguments[name])}, which the image must have" for name in _FILES if name in arguments]
    return Translated(command, models[0], revision, [name for name in served_names if name], arguments, notes)


def _check_options(arguments: ServerArguments, origin: Node) -> None:
    for name, what in _REFUSED.items():
        if name in arguments and not (name == "nnodes" and arguments[name] == 1):
            raise origin.refusal(f"--{name}: {what}")
    if arguments.get("runner") == "pooling":
        raise origin.refusal("--runner pooling: a model that answers no completions", "import a model that generates text")
    transfer = json.dumps(arguments.get("kv-transfer-config", ""))
    if re.search(r"kv_producer|kv_consumer|Nixl", transfer):
        raise origin.refusal(f"--kv-transfer-config: {DEPLOYMENTS['pd_cluster']}")


def _take_revision(arguments: ServerArguments, origin: Node, notes: list[str]) -> str | None:
    revision, tokenizer = arguments.pop("revision", None), arguments.pop("tokenizer-revision", None)
    if tokenizer != revision and tokenizer is not None:
        raise origin.refusal("--tokenizer-revision: the tokenizer's revision is the model's")
    if revision is None:
        return None
    notes.append(f"--revision {_as_words(revision)} became the variant's revision")
    return _as_words(revision)


def _as_words(value: JsonValue) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "" if value is True else str(value)
