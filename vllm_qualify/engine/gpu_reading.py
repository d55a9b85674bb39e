"""What NVML or nvidia-smi reports about every device of a machine."""

import csv
import re
from typing import Annotated, Literal, Self

import psutil
import pynvml
from pydantic import Field, ValidationError, model_validator

from vllm_qualify.engine.gpu_products import gpu_type_of, has_unified_memory
from vllm_qualify.errors import HostError
from vllm_qualify.recipe.values import Frozen

LEAST_DRIVER = 575
"""The oldest accepted branch of the NVIDIA driver. CUDA 12.9 needs 575.51.03 on Linux (CUDA Toolkit's release notes, table
"CUDA Toolkit and Corresponding Driver Versions"). CUDA 13 needs a newer one: an image may demand more than this."""

_COLUMNS = ("index", "name", "uuid", "compute_cap", "memory.total", "driver_version", "mig.mode.current")
NVIDIA_SMI_QUERY = [f"--query-gpu={','.join(_COLUMNS)}", "--format=csv,noheader,nounits"]
"""nvidia-smi's arguments; `parse_nvidia_smi` reads its standard output."""
_NO_DEVICES = "No devices were found"
# A product without MIG has no mode: newer drivers write [N/A], older ones [Not Supported].
_NO_MEMORY = ("[N/A]", "[Not Supported]")
_MIG_MODES = {"Enabled": True, "Disabled": False, "[N/A]": False, "[Not Supported]": False}


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


def read_nvml() -> Reading | None:
    """What NVML reports about this machine, or None if it has no NVIDIA driver or no NVIDIA GPU.

    Raises HostError if there is a driver, but it does not report all that a reading needs.
    """
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise _unreadable_nvml(error) from error
    try:
        gpus = [_nvml_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return Reading(driver=pynvml.nvmlSystemGetDriverVersion(), gpus=gpus, source="nvml") if gpus else None
    except (pynvml.NVMLError, ValidationError) as error:
        raise _unreadable_nvml(error) from error
    finally:
        pynvml.nvmlShutdown()


def parse_nvidia_smi(text: str) -> Reading | None:
    """Parse nvidia-smi's answer to NVIDIA_SMI_QUERY. None if it found a driver but no GPU.

    Raises HostError if it did not write a full row for each device, but an error, [N/A] for a number, or nothing.
    """
    if text.strip() == _NO_DEVICES:
        return None
    try:
        rows = []
        for cells in filter(None, csv.reader(text.splitlines(), strict=True)):
            if len(cells) != len(_COLUMNS):
                # An error message is not a row.
                raise ValueError(f"it wrote '{','.join(cells)}'")
            rows.append(dict(zip(_COLUMNS, map(str.strip, cells), strict=True)))
        drivers = sorted({row["driver_version"] for row in rows})
        if len(drivers) != 1:
            raise ValueError(f"it reported several drivers: {', '.join(drivers)}" if drivers else "it wrote nothing")
        return Reading(driver=drivers[0], gpus=[_parse_gpu(row) for row in rows], source="nvidia-smi")
    except (ValueError, csv.Error) as error:
        command = f"nvidia-smi {' '.join(NVIDIA_SMI_QUERY)}"
        remedy = f"run `{command}` there and mend what it says; driver {LEAST_DRIVER} knows all of it"
        problem = f"nvidia-smi did not report this machine's GPUs: {_reason_of(error)}"
        raise HostError(problem, remedy, "check", text.splitlines()[-10:]) from error


def _nvml_gpu(index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device)
    try:
        mode, _after_restart = pynvml.nvmlDeviceGetMigMode(device)
    except pynvml.NVMLError_NotSupported:
        mode = None
    name = pynvml.nvmlDeviceGetName(device)
    return Gpu(
        index=index,
        name=name,
        uuid=pynvml.nvmlDeviceGetUUID(device),
        compute_capability=f"{major}.{minor}",
        memory_mib=_nvml_memory_mib(device, name),
        mig=mode == pynvml.NVML_DEVICE_MIG_ENABLE,
    )


def _nvml_memory_mib(device: object, name: str) -> int:
    try:
        # nvidia-smi writes this number in whole MiB.
        total: int = pynvml.nvmlDeviceGetMemoryInfo(device).total
    except pynvml.NVMLError_NotSupported:
        if not has_unified_memory(name):
            raise
        return _read_own_memory_mib()
    return total // 2**20


def _read_own_memory_mib() -> int:
    """The machine's memory in MiB, in whole GiB: the part that the kernel keeps changes from one start to the next."""
    return round(psutil.virtual_memory().total / 2**30) * 1024


def _unreadable_nvml(error: Exception) -> HostError:
    remedy = "mend what `nvidia-smi` says on this host (after an update of the driver, restart it), or give --gpu-type cpu"
    return HostError(f"NVML did not report this machine's GPUs: {_reason_of(error)}", remedy, "check")


def _parse_gpu(row: dict[str, str]) -> Gpu:
    mig = row["mig.mode.current"]
    if mig not in _MIG_MODES:
        raise ValueError(f"mig.mode.current is '{mig}'")
    is_unified = row["memory.total"] in _NO_MEMORY and has_unified_memory(row["name"])
    return Gpu(
        index=_parse_whole(row, "index"),
        name=row["name"],
        uuid=row["uuid"],
        compute_capability=row["compute_cap"],
        memory_mib=_read_own_memory_mib() if is_unified else _parse_whole(row, "memory.total"),
        mig=_MIG_MODES[mig],
    )


def _parse_whole(row: dict[str, str], column: str) -> int:
    if not re.fullmatch(r"[0-9]+", row[column]):
        raise ValueError(f"{column} is '{row[column]}', and a whole number is needed")
    return int(row[column])


def _reason_of(error: Exception) -> str:
    """The reason on one line; pydantic's own text has several lines."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, at['loc'])) or 'all'} is {at['input']!r}: {at['msg']}" for at in error.errors())
    return str(error)
