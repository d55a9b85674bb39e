"""JSON schemas of recipes: which are sound, and how a document is held to one. Nothing is fetched."""

import json
import re
from collections.abc import Collection, Iterator
from fractions import Fraction
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from vllm_qualify.lazy import Lazy

if TYPE_CHECKING:
    import attrs
    import referencing
    from jsonschema import exceptions, validators
    from referencing import exceptions as lookup_errors
    from referencing import jsonschema as dialects
else:
    attrs = Lazy("attrs")
    exceptions, validators = Lazy("jsonschema.exceptions"), Lazy("jsonschema.validators")
    referencing, lookup_errors = Lazy("referencing"), Lazy("referencing.exceptions")
    dialects = Lazy("referencing.jsonschema")

Schema = dict[str, JsonValue]
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# The keywords whose schemas hold for the same value as the schema that has them: one, several in a list, several by names.
ONE_ALIKE, LISTED_ALIKE = ("not", "if", "then", "else"), ("allOf", "anyOf", "oneOf")
NAMED_ALIKE = ("dependentSchemas", "dependencies")
# How deeply a schema or a reply may be nested. A level takes up to ten calls of Python's thousand, and the caller has its own.
MOST_LEVELS = 64
# How much of a sentence on a fault is shown.
SHOWN = 300


def check_schema(schema: Schema) -> Schema:
    """The schema itself.

    Raises ValueError if it is no JSON or no schema, refers to what is not in it, or is one that no value could be held to: it
    refers to itself for the same value, or is nested too deeply.
    """
    if not isinstance(schema.get("$schema", ""), str):
        raise ValueError("is no JSON schema: its `$schema` is no text")
    if _is_deep(schema):
        raise ValueError(f"is nested too deeply: it has more than {MOST_LEVELS} levels")
    _check_characters(schema)
    try:
        _validator_of(schema).check_schema(schema)
        _check_references(schema)
    except exceptions.SchemaError as error:
        raise ValueError(f"is no JSON schema, {error.json_path}: {error.message[:SHOWN]}") from error
    except OverflowError as error:
        raise ValueError(f"is no JSON schema: a pattern has a number that is too large: {error}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    return schema


def find_fault(schema: Schema, document: JsonValue) -> str | None:
    """The first part of a document that does not fit a schema, in words. Formats are not looked at.

    Raises ValueError if the document cannot be held to the schema.
    """
    validator = _validator_of(schema)(schema, registry=referencing.Registry())
    try:
        fault = next(validator.iter_errors(document), None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (lookup_errors.Unresolvable, re.error, OverflowError) as error:
        raise ValueError(f"the schema has a part that is not understood: {error}") from error
    return _escape_halves(f"{fault.json_path}: {fault.message[:SHOWN]}") if fault else None


def _validator_of(schema: Schema) -> Any:
    """The class that validates a schema, by its `$schema` or as the newest draft."""
    return _make_multiples_exact(validators.validator_for(schema, default=validators.Draft202012Validator))


@cache
def _make_multiples_exact(known: Any) -> Any:
    extended = validators.extend(known, {"multipleOf": _check_multiple})
    extended.evolve = _evolve_validator
    return extended


def _evolve_validator(validator: Any, **changes: Any) -> Any:
    """The validator of a part of the schema. jsonschema's own takes its plain class where the part has a `$schema`."""
    known = validators.validator_for(changes.get("schema", validator.schema), default=None)
    kind = _make_multiples_exact(known) if known else type(validator)
    kept = {field.alias: getattr(validator, field.name) for field in attrs.fields(type(validator)) if field.init}
    return kind(**kept | changes)


def _check_multiple(validator: Any, multiple: float, value: Any, _: Schema) -> Iterator[Any]:
    """Exact, by the digits as they are written: as binary fractions 19.99 would be no multiple of 0.01."""
    if not validator.is_type(value, "number"):
        return
    whole, part = (Fraction(str(each)) if isinstance(each, float) else Fraction(each) for each in (value, multiple))
    if whole % part:
        yield exceptions.ValidationError(f"{value} is not a multiple of {multiple}")


def _is_deep(schema: JsonValue) -> bool:
    """Whether it has more than MOST_LEVELS levels of mappings and lists."""
    level = [schema]
    for _ in range(MOST_LEVELS):
        level = [inner for each in level for inner in _values_in(each) if isinstance(inner, dict | list)]
    return bool(level)


def _values_in(value: JsonValue) -> Collection[JsonValue]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_characters(schema: Schema) -> None:
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = _escape_halves(error.object[error.start])
        raise ValueError(f"has half of a character, {half}: write both halves, or the character itself") from error


def _escape_halves(text: str) -> str:
    """The text with each half of a character, which UTF-8 cannot have, as its number."""
    return text.encode("utf-8", "backslashreplace").decode()


def _check_references(schema: Schema) -> None:
    """Raises ValueError if a reference leads to nothing in the schema, or back to itself for the same value."""
    dialect = str(schema.get("$schema", ""))
    specification: Any = dialects.specification_with(dialect, default=dialects.DRAFT202012)
    todo: list[tuple[Any, Any]] = [(schema, referencing.Registry().resolver_with_root(specification.create_resource(schema)))]
    alike: dict[int, list[int]] = {}
    while todo:
        each, resolver = todo.pop()
        if not isinstance(each, dict) or id(each) in alike:
            continue
        targets = [_look_up(str(each[name]), resolver) for name in REFERENCES if name in each]
        alike[id(each)] = [id(one) for one in (*(target for target, _ in targets), *_schemas_alike(each))]
        inner = [one for one in specification.subresources_of(each) if isinstance(one, dict)]
        todo += [*targets, *((one, resolver.in_subresource(specification.create_resource(one))) for one in inner)]
    try:
        TopologicalSorter(alike).prepare()
    except CycleError as error:
        raise ValueError("refers to itself without an end: a reference leads back to it for the same value") from error


def _look_up(reference: str, resolver: Any) -> tuple[JsonValue, Any]:
    """The schema that a reference leads to, and what resolves its own references. Raises ValueError if it leads to none."""
    try:
        found = resolver.lookup(reference)
    except (lookup_errors.Unresolvable, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"refers to what is not in it: {reference}") from error
    if not isinstance(found.contents, dict | bool):
        raise ValueError(f"refers to what is no schema: {reference}")
    return found.contents, found.resolver


def _schemas_alike(schema: Schema) -> Iterator[JsonValue]:
    """The schemas in a schema that hold for the same value."""
    for name in ONE_ALIKE:
        yield schema.get(name)
    for name in LISTED_ALIKE:
        listed = schema.get(name)
        yield from listed if isinstance(listed, list) else ()
    for name in NAMED_ALIKE:
        named = schema.get(name)
        yield from named.values() if isinstance(named, dict) else ()
