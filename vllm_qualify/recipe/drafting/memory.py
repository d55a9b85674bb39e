"""How many GPUs a server needs, and how long a context they have room for. A reckoning before anything was measured."""

from typing import NamedTuple

from vllm_qualify.recipe.drafting.shape import Shape
from vllm_qualify.recipe.drafting.traffic import Traffic

GB = 10**9
# vLLM's own default is 0.90 to 0.92 of a GPU. Activations, CUDA graphs and the libraries take some GB of that on each.
UTILIZATION, TAKEN_GB = 0.90, 4
SIZES = (1, 2, 4, 8)
LEAST_CONTEXT_TOK = 2048


class Fitted(NamedTuple):
    """GPUs of one server, None if a node of 8 is too small, and the context that fits beside the weights.

    `weights_gb` is None if nobody says how large the weights are; then it is one GPU.
    """

    gpus: int | None
    context_tok: int
    weights_gb: float | None
    cache_gb: float


def fit_server(shape: Shape, weights_bytes: int | None, memory_gb: float, traffic: Traffic) -> Fitted:
    """The fewest GPUs that hold the weights and the traffic's KV cache: 1, 2, 4 or 8, as far as they divide the heads."""
    cache = traffic.at_once() * shape.cache_bytes(traffic.request_tok)
    weights_gb = weights_bytes / GB if weights_bytes else None
    for gpus in SIZES:
        if shape.heads and shape.heads % gpus:
            continue
        room = gpus * (UTILIZATION * memory_gb - TAKEN_GB) * GB - (weights_bytes or 0)
        # Heads of the cache that the GPUs outnumber are kept on several of them.
        copies = max(1, gpus // shape.kv_heads) if shape.kv_heads else 1
        if room >= cache * copies and room > 0:
            return Fitted(gpus, _fit_context(shape, room / copies), weights_gb, cache * copies / GB)
    return Fitted(None, 0, weights_gb, cache / GB)


def _fit_context(shape: Shape, room_bytes: float) -> int:
    """The model's context, or the longest power of two of which one request fits."""
    if shape.cache_bytes(shape.context_tok) <= room_bytes:
        return shape.context_tok
    context = LEAST_CONTEXT_TOK
    while context * 2 < shape.context_tok and shape.cache_bytes(context * 2) <= room_bytes:
        context *= 2
    return min(context, shape.context_tok)
