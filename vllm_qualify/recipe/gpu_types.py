"""The known GPU types, one line each. Any other product is a type with its own name, and nothing is known about it."""

from typing import NamedTuple


class GpuType(NamedTuple):
    """A GPU type. Its `name` in recipes is the word that all its products' names contain, in lower case.

    - `compute_capability` is that of all its products (https://developer.nvidia.com/cuda-gpus). None: the name is a product's
      whole name, or the type has no compute capability.
    - A `superchip` has an Arm CPU.
    - `imported` are its names in vllm-project/recipes. A name there that means several products, like RTX Pro 6000 (Server,
      Workstation, Max-Q), is in no line.
    - `pool_product` is the product of the nodes in its work pool, by the label of NVIDIA's GPU feature discovery. It is only
      one product, because form factors differ in speed. Without it the fleet has no pool for the type.
    - `memory_gb` is the memory of one GPU in GB, of the smallest product of the type: by `taxonomy.yaml` of
      vllm-project/recipes (commit 8959cf6), and for a100, a800, h800 and gh200 by NVIDIA's data sheets. Nothing is held to it:
      a first recipe is drafted with it.
    """

    name: str
    compute_capability: str | None
    superchip: bool = False
    imported: tuple[str, ...] = ()
    pool_product: str | None = None
    memory_gb: int | None = None


GPU_TYPES = (
    GpuType("a100", "8.0", imported=("a100",), memory_gb=40),
    # H800 and A800 are H100 and A100 with slower links.
    GpuType("a800", "8.0", memory_gb=40),
    GpuType("h100", "9.0", imported=("h100",), pool_product="NVIDIA-H100-80GB-HBM3", memory_gb=80),
    GpuType("h200", "9.0", imported=("h200",), pool_product="NVIDIA-H200", memory_gb=141),
    GpuType("h800", "9.0", memory_gb=80),
    GpuType("gh200", "9.0", superchip=True, imported=("gh200",), memory_gb=96),
    GpuType("b200", "10.0", imported=("b200",), pool_product="NVIDIA-B200", memory_gb=180),
    GpuType("gb200", "10.0", superchip=True, imported=("gb200",), memory_gb=192),
    GpuType("b300", "10.3", imported=("b300",), memory_gb=268),
    GpuType("gb300", "10.3", superchip=True, imported=("gb300", "dgx_station_gb300"), memory_gb=288),
    GpuType("gb10", "12.1", superchip=True, imported=("dgx_spark_gb10",), memory_gb=128),
    GpuType("geforce-rtx-4090", None, imported=("rtx_4090_2x",), memory_gb=24),
    GpuType("geforce-rtx-5090", None, imported=("rtx_5090", "rtx_5090_2x"), memory_gb=32),
    GpuType("cpu", None, imported=("xeon5", "xeon6")),
)

SUPERCHIPS = tuple(each.name for each in GPU_TYPES if each.superchip)
POOL_PRODUCTS = {f"gpu-{each.name}": each.pool_product for each in GPU_TYPES if each.pool_product}
"""The fleet's work pools for GPU types, each with the product of its nodes."""
MEMORY_GB = {each.name: each.memory_gb for each in GPU_TYPES if each.memory_gb}
"""The memory of one GPU of each known type, in GB."""
