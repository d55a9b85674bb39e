"""How long GPUs were idle while a server held them, from the samples that `engine.watch` wrote. Pure.

NVML gives the share of the last moments in which a kernel ran on the GPU: on an H200, of about the last fifth of a second.
Between two samples the mean of both counts. If the server's work repeats at exactly the interval of the samples, the result is
wrong. A GPU on which one small kernel runs is not idle.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_qualify.engine.watch import HostSample
from vllm_qualify.evidence.measurement import Measurement, invalid, valid
from vllm_qualify.recipe.metrics import GPU_IDLE
from vllm_qualify.recipe.values import CountOrZero, Frozen, Number

# Between samples further apart than this, the GPU's use is not known. A busy machine leaves out one or two samples.
MOST_GAP_S = 3.0
# If less than this share of the time is covered by samples, the GPU may have been idle for most of it, or never.
LEAST_COVERED = 0.5
REMEDY = "see what slows this machine down, and measure again"


class Stretch(Frozen):
    """How many seconds the samples cover, and for how many of these the GPU was idle."""

    told_s: Number
    idle_s: Number

    @property
    def share(self) -> float | None:
        return self.idle_s / self.told_s if self.told_s > 0 else None


class GpuIdle(Frozen):
    """One GPU by its index in NVML. `start` is until the first completion, `serving` from then until the end."""

    index: CountOrZero
    samples: CountOrZero
    start: Stretch
    serving: Stretch

    @property
    def whole(self) -> Stretch:
        return sum_of([self.start, self.serving])


class Idle(Frozen):
    """The GPUs of a server, held for `held_s` from its launch to its end. `because` says why the figures cannot be trusted."""

    held_s: Number
    gpus: list[GpuIdle]
    because: str | None = None

    @property
    def whole(self) -> Stretch:
        return sum_of([gpu.whole for gpu in self.gpus])


def sum_of(stretches: Sequence[Stretch]) -> Stretch:
    return Stretch(told_s=math.fsum(each.told_s for each in stretches), idle_s=math.fsum(each.idle_s for each in stretches))


def idle(host: Sequence[HostSample], gpus: Sequence[int], launched: float, ready: float, ended: float) -> Idle:
    """How long the GPUs `gpus` of a server were idle. The three unix times are its launch, first completion and end."""
    idle_gpus = [_measure_gpu(host, index, launched, ready, ended) for index in gpus]
    held_s = max(ended - launched, 0.0)
    return Idle(held_s=held_s, gpus=idle_gpus, because=next(_find_problems(host, idle_gpus, held_s), None))


def measurement(idleness: Idle, source: str) -> Measurement:
    """The idle share of all GPUs together. Its sample count is that of the GPU with the fewest samples."""
    share = idleness.whole.share
    if idleness.because is not None or share is None:
        return invalid(GPU_IDLE, idleness.because or "no sample has the GPUs' use", source)
    return valid(GPU_IDLE, share, source, sample_count=min(gpu.samples for gpu in idleness.gpus))


class _Sample(NamedTuple):
    time: float
    idle: float


def _measure_gpu(host: Sequence[HostSample], index: int, launched: float, ready: float, ended: float) -> GpuIdle:
    samples = [
        _Sample(look.time, 1 - min(max(gpu.utilization, 0.0), 1.0))
        for look in host
        for gpu in look.gpus
        if launched <= look.time <= ended and gpu.index == index and gpu.utilization is not None
    ]
    start, serving = _sum_stretch(samples, launched, ready), _sum_stretch(samples, ready, ended)
    return GpuIdle(index=index, samples=len(samples), start=start, serving=serving)


def _sum_stretch(samples: Sequence[_Sample], began: float, ended: float) -> Stretch:
    """The time between `began` and `ended` that is covered by pairs of samples near enough to each other."""
    told_s, idle_s = list[float](), list[float]()
    for before, after in pairwise(samples):
        if 0 < after.time - before.time <= MOST_GAP_S:
            told_s.append(max(0.0, min(after.time, ended) - max(before.time, began)))
            idle_s.append(told_s[-1] * (before.idle + after.idle) / 2)
    return Stretch(told_s=math.fsum(told_s), idle_s=math.fsum(idle_s))


def _find_problems(host: Sequence[HostSample], gpus: Sequence[GpuIdle], held_s: float) -> Iterator[str]:
    for gpu in gpus:
        told_s = gpu.whole.told_s
        if told_s < LEAST_COVERED * held_s or told_s == 0:
            yield f"GPU {gpu.index}'s use is known for only {told_s:.0f} of {held_s:.0f} s{_explain_gap(host, gpu)}: {REMEDY}"


def _explain_gap(host: Sequence[HostSample], gpu: GpuIdle) -> str:
    looks = [each for look in host for each in look.gpus if each.index == gpu.index]
    errors = [each.error for each in looks if each.error]
    if errors:
        return f" ({errors[-1]})"
    return " (it reports no utilization)" if looks and not gpu.samples else ""
