"""Report what this vLLM knows and how it configures a server, by its own code and without a GPU.

A script for the Python of any vLLM from 0.12 on: it imports vLLM and nothing of this project. Its first argument is the
question as JSON, `{"servers": […], "resolve": true}`. It writes one JSON object to the file that the second argument names, or
else to its standard output:

    {"version": "0.32.0",
     "build": "cuda" or "cpu",
     "options": {"max-num-seqs": {"type": "int", "choices": null, "default": null, …}, …},
     "configs": {"CompilationConfig": {"pass_config": {…}, …}, …},
     "environment": ["VLLM_LOGGING_LEVEL", …],
     "metrics": ["vllm:num_requests_running", …],
     "registries": {"tool-call-parser": ["hermes", …], "reasoning-parser": […], "kv-transfer-config.kv_connector": […], …},
     "required": {"enable-auto-tool-choice": "tool-call-parser", …},
     "ignoring": ["CompilationConfig", …],
     "resolved": {"dense": {"enable-prefix-caching": true, …}, "hybrid": {…}},
     "servers": [{"parsed": true, "unnamed": ["…", …], "refused": "…" or null, "unclear": "…" or null}, …]}

Schemas are JSON Schema. pydantic makes them from vLLM's own annotations, so they have choices, types and ranges. `resolved` has
the value of each option that is left out, for one model of each kind on a GPU; it is empty without `resolve`. `registries` has
the names under which parts are registered, by the option or field that takes such a name. `required` has the flags that
`vllm serve` refuses without another option, which it names. `ignoring` has the configuration classes that ignore a field which
they do not have, as all of 0.12 do; the others refuse it.

A server is `{"config": "…", "environment": {…}, "device": {…} or null}`: the text of its config file, and the GPU's name,
compute capability, memory and count, or null for a CPU. vLLM reads the config file and makes its whole configuration from it,
up to the point where it would load weights. `parsed` says that its parser accepted every option and value. `unnamed` are the
options that the parser then had set, and that no key of the config file names: a value was read as an option. `refused` is what
vLLM, or one of its registries, says against the server; `unclear` is what kept it from judging. With a device, vLLM's platform
for CUDA gets these facts instead of a driver's.
"""

import argparse
import ast
import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import logging
import os
import pickle
import re
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

METRIC_PREFIX = "vllm:"
VARIABLE_PREFIX = "VLLM_"
A_NAME = re.compile(f"[\"']{VARIABLE_PREFIX}")
# Where versions have the registry of tool parsers, the newest first.
TOOL_PARSERS = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers")
# Not those that print and end, like --help.
SWITCHES = (argparse._StoreTrueAction, argparse.BooleanOptionalAction)
# As vLLM words it: "--enable-auto-tool-choice requires --tool-call-parser".
REQUIRES = re.compile(r"--([a-z-]+) requires --([a-z-]+)")
COMPILED = ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch")
FLASH_ATTENTION = "vllm.vllm_flash_attn"
SIZES = {
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
# Models of each kind that has its own defaults. The first model that a version knows stands for the kind. Only its
# configuration is made.
MADE_MODELS: dict[str, list[dict[str, Any]]] = {
    "dense": [{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}],
    "hybrid": [
        {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
        {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": [2]},
    ],
}
A_GPU: dict[str, Any] = {"name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "memory_mib": 81_559, "count": 8}


# --- what it knows


def serve_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`, as the command itself makes it. It raises ValueError for what it refuses."""
    serve: Any = importlib.import_module("vllm.entrypoints.cli.serve")
    parser: Any = serve_command().subparser_init(serve.FlexibleArgumentParser().add_subparsers())

    def refuse(message: str) -> typing.NoReturn:
        raise ValueError(message)

    parser.error = refuse
    return typing.cast("argparse.ArgumentParser", parser)


def serve_command() -> Any:
    (command,) = importlib.import_module("vllm.entrypoints.cli.serve").cmd_init()
    return command


def accepted_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Every name that the parser accepts, even if its help omits it. Names that switch a flag off are listed with the flag."""
    names: dict[argparse.Action, list[str]] = {}
    for name, action in parser._option_string_actions.items():
        if name.startswith("--"):
            names.setdefault(action, []).append(name)
    options_by_name: dict[str, Any] = {}
    for action, given in names.items():
        negatives = [name for name in given if is_negative(name, action)]
        about = describe_option(action, [name.removeprefix("--") for name in negatives])
        options_by_name |= {name.removeprefix("--"): about for name in given if name not in negatives}
    return options_by_name


def is_negative(name: str, action: argparse.Action) -> bool:
    """Since 0.33 `--disable-x` is the opposite of `--enable-x`, beside `--no-enable-x`."""
    if not isinstance(action, argparse.BooleanOptionalAction):
        return False
    return name in getattr(action, "negative_option_strings", ()) or name.startswith("--no-")


def describe_option(action: argparse.Action, negatives: list[str]) -> dict[str, Any]:
    return {
        "is_flag": action.nargs == 0,
        "negatives": negatives,
        "several": action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 0),
        "choices": sorted(map(str, action.choices)) if action.choices is not None else None,
        "type": getattr(action.type, "__name__", None),
        "default": None if action.default is argparse.SUPPRESS else json_value(action.default),
        "destination": action.dest,
    }


def json_value(value: Any) -> Any:
    """As JSON, or as text where JSON has no form for it."""
    try:
        return json.loads(json.dumps(value, default=encode_value))
    except (TypeError, ValueError):
        return repr(value)


def encode_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value)


def ignoring_classes() -> list[str]:
    """The configuration classes that ignore a field which they do not have: pydantic does, where a class does not forbid it."""
    made_by_pydantic = {name: cls for name, cls in config_classes().items() if hasattr(cls, "__pydantic_fields__")}
    settings = {name: getattr(cls, "__pydantic_config__", None) or {} for name, cls in made_by_pydantic.items()}
    return sorted(name for name, given in settings.items() if given.get("extra", "ignore") == "ignore")


def config_classes() -> dict[str, type]:
    module: Any = importlib.import_module("vllm.config")
    classes = {name: getattr(module, name) for name in dir(module)}
    return {name: cls for name, cls in classes.items() if isinstance(cls, type) and dataclasses.is_dataclass(cls)}


def field_schemas(cls: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:
        hints = {}
    return {field.name: field_schema(cls, field.name, hints) for field in dataclasses.fields(cls) if field.init}


def field_schema(cls: Any, name: str, hints: dict[str, Any]) -> Any:
    """The schema of a field; None if vLLM's annotation has none, so any value is allowed."""
    from pydantic import PydanticUserError, TypeAdapter

    about = getattr(cls, "__pydantic_fields__", {}).get(name)
    hint: Any = about.annotation if about is not None else hints.get(name)
    if hint is None:
        return None
    if about is not None and about.metadata:
        hint = typing.Annotated[hint, *about.metadata]
    try:
        described = TypeAdapter(hint).json_schema()
    except (PydanticUserError, NameError, TypeError, ValueError):
        return None
    names = sorted({name for cls in find_enums(hint) for member in cls.__members__ for name in (member, member.lower())})
    if not names:
        return described
    # References begin at the top.
    definitions = {"$defs": described.pop("$defs")} if "$defs" in described else {}
    return {"anyOf": [described, {"enum": names}]} | definitions


def find_enums(hint: Any) -> list[Any]:
    """The enumerations in a type. vLLM also accepts their members by name, which their schema does not say."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [hint]
    return [cls for inner in typing.get_args(hint) for cls in find_enums(inner)]


def metric_names(package: Path) -> list[str]:
    """Every text in vLLM's source that is a metric's name."""
    names_read = set()
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if METRIC_PREFIX in text:
            constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            names = (value for value in constants if isinstance(value, str) and value.startswith(METRIC_PREFIX))
            names_read |= {name for name in names if name.removeprefix(METRIC_PREFIX).replace("_", "").isalnum()}
    return sorted(names_read)


def variable_names(package: Path) -> list[str]:
    """The environment variables of vLLM: those of its list, and those that its source reads without it."""
    envs: Any = importlib.import_module("vllm.envs")
    read_in = {name for path in package.rglob("*.py") for name in variables_read(path.read_text("utf-8", errors="replace"))}
    return sorted({*envs.environment_variables, *read_in})


def variables_read(source: str) -> set[str]:
    """The names in `os.environ["VLLM_…"]`, `os.environ.get("VLLM_…")`, `os.getenv("VLLM_…")` and `"VLLM_…" in os.environ`."""
    # Only a file that has such a text is read as Python: most files get the variables by their attributes of vllm.envs.
    if not A_NAME.search(source) or not re.search("environ|getenv", source):
        return set()
    names = {place.value for node in ast.walk(ast.parse(source)) if isinstance(place := name_place(node), ast.Constant)}
    return {name for name in names if isinstance(name, str) and name.startswith(VARIABLE_PREFIX)}


def name_place(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ"), slice=place, ctx=ast.Load()):
            return place
        case ast.Compare(left=place, comparators=[ast.Attribute(attr="environ")]):
            return place
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ")) | ast.Attribute(attr="getenv"), args=[place, *_]):
            return place
    return None


def registered_names() -> dict[str, list[str]]:
    """The names of the parts that are registered in this vLLM, by the option or the field that takes such a name."""
    # Plugins of the environment register more.
    importlib.import_module("vllm.plugins").load_general_plugins()
    tools = next(importlib.import_module(name) for name in TOOL_PARSERS if has_module(name))
    reasoning: Any = importlib.import_module("vllm.reasoning")
    connectors: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    quantization: Any = importlib.import_module("vllm.model_executor.layers.quantization")
    names: dict[str, Any] = {
        "tool-call-parser": tools.ToolParserManager.list_registered(),
        "reasoning-parser": reasoning.ReasoningParserManager.list_registered(),
        "kv-transfer-config.kv_connector": connectors.KVConnectorFactory._registry,
        "load-format": loaders._LOAD_FORMAT_TO_MODEL_LOADER,
        "quantization": quantization.QUANTIZATION_METHODS,
    }
    return {name: sorted(known) for name, known in names.items()}


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def required_options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The flags that `vllm serve` refuses when they are given alone, because they require another option."""
    actions = parser._option_string_actions.items()
    flags = [name for name, action in actions if isinstance(action, SWITCHES) and not is_negative(name, action)]
    found = (REQUIRES.search(refusal_of(parser, name)) for name in flags)
    return {match[1]: match[2] for match in found if match}


def refusal_of(parser: argparse.ArgumentParser, flag: str) -> str:
    try:
        serve_command().validate(parser.parse_args([flag]))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


# --- how it configures a server


class Absent:
    """Stands in for compiled code, which is looked up while a configuration is made, and never run."""

    def __call__(self, *_arguments: Any, **_options: Any) -> bool:
        return True

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()


class AbsentModule(types.ModuleType):
    """A module of the CUDA build that this one lacks."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: Any) -> Any:
        is_absent = any(name == absent or name.startswith(f"{absent}.") for absent in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> AbsentModule:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def can_be_imported(name: str) -> bool:
    """Whether it can be imported. Another process tries first, since code for another CPU ends the process that imports it."""
    return await_answer(start_apart(is_importable, name)) is True and is_importable(name)


def is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, OSError):
        return False
    return True


def stand_in_for_compiled_code() -> None:
    """Replace vLLM's compiled modules for CUDA, which cannot be imported without CUDA's libraries or in a CPU build."""
    # What they are part of takes seconds, and else each process that tries one would import it.
    importlib.import_module("vllm")
    absent = [f"vllm.{name}" for name in COMPILED if not can_be_imported(f"vllm.{name}")]
    if not any(can_be_imported(f"{FLASH_ATTENTION}.{name}") for name in ("_vllm_fa2_C", "_vllm_fa3_C")):
        absent.append(FLASH_ATTENTION)
        for name in [name for name in sys.modules if name.startswith(FLASH_ATTENTION)]:
            del sys.modules[name]
    sys.meta_path.insert(0, AbsentModules(absent))
    # While it is imported, it checks which operations exist. It must not find the stand-ins.
    importlib.import_module("vllm._custom_ops")
    namespace: Any = importlib.import_module("torch._ops")._OpNamespace
    look_up = namespace.__getattr__

    def look_up_or_absent(ours: Any, name: str) -> Any:
        try:
            return look_up(ours, name)
        except AttributeError:
            if name.startswith("__") or not str(ours.name).startswith(("_C", "_moe_C")):
                raise
            return Absent()

    namespace.__getattr__ = look_up_or_absent


def stand_in_for_a_driver(device: dict[str, Any]) -> None:
    """Use vLLM's own platform for CUDA, with a device that is not here."""
    stand_in_for_compiled_code()
    platforms: Any = importlib.import_module("vllm.platforms")
    interface: Any = importlib.import_module("vllm.platforms.interface")
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    capability = tuple(device["capability"])
    facts = {
        "get_device_capability": lambda *_, **__: interface.DeviceCapability(*capability),
        "has_device_capability": lambda wanted, *_, **__: capability >= capability_pair(wanted),
        "is_device_capability": lambda wanted, *_, **__: capability == capability_pair(wanted),
        "get_device_name": lambda *_, **__: device["name"],
        "get_device_uuid": lambda *_, **__: "GPU-0",
        "get_device_total_memory": lambda *_, **__: device["memory_mib"] * 2**20,
        "device_count": lambda *_, **__: device["count"],
        "is_fully_connected": lambda *_, **__: True,
        "log_warnings": lambda *_, **__: None,
    }
    methods = {name: staticmethod(fact) for name, fact in facts.items()}
    platforms._current_platform = type("StandIn", (cuda.CudaPlatformBase,), methods)()
    for name in ("vllm.utils", "vllm.utils.torch_utils"):
        module: Any = importlib.import_module(name)
        if hasattr(module, "cuda_device_count_stateless"):
            module.cuda_device_count_stateless = lambda: device["count"]
    torch: Any = importlib.import_module("torch")
    torch.cuda.get_device_capability = lambda *_: capability
    # vLLM would keep what it learns about a model class in a file, and import every layer for that.
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._LazyRegisteredModel._save_modelinfo_to_cache = lambda *_: None


def capability_pair(capability: Any) -> tuple[int, ...]:
    return tuple(capability) if isinstance(capability, tuple) else divmod(capability, 10)


def parse_config(config: str, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What vLLM's own parser reads from a config file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "server.yaml")
        path.write_text(config, encoding="utf-8")
        return parser.parse_args(["--config", str(path)])


def unnamed_options(config: str, parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The options that differ from their defaults, and that no key of the config file names."""
    yaml: Any = importlib.import_module("yaml")
    # vLLM 0.33 keeps the names that switch a flag off apart.
    names = {action: [*action.option_strings, *getattr(action, "negative_option_strings", ())] for action in parser._actions}
    keys = {f"--{str(key).partition('.')[0].replace('_', '-')}" for key in yaml.safe_load(config)}
    named = {action.dest for action, given in names.items() if keys & set(given)}
    defaults = vars(parser.parse_args([]))
    changed = [dest for dest, value in vars(parsed).items() if dest not in named | {"config"} and value != defaults.get(dest)]
    return [dest.replace("_", "-") for dest in changed]


def validate_options(parsed: argparse.Namespace) -> None:
    """What `vllm serve` checks between its parser and its engine. Raises ValueError for what it refuses."""
    try:
        serve_command().validate(parsed)
    except TypeError as error:
        raise ValueError(str(error)) from error
    # Without this flag the tool parser's name is not looked up, and a plugin may register more names.
    looks_up_tools = parsed.enable_auto_tool_choice and not parsed.tool_parser_plugin
    names = {
        "tool-call-parser": parsed.tool_call_parser if looks_up_tools else None,
        "reasoning-parser": None if parsed.reasoning_parser_plugin else parsed.reasoning_parser,
    }
    known = registered_names()
    for option, name in names.items():
        if name and name not in known[option]:
            raise ValueError(f"no {option} is registered as {name!r}")


def make_configuration(parsed: argparse.Namespace) -> Any:
    """vLLM's whole configuration for these options of a server."""
    arguments: Any = importlib.import_module("vllm.engine.arg_utils")
    made = arguments.AsyncEngineArgs.from_cli_args(parsed)
    look_at_classes_in_forks()
    usage: Any = importlib.import_module("vllm.usage.usage_lib")
    return made.create_engine_config(usage.UsageContext.OPENAI_API_SERVER)


def look_at_classes_in_forks() -> None:
    """vLLM looks at a model's class in a process that imports all of vLLM again, which takes seconds; a fork has most of it."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    start_anew: Any = getattr(registry, "_run_in_subprocess", None)

    def run(work: typing.Callable[[], Any]) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "answer")
            if isinstance(await_answer(start_apart(lambda: file.write_bytes(pickle.dumps(work())))), int):
                return pickle.loads(file.read_bytes())  # noqa: S301  (the fork's own)
        return start_anew(work)

    registry._run_in_subprocess = run


def judge_server(server: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(server["environment"])
    answer: dict[str, Any] = {"parsed": False, "unnamed": [], "refused": None, "unclear": None}
    try:
        parser = serve_parser()
        parsed = parse_config(server["config"], parser)
        answer |= {"parsed": True, "unnamed": unnamed_options(server["config"], parsed, parser)}
        validate_options(parsed)
        make_configuration(parsed)
    except (ValueError, NotImplementedError) as error:
        answer["unclear" if answer["parsed"] and is_of_the_model(error) else "refused"] = message_of(error)
    except Exception as error:  # whatever it is, it says nothing against the server
        answer["unclear"] = f"{type(error).__name__}: {message_of(error)}"
    return answer


def is_of_the_model(error: BaseException) -> bool:
    """Whether the model's own configuration or class could not be read: then the error says nothing about the arguments."""
    if "failed to be inspected" in str(error):
        return True
    seen: list[BaseException] = [error]
    for one in seen:
        inner = [one.__cause__, one.__context__]
        if hasattr(one, "errors"):
            inner += [about.get("ctx", {}).get("error") for about in typing.cast("Any", one).errors()]
        seen += [cause for cause in inner if isinstance(cause, BaseException) and cause not in seen]
    return any(isinstance(one, OSError) for one in seen)


def message_of(error: BaseException) -> str:
    """The error's text; pydantic's errors are without their echo of the input."""
    if hasattr(error, "errors"):
        each = typing.cast("Any", error).errors(include_url=False, include_context=False, include_input=False)
        return "; ".join(": ".join(filter(None, [".".join(map(str, one["loc"])), one["msg"]])) for one in each)
    return f"{error}" or type(error).__name__


def resolve_defaults(kind: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The value of each option that is left out, for a model of this kind; empty if this vLLM can configure none."""
    answers = (await_answer(start_apart(resolve_for_model, model, parser)) for model in MADE_MODELS[kind])
    return next((answer for answer in answers if "unclear" not in answer), {})


def resolve_for_model(model: dict[str, Any], parser: argparse.ArgumentParser) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model | SIZES), encoding="utf-8")
        made = make_configuration(parse_config(json.dumps({"model": folder, "skip-tokenizer-init": True}), parser))
    defaults = {}
    for name, about in accepted_options(parser).items():
        values = [getattr(part, about["destination"], None) for part in vars(made).values()]
        known = [value for value in values if value is not None]
        if len(known) == 1 and isinstance(known[0], bool | int | float | str) and folder not in str(known[0]):
            defaults[name] = json_value(known[0])
    return defaults


# --- each in a process of its own, since a process takes a platform only once


def start_apart(work: typing.Callable[..., Any], *arguments: Any) -> tuple[int, int]:
    """Start `work` in a process of its own: what it sets and imports is gone afterwards. `await_answer` gives its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work(*arguments)
        except BaseException as error:  # whatever it is, it must reach the parent
            answer = {"parsed": False, "refused": None, "unclear": f"{type(error).__name__}: {message_of(error)}"}
        with os.fdopen(writing, "w") as out:
            json.dump(answer, out)
        os._exit(0)
    os.close(writing)
    return child, reading


def await_answer(started: tuple[int, int]) -> Any:
    child, reading = started
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"parsed": False, "refused": None, "unclear": "it ended without a word"}


def answer_on(device: dict[str, Any] | None, is_home: bool, servers: list[dict[str, Any]]) -> dict[str, Any]:
    """What vLLM on this device says about these servers, in their order. With `is_home` it also says what it knows."""
    if device is not None:
        stand_in_for_a_driver(device)
    parser = serve_parser()
    return {
        "knows": collect_knowledge(parser) if is_home else {},
        "servers": [await_answer(start_apart(judge_server, server)) for server in servers],
    }


def collect_knowledge(parser: argparse.ArgumentParser) -> dict[str, Any]:
    vllm: Any = importlib.import_module("vllm")
    package = Path(str(vllm.__file__)).parent
    return {
        "options": accepted_options(parser),
        "configs": {name: field_schemas(cls) for name, cls in config_classes().items()},
        "environment": variable_names(package),
        "metrics": metric_names(package),
        "registries": registered_names(),
        "required": required_options(parser),
        "ignoring": ignoring_classes(),
    }


def resolve_kinds() -> dict[str, Any]:
    stand_in_for_a_driver(A_GPU)
    parser = serve_parser()
    return {kind: resolve_defaults(kind, parser) for kind in MADE_MODELS}


def ask_of_each(servers: list[dict[str, Any]], has_platform: bool) -> dict[str, Any]:
    by_device: dict[str, list[int]] = {}
    for number, server in enumerate(servers):
        by_device.setdefault(json.dumps(server["device"]), []).append(number)
    # The CUDA build without a GPU has no platform: then not even the parser can be made.
    home = json.dumps(None) if has_platform else next(iter(by_device), json.dumps(A_GPU))
    by_device.setdefault(home, [])
    started = {
        device: start_apart(answer_on, json.loads(device), device == home, [servers[number] for number in numbers])
        for device, numbers in by_device.items()
    }
    answers = {device: await_answer(child) for device, child in started.items()}
    if "knows" not in answers[home]:
        sys.exit(answers[home]["unclear"])
    answer: dict[str, Any] = answers[home]["knows"]
    judgements: dict[int, Any] = {}
    for device, numbers in by_device.items():
        judged_here = answers[device].get("servers") or [answers[device]] * len(numbers)
        judgements |= dict(zip(numbers, judged_here, strict=True))
    return answer | {"servers": [judgements[number] for number in range(len(servers))]}


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {"servers": [], "resolve": True}
    logging.disable(logging.CRITICAL)
    # vLLM prints while it is imported; only the answer may reach the output.
    answer_to = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT) if len(sys.argv) > 2 else os.dup(1)
    os.dup2(2, 1)
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    resolves = start_apart(resolve_kinds) if asked["resolve"] else None
    answer = ask_of_each(asked["servers"], bool(platform.device_type)) | {
        "version": importlib.metadata.version("vllm"),
        "build": "cpu" if platform.is_cpu() else "cuda",
        "resolved": await_answer(resolves) if resolves else {},
    }
    with os.fdopen(answer_to, "w") as out:
        json.dump(answer, out, indent=1, sort_keys=True)


if __name__ == "__main__":
    main()
