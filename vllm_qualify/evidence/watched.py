"""Reads what `engine.watch` wrote during a run: why a load does not count, and its course for plots."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_qualify.engine.kinds.base import CounterName
from vllm_qualify.engine.kinds.registry import names_of
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES, SLOWDOWNS, SW_POWER_CAP, HostSample, Scrape, family_of
from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.recipe.values import Frozen, Number

SLOWDOWN_REMEDY = "mend this host's cooling and power supply, see `nvidia-smi -q -d PERFORMANCE`, and measure again"
UNREADABLE = "what was watched during the load cannot be read"
MISSED_REMEDY = "see what slows this machine down or the server's /metrics, and measure again"

# Samples are planned so far apart, in s.
EVERY_S = 1.0
# With less than this share of its samples, a GPU may have been slowed down for most of a load.
LEAST_SAMPLES = 0.5
# A busy server answers late. Few samples are enough to see a queue, and all else follows from the server's counters.
LEAST_SCRAPES = 0.1
# A request that waits for one scheduler step waits for 1 of its output_len + 1 steps; in a wave of long prompts, for some more.
# Only replies of fewer than ten tokens would explain a tenth.
WAITING_ALLOWED = 0.10
# The share must be above that by this many of its standard errors: a wave that one sample happens to see waiting is no queue.
WAITING_ERRORS = 2.0
# The standard error of fewer samples means nothing.
LEAST_FOR_A_SHARE = 5

# The folder, in that of a stage, for what was watched during the stage.
WATCHED = "watched"

Sample = TypeVar("Sample", Scrape, HostSample)


class Watched(Frozen):
    """Both files of a folder, in order of time."""

    scrapes: list[Scrape]
    host: list[HostSample]


def watched_in(stage: Path, server: Path) -> Path:
    """The folder with what was watched during a stage: its own, or the server's while the stage runs."""
    inside = stage / WATCHED
    return inside if inside.is_dir() else server


def read_watched(folder: Path) -> Watched:
    """Read both files without an incomplete last line, which a killed run leaves. Raises one of UNUSABLE."""
    return Watched(scrapes=_read_lines(folder / SCRAPES, Scrape), host=read_host(folder))


def read_host(folder: Path) -> list[HostSample]:
    """Read the machine's file alone, which begins at the server's launch. Raises one of UNUSABLE."""
    return _read_lines(folder / HOST_SAMPLES, HostSample)


def value_of(scrape: Scrape, meaning: CounterName) -> float | None:
    """A scrape's value over all labels: the sum, or the largest if the values are shares. None if the scrape has none."""
    names = names_of(meaning)
    values = [value for key, value in scrape.values.items() if family_of(key) in names]
    if not values:
        return None
    return max(values) if meaning == "kv_cache_usage" else sum(values)


class QueueLimit(NamedTuple):
    """A load that has no queue: its server runs as many requests at once as it has clients, or does not say how many."""

    server: ServerPlan
    clients: int
    since: float
    """unix time; requests that wait before it are no queue"""


def watched_problems(folder: Path, began: float, ended: float, limit: QueueLimit | None = None) -> list[str]:
    """The reasons why a load between two unix times does not count, each with its remedy. Without a `limit` requests may wait.

    Preemptions are not among them: `load` has the server's count right before the load and right after.
    """
    try:
        watched = read_watched(folder)
        return [
            *_missed_samples(watched, began, ended),
            *(_queue_problems(_samples_between(watched.scrapes, limit.since, ended), limit) if limit else ()),
            *_slowdown_problems(_samples_between(watched.host, began, ended)),
        ]
    except UNUSABLE as error:
        return [f"{UNREADABLE}: {in_words(error)}"]


def notes(folder: Path, began: float, ended: float) -> list[str]:
    """What the report should mention about a load that counts nevertheless."""
    try:
        host = _samples_between(read_watched(folder).host, began, ended)
    except UNUSABLE as error:
        return [f"{UNREADABLE}: {in_words(error)}"]
    capped = [f"GPU {gpu}: in {count} of {len(host)} samples" for gpu, count in _count_by_gpu(host, [SW_POWER_CAP]).items()]
    return [f"the power limit lowered the clocks, as it may under load: {'; '.join(capped)}"] if capped else []


class Series(Frozen):
    """A run's course for plots, one value per sample, None where the sample has none. A rate begins with the second sample."""

    time_s: list[Number]
    running: list[Number | None]
    waiting: list[Number | None]
    kv_cache_usage: list[Number | None]
    output_tok_s: list[Number | None]


def series(folder: Path, began: float = -math.inf, ended: float = math.inf) -> Series:
    """The server's course between two unix times, in seconds from the first sample. Raises one of UNUSABLE."""
    scrapes = _samples_between(read_watched(folder).scrapes, began, ended)
    return Series(
        time_s=[scrape.time - scrapes[0].time for scrape in scrapes],
        running=[value_of(scrape, "running") for scrape in scrapes],
        waiting=[value_of(scrape, "waiting") for scrape in scrapes],
        kv_cache_usage=[value_of(scrape, "kv_cache_usage") for scrape in scrapes],
        output_tok_s=[None, *(_token_rate(one, other) for one, other in pairwise(scrapes))][: len(scrapes)],
    )


def _token_rate(one: Scrape, other: Scrape) -> float | None:
    before, after = value_of(one, "generation_tokens"), value_of(other, "generation_tokens")
    if before is None or after is None or after < before or other.time <= one.time:
        return None
    return (after - before) / (other.time - one.time)


def _read_lines(path: Path, kind: type[Sample]) -> list[Sample]:
    whole, _, _torn = path.read_text().rpartition("\n")
    return [kind.model_validate_json(line) for line in whole.splitlines()]


def _samples_between(samples: Sequence[Sample], began: float, ended: float) -> list[Sample]:
    return [sample for sample in samples if began <= sample.time <= ended]


def _missed_samples(watched: Watched, began: float, ended: float) -> Iterator[str]:
    scrapes, host = _samples_between(watched.scrapes, began, ended), _samples_between(watched.host, began, ended)
    wanted = max(1, math.floor((ended - began) / EVERY_S))
    is_long = wanted >= LEAST_FOR_A_SHARE
    answered = [scrape for scrape in scrapes if value_of(scrape, "running") is not None]
    # The scrapes are only for `_queue_problems`, which cannot use fewer samples than LEAST_FOR_A_SHARE.
    if is_long and len(answered) < LEAST_SCRAPES * wanted:
        why = next((f" ({scrape.error})" for scrape in reversed(scrapes) if scrape.error), "")
        yield f"the server's metrics were read only {len(answered)} of {wanted} times{why}: {MISSED_REMEDY}"
    # A machine without GPUs needs fewer: it has nothing that can slow down unseen.
    least = LEAST_SAMPLES if any(sample.gpus for sample in watched.host) else LEAST_SCRAPES if is_long else 0
    if len(host) < least * wanted:
        yield f"the machine was looked at only {len(host)} of {wanted} times: {MISSED_REMEDY}"
    errors: dict[int, list[str]] = {}
    for gpu in (gpu for sample in host for gpu in sample.gpus):
        # A GPU that does not report the reasons of its clocks may have been slowed down.
        if gpu.error or gpu.clock_reasons is None:
            errors.setdefault(gpu.index, []).append(gpu.error or "it reports no reasons of its clocks")
    for index, of_gpu in errors.items():
        read = len(host) - len(of_gpu)
        if read < LEAST_SAMPLES * wanted:
            yield f"GPU {index} was read only {read} of {wanted} times ({of_gpu[-1]}): {MISSED_REMEDY}"


def _queue_problems(scrapes: Sequence[Scrape], limit: QueueLimit) -> Iterator[str]:
    most_requests, kind = limit.server.most_requests, limit.server.engine_kind
    if most_requests is None or limit.clients > most_requests:
        return
    counts = [(value_of(scrape, "waiting"), value_of(scrape, "running")) for scrape in scrapes]
    both = [(waiting, waiting + running) for waiting, running in counts if waiting is not None and running is not None]
    share, least = _bound_share(both)
    if share is not None and least > WAITING_ALLOWED:
        yield (
            f"on average {share:.0%} of the requests in the server waited, although {limit.clients} clients are no more than"
            f" its {kind.concurrency} {most_requests}: {kind.queue_remedy}"
        )


def _bound_share(parts: Sequence[tuple[float, float]]) -> tuple[float | None, float]:
    """The share of the first numbers in the second ones, and its lower bound: WAITING_ERRORS standard errors less."""
    part, whole = (math.fsum(numbers) for numbers in zip(*parts, strict=True)) if parts else (0.0, 0.0)
    if len(parts) < LEAST_FOR_A_SHARE or not whole > 0:
        return None, 0.0
    share = part / whole
    squares = math.fsum((one - share * of) ** 2 for one, of in parts)
    error = math.sqrt(len(parts) / (len(parts) - 1) * squares) / whole
    return share, share - WAITING_ERRORS * error


def _slowdown_problems(host: Sequence[HostSample]) -> Iterator[str]:
    for index, count in _count_by_gpu(host, SLOWDOWNS).items():
        reasons = sorted({reason for sample in host for reason in _clock_reasons(sample, index) if reason in SLOWDOWNS})
        yield f"GPU {index} was slowed down in {count} of {len(host)} samples ({', '.join(reasons)}): {SLOWDOWN_REMEDY}"


def _count_by_gpu(host: Sequence[HostSample], reasons: Collection[str]) -> dict[int, int]:
    """The number of samples in which a GPU had one of the reasons, by the GPU's index; without those that never had one."""
    had = Counter(
        index
        for sample in host
        for index in {gpu.index for gpu in sample.gpus}
        if not set(reasons).isdisjoint(_clock_reasons(sample, index))
    )
    return dict(sorted(had.items()))


def _clock_reasons(sample: HostSample, index: int) -> list[str]:
    return [reason for gpu in sample.gpus if gpu.index == index for reason in gpu.clock_reasons or ()]
