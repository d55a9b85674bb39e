"""The hardware of a machine as a fingerprint, which every measurement has: the devices of one GPU type, or a CPU."""

import os
import platform
import re
from collections import defaultdict
from pathlib import Path

from vllm_qualify.engine.gpu_products import FormFactor, form_factor_of
from vllm_qualify.engine.gpu_reading import LEAST_DRIVER, Gpu, Reading, read_nvml
from vllm_qualify.errors import HostError
from vllm_qualify.recipe.values import Frozen

# CUDA's own variable for which devices a process may use.
VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon")


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
    isolated: bool = False
    """Whether such code was kept from other processes, their memory and terminals, and from other files' modes: by a container,
    or by namespaces and a filter of system calls. It is not compared."""

    @property
    def id(self) -> str:
        """One line of text, the same for two machines exactly if their measurements may be compared.

        For GPUs: name, form factor, memory of one device, compute capability and the exact driver, since another driver
        needs a new qualification. Their number is not part of it: a cell uses as many as its arguments say.

        For a CPU: name, cores, memory and features, since an engine uses all of them. The memory is in whole GiB, since
        the part that the kernel keeps changes from one start to the next.
        """
        if self.gpu_type == "cpu":
            parts = [f"cores: {self.count}", f"{round(self.memory_mib / 1024)} GiB", *self.features]
        else:
            capability = f"compute capability {self.compute_capability}"
            form_factor = self.form_factor or "form factor unknown"
            parts = [form_factor, f"{self.memory_mib} MiB", capability, f"driver {self.driver}"]
        return " · ".join([self.name, *parts])


def detect(wanted: str | None = None) -> Fingerprint:
    """The fingerprint of this machine from NVML, for the GPUs that the caller lets it use. Any machine can be read as `cpu`.

    Raises HostError if NVML does not report the GPUs, CUDA_VISIBLE_DEVICES names another, or they make no fingerprint.
    """
    reading = None if wanted == "cpu" else read_nvml()
    return fingerprint_of(reading and visible_devices(reading, os.environ.get(VISIBLE)), wanted)


def visible_devices(reading: Reading, chosen: str | None) -> Reading | None:
    """The devices that CUDA_VISIBLE_DEVICES names, by index or by the beginning of a UUID; all if it is not set.

    Indices are those of the PCI bus, as `nvidia-smi` counts. None if the variable is empty: CUDA sees no GPU then. Raises
    HostError if it names a device that is not there, a device twice, or a slice of a GPU.
    """
    if chosen is None:
        return reading
    gpus: list[Gpu] = []
    for name in filter(None, map(str.strip, chosen.split(","))):
        named = [gpu for gpu in reading.gpus if str(gpu.index) == name or (name[:4] == "GPU-" and gpu.uuid.startswith(name))]
        if len(named) != 1:
            there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in reading.gpus)
            problem = f"{VISIBLE} names {name!r}, which is not a GPU of this machine"
            raise HostError(problem, f"name some of these: {there}", "check")
        gpus += named
    if len({gpu.index for gpu in gpus}) < len(gpus):
        raise HostError(f"{VISIBLE}={chosen} names a GPU twice", "name each GPU once", "check")
    return reading.model_copy(update={"gpus": gpus}) if gpus else None


def fingerprint_of(reading: Reading | None, wanted: str | None = None) -> Fingerprint:
    """The fingerprint of the wanted GPU type; without a reading, that of this CPU.

    If the machine has only one GPU type, that one is taken, even if another type or none is wanted. Raises HostError if there
    are several types and none of them is wanted, several models of the type, or a device in MIG mode.
    """
    if reading is None or wanted == "cpu":
        return _cpu_fingerprint()
    gpus = _choose_type(reading, wanted)
    _check_comparable(gpus)
    first = gpus[0]
    return Fingerprint(
        gpu_type=first.gpu_type,
        name=first.name,
        form_factor=form_factor_of(first.name),
        count=len(gpus),
        memory_mib=first.memory_mib,
        compute_capability=first.compute_capability,
        driver=reading.driver,
        devices=[gpu.index for gpu in gpus],
    )


def check_driver(fingerprint: Fingerprint) -> None:
    """Raises HostError if the NVIDIA driver is older than LEAST_DRIVER, or unknown; a CPU needs none."""
    branch = re.match(r"[0-9]+", fingerprint.driver or "")
    if fingerprint.gpu_type != "cpu" and (branch is None or int(branch.group()) < LEAST_DRIVER):
        problem = f"the NVIDIA driver is {fingerprint.driver or 'unknown'}, and vLLM's images need {LEAST_DRIVER} or later"
        remedy = f"install a data-center driver of branch R{LEAST_DRIVER} or later on this host, and restart it"
        raise HostError(problem, remedy, "check")


def _choose_type(reading: Reading, wanted: str | None) -> list[Gpu]:
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


def _check_comparable(gpus: list[Gpu]) -> None:
    """Raises HostError if devices of one type are of several models, or one is cut into slices."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for gpu in gpus:
        kinds[gpu.kind].append(gpu.index)
    if len(kinds) > 1:
        there = "; ".join(f"{kind}: device {', '.join(map(str, indices))}" for kind, indices in kinds.items())
        problem = f"this machine has several models of {gpus[0].gpu_type} ({there}), whose measurements cannot be compared"
        remedy = "run where only devices of one of the models can be seen, like a container that is given no others"
        raise HostError(problem, remedy, "check")
    if sliced := [str(gpu.index) for gpu in gpus if gpu.mig]:
        problem = f"MIG mode is on at device {', '.join(sliced)} ({gpus[0].name}), and a slice is not a whole GPU"
        remedy = f"turn it off with `nvidia-smi -i {','.join(sliced)} -mig 0`, or run on a host without MIG"
        raise HostError(problem, remedy, "check")


def _cpu_fingerprint() -> Fingerprint:
    path = Path("/proc/cpuinfo")
    pairs = (line.partition(":") for line in (path.read_text().splitlines() if path.exists() else ()))
    about = {name.strip(): value.strip() for name, _, value in pairs}
    flags = about.get("flags", about.get("Features", "")).split()
    return Fingerprint(
        gpu_type="cpu",
        name=about.get("model name", platform.processor() or platform.machine()),
        count=len(os.sched_getaffinity(0)),
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        features=[flag for flag in _CPU_FLAGS if flag in flags],
    )
