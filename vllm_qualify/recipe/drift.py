"""Recipe drift: what a recipe asks for against what a version of vLLM knows, without a GPU and without a server."""

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from jsonschema import Draft202012Validator
from pydantic import JsonValue

from vllm_qualify.recipe.model import Environment, Frozen, ServerArguments
from vllm_qualify.recipe.tables import EngineTable, Option, Schema

Kind = Literal["unknown-option", "bad-value", "unknown-field", "unknown-environment", "changed-default"]
OURS = "VLLM_"
WHOLE = ("int",)


class Finding(Frozen):
    """One difference. A changed default is told and is no problem; all others are."""

    kind: Kind
    name: str
    told: str

    @property
    def is_problem(self) -> bool:
        return self.kind != "changed-default"


def check(server: ServerArguments, environment: Environment, table: EngineTable) -> list[Finding]:
    """Options, values and environment names that this vLLM does not take, in the recipe's order."""
    options = [finding for name, value in server.items() for finding in _of_option(name, value, table)]
    return [*options, *_of_environment(environment, table)]


def changed_defaults(server: ServerArguments, before: EngineTable, now: EngineTable) -> list[Finding]:
    """Options that the recipe leaves alone and whose default is another one in `now` than in `before`."""
    given = {_positive(name, now) for name in server}
    shared = [name for name in now.options if name in before.options and name not in given]
    return [
        Finding(
            kind="changed-default",
            name=name,
            told=f"by default {_short(before.options[name].default)} in {before.version}, "
            f"{_short(now.options[name].default)} in {now.version}",
        )
        for name in shared
        if before.options[name].default != now.options[name].default
    ]


def _of_option(name: str, value: JsonValue, table: EngineTable) -> Iterator[Finding]:
    found = table.options.get(_positive(name, table))
    if found is None:
        near = difflib.get_close_matches(name, table.options, n=1)
        hint = f"; the nearest is {near[0]}" if near else ""
        yield Finding(kind="unknown-option", name=name, told=f"vLLM {table.version} has no option --{name}{hint}")
    elif isinstance(value, dict):
        yield from _of_config(name, value, found, table)
    else:
        problem = _problem_of_flag(value) if found.is_flag else _problem_of_value(value, found, table)
        if problem:
            yield Finding(kind="bad-value", name=name, told=f"--{name} {_short(value)}: {problem}")


def _positive(name: str, table: EngineTable) -> str:
    """The option that a name is of: `enable-prefix-caching` for `no-enable-prefix-caching`."""
    positive = name.removeprefix("no-")
    of_it = table.options.get(positive)
    return positive if name not in table.options and of_it is not None and of_it.negative == name else name


def _problem_of_flag(value: JsonValue) -> str | None:
    return None if isinstance(value, bool) else "it is a flag: true or false"


def _problem_of_value(value: JsonValue, option: Option, table: EngineTable) -> str | None:
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not option.several:
        return "it takes one value"
    if isinstance(value, bool):
        return "it takes a value"
    if option.choices is not None:
        wrong = [str(one) for one in values if str(one) not in option.choices]
        return f"it takes one of {', '.join(option.choices)}" if wrong else None
    if option.type in WHOLE and not all(re.fullmatch("-?[0-9]+", str(one)) for one in values):
        return "it takes a whole number"
    schema = _schema_of(option, table)
    # An abbreviated number like 32k is the parser's to read, and any text may hold one.
    if schema is None or isinstance(value, str | list):
        return None
    return _first_error(value, schema)


def _schema_of(option: Option, table: EngineTable) -> Schema:
    """What the configuration field of this name takes, if there is just one such field."""
    found = [fields[option.destination] for fields in table.configs.values() if option.destination in fields]
    return found[0] if len(found) == 1 else None


def _of_config(name: str, value: dict[str, JsonValue], option: Option, table: EngineTable) -> Iterator[Finding]:
    fields = _config_of(option, table)
    if fields is None:
        return
    for field, inner in value.items():
        if field not in fields:
            near = difflib.get_close_matches(field, fields, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            told = f"--{name} has no field {field} in vLLM {table.version}{hint}"
            yield Finding(kind="unknown-field", name=f"{name}.{field}", told=told)
        elif problem := _first_error(inner, fields[field]):
            yield Finding(kind="bad-value", name=f"{name}.{field}", told=f"--{name}.{field} {_short(inner)}: {problem}")


def _config_of(option: Option, table: EngineTable) -> dict[str, Schema] | None:
    """The class of a `…_config` option, by its name: `compilation_config` is a CompilationConfig."""
    wanted = option.destination.replace("_", "")
    return next((fields for name, fields in table.configs.items() if name.lower() == wanted), None)


def _first_error(value: JsonValue, schema: Schema) -> str | None:
    if schema is None:
        return None
    errors = sorted(Draft202012Validator(_closed(schema)).iter_errors(value), key=lambda error: list(map(str, error.path)))
    return _in_words(errors[0]) if errors else None


def _in_words(error: Any) -> str:
    inner = error.context[0] if error.context else error
    place = ".".join(map(str, error.absolute_path))
    return f"{place}: {inner.message}" if place else str(inner.message)


def _closed(schema: Any) -> Any:
    """vLLM's dataclasses take no other fields than their own, which their schemas do not say."""
    if isinstance(schema, dict):
        closed = {name: _closed(inner) for name, inner in schema.items()}
        is_class = "properties" in schema and "additionalProperties" not in schema
        return closed | {"additionalProperties": False} if is_class else closed
    return [_closed(inner) for inner in schema] if isinstance(schema, list) else schema


def _of_environment(environment: Environment, table: EngineTable) -> list[Finding]:
    """Only vLLM's own names: what others read is theirs to know. vLLM itself would only warn."""
    unknown = [name for name in environment if name.startswith(OURS) and name not in table.environment]
    return [
        Finding(kind="unknown-environment", name=name, told=f"vLLM {table.version} does not read {name}, and would only warn")
        for name in unknown
    ]


def _short(value: JsonValue) -> str:
    text = re.sub(r"\s+", " ", json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 80 else f"{text[:77]}..."
