"""An FP8 KV cache without scales: a warning before anything is measured.

vLLM then takes 1.0 for every scale. On the CPU 0.32 says nothing of it, also where the checkpoint declares a scheme for the
cache (tried on the real engine). Accuracy gates see a great loss only.
"""

import re
from pathlib import Path

from vllm_qualify.engine.hub import cache_folder, folder_name
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.engine.weights import tensor_names
from vllm_qualify.plan.generation import generation_warnings
from vllm_qualify.recipe.serving import VLLM

# The kinds of FP8 with one scale for a layer. Others, as fp8_per_token_head, make theirs while they serve.
SCALED = ("fp8", "fp8_e4m3", "fp8_e5m2")
OPTION, CALCULATED = "kv-cache-dtype", "calculate-kv-scales"
# As FP8 checkpoints have them: vllm/model_executor/model_loader/weight_utils.py, `maybe_remap_kv_scale_name`.
_SCALE = re.compile(r"\.(?:k|v|kv|q)_scale$|\.[kv]_proj\.(?:output_scale|[kv]_scale)$|\.attn\.[kv]_scale$")


def kv_scale_warnings(server: ServerPlan) -> list[str]:
    """Why the KV cache's scales are all 1.0, in words; empty if they are not, or the weights are not on this machine."""
    kind = str(server.arguments.get(OPTION, "auto"))
    if server.kind != VLLM or kind not in SCALED or server.arguments.get(CALCULATED) is True:
        return []
    names = tensor_names(_weights_folder(server))
    if not names or any(map(_SCALE.search, names)):
        return []
    return [
        f"{OPTION} is {kind}, and the checkpoint has no scales for it: vLLM takes 1.0 for each, which can cost accuracy;"
        f" a variant with k_scale and v_scale, or `{OPTION}: auto`, is without doubt"
    ]


def _weights_folder(server: ServerPlan) -> Path:
    if server.is_local or server.revision is None:
        return Path(server.model)
    return cache_folder() / folder_name(server.model) / "snapshots" / server.revision


def model_warnings(server: ServerPlan, version: str) -> list[str]:
    """What the model's own files do that the recipe does not say, in words."""
    return [*generation_warnings(server, version), *kv_scale_warnings(server)]
