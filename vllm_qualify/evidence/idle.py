"""How long GPUs idled of the time for which a server held them, by what `engine.watch` wrote of them. Pure.

NVML tells the share of a GPU's last moments in which a kernel ran, on an H200 of about the last fifth of a second. Between two
samples the mean of both is taken. What the server does in turns exactly as long as the samples lie apart is seen wrongly; and a
GPU on which one small kernel runs is not idle.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_qualify.engine.watch import HostSample
from vllm_qualify.evidence.measurement import Measurement, invalid, valid
from vllm_qualify.recipe.metrics import GPU_IDLE
from vllm_qualify.recipe.values import CountOrNone, Frozen, Number

# Nobody knows what a GPU did between samples that lie further apart: a busy machine leaves out one or two of them.
MOST_GAP_S = 3.0
# With fewer than half of the time told, a GPU may have idled for the longer part of it, or never.
LEAST_TOLD = 0.5
REMEDY = "see what holds up this machine, and measure again"


class Stretch(Frozen):
    """Of how many seconds the samples tell, and for how many of these the GPU idled."""

    told_s: Number
    idle_s: Number

    @property
    def share(self) -> float | None:
        return self.idle_s / self.told_s if self.told_s > 0 else None


class GpuIdle(Frozen):
    """A GPU by its index in NVML: until the first completion, and from then until the end."""

    index: CountOrNone
    samples: CountOrNone
    start: Stretch
    serving: Stretch

    @property
    def whole(self) -> Stretch:
        return together([self.start, self.serving])


class Idle(Frozen):
    """Each GPU of a server that held them for `held_s`, from its launch to its end. With a `because` nothing of it is sure."""

    held_s: Number
    gpus: list[GpuIdle]
    because: str | None = None

    @property
    def whole(self) -> Stretch:
        return together([gpu.whole for gpu in self.gpus])


def together(stretches: Sequence[Stretch]) -> Stretch:
    return Stretch(told_s=math.fsum(each.told_s for each in stretches), idle_s=math.fsum(each.idle_s for each in stretches))


def idle(host: Sequence[HostSample], gpus: Sequence[int], launched: float, ready: float, ended: float) -> Idle:
    """Of the GPUs `gpus` of a server, between three unix times: its launch, its first completion and its end."""
    found = [_gpu(host, index, launched, ready, ended) for index in gpus]
    held_s = max(ended - launched, 0.0)
    return Idle(held_s=held_s, gpus=found, because=next(_problems(host, found, held_s), None))


def measurement(found: Idle, source: str) -> Measurement:
    """The share of all GPUs together; its samples are those of the GPU with the fewest."""
    share = found.whole.share
    if found.because is not None or share is None:
        return invalid(GPU_IDLE, found.because or "no sample tells of the GPUs' use", source)
    return valid(GPU_IDLE, share, source, sample_count=min(gpu.samples for gpu in found.gpus))


class _Sample(NamedTuple):
    time: float
    idle: float


def _gpu(host: Sequence[HostSample], index: int, launched: float, ready: float, ended: float) -> GpuIdle:
    samples = [each for each in _samples(host, index) if launched <= each.time <= ended]
    return GpuIdle(
        index=index,
        samples=len(samples),
        start=_stretch(samples, launched, ready),
        serving=_stretch(samples, ready, ended),
    )


def _samples(host: Sequence[HostSample], index: int) -> Iterator[_Sample]:
    for look in host:
        for gpu in look.gpus:
            if gpu.index == index and gpu.utilization is not None:
                yield _Sample(look.time, 1 - min(max(gpu.utilization, 0.0), 1.0))


def _stretch(samples: Sequence[_Sample], began: float, ended: float) -> Stretch:
    """What lies between the two times of each pair of samples that lie near enough."""
    parts = [
        (max(0.0, min(after.time, ended) - max(before.time, began)), (before.idle + after.idle) / 2)
        for before, after in pairwise(samples)
        if 0 < after.time - before.time <= MOST_GAP_S
    ]
    return Stretch(told_s=math.fsum(told_s for told_s, _ in parts), idle_s=math.fsum(told_s * share for told_s, share in parts))


def _problems(host: Sequence[HostSample], gpus: Sequence[GpuIdle], held_s: float) -> Iterator[str]:
    for gpu in gpus:
        told_s = gpu.whole.told_s
        if told_s < LEAST_TOLD * held_s or told_s == 0:
            yield f"GPU {gpu.index}'s use is told for only {told_s:.0f} of {held_s:.0f} s{_why(host, gpu)}: {REMEDY}"


def _why(host: Sequence[HostSample], gpu: GpuIdle) -> str:
    looks = [each for look in host for each in look.gpus if each.index == gpu.index]
    errors = [each.error for each in looks if each.error]
    if errors:
        return f" ({errors[-1]})"
    return " (it tells no utilization)" if looks and not gpu.samples else ""
