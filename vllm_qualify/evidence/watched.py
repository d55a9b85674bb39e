"""Reads what `engine.watch` wrote during a run: why a load does not count, and plots of its course for people."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from vllm_qualify.engine.kind import KINDS, names_of
from vllm_qualify.engine.kinds.base import CounterName, EngineKind
from vllm_qualify.engine.watch import (
    HOST_SAMPLES,
    SCRAPES,
    SLOWDOWNS,
    SW_POWER_CAP,
    HostSample,
    Scrape,
    family_of,
)
from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.recipe.serving import VLLM
from vllm_qualify.recipe.values import Frozen, Number

SLOWDOWN_REMEDY = "mend this host's cooling and power supply, see `nvidia-smi -q -d PERFORMANCE`, and measure again"
MISSED_REMEDY = "see what slows this machine down or the server's /metrics, and measure again"

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

Sample = TypeVar("Sample", Scrape, HostSample)


# The folder, in that of a stage, for what was watched during the stage.
WATCHED = "watched"


class Watched(Frozen):
    """Both files of a folder, in order of time."""

    scrapes: list[Scrape]
    host: list[HostSample]


def watched_in(stage: Path, server: Path) -> Path:
    """The folder with what was watched during a stage: its own, or the server's while the stage runs and in older runs."""
    inside = stage / WATCHED
    return inside if inside.is_dir() else server


def read_watched(folder: Path) -> Watched:
    """Read both files without an incomplete last line, which a killed run leaves. Raises one of UNUSABLE."""
    return Watched(scrapes=_lines(folder / SCRAPES, Scrape), host=read_host(folder))


def read_host(folder: Path) -> list[HostSample]:
    """Read the machine's file alone, which begins at the server's launch, as `read` does."""
    return _lines(folder / HOST_SAMPLES, HostSample)


def value_of(scrape: Scrape, meaning: CounterName) -> float | None:
    """A scrape's value over all labels: the sum, or the largest if the values are shares. None if the scrape has none."""
    names = names_of(meaning)
    values = [value for key, value in scrape.values.items() if family_of(key) in names]
    if not values:
        return None
    return max(values) if meaning == "kv_cache_usage" else sum(values)


def problems(
    folder: Path,
    began: float,
    ended: float,
    clients: int,
    most_requests: int | None,
    every_s: float = 1.0,
    queues_from: float | None = None,
    kind: EngineKind = KINDS[VLLM],
) -> list[str]:
    """The reasons why a load between two unix times does not count, each with its remedy.

    Preemptions are not among them: `load` has the server's count right before the load and right after. `most_requests` is how
    many requests the server runs at once; without it, queues are not checked. Requests that wait before `queues_from` are no
    queue. `kind` is the server's, with the name and the remedy of its limit. Samples are planned every `every_s`: a tenth of
    them is enough, and half of those of the GPUs.
    """
    try:
        watched = read_watched(folder)
        return [
            *_missed(watched, began, ended, every_s),
            *_queueing(
                _within(watched.scrapes, began if queues_from is None else queues_from, ended), clients, most_requests, kind
            ),
            *_slowdowns(_within(watched.host, began, ended)),
        ]
    except UNUSABLE as error:
        return [f"what was watched during the load cannot be read: {in_words(error)}"]


def notes(folder: Path, began: float, ended: float) -> list[str]:
    """What the report should mention about a load that counts nevertheless."""
    try:
        watched = read_watched(folder)
    except UNUSABLE as error:
        return [f"what was watched during the load cannot be read: {in_words(error)}"]
    host = _within(watched.host, began, ended)
    capped = [f"GPU {index}: in {count} of {len(host)} samples" for index, count in _counted(host, [SW_POWER_CAP]).items()]
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
    scrapes = _within(read_watched(folder).scrapes, began, ended)
    return Series(
        time_s=[scrape.time - scrapes[0].time for scrape in scrapes],
        running=[value_of(scrape, "running") for scrape in scrapes],
        waiting=[value_of(scrape, "waiting") for scrape in scrapes],
        kv_cache_usage=[value_of(scrape, "kv_cache_usage") for scrape in scrapes],
        output_tok_s=[None, *(_rate(one, other) for one, other in pairwise(scrapes))][: len(scrapes)],
    )


def _rate(one: Scrape, other: Scrape) -> float | None:
    before, after = value_of(one, "generation_tokens"), value_of(other, "generation_tokens")
    if before is None or after is None or after < before or other.time <= one.time:
        return None
    return (after - before) / (other.time - one.time)


def _lines(path: Path, kind: type[Sample]) -> list[Sample]:
    whole, _, _torn = path.read_text().rpartition("\n")
    return [kind.model_validate_json(line) for line in whole.splitlines()]


def _within(samples: Sequence[Sample], began: float, ended: float) -> list[Sample]:
    return [sample for sample in samples if began <= sample.time <= ended]


def _missed(watched: Watched, began: float, ended: float, every_s: float) -> Iterator[str]:
    scrapes, host = _within(watched.scrapes, began, ended), _within(watched.host, began, ended)
    wanted = max(1, math.floor((ended - began) / every_s))
    answered = [scrape for scrape in scrapes if value_of(scrape, "running") is not None]
    # The scrapes are only for `_queueing`, which cannot use fewer samples than LEAST_FOR_A_SHARE.
    if wanted >= LEAST_FOR_A_SHARE and len(answered) < LEAST_SCRAPES * wanted:
        why = next((f" ({scrape.error})" for scrape in reversed(scrapes) if scrape.error), "")
        yield f"the server's metrics were read only {len(answered)} of {wanted} times{why}: {MISSED_REMEDY}"
    if len(host) < _least_looks(watched, wanted):
        yield f"the machine was looked at only {len(host)} of {wanted} times: {MISSED_REMEDY}"
    for index, errors in _gpu_errors(host).items():
        if len(host) - len(errors) < LEAST_SAMPLES * wanted:
            read = len(host) - len(errors)
            yield f"GPU {index} was read only {read} of {wanted} times ({errors[-1]}): {MISSED_REMEDY}"


def _least_looks(watched: Watched, wanted: int) -> float:
    """The fewest samples of the machine. One without GPUs needs fewer: it has nothing that can slow down unseen."""
    if any(sample.gpus for sample in watched.host):
        return LEAST_SAMPLES * wanted
    return LEAST_SCRAPES * wanted if wanted >= LEAST_FOR_A_SHARE else 0


def _gpu_errors(host: Sequence[HostSample]) -> dict[int, list[str]]:
    errors: dict[int, list[str]] = {}
    for sample in host:
        for gpu in sample.gpus:
            # A GPU that does not report the reasons of its clocks may have been slowed down.
            if gpu.error or gpu.clock_reasons is None:
                errors.setdefault(gpu.index, []).append(gpu.error or "it reports no reasons of its clocks")
    return errors


def _queueing(scrapes: Sequence[Scrape], clients: int, most_requests: int | None, kind: EngineKind) -> Iterator[str]:
    if most_requests is None or clients > most_requests:
        return
    counts = [(value_of(scrape, "waiting"), value_of(scrape, "running")) for scrape in scrapes]
    both = [(waiting, waiting + running) for waiting, running in counts if waiting is not None and running is not None]
    share, least = _share(both)
    if share is not None and least > WAITING_ALLOWED:
        yield (
            f"on average {share:.0%} of the requests in the server waited, although {clients} clients are no more than its"
            f" {kind.concurrency} {most_requests}: {kind.queue_remedy}"
        )


def _share(parts: Sequence[tuple[float, float]]) -> tuple[float | None, float]:
    """The share of the first numbers in the second ones, and its lower bound: WAITING_ERRORS standard errors less."""
    part, whole = (math.fsum(numbers) for numbers in zip(*parts, strict=True)) if parts else (0.0, 0.0)
    if len(parts) < LEAST_FOR_A_SHARE or not whole > 0:
        return None, 0.0
    share = part / whole
    squares = math.fsum((one - share * of) ** 2 for one, of in parts)
    error = math.sqrt(len(parts) / (len(parts) - 1) * squares) / whole
    return share, share - WAITING_ERRORS * error


def _slowdowns(host: Sequence[HostSample]) -> Iterator[str]:
    for index, count in _counted(host, SLOWDOWNS).items():
        reasons = sorted({reason for sample in host for reason in _reasons(sample, index) if reason in SLOWDOWNS})
        yield f"GPU {index} was slowed down in {count} of {len(host)} samples ({', '.join(reasons)}): {SLOWDOWN_REMEDY}"


def _counted(host: Sequence[HostSample], reasons: Collection[str]) -> dict[int, int]:
    """The number of samples in which a GPU had one of the reasons, by the GPU's index."""
    indices = sorted({gpu.index for sample in host for gpu in sample.gpus})
    counts = {index: sum(any(one in reasons for one in _reasons(sample, index)) for sample in host) for index in indices}
    return {index: count for index, count in counts.items() if count}


def _reasons(sample: HostSample, index: int) -> list[str]:
    return [reason for gpu in sample.gpus if gpu.index == index for reason in gpu.clock_reasons or ()]


# Sizes of the drawing, in its own units; the page sets its real width.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 160, 56, 8, 24, 24
WRITTEN_WHOLE, SUFFIXES = 10_000, ((10**9, "G"), (10**6, "M"), (10**3, "k"))
DASHES = ("", "6 3", "2 3", "8 3 2 3")


def chart(title: str, unit: str, time_s: Sequence[float], lines: Mapping[str, Sequence[float | None]]) -> str:
    """A line chart over time as an inline SVG in the text's own colour. A line is broken where a value is None.

    Numbers have up to four digits, from 10,000 on with k, M or G for thousands, millions or billions: 32, 12.5k, 1.2M.

    Raises ValueError if a line does not have one value per time, if there are more than four lines, or if all values are None.
    """
    if len(lines) > len(DASHES) or any(len(values) != len(time_s) for values in lines.values()):
        raise ValueError("a chart takes up to four lines, each with a value a time")
    known = [value for values in lines.values() for value in values if value is not None]
    if not known:
        raise ValueError("a chart needs at least one value")
    largest, last_s = max(*known, 0.0) or 1.0, max(time_s[-1], 0.0) or 1.0
    across = _scale(last_s, LEFT, WIDTH - RIGHT)
    up = _scale(largest, HEIGHT - BOTTOM, TOP)
    drawn = [_drawn(time_s, values, across, up, dash) for values, dash in zip(lines.values(), DASHES, strict=False)]
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg"'
            ' fill="none" stroke="currentColor" font-family="sans-serif" font-size="11">',
            f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke-opacity="0.4"/>',
            *drawn,
            '<g fill="currentColor" stroke="none">',
            f'<text x="{LEFT}" y="{TOP - 10}">{escape(title)}</text>',
            f'<text x="{LEFT - 4}" y="{TOP + 4}" text-anchor="end">{_short(largest)}</text>',
            f'<text x="{LEFT - 4}" y="{TOP + 18}" text-anchor="end">{escape(unit)}</text>',
            f'<text x="{LEFT - 4}" y="{HEIGHT - BOTTOM}" text-anchor="end">0</text>',
            f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{_short(last_s)} s</text>',
            "</g>",
            *_legend(list(lines)),
            "</svg>",
        ]
    )


def _short(number: float) -> str:
    rounded = float(f"{number:.4g}")
    if rounded < WRITTEN_WHOLE:
        return f"{rounded:.4g}"
    size, suffix = next(each for each in SUFFIXES if rounded >= each[0])
    return f"{rounded / size:.4g}{suffix}"


def _scale(largest: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: round(start + (end - start) * value / largest, 1)


def _drawn(
    time_s: Sequence[float],
    values: Sequence[float | None],
    across: Callable[[float], float],
    up: Callable[[float], float],
    dash: str,
) -> str:
    path, is_down = [], False
    for time, value in zip(time_s, values, strict=True):
        if value is not None:
            path.append(f"{'L' if is_down else 'M'}{across(time):g} {up(value):g}")
        is_down = value is not None
    # A value without neighbours becomes a dot: a line without length is visible by its round cap.
    return f'<path d="{"".join(_with_dots(path))}" stroke-width="1.5" stroke-linecap="round" stroke-dasharray="{dash}"/>'


def _with_dots(path: Sequence[str]) -> Iterator[str]:
    for step, following in zip(path, [*path[1:], "M"], strict=True):
        yield f"{step}h0" if step.startswith("M") and following.startswith("M") else step


def _legend(names: Sequence[str]) -> Iterator[str]:
    for place, (name, dash) in enumerate(zip(names, DASHES, strict=False)):
        x = WIDTH - RIGHT - 110 * (len(names) - place)
        yield f'<path d="M{x} {TOP - 14}h20" stroke-width="1.5" stroke-dasharray="{dash}"/>'
        yield f'<text x="{x + 24}" y="{TOP - 10}" fill="currentColor" stroke="none">{escape(name)}</text>'
