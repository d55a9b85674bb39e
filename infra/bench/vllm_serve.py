"""What `vllm serve` of this Python's vLLM makes of whole commands, up to where it would read the model. No GPU is used.

A script for the Python of any vLLM from 0.12 on. Its standard input is JSON, with the words that follow `vllm serve`:

    {"gpu": true, "commands": [{"words": ["MODEL", "--option", …], "environment": {…}}, …]}

Its standard output is `{"version": "0.32.0", "refusals": […]}`: for each command null, or why this vLLM refuses it. With `gpu`,
vLLM's platform for CUDA gets an H100's facts.

It does what the command `vllm` itself does first: the parser of all commands, the checks of `serve`, the engine's arguments.
Then it looks up the names of parsers, connectors, loaders and quantizations, reads vLLM's own environment variables, and lets
the classes of the configuration that vLLM makes only beside a model say which fields and values they take.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

PROBE = Path(__file__).parents[2] / "vllm_qualify" / "drift" / "probe.py"
# pydantic's words for a field that a class does not have, and for a value of the wrong kind. Others come from checks between
# fields, which need a model.
OF_A_FIELD = ("unexpected_keyword_argument", "literal_error", "enum")
LONGEST_REFUSAL = 400


def main() -> None:
    logging.disable(logging.CRITICAL)
    # vLLM prints while it is imported.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    if asked["gpu"]:
        stand_in_for_a_gpu()
    refusals = [refusal_of(command["words"], command["environment"]) for command in asked["commands"]]
    with os.fdopen(answer_to, "w") as out:
        json.dump({"version": importlib.metadata.version("vllm"), "refusals": refusals}, out)


def stand_in_for_a_gpu() -> None:
    specification: Any = importlib.util.spec_from_file_location("probe", PROBE)
    probe: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(probe)
    probe.stand_in_for_a_driver(probe.A_GPU)


def refusal_of(words: list[str], environment: dict[str, str]) -> str | None:
    try:
        with set_beside(environment):
            serve(words, environment)
    except Exception as error:  # whatever it is, the server would end with it
        return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REFUSAL]
    return None


@contextmanager
def set_beside(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def serve(words: list[str], environment: dict[str, str]) -> None:
    """As `vllm.entrypoints.cli.main` and `vllm.entrypoints.cli.serve` do it."""
    module: Any = importlib.import_module("vllm.entrypoints.cli.serve")
    parser: Any = module.FlexibleArgumentParser()
    (command,) = module.cmd_init()
    inner: Any = command.subparser_init(parser.add_subparsers(required=False, dest="subparser"))
    parser.error = inner.error = refuse
    parsed = parser.parse_args(["serve", *words])
    command.validate(parsed)
    look_up(parsed)
    read_variables(environment)
    arguments: Any = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(parsed)
    look_at_parts(arguments)


def refuse(message: str) -> NoReturn:
    raise ValueError(message)


def read_variables(environment: dict[str, str]) -> None:
    """Read each variable as vLLM's code does when it needs it. Some take only certain values."""
    envs: Any = importlib.import_module("vllm.envs")
    for name in environment.keys() & envs.environment_variables.keys():
        envs.environment_variables[name]()


def look_up(parsed: argparse.Namespace) -> None:
    """Look up what the server looks up by name when it starts. Without automatic choice it does not look up the tool parser."""
    if parsed.enable_auto_tool_choice and not parsed.tool_parser_plugin:
        has_own_package = importlib.util.find_spec("vllm.tool_parsers")
        name = "vllm.tool_parsers" if has_own_package else "vllm.entrypoints.openai.tool_parsers"
        importlib.import_module(name).ToolParserManager.get_tool_parser(parsed.tool_call_parser)
    if parsed.reasoning_parser and not parsed.reasoning_parser_plugin:
        importlib.import_module("vllm.reasoning").ReasoningParserManager.get_reasoning_parser(parsed.reasoning_parser)


def look_at_parts(arguments: Any) -> None:
    config: Any = importlib.import_module("vllm.config")
    if arguments.speculative_config:
        check_fields(config.SpeculativeConfig, arguments.speculative_config)
    transfer = arguments.kv_transfer_config
    if transfer is not None and transfer.kv_connector and not transfer.kv_connector_module_path:
        factory: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
        factory.KVConnectorFactory.get_connector_class(transfer)
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    load_format = str(arguments.load_format).lower()
    if load_format not in loaders._LOAD_FORMAT_TO_MODEL_LOADER:
        raise ValueError(f"load format {load_format} is not registered")
    if arguments.quantization:
        quantizations: Any = importlib.import_module("vllm.model_executor.layers.quantization")
        if str(arguments.quantization).lower() not in quantizations.QUANTIZATION_METHODS:
            raise ValueError(f"quantization {arguments.quantization} is not registered")


def check_fields(cls: Any, value: dict[str, Any]) -> None:
    """Raises ValueError if the class does not take a field, or not the value of one."""
    from pydantic import ValidationError

    try:
        cls(**value)
    except ValidationError as error:
        wrong = [one for one in error.errors() if one["type"] in OF_A_FIELD or one["type"].endswith(("_type", "_parsing"))]
        if wrong:
            raise ValueError("; ".join(f"{one['loc']}: {one['msg']}" for one in wrong)) from error
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise
    except Exception:  # whatever it says, it misses the model
        return


if __name__ == "__main__":
    main()
