"""Kinds of engine: what differs between them in how a server is told what to serve. All offer OpenAI's interface."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import yaml
from pydantic import JsonValue

from vllm_qualify.recipe.model import VLLM, EngineName, ServerArguments

TENSORRT_LLM: EngineName = "tensorrt-llm"


class Served(NamedTuple):
    """What a server is told, whatever its kind. A model of the hub has a revision; local weights have none."""

    model: str
    revision: str | None
    name: str
    host: str
    port: int


@dataclass(frozen=True)
class EngineKind:
    """One kind.

    `title` is its name for people, `package` the distribution that tells its version, of at least `least_version`. `parallel`
    are the options whose product is the number of GPUs; `trust_remote_code` and `speculative` are the options of that meaning.
    It is served from an image only where it `needs_image`. At
    `metrics_path` the server has its counters for Prometheus. Without `has_client` its image cannot run `vllm bench serve`.

    `config` makes the config file's content of the recipe's options, and `text` the file of it. `arguments` gives what follows
    the image in `docker run`, for a config file at that place.
    """

    name: EngineName
    title: str
    package: str
    example_image: str
    least_version: str | None
    needs_image: bool
    has_client: bool
    parallel: tuple[str, ...]
    trust_remote_code: str
    speculative: str
    metrics_path: str
    config: Callable[[Served, ServerArguments], ServerArguments]
    text: Callable[[ServerArguments], str]
    arguments: Callable[[Served, str], list[str]]


def _vllm_config(served: Served, options: ServerArguments) -> ServerArguments:
    ours: ServerArguments = {
        "model": served.model,
        "served-model-name": [served.name],
        "host": served.host,
        "port": served.port,
    }
    pinned: ServerArguments = {"revision": served.revision, "tokenizer-revision": served.revision} if served.revision else {}
    return ours | pinned | options


def _vllm_text(config: ServerArguments) -> str:
    """A mapping is written as the JSON text that its option takes: vLLM before 0.16 gives the option Python's form of it.

    A flag that is false is written by its other name: older versions leave out what is false, and take their default.
    """
    return _plain_text(dict(_vllm_entry(name, value) for name, value in config.items()))


def _vllm_entry(name: str, value: JsonValue) -> tuple[str, JsonValue]:
    if value is False:
        return (name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"), True
    return name, json.dumps(value) if isinstance(value, dict) else value


def _plain_text(config: ServerArguments) -> str:
    """By the library that engines read it with: in YAML 1.2 a bare `on` is text, and to them it is true."""
    return yaml.safe_dump(config, width=math.inf)


def _vllm_arguments(_served: Served, config: str) -> list[str]:
    return ["--config", config]


def _tensorrt_llm_config(_served: Served, options: ServerArguments) -> ServerArguments:
    # Without these there is no /prometheus/metrics, or there are no counts of the KV cache's blocks on it.
    counted: ServerArguments = {"return_perf_metrics": True, "enable_iter_perf_stats": True}
    return counted | options


def _tensorrt_llm_arguments(served: Served, config: str) -> list[str]:
    """The config file holds arguments of its LLM class; where to listen and how to call the model is said to the server."""
    return [
        *("trtllm-serve", "serve", served.model),
        *("--host", served.host, "--port", str(served.port)),
        *("--served_model_name", served.name),
        # Newer versions prefer the name --hf_revision; this one all of them know.
        *(("--revision", served.revision) if served.revision else ()),
        *("--config", config),
    ]


KINDS: dict[EngineName, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind(
            name=VLLM,
            title="vLLM",
            package="vllm",
            example_image="vllm/vllm-openai:v0.32.0",
            least_version=None,
            needs_image=False,
            has_client=True,
            parallel=("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "prefill-context-parallel-size"),
            trust_remote_code="trust-remote-code",
            speculative="speculative-config",
            metrics_path="/metrics",
            config=_vllm_config,
            text=_vllm_text,
            arguments=_vllm_arguments,
        ),
        EngineKind(
            name=TENSORRT_LLM,
            title="TensorRT-LLM",
            package="tensorrt_llm",
            example_image="nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc29",
            # --served_model_name came with NVIDIA/TensorRT-LLM pull request 11711, between 1.2 and 1.3.
            least_version="1.3",
            needs_image=True,
            has_client=False,
            parallel=("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
            trust_remote_code="trust_remote_code",
            speculative="speculative_config",
            metrics_path="/prometheus/metrics",
            config=_tensorrt_llm_config,
            text=_plain_text,
            arguments=_tensorrt_llm_arguments,
        ),
    )
}


def kind_in(packages: Mapping[str, JsonValue]) -> EngineKind | None:
    """The kind of engine that an environment with these packages holds."""
    return next((kind for kind in KINDS.values() if kind.package in packages), None)
