"""The kinds of engine by name."""

from collections.abc import Mapping

from pydantic import JsonValue

from vllm_qualify.engine.kinds import tensorrt_llm, vllm
from vllm_qualify.engine.kinds.base import CounterName, EngineKind
from vllm_qualify.recipe.serving import EngineName

KINDS: Mapping[EngineName, EngineKind] = {kind.name: kind for kind in (vllm.KIND, tensorrt_llm.KIND)}


def kind_in(packages: Mapping[str, JsonValue]) -> EngineKind | None:
    """The kind of engine that an environment with these packages holds."""
    return next((kind for kind in KINDS.values() if kind.package in packages), None)


def names_of(count: CounterName) -> frozenset[str]:
    """A counter's names on the metrics pages of all kinds, without `_total`. No name has two meanings."""
    return frozenset(name for kind in KINDS.values() for name in kind.counters.get(count, ()))
