"""An H200 as NVML and nvidia-smi read it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest

from vllm_qualify.engine.gpu import Fingerprint

CAPTURED = Path(__file__).parents[1] / "engine" / "captured_gpu"
SMI = (CAPTURED / "nvidia-smi.csv").read_text()
H200 = Fingerprint(
    gpu_type="h200",
    name="NVIDIA H200",
    form_factor="SXM",
    count=1,
    memory_mib=143_771,
    compute_capability="9.0",
    driver="580.159.04",
    devices=[0],
)
REAL = json.loads((CAPTURED / "nvml.json").read_text())
STRUCTURES: dict[str, Any] = {
    "nvmlDeviceGetMemoryInfo": pynvml.c_nvmlMemory_t,
    "nvmlDeviceGetUtilizationRates": pynvml.c_nvmlUtilization_t,
}


class Nvml:
    """NVML that returns what it returned on the real machine; of each of `devices`, by the name of the function."""

    def __init__(self, patch: pytest.MonkeyPatch, devices: Sequence[Mapping[str, Any]] = REAL["devices"]) -> None:
        self.devices, self.is_open = devices, False
        patch.setattr(pynvml, "nvmlInit", lambda: setattr(self, "is_open", True))
        patch.setattr(pynvml, "nvmlShutdown", lambda: setattr(self, "is_open", False))
        patch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(devices))
        patch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        patch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: REAL["nvmlSystemGetDriverVersion"])
        for function in {name for device in devices for name in device}:
            patch.setattr(pynvml, function, self.function(function))

    def function(self, name: str) -> Callable[..., object]:
        def call(index: int, *which: int) -> object:
            answer = self.devices[index][name]
            if isinstance(answer, Exception):
                raise answer
            if name in STRUCTURES:
                return STRUCTURES[name](**answer)
            return answer[str(which[0])] if isinstance(answer, dict) else answer

        return call
