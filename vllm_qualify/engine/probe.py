"""Tell what this vLLM knows, by its own code: options of `vllm serve`, configuration fields, environment names, metric names.

A script of its own, for the Python of any vLLM from 0.12 on: it imports vLLM and nothing of this project, needs no GPU, and
writes one JSON object to its standard output:

    {"version": "0.32.0",
     "options": {"max-num-seqs": {"type": "int", "choices": null, "default": null, …}, …},
     "configs": {"CompilationConfig": {"pass_config": {…}, …}, …},
     "environment": ["VLLM_LOGGING_LEVEL", …],
     "metrics": ["vllm:num_requests_running", …]}

Schemas are JSON Schema, as pydantic makes them from vLLM's own annotations, and so hold choices, types and ranges.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import importlib.metadata
import io
import json
import logging
import sys
import typing
from pathlib import Path
from typing import Any

METRIC_PREFIX = "vllm:"


def serve_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`, as the command itself makes it."""
    serve: Any = importlib.import_module("vllm.entrypoints.cli.serve")
    (command,) = serve.cmd_init()
    parser: argparse.ArgumentParser = command.subparser_init(serve.FlexibleArgumentParser().add_subparsers())
    return parser


def options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    found = {}
    for action in parser._actions:
        long = [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]
        names = [name for name in long if not (isinstance(action, argparse.BooleanOptionalAction) and name.startswith("no-"))]
        for name in names:
            found[name] = option(action, name, long)
    return found


def option(action: argparse.Action, name: str, names: list[str]) -> dict[str, Any]:
    negative = f"no-{name}"
    return {
        "is_flag": action.nargs == 0,
        "negative": negative if negative in names else None,
        "several": action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 0),
        "choices": sorted(map(str, action.choices)) if action.choices is not None else None,
        "type": getattr(action.type, "__name__", None),
        "default": plain(action.default),
        "destination": action.dest,
    }


def plain(found: Any) -> Any:
    """As JSON, or as text where JSON has no form for it."""
    try:
        return json.loads(json.dumps(found, default=as_json))
    except (TypeError, ValueError):
        return repr(found)


def as_json(found: Any) -> Any:
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {field.name: getattr(found, field.name, None) for field in dataclasses.fields(found)}
    if isinstance(found, set | frozenset):
        return sorted(map(str, found))
    return str(found)


def configs() -> dict[str, Any]:
    """The fields of every configuration class, each with its schema and its default."""
    module: Any = importlib.import_module("vllm.config")
    classes = {name: getattr(module, name) for name in dir(module)}
    return {name: fields(cls) for name, cls in classes.items() if isinstance(cls, type) and dataclasses.is_dataclass(cls)}


def fields(cls: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:
        hints = {}
    return {field.name: schema(cls, field.name, hints) for field in dataclasses.fields(cls) if field.init}


def schema(cls: Any, name: str, hints: dict[str, Any]) -> Any:
    """None where vLLM's annotation has no schema: anything may stand there."""
    from pydantic import PydanticUserError, TypeAdapter

    about = getattr(cls, "__pydantic_fields__", {}).get(name)
    hint: Any = about.annotation if about is not None else hints.get(name)
    if hint is None:
        return None
    if about is not None and about.metadata:
        hint = typing.Annotated[hint, *about.metadata]
    try:
        return TypeAdapter(hint).json_schema()
    except (PydanticUserError, NameError, TypeError, ValueError):
        return None


def metrics(package: Path) -> list[str]:
    """Every text in vLLM's source that is a metric's name."""
    found = set()
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if METRIC_PREFIX in text:
            constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            names = (value for value in constants if isinstance(value, str) and value.startswith(METRIC_PREFIX))
            found |= {name for name in names if name.removeprefix(METRIC_PREFIX).replace("_", "").isalnum()}
    return sorted(found)


def main() -> None:
    logging.disable(logging.CRITICAL)
    # vLLM prints while it is imported; nothing but the answer may reach the output.
    with contextlib.redirect_stdout(io.StringIO()):
        vllm: Any = importlib.import_module("vllm")
        envs: Any = importlib.import_module("vllm.envs")
        answer = {
            "version": importlib.metadata.version("vllm"),
            "options": options(serve_parser()),
            "configs": configs(),
            "environment": sorted(envs.environment_variables),
            "metrics": metrics(Path(str(vllm.__file__)).parent),
        }
    json.dump(answer, sys.stdout, indent=1, sort_keys=True)


if __name__ == "__main__":
    main()
