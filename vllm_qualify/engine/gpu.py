"""Which GPU type this machine is, read from NVML; a machine without an NVIDIA GPU is of type `cpu`."""

import os
import platform
import re
from pathlib import Path

import pynvml

from vllm_qualify.recipe.model import Frozen

# The word in NVML's product name that tells the type.
_TYPES = {"H100": "h100", "H200": "h200", "GH200": "gh200", "B200": "b200", "GB200": "gb200", "B300": "b300", "A100": "a100"}
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon")


class Fingerprint(Frozen):
    """The hardware that measured. Measurements of different fingerprints are never compared."""

    gpu_type: str
    name: str
    count: int
    memory_mib: int
    compute_capability: str | None = None
    driver: str | None = None
    features: list[str] = []


def detect(wanted: str | None = None) -> Fingerprint:
    """The fingerprint of this machine; `cpu` can be wanted of any machine, also of one with GPUs."""
    if wanted == "cpu":
        return _cpu()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return _cpu()
    try:
        return _nvidia() if pynvml.nvmlDeviceGetCount() else _cpu()
    finally:
        pynvml.nvmlShutdown()


def gpu_type_of(name: str) -> str:
    """`h200` for 'NVIDIA H200'; an unknown product keeps its own name, in lower case."""
    words = [word for word in re.split(r"[\s-]+", name.upper()) if word != "NVIDIA"]
    known = next((_TYPES[word] for word in words if word in _TYPES), None)
    return known or "-".join(words).lower()


def _nvidia() -> Fingerprint:
    first = pynvml.nvmlDeviceGetHandleByIndex(0)
    name = str(pynvml.nvmlDeviceGetName(first))
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(first)
    return Fingerprint(
        gpu_type=gpu_type_of(name),
        name=name,
        count=pynvml.nvmlDeviceGetCount(),
        memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(first).total) // 2**20,
        compute_capability=f"{major}.{minor}",
        driver=str(pynvml.nvmlSystemGetDriverVersion()),
    )


def _cpu() -> Fingerprint:
    about = _cpuinfo()
    flags = about.get("flags", about.get("Features", "")).split()
    return Fingerprint(
        gpu_type="cpu",
        name=about.get("model name", platform.processor() or platform.machine()),
        count=len(os.sched_getaffinity(0)),
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        features=[flag for flag in _CPU_FLAGS if flag in flags],
    )


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}
