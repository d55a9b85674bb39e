"""Recipe drift: compares a recipe with what a version of vLLM knows, without a GPU and without a server."""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from pydantic import JsonValue

from vllm_qualify.recipe.metrics import COUNTERS_READ
from vllm_qualify.recipe.serving import Environment, ServerArguments
from vllm_qualify.recipe.tables import EngineTable, ModelKind, Option, Schema
from vllm_qualify.recipe.values import Frozen

_OfOptions = Literal["unknown-option", "spare-value", "unnamed-option", "bad-value", "unregistered-name", "missing-option"]
_OfFields = Literal["unknown-field", "ignored-field", "unknown-environment", "refused-environment", "unknown-metric"]
_OfServers = Literal["refused", "perhaps-refused", "changed-default", "runs-code", "trusts-code", "unnamed-backend"]
_OfTasks = Literal["unknown-task", "unknown-filter", "unknown-score", "context-too-short", "refused-request"]
FindingKind = Literal[_OfOptions, _OfFields, _OfServers, _OfTasks]
WITHOUT_EFFECT = ("ignored-field", "unknown-environment")
NOTES = (*WITHOUT_EFFECT, "perhaps-refused", "changed-default", "trusts-code", "unnamed-backend")
# Findings that vLLM's parser would refuse, and those that its parser or its configuration would. It accepts the first letters
# of an option, and takes a second value of an option for the model: findings about these count, whatever the parser says.
OF_THE_PARSER = ("unknown-field",)
OF_THE_SERVER = (*OF_THE_PARSER, "bad-value")
ABOUT_THE_SERVER = (
    *(*OF_THE_SERVER, "unknown-option", "spare-value", "unnamed-option", "unregistered-name", "missing-option"),
    "refused-environment",
)
# The models that a default is for, if it differs by the kind of model.
MODELS: dict[ModelKind, str] = {"dense": ", for models with attention only", "hybrid": ", for models with Mamba layers"}
OURS = "VLLM_"
# The flag with which vLLM refuses environment variables that it does not know, which it else only warns of.
STRICT_ENVIRONMENT = "fail-on-environ-validation"
# An option that takes a registered name → the one that may register more names, by code that a table does not know.
PLUGINS = {
    "tool-call-parser": "tool-parser-plugin",
    "reasoning-parser": "reasoning-parser-plugin",
    "kv-transfer-config.kv_connector": "kv-transfer-config.kv_connector_module_path",
}
# An option with a registered name → the flag without which vLLM does not look the name up.
LOOKED_UP_WITH = {"tool-call-parser": "enable-auto-tool-choice"}
# The function of vLLM 0.33 that reads `none` as no name.
READS_NONE = "parse_reasoning_parser"
_HUMAN = r"-?[0-9]+|[0-9]+(\.[0-9]+)?[kKmMgGtT]"
# By the name of the function that reads the option's text: the texts that it accepts, and their name for people.
NUMBERS = {
    "int": ("-?[0-9]+", "a whole number"),
    "float": (r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", "a number"),
    "human_readable_int": (_HUMAN, "a whole number, or one like 32k"),
    "human_readable_int_or_auto": (f"{_HUMAN}|auto", "a whole number, one like 32k, or auto"),
}


class Finding(Frozen):
    """One difference. Those of the kinds in NOTES are only reported; others are problems."""

    kind: FindingKind
    name: str
    told: str

    @property
    def is_problem(self) -> bool:
        return self.kind not in NOTES


def check_server(server: ServerArguments, environment: Environment, table: EngineTable) -> list[Finding]:
    """Options, values and environment names that this vLLM does not accept, in the recipe's order; then missing counters."""
    options = [finding for name, value in server.items() for finding in _check_option(name, value, table)]
    together = [*_check_twice(server, table), *_check_registries(server, table), *_check_required(server, table)]
    unknown = [name for name in COUNTERS_READ if name not in table.metrics]
    problem = "vLLM {} has no counter {}, which decides whether a load is valid"
    metrics = [Finding(kind="unknown-metric", name=name, told=problem.format(table.version, name)) for name in unknown]
    return [*options, *together, *_check_environment(server, environment, table), *metrics]


def refusal_finding(words: str, version: str, is_of_this_build: bool) -> Finding:
    """The refusal of a server by vLLM's own configuration. A CPU build's refusal is not certain for a GPU server."""
    first = words.splitlines()[0]
    if is_of_this_build:
        return Finding(kind="refused", name="server", told=f"vLLM {version} refuses it: {first}")
    return Finding(kind="perhaps-refused", name="server", told=f"vLLM {version}, whose CPU build was asked, says: {first}")


def runs_code(line: str, *, is_allowed: bool) -> Finding:
    """A place of the recipe that runs code, or opens the server to requests that change it."""
    name, _, why = line.partition(": ")
    return Finding(kind="trusts-code" if is_allowed else "runs-code", name=name, told=f"{name}: {why}")


def unnamed_options(options: Iterable[str]) -> list[Finding]:
    """Options that the engine's parser read from the config file, and that no key there names."""
    problem = "is set, and no key of the recipe names it: a value was read as an option, or as the model"
    return [Finding(kind="unnamed-option", name=name, told=f"--{name} {problem}") for name in options]


def changed_defaults(server: ServerArguments, before: EngineTable, now: EngineTable) -> list[Finding]:
    """Options that the recipe does not set, and whose default in `now` differs from that in `before`."""
    given = {_positive_name(name, now): value for name, value in server.items()}
    shared = [name for name in now.options if name in before.options and isinstance(given.get(name, {}), dict)]
    changed = [finding for name in shared for finding in _changed_default(name, before, now)]
    fields = {f"{name}.{field}" for name, value in given.items() if isinstance(value, dict) for field in value}
    return [finding for finding in changed if finding.name not in fields]


def _changed_default(name: str, before: EngineTable, now: EngineTable) -> Iterator[Finding]:
    """The changes of one default. Where the tables know it for a kind of model, these values count."""
    kinds = [kind for kind in MODELS if name in before.resolved.get(kind, {}) and name in now.resolved.get(kind, {})]
    changes = {MODELS[kind]: (before.resolved[kind][name], now.resolved[kind][name]) for kind in kinds}
    if not kinds:
        changes = {"": (before.options[name].default, now.options[name].default)}
    elif len({json.dumps(change) for change in changes.values()}) == 1:
        changes = {"": next(iter(changes.values()))}
    for of, change in changes.items():
        yield from _default_difference(name, change, of, before, now)


def _default_difference(
    name: str, change: tuple[JsonValue, JsonValue], of: str, before: EngineTable, now: EngineTable
) -> Iterator[Finding]:
    old, new = change
    if isinstance(old, dict) and isinstance(new, dict):
        for field in [field for field in new if field in old]:
            yield from _default_difference(f"{name}.{field}", (old[field], new[field]), of, before, now)
    elif old != new:
        text = f"--{name} is {_shorten(old)} by default in {before.version} and {_shorten(new)} in {now.version}{of}"
        yield Finding(kind="changed-default", name=name, told=text)


def _check_twice(server: ServerArguments, table: EngineTable) -> Iterator[Finding]:
    """Options that are given by two of their names: only the order in the config file would decide which one counts."""
    names: dict[str, list[str]] = {}
    for name in server:
        destination = _find_option(name, table)
        names.setdefault(destination.destination if destination else name, []).append(name)
    for given in names.values():
        if len(given) > 1 and not any("." in name for name in given):
            problem = f"--{' and --'.join(given)} are one option: give one of them"
            yield Finding(kind="bad-value", name=given[0], told=problem)


def _check_registries(server: ServerArguments, table: EngineTable) -> Iterator[Finding]:
    """Names of parsers and other parts that this vLLM has not registered. What a plugin registers is not known here."""
    for path, known in table.registries.items():
        name, plugin, flag = _value_of(server, path, table), PLUGINS.get(path), LOOKED_UP_WITH.get(path)
        is_looked_up = flag is None or _value_of(server, flag, table) is True
        if not isinstance(name, str) or not is_looked_up or (plugin and _value_of(server, plugin, table)):
            continue
        option = table.options[path.partition(".")[0]]
        is_none = name == "" or (name.lower() == "none" and option.type == READS_NONE)
        if not is_none and not {name, name.lower()} & set(known):
            problem = f"vLLM {table.version} knows no such name{nearest_words(name, known)}"
            yield Finding(kind="unregistered-name", name=path, told=f"--{path} {_shorten(name)}: {problem}")


def _check_required(server: ServerArguments, table: EngineTable) -> Iterator[Finding]:
    """Flags without the option that `vllm serve` requires beside them."""
    for flag, wanted in table.required.items():
        there = _value_of(server, wanted, table)
        if _value_of(server, flag, table) is True and not (table.options[wanted].default if there is None else there):
            yield Finding(kind="missing-option", name=flag, told=f"--{flag} requires --{wanted}")


def _value_of(server: ServerArguments, path: str, table: EngineTable) -> JsonValue:
    """The value of an option, or of a field of its mapping; None if it is not given."""
    wanted, _, field = path.partition(".")
    option = _find_option(wanted, table)
    for name, value in server.items():
        plain, _, inner = name.partition(".")
        if option is not None and _find_option(plain, table) == option:
            fields = _nest_fields(inner, value) if field else {}
            is_off = value is True and plain in option.negatives
            return fields.get(field) if field else not is_off and value
    return None


def _find_option(name: str, table: EngineTable) -> Option | None:
    return table.options.get(_positive_name(name.partition(".")[0], table))


def _check_option(name: str, value: JsonValue, table: EngineTable) -> Iterator[Finding]:
    plain, _, path = name.partition(".")
    option = _find_option(name, table)
    fields = None if option is None else table.configs.get(_config_class(option, table))
    if option is None:
        hint = nearest_words(plain, table.options)
        yield Finding(kind="unknown-option", name=name, told=f"vLLM {table.version} has no option --{plain}{hint}")
    elif path or (fields is not None and isinstance(_as_mapping(value), dict)):
        yield from _check_config(plain, option, _nest_fields(path, value), fields or {}, table)
    elif isinstance(value, list) and len(value) > 1 and not option.several:
        yield Finding(kind="spare-value", name=name, told=f"--{name} {_shorten(value)}: it takes one value")
    else:
        problem = _flag_problem(plain, value, option) if option.is_flag else _value_problem(value, option, table)
        if problem:
            yield Finding(kind="bad-value", name=name, told=f"--{name} {_shorten(value)}: {problem}")


def nearest_words(name: str, known: Iterable[str]) -> str:
    """The known name that is the most like it, to be said behind a problem; empty if none is like it."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest is {near[0]}" if near else ""


def _as_mapping(value: JsonValue) -> JsonValue:
    """The value; if it is JSON text, the value that the text describes. An option accepts a mapping in both forms."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _nest_fields(path: str, value: JsonValue) -> dict[str, JsonValue]:
    """The mapping that `--compilation-config.pass_config.eliminate_noops true` means."""
    fields = _as_mapping(value)
    for step in reversed(path.split(".") if path else []):
        fields = {step: fields}
    return fields if isinstance(fields, dict) else {}


def _positive_name(name: str, table: EngineTable) -> str:
    """The option that a name belongs to: `enable-prefix-caching` for `no-enable-prefix-caching`."""
    if name in table.options:
        return name
    return next((positive for positive, option in table.options.items() if name in option.negatives), name)


def _flag_problem(name: str, value: JsonValue, option: Option) -> str | None:
    """Why a flag cannot have this value. The config file expresses `false` by adding `no-` to the name or removing it."""
    if not isinstance(value, bool):
        return "it is a flag: true or false"
    can_be_off = f"no-{name}" in option.negatives or (name in option.negatives and name.startswith("no-"))
    return None if value or can_be_off else "it cannot be switched off so: leave it out, or give its opposite"


def _value_problem(value: JsonValue, option: Option, table: EngineTable) -> str | None:
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not option.several:
        return "it takes one value"
    if isinstance(value, bool):
        return "it takes a value"
    if isinstance(value, dict):
        return "it takes no mapping" if option.type in (*NUMBERS, "str") or option.choices is not None else None
    if option.choices is not None:
        wrong = [str(one) for one in values if str(one) not in option.choices]
        return f"it takes one of {', '.join(option.choices)}" if wrong else None
    if option.type in NUMBERS:
        pattern, words = NUMBERS[option.type]
        if not all(re.fullmatch(pattern, str(one)) for one in values):
            return f"it takes {words}"
    number = _as_number(value, option)
    if number is None:
        return None
    # If several fields of the configuration have the option's name, all must refuse the number.
    schemas = [fields[option.destination] for fields in table.configs.values() if option.destination in fields]
    problems = [_first_error(number, schema) for schema in schemas]
    return problems[0] if problems and all(problems) else None


def _as_number(value: JsonValue, option: Option) -> JsonValue:
    """The number that the schema can check, also if it is given as text. Only the parser reads short forms like 32k."""
    if isinstance(value, str) and option.type in NUMBERS:
        try:
            return float(value) if option.type == "float" else int(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) else None


def _check_config(
    name: str, option: Option, value: dict[str, JsonValue], fields: dict[str, Schema], table: EngineTable
) -> Iterator[Finding]:
    kind: FindingKind = "ignored-field" if _config_class(option, table) in table.ignoring else "unknown-field"
    for field, inner in value.items():
        place = f"{name}.{field}"
        if field not in fields:
            ignored = ", and ignores it" if kind == "ignored-field" else ""
            problem = f"--{name} has no field {field} in vLLM {table.version}{ignored}{nearest_words(field, fields)}"
            yield Finding(kind=kind, name=place, told=problem)
        elif refusal := _first_error(inner, fields[field]):
            yield Finding(kind="bad-value", name=place, told=f"--{place} {_shorten(inner)}: {refusal}")
        elif spare := _first_error(inner, _refuse_unknown_fields(fields[field])):
            told = f"--{place} {_shorten(inner)}: vLLM {table.version} ignores a field: {spare}"
            yield Finding(kind="ignored-field", name=place, told=told)


def _config_class(option: Option, table: EngineTable) -> str:
    """The class of a `…_config` option by its name: `compilation_config` is a CompilationConfig. Empty if there is none."""
    wanted = option.destination.replace("_", "")
    return next((name for name in table.configs if name.lower() == wanted), "")


def _first_error(value: JsonValue, schema: Schema) -> str | None:
    errors = [] if schema is None else errors_of(value, schema)
    if not errors:
        return None
    error = errors[0]
    inner = error.context[0] if error.context else error
    place = ".".join(map(str, error.absolute_path))
    return f"{place}: {inner.message}" if place else str(inner.message)


def _refuse_unknown_fields(schema: Any) -> Any:
    """The schema, with an error for each unknown field. A class that ignores such fields has a schema that allows them."""
    if isinstance(schema, dict):
        closed = {name: _refuse_unknown_fields(inner) for name, inner in schema.items()}
        is_class = "properties" in schema and "additionalProperties" not in schema
        return closed | {"additionalProperties": False} if is_class else closed
    return [_refuse_unknown_fields(inner) for inner in schema] if isinstance(schema, list) else schema


def _check_environment(server: ServerArguments, environment: Environment, table: EngineTable) -> list[Finding]:
    """Unknown names, only among vLLM's own: other programs read the rest. vLLM serves all the same, if no flag forbids it."""
    unknown = [name for name in environment if name.startswith(OURS) and name not in table.environment]
    kind: FindingKind = "refused-environment" if _value_of(server, STRICT_ENVIRONMENT, table) is True else "unknown-environment"
    what = f"and --{STRICT_ENVIRONMENT} refuses it" if kind == "refused-environment" else "so it has no effect"
    return [Finding(kind=kind, name=name, told=f"vLLM {table.version} does not read {name}, {what}") for name in unknown]


def _shorten(value: JsonValue) -> str:
    text = re.sub(r"\s+", " ", json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- JSON Schema as vLLM's configuration reads values: pydantic's lax mode, in which `"False"` is a boolean and `"3"` a number.
# https://docs.pydantic.dev/latest/concepts/conversion_table/ lists what it converts.

_BOOLEANS = ("0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes")
_WHOLE = re.compile(r"\s*[-+]?[0-9]+(_[0-9]+)*(\.0*)?\s*")
_NUMBER = re.compile(r"\s*[-+]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def errors_of(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    """jsonschema's errors, those of the first place in the value first."""
    return sorted(_Validator(schema).iter_errors(value), key=lambda error: list(map(str, error.path)))


def _is_boolean(_checker: Any, value: object) -> bool:
    return value.lower() in _BOOLEANS if isinstance(value, str) else isinstance(value, int | float) and value in (0, 1)


def _is_whole(_checker: Any, value: object) -> bool:
    return _WHOLE.fullmatch(value) is not None if isinstance(value, str) else isinstance(value, int | float) and value % 1 == 0


def _is_number(_checker: Any, value: object) -> bool:
    return _NUMBER.fullmatch(value) is not None if isinstance(value, str) else isinstance(value, int | float)


def _check_bound(keyword: str) -> Any:
    """The keyword's own check, of the number that a text is read as."""
    check = Draft202012Validator.VALIDATORS[keyword]

    def check_number(validator: Any, bound: Any, value: Any, schema: Any) -> Iterator[Any]:
        number = float(value) if isinstance(value, str) and _is_number(None, value) else value
        return iter(check(validator, bound, number, schema) or ())

    return check_number


_TYPES = Draft202012Validator.TYPE_CHECKER.redefine_many({"boolean": _is_boolean, "integer": _is_whole, "number": _is_number})
_Validator: Any = extend(
    Draft202012Validator, MappingProxyType({keyword: _check_bound(keyword) for keyword in _BOUNDS}), type_checker=_TYPES
)
