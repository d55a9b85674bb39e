"""The parts of a server's start, and the KV cache that it made, from its log. The kind of engine gives the wording. Pure."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_qualify.engine.kinds.base import StartLog
from vllm_qualify.engine.kinds.vllm import START_LOG
from vllm_qualify.evidence.measurement import Measurement, invalid, valid
from vllm_qualify.recipe.values import Frozen, Number

# All time zones differ by multiples of this, and a day is a multiple of it.
ZONE_STEP_S = 900
DAY_S = 86_400
# A log's times are cut to whole seconds.
LOG_STEP_S = 1

PARTS = {
    "image_s": "startup_image_s",
    "process_s": "startup_process_s",
    "weights_s": "startup_weights_s",
    "compile_s": "startup_compile_s",
    "graphs_s": "startup_graphs_s",
    "ready_s": "startup_ready_s",
}
"""The metric of each part."""


class Startup(Frozen):
    """The parts of a start, each in seconds or None. `because` has the reason for every None, by the field's name.

    `image_s` was over before the launch. `process_s` goes from the launch until the weights begin, precise to one second.
    `ready_s` is the rest until the first completion, with everything that the log does not report. `warm` says that the
    compiled code came from a cache.
    """

    startup_s: Number
    image_s: Number | None
    process_s: Number | None
    weights_s: Number | None
    compile_s: Number | None
    graphs_s: Number | None
    ready_s: Number | None
    warm: bool | None
    because: dict[str, str]


class KvCache(Frozen):
    """How many tokens the KV cache of all engines holds, and how many requests of the maximum length.

    The log does not give the size of a block in tokens: `block_tok` comes from elsewhere, or is None.
    """

    tokens: int
    max_concurrency: Number | None
    block_tok: int | None = None


class LogLine(NamedTuple):
    """A line of a log: the process that wrote it, and its time on the server's clock, in seconds since midnight."""

    process: str
    clock_s: int
    message: str


PartTime = tuple[float | None, str]
"""A part in seconds, or None and the reason."""


def startup(
    log: str, startup_s: float, launched: float, image_s: float | None = None, wording: StartLog = START_LOG
) -> Startup:
    """The parts of a start, from the server's `log` in the `wording` of its kind.

    The start took `startup_s`, and `launched` is the unix time of the launch.
    """
    lines = list(_read_lines(log, wording))
    loaded = _by_process(lines, wording.loaded) or _by_process(lines, wording.read)
    so_far = {process: [max(each)] for process, each in _by_process(lines, wording.compiled_so_far).items()}
    compiled = _by_process(lines, wording.compiled) or so_far or _warm_ups(lines, wording)
    is_eager = any(wording.eager.search(line.message) for line in lines)
    none_if_eager = f"there is none: the server runs with {wording.eager_option}" if is_eager else ""
    no_compiling = none_if_eager or "the log does not say how long torch.compile took"
    no_graphs = none_if_eager or "the log does not mention a capture of CUDA graphs"
    times: dict[str, PartTime] = {
        "image_s": (image_s, "no image was pulled in one go"),
        "process_s": _time_process(lines, launched, startup_s, wording),
        "weights_s": (_longest_total(loaded), "the log does not say how long the weights took"),
        "compile_s": (_longest_total(compiled), no_compiling),
        "graphs_s": (_longest_total(_by_process(lines, wording.captured)), no_graphs),
    }
    times["ready_s"] = _time_rest(startup_s, times)
    warm = False if wording.anew.search(log) else True if wording.from_cache.search(log) else None
    because = {name: reason for name, (value, reason) in times.items() if value is None}
    if warm is None:
        because["warm"] = "the log does not mention a cache of compiled graphs"
    return Startup(startup_s=startup_s, warm=warm, because=because, **{name: value for name, (value, _) in times.items()})


def startup_measurements(times: Startup, source: str) -> list[Measurement]:
    """One measurement for each of PARTS, invalid where the part is None; and `startup_warm_s`, invalid unless it was warm."""
    values: dict[str, PartTime] = {
        metric: (getattr(times, part), times.because.get(part, "")) for part, metric in PARTS.items()
    }
    not_warm = times.because.get("warm", "the start was cold: it compiled")
    values["startup_warm_s"] = (times.startup_s if times.warm else None, not_warm)
    return [
        invalid(metric, reason, source) if value is None else valid(metric, value, source, sample_count=1)
        for metric, (value, reason) in values.items()
    ]


def kv_cache(log: str) -> KvCache | None:
    """What the engines logged about their KV caches: the last line of each counts. None if no engine logged it."""
    tokens: dict[str, int] = {}
    times: dict[str, float] = {}
    for line in _read_lines(log, START_LOG):
        if match := START_LOG.kv_tokens.search(line.message):
            tokens[line.process] = int(match["tokens"].replace(",", ""))
        if match := START_LOG.kv_concurrency.search(line.message):
            times[line.process] = float(match["times"])
    if not tokens:
        return None
    return KvCache(tokens=sum(tokens.values()), max_concurrency=sum(times.values()) if times else None)


def _read_lines(log: str, wording: StartLog) -> Iterator[LogLine]:
    for match in wording.line.finditer(log):
        clock_s = 3600 * int(match["h"]) + 60 * int(match["min"]) + int(match["s"])
        yield LogLine(match["process"] or "", clock_s, match["message"])


def _elapsed_s(since: LogLine, until: LogLine) -> float:
    """The seconds between two lines of a start, which takes less than a day."""
    return (until.clock_s - since.clock_s) % DAY_S


def _time_process(lines: Sequence[LogLine], launched: float, startup_s: float, wording: StartLog) -> PartTime:
    """The time from the launch until the weights begin.

    Only the time zone of the server's clock can differ from ours, and its first line comes within minutes of the launch.
    """
    begin = next((line for line in lines if wording.begins.match(line.message)), None)
    if begin is None:
        return None, "the log does not say when the weights began"
    first_s = (lines[0].clock_s - launched + ZONE_STEP_S / 2) % ZONE_STEP_S - ZONE_STEP_S / 2
    took_s = first_s + _elapsed_s(lines[0], begin)
    if not -LOG_STEP_S < took_s <= startup_s:
        return None, f"by the log's clock the weights began {took_s:.0f} s after the launch, of a start of {startup_s:.0f} s"
    return max(took_s, 0.0), ""


def _time_rest(startup_s: float, times: dict[str, PartTime]) -> PartTime:
    if missing := [name for name in ("process_s", "weights_s") if times[name][0] is None]:
        return None, f"the rest is not known without {' and '.join(missing)}"
    within = [times[name][0] or 0.0 for name in ("process_s", "weights_s", "compile_s", "graphs_s")]
    rest_s = startup_s - sum(within)
    # The log's clock is in whole seconds.
    if rest_s < -2:
        return None, f"the log's parts are {-rest_s:.0f} s more than the whole start"
    return max(rest_s, 0.0), ""


def _by_process(lines: Sequence[LogLine], pattern: re.Pattern[str]) -> dict[str, list[float]]:
    """The seconds that each process logs in lines that match `pattern`."""
    seconds_of: dict[str, list[float]] = {}
    for line in lines:
        if match := pattern.search(line.message):
            seconds_of.setdefault(line.process, []).append(float(match["s"]))
    return seconds_of


def _warm_ups(lines: Sequence[LogLine], wording: StartLog) -> dict[str, list[float]]:
    """The length of each CPU warm-up, in which it compiles, precise to one second."""
    begun: dict[str, LogLine] = {}
    seconds_of: dict[str, list[float]] = {}
    for line in lines:
        if wording.warms_up.match(line.message):
            begun[line.process] = line
        elif wording.warmed_up.match(line.message) and line.process in begun:
            seconds_of.setdefault(line.process, []).append(_elapsed_s(begun.pop(line.process), line))
    return seconds_of


def _longest_total(by_process: dict[str, list[float]]) -> float | None:
    """The longest total of a process: ranks work at the same time, and each does one thing after another."""
    return max(map(sum, by_process.values()), default=None)
