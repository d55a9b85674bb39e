"""GPU types: by what NVML and nvidia-smi read, never by a label. captured_gpu has a real H200's answers (see its README)."""

import csv
import os
import platform
from typing import Any

import pynvml
import pytest

from tests.builders.gpus import CAPTURED, H200, REAL, SMI, Nvml
from vllm_qualify.engine.gpu import Fingerprint, check_driver, detect, fingerprint_of
from vllm_qualify.engine.gpu_products import form_factor_of, gpu_type_of
from vllm_qualify.engine.gpu_reading import LEAST_DRIVER, NVIDIA_SMI_QUERY, Reading, parse_nvidia_smi, read_nvml
from vllm_qualify.errors import HostError

PRODUCTS = [
    ("NVIDIA H100 80GB HBM3", "9.0", "h100", "SXM"),
    ("NVIDIA H100 PCIe", "9.0", "h100", "PCIe"),
    ("NVIDIA H100 NVL", "9.0", "h100", "NVL"),
    ("NVIDIA H100", "9.0", "h100", None),
    ("NVIDIA H200", "9.0", "h200", "SXM"),
    ("nvidia h200", "9.0", "h200", "SXM"),
    ("NVIDIA H200 NVL", "9.0", "h200", "NVL"),
    ("NVIDIA H20", "9.0", "h20", "SXM"),
    ("NVIDIA H20-3e", "9.0", "h20-3e", "SXM"),
    ("NVIDIA H20 NVL16", "9.0", "h20-nvl16", None),
    ("NVIDIA H800", "9.0", "h800", "SXM"),
    ("NVIDIA H800 PCIe", "9.0", "h800", "PCIe"),
    ("NVIDIA H800 NVL", "9.0", "h800", "NVL"),
    ("NVIDIA GH200 480GB", "9.0", "gh200", "superchip"),
    ("NVIDIA GH200 144G HBM3e", "9.0", "gh200", "superchip"),
    ("NVIDIA B200", "10.0", "b200", "SXM"),
    ("NVIDIA GB200", "10.0", "gb200", "superchip"),
    ("NVIDIA B300 SXM6 AC", "10.3", "b300", "SXM"),
    ("NVIDIA GB300", "10.3", "gb300", "superchip"),
    ("NVIDIA A100-SXM4-40GB", "8.0", "a100", "SXM"),
    ("NVIDIA A100-SXM4-80GB", "8.0", "a100", "SXM"),
    ("NVIDIA A100-SXM-64GB", "8.0", "a100", "SXM"),
    ("NVIDIA A100 80GB PCIe", "8.0", "a100", "PCIe"),
    ("NVIDIA A100-PCIE-40GB", "8.0", "a100", "PCIe"),
    ("NVIDIA A100-PG509-200", "8.0", "a100", None),
    ("NVIDIA A800-SXM4-80GB", "8.0", "a800", "SXM"),
    ("NVIDIA L40S", "8.9", "l40s", "PCIe"),
    ("NVIDIA L4", "8.9", "l4", "PCIe"),
    ("Tesla T4", "7.5", "tesla-t4", "PCIe"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", "rtx-pro-6000-blackwell-server-edition", "PCIe"),
    ("NVIDIA GeForce RTX 5090", "12.0", "geforce-rtx-5090", None),
    ("Quadro RTX 6000/8000", "7.5", "quadro-rtx-6000-8000", None),
    # a name alone makes no type
    ("NVIDIA H100 80GB HBM3", "8.0", "h100-80gb-hbm3", "SXM"),
    ("NVIDIA B300 SXM6 AC", "10.0", "b300-sxm6-ac", "SXM"),
    ("NVIDIA H200", "8.0", "h200-sm80", "SXM"),
    ("NVIDIA B200", "10.3", "b200-sm103", "SXM"),
    ("GRID A100-40C", "8.0", "grid-a100-40c", None),
    ("NVIDIA A100-1-5C", "8.0", "a100-1-5c", None),
]


@pytest.mark.parametrize(("name", "capability", "gpu_type", "form_factor"), PRODUCTS)
def test_the_type_and_the_form_factor_of_a_product(name: str, capability: str, gpu_type: str, form_factor: str | None) -> None:
    assert (gpu_type_of(name, capability), form_factor_of(name)) == (gpu_type, form_factor)


def nvml_device(**changes: object) -> dict[str, Any]:
    """The real device, with some of what NVML's functions return changed."""
    return {**REAL["devices"][0], **{f"nvmlDeviceGet{name}": value for name, value in changes.items()}}


def smi(**changes: str) -> str:
    """nvidia-smi's real row with some columns changed; `__` in a keyword stands for a dot."""
    columns = NVIDIA_SMI_QUERY[0].removeprefix("--query-gpu=").split(",")
    row = dict(zip(columns, SMI.strip().split(", "), strict=True))
    named = {name.replace("__", "."): value for name, value in changes.items()}
    assert set(named) <= set(row)
    return ", ".join((row | named).values()) + "\n"


def reading(*devices: tuple[str, str, str]) -> Reading:
    """Of a machine with devices of these names, compute capabilities and memories in MiB."""
    rows = (
        smi(index=str(index), name=name, compute_cap=capability, memory__total=memory)
        for index, (name, capability, memory) in enumerate(devices)
    )
    read_devices = parse_nvidia_smi("".join(rows))
    assert read_devices is not None
    return read_devices


A_H200 = ("NVIDIA H200", "9.0", "143771")
A_B200 = ("NVIDIA B200", "10.0", "183359")


def test_both_sources_tell_the_same_of_the_real_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch)
    from_nvml, from_smi = read_nvml(), parse_nvidia_smi(SMI)
    assert from_nvml is not None
    assert from_smi is not None
    assert (from_nvml.source, from_smi.source) == ("nvml", "nvidia-smi")
    assert from_nvml == from_smi.model_copy(update={"source": "nvml"})
    assert detect() == fingerprint_of(from_smi) == H200
    assert not nvml.is_open


def test_the_query_is_of_the_columns_that_were_read() -> None:
    """Else the captured row would prove nothing about the query."""
    columns = NVIDIA_SMI_QUERY[0].removeprefix("--query-gpu=").split(",")
    assert columns == ["index", "name", "uuid", "compute_cap", "memory.total", "driver_version", "mig.mode.current"]
    assert NVIDIA_SMI_QUERY[1:] == ["--format=csv,noheader,nounits"]
    assert len(next(csv.reader([SMI]))) == len(columns)


def test_a_product_without_mig_and_mig_that_is_only_to_come_are_whole_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    to_come = [pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE]
    for answer in (pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), to_come):
        Nvml(monkeypatch, [nvml_device(MigMode=answer)])
        assert detect() == H200
    for mode in ("[N/A]", "[Not Supported]"):
        assert fingerprint_of(parse_nvidia_smi(smi(mig__mode__current=mode))) == H200


def test_a_product_that_has_the_machines_memory_is_read_so_by_both_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """GB10 and Thor: snowflakedb/ArcticTraining#345, XuehaiPan/nvitop#208, leptonai/gpud#1170."""
    unified = nvml_device(Name="NVIDIA GB10", CudaComputeCapability=[12, 1])
    unified["nvmlDeviceGetMemoryInfo"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    Nvml(monkeypatch, [unified])
    from_nvml = detect()
    from_smi = fingerprint_of(parse_nvidia_smi(smi(name="NVIDIA GB10", compute_cap="12.1", memory__total="[N/A]")))
    assert from_nvml == from_smi
    assert (from_nvml.gpu_type, from_nvml.form_factor) == ("gb10", "superchip")
    assert from_nvml.memory_mib == fingerprint_of(None).memory_mib // 1024 * 1024 or from_nvml.memory_mib % 1024 == 0


@pytest.mark.parametrize(
    "broken",
    [
        nvml_device(MemoryInfo=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)),
        nvml_device(Name=pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)),
        nvml_device(MemoryInfo={"total": 0}),
        nvml_device(Name=""),
    ],
)
def test_a_device_that_nvml_cannot_read_is_the_hosts_error(broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch, [broken])
    with pytest.raises(HostError, match="NVML did not report") as caught:
        detect()
    assert caught.value.place == "check"
    assert "\n" not in caught.value.problem
    assert not nvml.is_open


def failing_init(patch: pytest.MonkeyPatch, code: int) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(code)

    patch.setattr(pynvml, "nvmlInit", fail)


def test_a_broken_driver_makes_no_cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a GPU host would measure its CPU, and say so to nobody."""
    failing_init(monkeypatch, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(HostError, match="NVML did not report"):
        detect()
    assert detect("cpu").gpu_type == "cpu"


def test_a_gpu_machine_is_a_cpu_machine_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(monkeypatch)
    assert (detect("cpu").gpu_type, detect("cpu").devices) == ("cpu", [])
    assert fingerprint_of(reading(A_H200), "cpu").gpu_type == "cpu"
    assert detect("h200") == H200
    # the plan says then what was wanted and what is there
    assert detect("h100") == H200


FOUR = [nvml_device(UUID=f"GPU-{index}f6b5afc-5dff-2e56-7bcb-685dbed05b52") for index in range(4)]


@pytest.mark.parametrize(
    ("chosen", "devices"),
    [("2", [2]), ("3, 1", [1, 3]), ("GPU-3f6b5afc-5dff-2e56-7bcb-685dbed05b52,0", [0, 3]), ("GPU-1f6b", [1]), ("", [])],
)
def test_a_run_has_all_gpus_or_those_that_its_caller_lets_it_use(
    chosen: str, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server on GPU 2 whose clocks and power were read from GPU 0 would be judged by another run's."""
    Nvml(monkeypatch, FOUR)
    assert detect().devices == [0, 1, 2, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    machine = detect()
    assert (machine.devices, machine.gpu_type) == (devices, "h200" if devices else "cpu")


NO_GPU = ("is not a GPU of this machine", r"0 \(GPU-0f6b5afc")


@pytest.mark.parametrize(
    ("chosen", "message", "remedy"),
    [
        *((chosen, *NO_GPU) for chosen in ("4", "0,-1", "GPU-", "MIG-1f6b5afc", "all")),
        ("1,GPU-1f6b", "names a GPU twice", "once"),
    ],
)
def test_a_choice_that_cannot_be_met_is_named(chosen: str, message: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(monkeypatch, FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    with pytest.raises(HostError, match=f"{message}(?s:.)*{remedy}"):
        detect()


def test_a_driver_without_a_gpu_is_a_cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch, [])
    assert detect().gpu_type == "cpu"
    assert not nvml.is_open
    nothing = parse_nvidia_smi((CAPTURED / "no-devices.txt").read_text())
    assert nothing is None
    assert fingerprint_of(nothing).gpu_type == "cpu"


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_machine_without_a_driver_is_a_cpu_machine(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_init(monkeypatch, code)
    assert read_nvml() is None
    machine = detect()
    told = machine.model_dump(include={"name", "memory_mib", "features"})
    assert machine == Fingerprint(gpu_type="cpu", count=len(os.sched_getaffinity(0)), **told)
    assert machine.name.strip()
    assert machine.memory_mib > 256
    if platform.machine() == "x86_64":
        assert set(machine.features) <= {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}


UNREADABLE = {
    "an error": ((CAPTURED / "unknown-field.txt").read_text(), 'Field "nope" is not a valid field'),
    "nothing": ("", "it wrote nothing"),
    "a blank line": ("\n", "it wrote nothing"),
    "no driver to talk to": ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "has failed"),
    "a header": (",".join(NVIDIA_SMI_QUERY[0].split("=")[1].split(",")) + "\n" + SMI, "index"),
    "units": (smi(memory__total="143771 MiB"), "memory.total is '143771 MiB'"),
    "no memory": (smi(memory__total="[N/A]"), r"memory.total is '\[N/A\]'"),
    "no right to see it": (smi(memory__total="[Insufficient Permissions]"), "memory.total"),
    "no memory at all": (smi(memory__total="0"), "memory_mib is 0"),
    "no index": (smi(index="[Not Supported]"), "index is"),
    "a negative index": (smi(index="-1"), "index is '-1'"),
    "no capability": (smi(compute_cap="[N/A]"), "compute_capability is"),
    "half a capability": (smi(compute_cap="9"), "compute_capability is '9'"),
    "no driver": (smi(driver_version="[N/A]"), "driver is"),
    "no name": (smi(name=""), "name is ''"),
    "no UUID": (smi(uuid="[N/A]"), "uuid is"),
    "an unknown MIG mode": (smi(mig__mode__current="Perhaps"), "mig.mode.current is 'Perhaps'"),
    "a cell less": (SMI.replace(", Disabled", ""), "it wrote"),
    "a cell more": (SMI.replace("Disabled", "Disabled, 700.00"), "it wrote"),
    "a device twice": (SMI + SMI, "two devices have the same index"),
    "two drivers": (SMI + smi(index="1", driver_version="575.57.08"), "several drivers: 575.57.08, 580.159.04"),
    "a row and an error": (SMI + "Unable to determine the device handle for GPU1\n", "Unable to determine"),
}


@pytest.mark.parametrize(("text", "message"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_nvidia_smi_does_not_tell_is_not_guessed(text: str, message: str) -> None:
    with pytest.raises(HostError, match=message) as caught:
        parse_nvidia_smi(text)
    assert caught.value.place == "check"
    assert NVIDIA_SMI_QUERY[0] in caught.value.remedy
    assert list(caught.value.log_tail) == text.splitlines()
    assert "\n" not in caught.value.problem


def test_all_devices_of_a_type_are_its_devices_in_the_order_of_their_indices() -> None:
    machine = fingerprint_of(reading(*[A_H200] * 8))
    assert machine == H200.model_copy(update={"count": 8, "devices": list(range(8))})
    assert fingerprint_of(parse_nvidia_smi(smi(index="3") + smi(index="1"))).devices == [1, 3]


def test_a_mixed_host_gives_the_devices_of_the_wanted_type() -> None:
    mixed = reading(A_H200, A_B200, A_H200, A_B200, A_B200)
    hopper, blackwell = fingerprint_of(mixed, "h200"), fingerprint_of(mixed, "b200")
    assert (hopper.gpu_type, hopper.count, hopper.devices) == ("h200", 2, [0, 2])
    assert (blackwell.gpu_type, blackwell.count, blackwell.devices) == ("b200", 3, [1, 3, 4])
    assert (blackwell.name, blackwell.memory_mib, blackwell.compute_capability) == ("NVIDIA B200", 183_359, "10.0")


@pytest.mark.parametrize("wanted", [None, "h100"])
def test_a_mixed_host_must_be_given_its_type(wanted: str | None) -> None:
    with pytest.raises(HostError) as caught:
        fingerprint_of(reading(A_H200, A_B200, A_H200), wanted)
    assert "h200: 2 x NVIDIA H200; b200: 1 x NVIDIA B200" in caught.value.problem
    assert ("none is h100" in caught.value.problem) == (wanted == "h100")
    assert "--gpu-type" in caught.value.remedy
    assert "h200, b200" in caught.value.remedy
    assert caught.value.place == "check"


@pytest.mark.parametrize(
    "other", [("NVIDIA H100 PCIe", "9.0", "81559"), ("NVIDIA H100 80GB HBM3", "9.0", "65247")], ids=["form factor", "memory"]
)
def test_two_models_of_one_type_do_not_mix(other: tuple[str, str, str]) -> None:
    with pytest.raises(HostError, match="several models of h100") as caught:
        fingerprint_of(reading(("NVIDIA H100 80GB HBM3", "9.0", "81559"), other), "h100")
    assert other[0] in caught.value.problem
    assert other[2] in caught.value.problem


def test_a_slice_is_not_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(monkeypatch, [nvml_device(), nvml_device(MigMode=[pynvml.NVML_DEVICE_MIG_ENABLE, 0])])
    with pytest.raises(HostError, match="MIG mode is on at device 1") as caught:
        detect("h200")
    assert "-i 1 -mig 0" in caught.value.remedy
    sliced = smi(index="1", name="NVIDIA B200", compute_cap="10.0", mig__mode__current="Enabled")
    devices = parse_nvidia_smi(SMI + sliced)
    with pytest.raises(HostError, match="MIG mode is on at device 1"):
        fingerprint_of(devices, "b200")
    assert fingerprint_of(devices, "h200") == H200, "a slice of another type does not matter"


@pytest.mark.parametrize("driver", ["574.99.99", "570.124.06", "99.1", "not a version", None])
def test_an_older_driver_is_refused(driver: str | None) -> None:
    with pytest.raises(HostError, match=driver or "unknown") as caught:
        check_driver(H200.model_copy(update={"driver": driver}))
    assert str(LEAST_DRIVER) in caught.value.problem
    assert str(LEAST_DRIVER) in caught.value.remedy
    assert caught.value.place == "check"


def test_a_driver_that_is_new_enough_is_taken_and_a_cpu_needs_none() -> None:
    assert LEAST_DRIVER == 575
    for driver in ("575.51.03", "580.159.04", "1000.1"):
        check_driver(H200.model_copy(update={"driver": driver}))
    check_driver(detect("cpu"))


CPU = Fingerprint(gpu_type="cpu", name="Some CPU", count=8, memory_mib=32_060, features=["avx2", "avx512f"])


def test_the_id_is_one_readable_line() -> None:
    assert H200.id == "NVIDIA H200 · SXM · 143771 MiB · compute capability 9.0 · driver 580.159.04"
    assert CPU.id == "Some CPU · cores: 8 · 31 GiB · avx2 · avx512f"


@pytest.mark.parametrize(
    ("machine", "changes", "comparable"),
    [
        (H200, {"count": 8}, True),
        (H200, {"devices": [3]}, True),
        (H200, {"name": "NVIDIA H200 NVL"}, False),
        (H200, {"form_factor": "NVL"}, False),
        (H200, {"form_factor": None}, False),
        (H200, {"memory_mib": 143_770}, False),
        (H200, {"compute_capability": "10.0"}, False),
        (H200, {"driver": "580.159.03"}, False),
        (CPU, {"memory_mib": 32_050}, True),
        (CPU, {"name": "Another CPU"}, False),
        (CPU, {"count": 4}, False),
        (CPU, {"memory_mib": 16_030}, False),
        (CPU, {"features": ["avx2", "avx512f", "amx_bf16"]}, False),
    ],
)
def test_what_makes_measurements_comparable(machine: Fingerprint, changes: dict[str, object], comparable: bool) -> None:
    assert (machine.model_copy(update=changes).id == machine.id) == comparable
