"""A vLLM server's start in parts, and the KV cache that it made, from its log. Pure.

The wordings are those of vLLM 0.12 to 0.33; on a GPU and on the CPU some differ.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_qualify.evidence.measurement import Measurement, invalid, valid
from vllm_qualify.recipe.model import Frozen, Number

# Its stamp has no year and no time zone. What stands before it is the process, and a prefix that somebody configured.
_LINE = re.compile(
    r"(?:\((?P<process>(?=[^()\n]{0,80}\bpid=\d)[^()\n]{1,160})\) )?"
    r"(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d (?P<h>\d\d):(?P<min>\d\d):(?P<s>\d\d) \[[^\]]*\] (?P<message>.*)"
)
# No time zone is apart from another by less, and a day is a multiple of it.
ZONE_STEP_S = 900
DAY_S = 86_400

# Bounded, as every count in a log: nothing that stands there may take long to read, or be more than a number can hold.
_S = r"(?P<s>\d{1,9}(?:\.\d{1,9})?)"

# vLLM's newer model runner, V2, has the other words.
_BEGIN = re.compile(r"Starting to load model |Loading model from scratch")
# The whole of it, with a download, a draft model and what is made of the weights; the CPU's runner tells only of the reading.
_LOADED = re.compile(rf"Model loading took .{{1,40}}? and {_S} seconds")
_READ = re.compile(rf"Loading weights took {_S} seconds")
# A line for each model that is compiled, the draft model too. `takes`, of older versions, is of all until then.
_COMPILED = re.compile(rf"torch\.compile (?:and initial profiling(?:/warmup)? run (?:together )?)?took {_S} s in total")
_COMPILED_SO_FAR = re.compile(rf"torch\.compile takes {_S} s in total")
# On the CPU there is no other word of it.
_WARMS_UP, _WARMED_UP = re.compile(r"Warming up model for the compilation"), re.compile(r"Warming up done")
# Newer versions capture some graphs twice, first to see how much memory they take.
_CAPTURED = re.compile(rf"Graph capturing finished in {_S} secs")

_FROM_CACHE = re.compile(r"Directly load (?:the compiled graph\(s\)|AOT compilation)")
_ANEW = re.compile(r"Compiling a graph for |[Ss]aved AOT compiled function|Compiling model again due to a load failure")
_EAGER = re.compile(r"enforce_eager=True")

# In older versions the two stand on lines of their own. The pool is `GPU`, `CPU` or another device's.
_KV_TOKENS = re.compile(r"KV cache size: (?P<tokens>\d[\d,]{0,20}) tokens")
_KV_CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]{1,20} tokens per request: (?P<times>\d{1,12}(?:\.\d{1,9})?)x")

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
    """A start in parts, each in seconds or None; `because` has the reason for every None, by the field's name.

    `image_s` was over before the launch. `process_s`: from there until the weights begin, to a second. `ready_s`: the rest
    until the first completion, with whatever the log does not tell of. `warm`: what is compiled came from a cache.
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
    """How many tokens the KV cache of all engines holds, and how many requests of the greatest length.

    The log does not tell of how many tokens a block of it is: `block_tok` is from elsewhere, or None.
    """

    tokens: int
    max_concurrency: Number | None
    block_tok: int | None = None


class Line(NamedTuple):
    """A line of a log: the process it is from, and its time on the server's clock, in seconds since midnight."""

    process: str
    clock_s: int
    message: str


Told = tuple[float | None, str]
"""A part in seconds, or None and why."""


def startup(
    log: str, startup_s: float, launched: float | None, image_s: float | None = None, started_before: bool = False
) -> Startup:
    """The parts of a start of `startup_s`, of which `log` is the server's, `launched` at this unix time.

    `started_before`: the same server ran on this machine already; its start is warm then unless the log says otherwise.
    """
    lines = list(_lines(log))
    told: dict[str, Told] = {
        "image_s": (image_s, "no image was pulled in one go"),
        "process_s": _process(lines, launched, startup_s),
        "weights_s": _weights(lines),
        "compile_s": _compile(lines),
        "graphs_s": _graphs(lines),
    }
    told["ready_s"] = _rest(startup_s, told)
    warm = _warm(log, started_before)
    because = {name: reason for name, (value, reason) in told.items() if value is None}
    if warm is None:
        because["warm"] = "the log tells of no cache of compiled graphs"
    return Startup(startup_s=startup_s, warm=warm, because=because, **{name: value for name, (value, _) in told.items()})


def measurements(found: Startup, source: str) -> list[Measurement]:
    """One for each of PARTS, and the whole as `startup_warm_s` if the start was warm; invalid where a part is None."""
    return [*(_measurement(found, part, metric, source) for part, metric in PARTS.items()), _warm_start(found, source)]


def kv_cache(log: str) -> KvCache | None:
    """What the server's engines said of their KV caches, the last of each; None if none did."""
    tokens: dict[str, int] = {}
    times: dict[str, float] = {}
    for line in _lines(log):
        if match := _KV_TOKENS.search(line.message):
            tokens[line.process] = int(match["tokens"].replace(",", ""))
        if match := _KV_CONCURRENCY.search(line.message):
            times[line.process] = float(match["times"])
    if not tokens:
        return None
    return KvCache(tokens=sum(tokens.values()), max_concurrency=sum(times.values()) if times else None)


def _measurement(found: Startup, part: str, metric: str, source: str) -> Measurement:
    value: float | None = getattr(found, part)
    return invalid(metric, found.because[part], source) if value is None else valid(metric, value, source, sample_count=1)


def _warm_start(found: Startup, source: str) -> Measurement:
    if found.warm:
        return valid("startup_warm_s", found.startup_s, source, sample_count=1)
    return invalid("startup_warm_s", found.because.get("warm", "the start was cold: it compiled"), source)


def _lines(log: str) -> Iterator[Line]:
    for match in _LINE.finditer(log):
        clock_s = 3600 * int(match["h"]) + 60 * int(match["min"]) + int(match["s"])
        yield Line(match["process"] or "", clock_s, match["message"])


def _elapsed_s(since: Line, until: Line) -> float:
    """Of a start, which takes less than a day."""
    return (until.clock_s - since.clock_s) % DAY_S


def _process(lines: Sequence[Line], launched: float | None, startup_s: float) -> Told:
    """The server's clock is ours but for the time zone: its first line comes within minutes of the launch."""
    begin = next((line for line in lines if _BEGIN.match(line.message)), None)
    if launched is None:
        return None, "nobody recorded when the server was launched"
    if begin is None:
        return None, "the log does not tell when the weights began"
    first_s = (lines[0].clock_s - launched + ZONE_STEP_S / 2) % ZONE_STEP_S - ZONE_STEP_S / 2
    took_s = first_s + _elapsed_s(lines[0], begin)
    if not 0 <= took_s <= startup_s:
        return None, f"by the log's clock the weights began {took_s:.0f} s after the launch, of a start of {startup_s:.0f} s"
    return took_s, ""


def _weights(lines: Sequence[Line]) -> Told:
    loaded = _by_process(lines, _LOADED) or _by_process(lines, _READ)
    return _longest(loaded), "the log does not tell how long the weights took"


def _compile(lines: Sequence[Line]) -> Told:
    so_far = {process: [max(each)] for process, each in _by_process(lines, _COMPILED_SO_FAR).items()}
    compiled = _by_process(lines, _COMPILED) or so_far or _warm_ups(lines)
    return _longest(compiled), _why_none(lines, "the log does not tell how long torch.compile took")


def _graphs(lines: Sequence[Line]) -> Told:
    captured = _by_process(lines, _CAPTURED)
    return _longest(captured), _why_none(lines, "the log tells of no capture of CUDA graphs")


def _rest(startup_s: float, told: dict[str, Told]) -> Told:
    if missing := [name for name in ("process_s", "weights_s") if told[name][0] is None]:
        return None, f"the rest is not known without {' and '.join(missing)}"
    within = [told[name][0] or 0.0 for name in ("process_s", "weights_s", "compile_s", "graphs_s")]
    rest_s = startup_s - sum(within)
    # The log's clock is in whole seconds.
    if rest_s < -2:
        return None, f"the log's parts are {-rest_s:.0f} s more than the whole start"
    return max(rest_s, 0.0), ""


def _why_none(lines: Sequence[Line], otherwise: str) -> str:
    return (
        "there is none: the server runs with enforce-eager" if any(_EAGER.search(line.message) for line in lines) else otherwise
    )


def _by_process(lines: Sequence[Line], wording: re.Pattern[str]) -> dict[str, list[float]]:
    """The seconds that each process tells in these words."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if match := wording.search(line.message):
            found.setdefault(line.process, []).append(float(match["s"]))
    return found


def _warm_ups(lines: Sequence[Line]) -> dict[str, list[float]]:
    """From the begin to the end of the CPU's warm-up, in which it compiles; to a second."""
    begun: dict[str, Line] = {}
    found: dict[str, list[float]] = {}
    for line in lines:
        if _WARMS_UP.match(line.message):
            begun[line.process] = line
        elif _WARMED_UP.match(line.message) and line.process in begun:
            found.setdefault(line.process, []).append(_elapsed_s(begun.pop(line.process), line))
    return found


def _longest(by_process: dict[str, list[float]]) -> float | None:
    """Ranks do the same at the same time, and each does one thing after the other."""
    return max(map(sum, by_process.values()), default=None)


def _warm(log: str, started_before: bool) -> bool | None:
    if _ANEW.search(log):
        return False
    return True if started_before or _FROM_CACHE.search(log) else None
