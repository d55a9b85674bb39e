"""What a recipe is drafted of."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_qualify.recipe.drafting.chats import Told
from vllm_qualify.recipe.drafting.shape import Shape


class ParserLine(NamedTuple):
    """A parser of the engine, or none; and in words why. `readers` are all that read the text, None if no engine was asked."""

    name: str | None
    why: str
    readers: Collection[str] | None = None


class Model(NamedTuple):
    """What is known of a model. `told` is None for one without a chat template. `written` is its name or path in the recipe."""

    written: str
    shape: Shape
    told: Told | None
    template_file: str
    weights_bytes: int | None
    weights_by: str
    tools: ParserLine
    reasoning: ParserLine


class Host(NamedTuple):
    """A GPU type to serve on. `memory_gb` is that of one GPU; None if nobody knows it. `has_bf16` is of a CPU."""

    gpu_type: str
    memory_gb: float | None = None
    has_bf16: bool = True


class Published(NamedTuple):
    """What vllm-project/recipes publishes for this model: arguments and environment by GPU type, and the file."""

    source: str
    servers: Mapping[str, Mapping[str, Any]]
    environments: Mapping[str, Mapping[str, str]]


class Command(NamedTuple):
    """What was typed, and the recipe's file, None for the terminal."""

    typed: str
    output: Path | None
