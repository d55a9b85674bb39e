"""JSON Schema as vLLM's configuration reads values: pydantic's lax mode, in which `"False"` is a boolean and `"3"` a number.

https://docs.pydantic.dev/latest/concepts/conversion_table/ lists what it converts.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend

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


def _bounded(keyword: str) -> Any:
    """The keyword's own check, of the number that a text is read as."""
    check = Draft202012Validator.VALIDATORS[keyword]

    def checked(validator: Any, bound: Any, value: Any, schema: Any) -> Iterator[Any]:
        number = float(value) if isinstance(value, str) and _is_number(None, value) else value
        return iter(check(validator, bound, number, schema) or ())

    return checked


_TYPES = Draft202012Validator.TYPE_CHECKER.redefine_many({"boolean": _is_boolean, "integer": _is_whole, "number": _is_number})
_Validator: Any = extend(
    Draft202012Validator, MappingProxyType({keyword: _bounded(keyword) for keyword in _BOUNDS}), type_checker=_TYPES
)
