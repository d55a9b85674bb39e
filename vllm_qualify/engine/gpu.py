"""The GPU type of a machine, as NVML or nvidia-smi reports it. A machine without an NVIDIA GPU is of type `cpu`.

A reading is what one source reports about every device. Its devices of one GPU type make a fingerprint, which every measurement
has.
"""

import csv
import os
import platform
import re
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Literal, Self

import pynvml
from pydantic import Field, ValidationError, model_validator

from vllm_qualify.errors import HostError
from vllm_qualify.recipe.gpu_types import GPU_TYPES, SUPERCHIPS
from vllm_qualify.recipe.values import Frozen

FormFactor = Literal["SXM", "PCIe", "NVL", "superchip"]

LEAST_DRIVER = 575
"""The oldest accepted branch of the NVIDIA driver. CUDA 12.9 needs 575.51.03 on Linux (CUDA Toolkit's release notes, table
"CUDA Toolkit and Corresponding Driver Versions"). CUDA 13 needs a newer one: an image may demand more than this."""

_COLUMNS = ("index", "name", "uuid", "compute_cap", "memory.total", "driver_version", "mig.mode.current")
NVIDIA_SMI_QUERY = [f"--query-gpu={','.join(_COLUMNS)}", "--format=csv,noheader,nounits"]
"""nvidia-smi's arguments; `parse_nvidia_smi` reads its standard output."""
_NO_DEVICES = "No devices were found"
# A product without MIG has no mode: newer drivers write [N/A], older ones [Not Supported].
_MIG_MODES = {"Enabled": True, "Disabled": False, "[N/A]": False, "[Not Supported]": False}

# The word in a product's name that gives its type, and the compute capability that every such product has.
_CAPABILITIES = {each.name.upper(): each.compute_capability for each in GPU_TYPES if each.compute_capability}
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
# CUDA's own variable for which devices a process may use.
VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon")


class Gpu(Frozen):
    """One device as read. The index follows the PCI bus; CUDA's own index does so only if CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    index: Annotated[int, Field(strict=True, ge=0)]
    name: Annotated[str, Field(min_length=1)]
    uuid: Annotated[str, Field(pattern=r"^GPU-[0-9A-Fa-f-]+$")]
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+$")]
    memory_mib: Annotated[int, Field(strict=True, gt=0)]
    mig: bool

    @property
    def gpu_type(self) -> str:
        return gpu_type_of(self.name, self.compute_capability)

    @property
    def kind(self) -> str:
        """One line of text, the same for two devices exactly if they are the same model."""
        return f"{self.name}, compute capability {self.compute_capability}, {self.memory_mib} MiB"


class Reading(Frozen):
    """What one source reports about a machine's devices. All sources report the same about one machine."""

    driver: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)+$")]
    gpus: Annotated[list[Gpu], Field(min_length=1)]
    source: Literal["nvml", "nvidia-smi"]

    @model_validator(mode="after")
    def _indices_differ(self) -> Self:
        if len({gpu.index for gpu in self.gpus}) < len(self.gpus):
            raise ValueError("two devices have the same index")
        return self


class Fingerprint(Frozen):
    """The hardware of a measurement. Measurements are compared only if their fingerprints have the same `id`."""

    gpu_type: str
    name: str
    form_factor: FormFactor | None = None
    count: int
    memory_mib: int
    compute_capability: str | None = None
    driver: str | None = None
    features: list[str] = []
    devices: list[int] = []
    """The indices of the devices of this type on their machine, in order. They are not compared."""
    confined: bool = False
    """Whether code of a model was kept from this machine's keys: by a container or by Landlock. It is not compared."""

    @property
    def id(self) -> str:
        """One line of text, the same for two machines exactly if their measurements may be compared.

        For GPUs: name, form factor, memory of one device, compute capability and the exact driver, since another driver
        needs a new qualification. Their number is not part of it: a cell uses as many as its arguments say.

        For a CPU: name, cores, memory and features, since an engine uses all of them. The memory is in whole GiB, since
        the part that the kernel keeps changes from one start to the next.
        """
        return " · ".join(self._cpu_parts() if self.gpu_type == "cpu" else self._gpu_parts())

    def _cpu_parts(self) -> list[str]:
        return [self.name, f"cores: {self.count}", f"{round(self.memory_mib / 1024)} GiB", *self.features]

    def _gpu_parts(self) -> list[str]:
        return [
            self.name,
            self.form_factor or "form factor unknown",
            f"{self.memory_mib} MiB",
            f"compute capability {self.compute_capability}",
            f"driver {self.driver}",
        ]


def detect(wanted: str | None = None) -> Fingerprint:
    """The fingerprint of this machine from NVML, for the GPUs that the caller lets it use. Any machine can be read as `cpu`.

    Raises as the functions that it calls.
    """
    reading = None if wanted == "cpu" else read_nvml()
    return fingerprint_of(reading and visible(reading, os.environ.get(VISIBLE)), wanted)


def visible(reading: Reading, chosen: str | None) -> Reading | None:
    """The devices that CUDA_VISIBLE_DEVICES names, by index or by the beginning of a UUID; all if it is not set.

    Indices are those of the PCI bus, as `nvidia-smi` counts. None if the variable is empty: CUDA sees no GPU then.

    Raises:
        HostError: it names a device that is not there, a device twice, or a slice of a GPU.
    """
    if chosen is None:
        return reading
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    gpus = [_named(reading, name) for name in names]
    if len({gpu.index for gpu in gpus}) < len(gpus):
        raise HostError(f"{VISIBLE}={chosen} names a GPU twice", "name each GPU once", "check")
    return reading.model_copy(update={"gpus": gpus}) if gpus else None


def _named(reading: Reading, name: str) -> Gpu:
    named = [gpu for gpu in reading.gpus if str(gpu.index) == name or (name.startswith("GPU-") and gpu.uuid.startswith(name))]
    if len(named) != 1:
        there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in reading.gpus)
        raise HostError(
            f"{VISIBLE} names {name!r}, which is not a GPU of this machine", f"name some of these: {there}", "check"
        )
    return named[0]


def read_nvml() -> Reading | None:
    """What NVML reports about this machine, or None if it has no NVIDIA driver or no NVIDIA GPU.

    Raises:
        HostError: there is a driver, but it does not report all that a reading needs.
    """
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise _unreadable_nvml(error) from error
    try:
        return _nvml_reading() if pynvml.nvmlDeviceGetCount() else None
    except (pynvml.NVMLError, ValidationError) as error:
        raise _unreadable_nvml(error) from error
    finally:
        pynvml.nvmlShutdown()


def parse_nvidia_smi(text: str) -> Reading | None:
    """Parse nvidia-smi's answer to NVIDIA_SMI_QUERY. None if it found a driver but no GPU.

    Raises:
        HostError: it did not write a full row for each device, but an error, [N/A] for a number, or nothing.
    """
    if text.strip() == _NO_DEVICES:
        return None
    try:
        rows = [_row(cells) for cells in csv.reader(text.splitlines(), strict=True) if cells]
        return Reading(driver=_one_driver(rows), gpus=[_gpu(row) for row in rows], source="nvidia-smi")
    except (ValueError, csv.Error) as error:
        raise HostError(
            f"nvidia-smi did not report this machine's GPUs: {_reason(error)}",
            f"run `nvidia-smi {' '.join(NVIDIA_SMI_QUERY)}` there and mend what it says; driver {LEAST_DRIVER} knows all of it",
            "check",
            text.splitlines()[-10:],
        ) from error


def fingerprint_of(reading: Reading | None, wanted: str | None = None) -> Fingerprint:
    """The fingerprint of the wanted GPU type; without a reading, that of this CPU.

    If the machine has only one GPU type, that one is taken, even if another type or none is wanted.

    Raises:
        HostError: there are several types and none of them is wanted, several models of the type, or a device in MIG mode.
    """
    if reading is None or wanted == "cpu":
        return _cpu()
    gpus = _of_one_type(reading, wanted)
    _check_one_model(gpus)
    _check_whole(gpus)
    return Fingerprint(
        gpu_type=gpus[0].gpu_type,
        name=gpus[0].name,
        form_factor=form_factor_of(gpus[0].name),
        count=len(gpus),
        memory_mib=gpus[0].memory_mib,
        compute_capability=gpus[0].compute_capability,
        driver=reading.driver,
        devices=[gpu.index for gpu in gpus],
    )


def check_driver(fingerprint: Fingerprint) -> None:
    """Raises HostError if the NVIDIA driver is older than LEAST_DRIVER, or unknown; a CPU needs none."""
    if fingerprint.gpu_type == "cpu":
        return
    branch = re.match(r"[0-9]+", fingerprint.driver or "")
    if branch is None or int(branch.group()) < LEAST_DRIVER:
        raise HostError(
            f"the NVIDIA driver is {fingerprint.driver or 'unknown'}, and vLLM's images need {LEAST_DRIVER} or later",
            f"install a data-center driver of branch R{LEAST_DRIVER} or later on this host, and restart it",
            "check",
        )


def gpu_type_of(name: str, compute_capability: str) -> str:
    """`h200` for 'NVIDIA H200' of 9.0. Any other product keeps its own name, in lower case.

    A product also keeps its name if its compute capability is not the type's, or if it is a vGPU, which is a share of a GPU.
    """
    words = _words(name)
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


def form_factor_of(name: str) -> FormFactor | None:
    """The form factor of the product with this NVML name; None if neither the name nor the table shows it."""
    words = _words(name)
    if any(word.lower() in SUPERCHIPS for word in words):
        return "superchip"
    if any(re.fullmatch(r"SXM[0-9]*", word) for word in words):
        return "SXM"
    if "NVL" in words:
        return "NVL"
    return "PCIe" if "PCIE" in words else _FORM_FACTORS.get(" ".join(words))


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[A-Z0-9.]+", name.upper()) if word != "NVIDIA"]


def _of_one_type(reading: Reading, wanted: str | None) -> list[Gpu]:
    """The devices of one GPU type, in the order of their indices."""
    types: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in sorted(reading.gpus, key=lambda gpu: gpu.index):
        types[gpu.gpu_type].append(gpu)
    if wanted in types:
        return types[wanted]
    if len(types) > 1:
        there = "; ".join(f"{name}: {len(gpus)} x {gpus[0].name}" for name, gpus in types.items())
        problem = f"this machine has GPUs of several types ({there})" + (f", and none is {wanted}" if wanted else "")
        raise HostError(problem, f"give --gpu-type, one of {', '.join(types)}", "check")
    return next(iter(types.values()))


def _check_one_model(gpus: list[Gpu]) -> None:
    kinds: dict[str, list[int]] = defaultdict(list)
    for gpu in gpus:
        kinds[gpu.kind].append(gpu.index)
    if len(kinds) > 1:
        there = "; ".join(f"{kind}: device {_list(indices)}" for kind, indices in kinds.items())
        raise HostError(
            f"this machine has several models of {gpus[0].gpu_type} ({there}), whose measurements cannot be compared",
            "run where only devices of one of the models can be seen, like a container that is given no others",
            "check",
        )


def _check_whole(gpus: list[Gpu]) -> None:
    sliced = [gpu.index for gpu in gpus if gpu.mig]
    if sliced:
        raise HostError(
            f"MIG mode is on at device {_list(sliced)} ({gpus[0].name}), and a slice is not a whole GPU",
            f"turn it off with `nvidia-smi -i {','.join(map(str, sliced))} -mig 0`, or run on a host without MIG",
            "check",
        )


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _nvml_reading() -> Reading:
    gpus = [_nvml_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return Reading(driver=pynvml.nvmlSystemGetDriverVersion(), gpus=gpus, source="nvml")


def _nvml_gpu(index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device)
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(device),
        uuid=pynvml.nvmlDeviceGetUUID(device),
        compute_capability=f"{major}.{minor}",
        # nvidia-smi writes this number in whole MiB.
        memory_mib=pynvml.nvmlDeviceGetMemoryInfo(device).total // 2**20,
        mig=_nvml_mig(device),
    )


def _nvml_mig(device: object) -> bool:
    try:
        current, _after_restart = pynvml.nvmlDeviceGetMigMode(device)
    except pynvml.NVMLError_NotSupported:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _unreadable_nvml(error: Exception) -> HostError:
    remedy = "mend what `nvidia-smi` says on this host (after an update of the driver, restart it), or give --gpu-type cpu"
    return HostError(f"NVML did not report this machine's GPUs: {_reason(error)}", remedy, "check")


def _row(cells: list[str]) -> dict[str, str]:
    """A device's cells by column. Raises ValueError if there are more or fewer: an error message is not a row."""
    if len(cells) != len(_COLUMNS):
        raise ValueError(f"it wrote '{','.join(cells)}'")
    return {column: cell.strip() for column, cell in zip(_COLUMNS, cells, strict=True)}


def _one_driver(rows: list[dict[str, str]]) -> str:
    drivers = sorted({row["driver_version"] for row in rows})
    if len(drivers) != 1:
        raise ValueError(f"it reported several drivers: {', '.join(drivers)}" if drivers else "it wrote nothing")
    return drivers[0]


def _gpu(row: dict[str, str]) -> Gpu:
    mig = row["mig.mode.current"]
    if mig not in _MIG_MODES:
        raise ValueError(f"mig.mode.current is '{mig}'")
    return Gpu(
        index=_whole(row, "index"),
        name=row["name"],
        uuid=row["uuid"],
        compute_capability=row["compute_cap"],
        memory_mib=_whole(row, "memory.total"),
        mig=_MIG_MODES[mig],
    )


def _whole(row: dict[str, str], column: str) -> int:
    if not re.fullmatch(r"[0-9]+", row[column]):
        raise ValueError(f"{column} is '{row[column]}', and a whole number is needed")
    return int(row[column])


def _reason(error: Exception) -> str:
    """The reason on one line; pydantic's own text has several lines."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, at['loc'])) or 'all'} is {at['input']!r}: {at['msg']}" for at in error.errors())
    return str(error)


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
