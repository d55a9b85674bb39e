"""Commands of a source, and their translation for a recipe. Parts that no recipe can have are refused here."""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from pydantic import JsonValue

from vllm_qualify.recipe import gpu_types
from vllm_qualify.recipe.environment import may_be_left_out
from vllm_qualify.recipe.importing.documents import InexpressibleError, Node
from vllm_qualify.recipe.loading import short
from vllm_qualify.recipe.serving import Environment, ServerArguments, is_environment_name

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
    command = _leave_out_variables(command, notes)
    return Translated(command, models[0], revision, [name for name in served_names if name], arguments, notes)


def _leave_out_variables(command: Command, notes: list[str]) -> Command:
    """The command without the switches that no recipe may set: published recipes come to have others than are known here."""
    kept = dict[str, str]()
    for name, value in command.environment.items():
        # The recipe itself refuses what is no name, a secret, and all that says where something comes from.
        if is_environment_name(name) and may_be_left_out(name, value):
            notes.append(f"left out the variable {name} ({short(value)}): no recipe may set it, so the server does not have it")
        else:
            kept[name] = value
    return replace(command, environment=kept)


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


# --- the words of a command as server arguments, as vLLM's own parser reads them

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
_NEGATIVE_NUMBER = re.compile(r"-[0-9]+|-[0-9]*\.[0-9]+")
_HUMAN_NUMBER = re.compile(r"([0-9]+)(\.[0-9]+)?([kKmMgGtT])")
_LONGEST_NUMBER = 18


@dataclass(frozen=True)
class _Option:
    """An option of a command: `name` is its text up to a dot, `long` its long form without dashes, `path` what follows."""

    name: str
    long: str
    path: tuple[str, ...]
    values: tuple[str, ...]


def positional_and_arguments(words: list[str], origin: Node, notes: list[str]) -> tuple[list[str], ServerArguments]:
    """The words before the first option, and all options as server arguments. Adds notes for the reader to `notes`.

    Raises InexpressibleError if vLLM would not read the words, or not as one value for each option.
    """
    separated = [part for word in words for part in _split_word(word, notes)]
    starts = [index for index, word in enumerate(separated) if _is_option(word)]
    bounds = pairwise([*starts, len(separated)])
    options = [_parse_option(separated[start], separated[start + 1 : end], origin) for start, end in bounds]
    return separated[: starts[0]] if starts else separated, _collect_arguments(options, origin, notes)


def _split_word(word: str, notes: list[str]) -> list[str]:
    """The word, split if it contains both an option and its value. A shell would read it as two words."""
    if not re.fullmatch(r"--[A-Za-z0-9_.-]+\s+[^\s'\"\\]+", word):
        return [word]
    notes.append(f"{word.split()[0]} and its value are one word in the source, and two in what it means to a shell")
    return shlex.split(word)


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE_NUMBER.fullmatch(word)


def _parse_option(word: str, values: list[str], origin: Node) -> _Option:
    if word.startswith("-O"):
        return _optimization_level(word, values, origin)
    written, equals, value = word.partition("=")
    if equals and _is_option(value):
        raise origin.refusal(f"{short(word)}, a value that looks like an option")
    name, *path = written.split(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    elif name not in SHORT_FORMS:
        raise origin.refusal(f"the short option {short(word)}, which vLLM 0.32 does not have", "write its long form")
    long = SHORT_FORMS.get(name, name).removeprefix("--")
    given = [value, *values] if equals else values
    if (equals and values) or (path and len(given) != 1) or not all(path):
        raise origin.refusal(f"the words {short(' '.join([word, *values]))}: one value is needed")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", long):
        raise origin.refusal(f"{short(word)}, which is not an option of `vllm serve`")
    return _Option(name, long, tuple(path), tuple(given))


def _optimization_level(word: str, values: list[str], origin: Node) -> _Option:
    """The option `-O3`, `-O=3` or `-O 3`. In earlier versions of vLLM, -O took a compilation config."""
    given = [part for part in [word.removeprefix("-O").removeprefix("="), *values] if part]
    if len(given) != 1 or given[0] not in ("0", "1", "2", "3"):
        raise origin.refusal(f"{short(' '.join([word, *values]))}: -O takes a level of 0 to 3", "use -cc for the rest")
    return _Option("-O", "optimization-level", (), tuple(given))


def _collect_arguments(options: list[_Option], origin: Node, notes: list[str]) -> ServerArguments:
    """Every option once, with its last value. As in vLLM, dotted options of one name are one mapping, behind all others."""
    arguments: ServerArguments = {}
    mappings: dict[str, tuple[str, dict[str, JsonValue]]] = {}
    for option in options:
        if option.path:
            _insert_dotted(mappings.setdefault(option.name, (option.long, {}))[1], option, origin)
    plain = ((option.long, _parse_values(option.values)) for option in options if not option.path)
    for name, value in chain(plain, mappings.values()):
        opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
        earlier = [key for key in (name, opposite) if key in arguments]
        # For all other options the last value counts.
        if earlier and name == "middleware":
            raise origin.refusal(f"--{name} more than once: vLLM would keep every value")
        for key in earlier:
            del arguments[key]
            both = f"--{key} and then --{name} are given" if key != name else f"--{key} is given more than once"
            notes.append(f"{both}: vLLM takes the last one, and so does this recipe")
        arguments[name] = value
    return arguments


def _insert_dotted(mapping: dict[str, JsonValue], option: _Option, origin: Node) -> None:
    *parents, last = option.path
    text = option.values[0]
    value: JsonValue = list[JsonValue](text.split(",")) if last.endswith("+") else _dotted_value(text)
    last = last.removesuffix("+")
    for key in parents:
        inner = mapping.setdefault(key, {})
        if not isinstance(inner, dict):
            raise origin.refusal(f"{option.name}.{'.'.join(option.path)} inside something that is not a mapping")
        mapping = inner
    before = mapping.get(last)
    if isinstance(before, dict):
        raise origin.refusal(f"{option.name}.{'.'.join(option.path)} beside a dotted option inside of it")
    mapping[last] = [*before, *value] if isinstance(before, list) and isinstance(value, list) else value


def _dotted_value(text: str) -> JsonValue:
    """The value of a dotted option. vLLM reads it as JSON, as a number like 80g, or as text."""
    try:
        return _finite_json(text)
    except ValueError:
        pass
    match = _HUMAN_NUMBER.fullmatch(text.strip())
    if match is None or len(text) > _LONGEST_NUMBER:
        return text
    whole, fraction, suffix = match.groups()
    power = "kmgt".index(suffix.lower()) + 1
    if suffix.islower():
        return int(float(whole + (fraction or "")) * 1000**power)
    return text if fraction else int(whole) * 1024**power


def _parse_values(values: tuple[str, ...]) -> JsonValue:
    """A value that vLLM's `--config` file turns into the same words again. A mapping becomes JSON with the same content."""
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
    """The parsed JSON. Raises ValueError if it is not JSON, or has a number that a recipe cannot have."""
    parsed: JsonValue = json.loads(text)
    json.dumps(parsed, allow_nan=False)
    return parsed


def _has_no_null(value: JsonValue) -> bool:
    """Whether the value has no null. A recipe cannot have null, so JSON with a null stays text."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is not None and all(map(_has_no_null, inner))


def _plain_value(word: str) -> JsonValue:
    """The number, if Python writes it exactly like the word; else the word."""
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
