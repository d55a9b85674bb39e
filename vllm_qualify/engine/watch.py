"""Samples of the server and of the machine during a run, each taken by a thread and written line by line.

A line of "server-metrics.jsonl" is a `Scrape`, a line of "host.jsonl" is a `HostSample`. Each line is written as soon as it is
made: if a run is killed, only the last line may be torn.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pynvml
from prometheus_client.parser import text_string_to_metric_families

from vllm_qualify.engine.kinds.base import CounterName, EngineKind
from vllm_qualify.engine.metrics_page import lines_of
from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.tables import table_of
from vllm_qualify.recipe.values import CountOrZero, Frozen, Number

if TYPE_CHECKING:
    import httpx

    from vllm_qualify import answers
else:
    answers, httpx = Lazy("vllm_qualify.answers"), Lazy("httpx")

SCRAPES, HOST_SAMPLES = "server-metrics.jsonl", "host.jsonl"
# A longer wait for a page would lose too many samples, and delay the end of the run.
SCRAPE_TIMEOUT_S = 5.0
MIB = 2**20

# The first two come from the GPU's own protection, the third from its driver's, the fourth from the host's power supply.
SLOWDOWNS: dict[str, int] = {
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "hw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "sw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "hw_power_brake_slowdown": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}
SW_POWER_CAP = "sw_power_cap"
CLOCK_REASONS: dict[str, int] = SLOWDOWNS | {
    SW_POWER_CAP: pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "gpu_idle": pynvml.nvmlClocksThrottleReasonGpuIdle,
    "applications_clocks_setting": pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting,
    "sync_boost": pynvml.nvmlClocksThrottleReasonSyncBoost,
    "display_clock_setting": pynvml.nvmlClocksThrottleReasonDisplayClockSetting,
}
"""NVML's reasons why a GPU's clocks are not higher, by nvidia-smi's names."""

# Unix time when this process began, over the monotonic clock.
OFFSET_S = time.time() - time.monotonic()
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Roots = Callable[[], Collection[int]]
"""Gives, at every sample, the ids of the processes whose trees are sampled together; empty before they start."""


def steady_s() -> float:
    """Unix time in s that never jumps: the machine's clock when this process began, carried on by the monotonic clock.

    Samples of a load are put together by it: if the machine's clock is set meanwhile, each still lies where it was taken.
    """
    return OFFSET_S + time.monotonic()


def steady_clock_arguments() -> list[str]:
    """Arguments by which another process takes over `steady_s`: its lead over the monotonic clock in s, and the clock's id.

    All processes of a kernel have the same monotonic clock. A kernel is known by the id of its boot, also in a container.
    """
    return [repr(OFFSET_S), BOOT_ID.read_text().strip()]


def metric_families(kind: EngineKind, version: str) -> Collection[str]:
    """The metrics to keep of a server's page: the names that this version has. Empty if the kind does not report its queue.

    Raises CallerError if the kind has tables, but none for this version.
    """
    if not kind.tells_its_queue:
        return []
    if not kind.has_tables:
        return [name for names in kind.counters.values() for name in names]
    return kept_metrics(kind, version).values()


def kept_metrics(kind: EngineKind, version: str) -> dict[CounterName, str]:
    """The names of the kind's counters that a version has. Raises CallerError if the catalog has no table for it."""
    has = frozenset(table_of(version).metrics)
    newest = {meaning: next((name for name in names if name in has), None) for meaning, names in kind.counters.items()}
    return {meaning: name for meaning, name in newest.items() if name is not None}


class Scrape(Frozen):
    """The server's metrics at `time`, in unix seconds of `steady_s`: values by name and labels, or the error."""

    time: Number
    values: dict[str, Number] = {}
    error: str | None = None


class ProcessSample(Frozen):
    """Trees of processes together: the CPU time used since their start, and the resident memory."""

    cpu_s: Number
    rss_mib: Number


class GpuSample(Frozen):
    """A GPU by its index in NVML. What this product does not report is None. With an `error` nothing could be read.

    `utilization` is the share of NVML's last sample period, up to a second, in which a kernel ran.
    """

    index: CountOrZero
    sm_mhz: CountOrZero | None = None
    memory_mhz: CountOrZero | None = None
    clock_reasons: list[str] | None = None
    memory_used_mib: CountOrZero | None = None
    power_w: Number | None = None
    temperature_c: CountOrZero | None = None
    utilization: Number | None = None
    error: str | None = None


class HostSample(Frozen):
    """The machine at `time`, as in `Scrape`. `cpu_share` is that of all cores since the previous line, None in the first.

    In `processes` a value is None if there is no such process, or this machine knows none.
    """

    time: Number
    cpu_share: Number | None
    load_1min: Number
    memory_available_mib: Number
    processes: dict[str, ProcessSample | None] = {}
    gpus: list[GpuSample] = []


def watching_machine(
    folder: Path, roots: Mapping[str, Roots], gpus: Sequence[int] = (), every_s: float = 1.0
) -> AbstractContextManager[None]:
    """Within the block, sample the machine every `every_s`. The samples are appended to its file in `folder`.

    The thread never raises into the block, and ends with it. If it cannot read something, a line says so. If it cannot write,
    lines are missing.
    """
    return _writing_samples(folder / HOST_SAMPLES, _host_samples(roots, gpus), every_s)


def watching_server(
    metrics_url: str, families: Collection[str], folder: Path, every_s: float = 1.0
) -> AbstractContextManager[None]:
    """The same for a server's metrics; `families` are their names, as in `kept_metrics`.

    If the server does not answer, the thread ends up to SCRAPE_TIMEOUT_S after the block.
    """
    return _writing_samples(folder / SCRAPES, (scrape_metrics(metrics_url, families) for _ in count()), every_s)


@contextmanager
def _writing_samples(path: Path, samples: Generator[Scrape | HostSample], every_s: float) -> Iterator[None]:
    """Append a sample every `every_s`, by a thread. A sample is left out if the one before is still being taken."""
    over = threading.Event()

    def write_until_over() -> None:
        started, ticks = time.monotonic(), 0
        # A full disk stops the run at its own writes. Here only the lines end, and their reader counts them.
        with closing(samples), suppress(OSError):
            while not over.is_set():
                line = next(samples).model_dump_json(exclude_defaults=True)
                with path.open("a") as file:
                    file.write(f"{line}\n")
                ticks = max(ticks + 1, int((time.monotonic() - started) / every_s) + 1)
                over.wait(started + ticks * every_s - time.monotonic())

    sampler = threading.Thread(target=write_until_over, name="watch", daemon=True)
    sampler.start()
    try:
        yield
    finally:
        over.set()
        sampler.join()


def first_in_container(container_id: str) -> Collection[int]:
    """The id of a container's first process, which is its server. Empty if its Docker Engine is on another machine."""
    inside = {pid for pid in psutil.pids() if container_id in _read_proc(pid, "cgroup")}
    roots = [pid for pid in inside if _read_status(pid, "PPid") not in map(str, inside)]
    # Its own namespace counts it as 1. That is the last of its ids: the outermost namespace's comes first.
    return [pid for pid in roots if _read_status(pid, "NSpid").split()[-1:] == ["1"]]


def _read_status(pid: int, name: str) -> str:
    lines = (line.partition(":") for line in _read_proc(pid, "status").splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")


def _read_proc(pid: int, name: str) -> str:
    """A file of /proc; empty if the process has ended. A process's name may be any bytes."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def scrape_metrics(metrics_url: str, families: Collection[str]) -> Scrape:
    """Read the gauges and counters of these families, but no parts of histograms.

    The time is that of the answer: a busy server handles a request late, and reports its state at that moment.
    """
    try:
        page = answers.ask_within("GET", metrics_url, SCRAPE_TIMEOUT_S).raise_for_status().text
        now = steady_s()
        return Scrape(time=now, values=parse_metrics(page, families))
    except (httpx.HTTPError, ValueError) as error:
        return Scrape(time=steady_s(), error=f"{type(error).__name__}: {error}"[:200])


def parse_metrics(page: str, families: Collection[str]) -> dict[str, float]:
    """A metrics page's gauges and counters of these families, each as `name{label="value",…}`. Raises ValueError."""
    starts = tuple(start for family in families for start in (family, f"# TYPE {family}"))
    return {
        _metric_key(sample.name, sample.labels): float(sample.value)
        for family in text_string_to_metric_families(lines_of(page, lambda line: line.startswith(starts)))
        if family.name in families and family.type in ("gauge", "counter")
        for sample in family.samples
        # `_created` is a time and not a count, and NaN is not a value.
        if not sample.name.endswith("_created") and math.isfinite(sample.value)
    }


def family_of(key: str) -> str:
    """The family of one of `parsed`'s keys."""
    return key.partition("{")[0].removesuffix("_total")


def _metric_key(name: str, labels: Mapping[str, str]) -> str:
    text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{text}}}" if text else name


def _host_samples(roots: Mapping[str, Roots], gpus: Sequence[int]) -> Generator[HostSample]:
    with _nvml_devices(gpus) as devices:
        # psutil measures from one call to the next: its first result means nothing.
        psutil.cpu_percent()
        is_first = True
        while True:
            share = psutil.cpu_percent() / 100
            yield HostSample(
                time=steady_s(),
                cpu_share=None if is_first else share,
                load_1min=os.getloadavg()[0],
                memory_available_mib=psutil.virtual_memory().available / MIB,
                processes={name: _process_sample(asked) for name, asked in roots.items()},
                gpus=[_gpu_sample(index, device) for index, device in devices.items()],
            )
            is_first = False


def _process_sample(asked: Roots) -> ProcessSample | None:
    """All trees together; None if there is none, or a root has ended. Any other has left its time to its parent."""
    samples = []
    try:
        for root in map(psutil.Process, asked()):
            samples.append(_single_sample(root))
            for process in root.children(recursive=True):
                with suppress(psutil.Error):
                    samples.append(_single_sample(process))
    except (psutil.Error, OSError):
        return None
    total = ProcessSample(cpu_s=sum(one.cpu_s for one in samples), rss_mib=sum(one.rss_mib for one in samples))
    return total if samples else None


def _single_sample(process: psutil.Process) -> ProcessSample:
    with process.oneshot():
        times = process.cpu_times()
        used_s = times.user + times.system + times.children_user + times.children_system
        return ProcessSample(cpu_s=used_s, rss_mib=process.memory_info().rss / MIB)


@contextmanager
def _nvml_devices(gpus: Sequence[int]) -> Iterator[dict[int, object]]:
    """NVML's handles by index, or a text that says why there is none."""
    devices: dict[int, object] = {}
    if not gpus:
        yield devices
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield dict.fromkeys(gpus, str(error))
        return
    try:
        for index in gpus:
            try:
                devices[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
            except pynvml.NVMLError as error:
                devices[index] = str(error)
        yield devices
    finally:
        pynvml.nvmlShutdown()


def _gpu_sample(index: int, device: object) -> GpuSample:
    if isinstance(device, str):
        return GpuSample(index=index, error=device)
    try:
        reasons = _nvml_value(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, device)
        memory = _nvml_value(pynvml.nvmlDeviceGetMemoryInfo, device)
        power_mw = _nvml_value(pynvml.nvmlDeviceGetPowerUsage, device)
        rates = _nvml_value(pynvml.nvmlDeviceGetUtilizationRates, device)
        return GpuSample(
            index=index,
            sm_mhz=_nvml_value(pynvml.nvmlDeviceGetClockInfo, device, pynvml.NVML_CLOCK_SM),
            memory_mhz=_nvml_value(pynvml.nvmlDeviceGetClockInfo, device, pynvml.NVML_CLOCK_MEM),
            clock_reasons=None if reasons is None else reason_names(reasons),
            memory_used_mib=None if memory is None else memory.used // MIB,
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=_nvml_value(pynvml.nvmlDeviceGetTemperature, device, pynvml.NVML_TEMPERATURE_GPU),
            utilization=None if rates is None else rates.gpu / 100,
        )
    except pynvml.NVMLError as error:
        return GpuSample(index=index, error=str(error))


def _nvml_value(function: Callable[..., Any], *arguments: object) -> Any:
    """What NVML reports; None if the product does not report it. Raises pynvml.NVMLError."""
    try:
        return function(*arguments)
    except pynvml.NVMLError_NotSupported:
        return None


def reason_names(bits: int) -> list[str]:
    """NVML's bit mask of clock reasons in words; bits without a word here are one `0x…`."""
    known = [name for name, bit in CLOCK_REASONS.items() if bits & bit]
    others = bits & ~sum(CLOCK_REASONS.values())
    return [*known, *([hex(others)] if others else [])]
