"""Turns the words of a command into server arguments, as vLLM's own parser does."""

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pydantic import JsonValue

from vllm_qualify.recipe.importing.documents import Node, short
from vllm_qualify.recipe.serving import ServerArguments

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
# vLLM keeps every value of these options. For all others the last value counts.
_COLLECTED = ("middleware",)
_LEVELS = ("0", "1", "2", "3")
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

    Raises:
        InexpressibleError: vLLM would not read the words, or not as one value for each option.
    """
    separated = [part for word in words for part in _separated(word, notes)]
    starts = [index for index, word in enumerate(separated) if _is_option(word)]
    bounds = pairwise([*starts, len(separated)])
    options = [_option(separated[start], separated[start + 1 : end], origin) for start, end in bounds]
    return separated[: starts[0]] if starts else separated, _arguments(options, origin, notes)


def _separated(word: str, notes: list[str]) -> list[str]:
    """The word, split if it contains both an option and its value. A shell would read it as two words."""
    if not re.fullmatch(r"--[A-Za-z0-9_.-]+\s+[^\s'\"\\]+", word):
        return [word]
    notes.append(f"{word.split()[0]} and its value are one word in the source, and two in what it means to a shell")
    return shlex.split(word)


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE_NUMBER.fullmatch(word)


def _option(word: str, values: list[str], origin: Node) -> _Option:
    if word.startswith("-O"):
        return _optimization_level(word, values, origin)
    written, equals, value = word.partition("=")
    if equals and _is_option(value):
        raise origin.refused(f"{short(word)}, a value that looks like an option")
    name, *path = written.split(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    elif name not in SHORT_FORMS:
        raise origin.refused(f"the short option {short(word)}, which vLLM 0.32 does not have", "write its long form")
    long = SHORT_FORMS.get(name, name).removeprefix("--")
    given = [value, *values] if equals else values
    if (equals and values) or (path and len(given) != 1) or not all(path):
        raise origin.refused(f"the words {short(' '.join([word, *values]))}: one value is needed")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", long):
        raise origin.refused(f"{short(word)}, which is not an option of `vllm serve`")
    return _Option(name, long, tuple(path), tuple(given))


def _optimization_level(word: str, values: list[str], origin: Node) -> _Option:
    """The option `-O3`, `-O=3` or `-O 3`. In earlier versions of vLLM, -O took a compilation config."""
    given = [part for part in [word.removeprefix("-O").removeprefix("="), *values] if part]
    if len(given) != 1 or given[0] not in _LEVELS:
        raise origin.refused(f"{short(' '.join([word, *values]))}: -O takes a level of 0 to 3", "use -cc for the rest")
    return _Option("-O", "optimization-level", (), tuple(given))


def _arguments(options: list[_Option], origin: Node, notes: list[str]) -> ServerArguments:
    """Every option once, with its last value."""
    arguments: ServerArguments = {}
    for name, value in _named_values(options, origin):
        opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
        earlier = [key for key in (name, opposite) if key in arguments]
        if earlier and name in _COLLECTED:
            raise origin.refused(f"--{name} more than once: vLLM would keep every value")
        for key in earlier:
            del arguments[key]
            both = f"--{key} and then --{name} are given" if key != name else f"--{key} is given more than once"
            notes.append(f"{both}: vLLM takes the last one, and so does this recipe")
        arguments[name] = value
    return arguments


def _named_values(options: list[_Option], origin: Node) -> Iterator[tuple[str, JsonValue]]:
    """Names and values, as in vLLM: dotted options of one name become one mapping, which comes after all other options."""
    mappings: dict[str, tuple[str, dict[str, JsonValue]]] = {}
    for option in options:
        if option.path:
            _insert(mappings.setdefault(option.name, (option.long, {}))[1], option, origin)
        else:
            yield option.long, _value(option.values)
    yield from mappings.values()


def _insert(mapping: dict[str, JsonValue], option: _Option, origin: Node) -> None:
    *parents, last = option.path
    value = _dotted_value(option.values[0], is_list=last.endswith("+"))
    last = last.removesuffix("+")
    for key in parents:
        inner = mapping.setdefault(key, {})
        if not isinstance(inner, dict):
            raise origin.refused(f"{option.name}.{'.'.join(option.path)} inside something that is not a mapping")
        mapping = inner
    before = mapping.get(last)
    if isinstance(before, dict):
        raise origin.refused(f"{option.name}.{'.'.join(option.path)} beside a dotted option inside of it")
    mapping[last] = [*before, *value] if isinstance(before, list) and isinstance(value, list) else value


def _dotted_value(text: str, is_list: bool) -> JsonValue:
    """The value of a dotted option. vLLM reads it as JSON, as a number like 80g, or as text."""
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
