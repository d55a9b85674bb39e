"""GPU types: by the name that NVML gives, never by a label."""

import os
import platform

import pynvml
import pytest

from vllm_qualify.engine.gpu import Fingerprint, detect, gpu_type_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("nvidia h200", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell", "rtx-pro-6000-blackwell"),
        ("Tesla T4", "tesla-t4"),
        ("NVIDIA H20", "h20"),
    ],
)
def test_the_type_of_a_product(name: str, expected: str) -> None:
    assert gpu_type_of(name) == expected


class Nvml:
    """NVML on a machine with `count` GPUs of one kind."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.is_open = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(pynvml, "nvmlInit", lambda: setattr(self, "is_open", True))
        patch.setattr(pynvml, "nvmlShutdown", lambda: setattr(self, "is_open", False))
        patch.setattr(pynvml, "nvmlDeviceGetCount", lambda: self.count)
        patch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        patch.setattr(pynvml, "nvmlDeviceGetName", lambda _: "NVIDIA H200")
        patch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda _: (9, 0))
        patch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda _: pynvml.c_nvmlMemory_t(total=150_754_820_096))
        patch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "570.86.15")


def test_the_fingerprint_of_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(count=8)
    nvml.install(monkeypatch)
    assert detect() == Fingerprint(
        gpu_type="h200",
        name="NVIDIA H200",
        count=8,
        memory_mib=143_771,
        compute_capability="9.0",
        driver="570.86.15",
    )
    assert not nvml.is_open


def test_a_gpu_machine_is_a_cpu_machine_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(count=8).install(monkeypatch)
    assert detect("cpu").gpu_type == "cpu"
    assert detect("h200").gpu_type == "h200"
    assert detect("h100").gpu_type == "h200"


def test_a_driver_without_a_gpu_is_a_cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(count=0)
    nvml.install(monkeypatch)
    assert detect().gpu_type == "cpu"
    assert not nvml.is_open


def test_a_machine_without_a_driver_is_a_cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    found = detect()
    assert found.gpu_type == "cpu"
    assert found.name.strip()
    assert found.count == len(os.sched_getaffinity(0))
    assert found.memory_mib > 256
    assert found.compute_capability is None
    assert found.driver is None
    if platform.machine() == "x86_64":
        assert set(found.features) <= {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}


def has_nvidia() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@pytest.mark.skipif(has_nvidia(), reason="this machine has an NVIDIA driver")
def test_this_machine_is_a_cpu_machine_and_the_same_each_time() -> None:
    assert detect().gpu_type == "cpu"
    assert detect() == detect()
