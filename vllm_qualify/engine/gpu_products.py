"""What the name of an NVIDIA product tells: its GPU type and its form factor."""

import re
from typing import Literal

from vllm_qualify.recipe.gpu_types import GPU_TYPES, SUPERCHIPS

FormFactor = Literal["SXM", "PCIe", "NVL", "superchip"]

# The word in a product's name that gives its type, and the compute capability that every such product has.
_CAPABILITIES = {each.name.upper(): each.compute_capability for each in GPU_TYPES if each.compute_capability}
# Products that share the machine's memory: the driver reports none of their own.
_UNIFIED = ("GB10", "THOR", "ORIN")
# The last word of a vGPU's name is its share of the memory and its licence: 'GRID A100-40C'.
_VGPU_PROFILE = re.compile(r"[0-9]+[ABCQ]")

# Products whose name does not show the form factor, by their whole name in the table "Compatible GPUs" of NVIDIA's README of
# its open kernel modules (github.com/NVIDIA/open-gpu-kernel-modules, 595.45.04). H100 and H200 are SXM5 by "Supported GPUs" in
# NVIDIA's MIG user guide. The other SXM products are modules of HGX boards, and the PCIe products exist only as cards. Any
# other name has no form factor, such as 'NVIDIA H100' alone, which does not show the memory either.
_FORM_FACTORS: dict[str, FormFactor] = {
    "H100 80GB HBM3": "SXM",
    "H200": "SXM",
    "H800": "SXM",
    "H20": "SXM",
    "H20 3E": "SXM",
    "B200": "SXM",
    "A2": "PCIe",
    "A10": "PCIe",
    "A16": "PCIe",
    "A30": "PCIe",
    "A40": "PCIe",
    "L4": "PCIe",
    "L20": "PCIe",
    "L40": "PCIe",
    "L40S": "PCIe",
    "RTX PRO 6000 BLACKWELL SERVER EDITION": "PCIe",
    "TESLA T4": "PCIe",
}


def gpu_type_of(name: str, compute_capability: str) -> str:
    """`h200` for 'NVIDIA H200' of 9.0. Any other product keeps its own name, in lower case.

    A product also keeps its name if its compute capability is not the type's, or if it is a vGPU, which is a share of a GPU.
    """
    words = _name_words(name)
    plain = "-".join(words).lower()
    known = next((word for word in words if word in _CAPABILITIES), None)
    if known is None or any(map(_VGPU_PROFILE.fullmatch, words)):
        return plain
    if _CAPABILITIES[known] == compute_capability:
        return known.lower()
    # The bare name 'NVIDIA H200' is that of the type, but this product is not of the type.
    return plain if plain.upper() not in _CAPABILITIES else f"{plain}-sm{compute_capability.replace('.', '')}"


def compute_capability_of(gpu_type: str) -> str | None:
    """`9.0` for `h200`; None for a type that is in no table."""
    return _CAPABILITIES.get(gpu_type.upper())


def has_unified_memory(name: str) -> bool:
    """Whether the product with this NVML name has the machine's memory, and none of its own."""
    return any(word in _UNIFIED for word in _name_words(name))


def form_factor_of(name: str) -> FormFactor | None:
    """The form factor of the product with this NVML name; None if neither the name nor the table shows it."""
    words = _name_words(name)
    if any(word.lower() in SUPERCHIPS for word in words):
        return "superchip"
    if any(re.fullmatch(r"SXM[0-9]*", word) for word in words):
        return "SXM"
    if "NVL" in words:
        return "NVL"
    return "PCIe" if "PCIE" in words else _FORM_FACTORS.get(" ".join(words))


def _name_words(name: str) -> list[str]:
    return [word for word in re.findall(r"[A-Z0-9.]+", name.upper()) if word != "NVIDIA"]
