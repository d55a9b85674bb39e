"""The measurements of a load."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_qualify.evidence.load import agreement, steady
from vllm_qualify.evidence.load.ended import end_of
from vllm_qualify.evidence.load.problems import hit_share, problems_of
from vllm_qualify.evidence.load.repeats import interval_over_looks
from vllm_qualify.evidence.load.result import BESIDE, KEYS, Repeat, Steady, count_of, key_of, peak_chunks, read_repeat
from vllm_qualify.evidence.load.told import untold
from vllm_qualify.evidence.load.warmed import warm_up_problems
from vllm_qualify.evidence.measurement import (
    UNUSABLE,
    Interval,
    Measurement,
    around,
    geometric_mean,
    in_words,
    invalid,
    repeat_interval,
    share_interval,
    valid,
)
from vllm_qualify.evidence.restarts import moments_of_repeats, restart_problems
from vllm_qualify.evidence.sequential import Levels, Sides
from vllm_qualify.recipe.metrics import GOODPUT, METRICS, PEAK_CHUNKS, PER_GPU, PREFIX_HIT_SHARE, TURN_TTFTS, least_requests
from vllm_qualify.recipe.serving import VLLM, EngineName, ServerArguments
from vllm_qualify.recipe.workload import Load

STAGE = "load"
ACCEPTANCE = "acceptance_length_tok"
# Metrics that need two servers, one with a draft model and one without. One run of bench cannot give them.
NOT_OF_ONE_SERVER = ("speculative_speedup",)
OUTPUT = "output_throughput_tok_s"
# The first repeat is far off if it differs so much from the others' mean, and by so many times their spread.
FAR_OFF, FAR_OFF_SPREADS = 0.25, 5.0
OVERLOAD_REMEDY = "lower request_rate, or set `window: whole`, which shows how late its replies became"
WHOLE = ", over whole runs with their ramp-up and tail"


@dataclass(frozen=True)
class OverLooks:
    """The looks at a load, for its intervals. It has `count` repeats, of which the first `left_out` were warm-up."""

    levels: Levels
    looks: range
    count: int
    left_out: int

    def interval(self, metric: str, value: float, at_look: Callable[[int, Sides], Interval | None]) -> Interval | None:
        """As `interval_over_looks`."""
        direction = METRICS[metric].direction
        return interval_over_looks(value, at_look, direction, self.levels, self.looks, self.count, left_out=self.left_out)


def parse_load(
    folder: Path,
    settings: Load,
    levels: Levels,
    kind: EngineName = VLLM,
    arguments: ServerArguments | None = None,
    watched: Path | None = None,
    model: str | None = None,
    gpus: int = 0,
    warmed: bool = False,
    one_start: bool = True,
) -> list[Measurement]:
    """One measurement per load metric, over the steady state of every repeat. All are invalid if any repeat is.

    A first repeat that is far off the others counts as warm-up.

    `folder` is the stage's or its BESIDE. `kind` and `arguments` are the server's: kinds name their counters differently, and a
    feature that a server does not count must be switched off. `watched` is the folder with what was watched of the server, None
    if nothing was. `model` is the name that the server serves it by; None leaves the file's own unchecked.
    `gpus` is how many the server has; 0 on a CPU, whose throughput has no share for each. With `warmed`, the load counts only
    if the server was warmed up like the one that it ran in turns with. All repeats must be of `one_start` of it, unless it was
    started for some of them, and again for the others.

    If the budget ended a load before the first look, its values have no interval.
    """
    place = f"{folder.parent.name}/{folder.name}" if folder.name == BESIDE else folder.name
    source = f"{place}/bench-*.json"
    try:
        count = count_of(folder)
        repeats = [read_repeat(folder, place, number) for number in range(1, count + 1)]
        ended, why_not = end_of(folder.parent if folder.name == BESIDE else folder, count, settings)
        steady_states, problems = _examined(folder, repeats, settings, kind, arguments or {}, watched, model)
        cold = warm_up_problems(folder, settings, kind, arguments or {}, model) if warmed else []
        if not problems and one_start:
            problems = restart_problems(moments_of_repeats(folder, [repeat.number for repeat in repeats]))
        if problems := why_not + _turns_problems(folder, count) + cold + problems:
            hits = [PREFIX_HIT_SHARE] if _shares(folder, settings, repeats, kind) else []
            names = [*_names(settings, repeats, gpus), *hits]
            return [invalid(name, "; ".join(problems), source) for name in names]
        if problem := first_repeat_problem([each.values[OUTPUT] for each in steady_states]):
            repeats, steady_states = repeats[1:], steady_states[1:]
            source += f" without the first: {problem}"
        if any(each.rebuilt for each in steady_states):
            source += ", the requests' start times from their latencies"
        if why_not_told := next(filter(None, (untold(folder, each.number, kind, arguments or {}) for each in repeats)), ""):
            source += f", {why_not_told}"
        source += WHOLE if settings.window == "whole" else ""
        over, because = OverLooks(levels, settings.looks, count, count - len(repeats)), ended.because if ended else None
        measured = [_measurement(name, repeats, steady_states, over, source, gpus) for name in _names(settings, repeats, gpus)]
        measured += _hits(folder, place, settings, repeats, kind, over)
        return [row if row.invalid_because else row.model_copy(update={"ended_because": because}) for row in measured]
    except UNUSABLE as error:
        return [invalid(name, f"bench left no usable result: {in_words(error)}", source) for name in _names(settings, [], gpus)]


def _names(settings: Load, repeats: Sequence[Repeat], gpus: int) -> list[str]:
    """The metrics of a load: goodput only with an SLO, and some only where bench tells them, as of a draft model."""
    names = [metric.name for metric in METRICS.values() if metric.stage == STAGE and metric.name not in NOT_OF_ONE_SERVER]
    told = {key for repeat in repeats if isinstance(repeat.about, dict) for key in repeat.about}
    unasked = {PREFIX_HIT_SHARE, *(() if settings.slo else (GOODPUT,)), *(() if gpus else PER_GPU)}
    unasked |= set(TURN_TTFTS if settings.turns == 1 else ())
    unasked |= {name for name in (ACCEPTANCE, PEAK_CHUNKS) if KEYS[name] not in told}
    return [name for name in names if name not in unasked]


def _examined(
    folder: Path,
    repeats: Sequence[Repeat],
    settings: Load,
    kind: EngineName,
    arguments: ServerArguments,
    watched: Path | None,
    model: str | None,
) -> tuple[list[Steady], list[str]]:
    """The steady states of the repeats, and the problems that make the load invalid."""
    steady_states: list[Steady] = []
    problems: list[str] = []
    for repeat in repeats:
        reasons = problems_of(folder, repeat, settings, kind, arguments, watched, model=model)
        try:
            # The steady state of a repeat with problems does not matter.
            steady_states += [] if reasons else [repeat.steady(settings)]
        except steady.UnsteadyError as error:
            reasons = [str(error)]
        except steady.OverloadError as error:
            reasons = [f"the server does not keep up with {settings.request_rate:g} req/s: {error}: {OVERLOAD_REMEDY}"]
        problems += [f"repeat {repeat.number}: {problem}" for problem in reasons]
    return steady_states, problems or agreement.repeat_problems(repeats)


def _turns_problems(folder: Path, count: int) -> list[str]:
    """In turns, both servers have equally many repeats."""
    other = folder.parent if folder.name == BESIDE else folder / BESIDE
    if not other.is_dir() or (others := count_of(other)) == count:
        return []
    return [f"{count} repeats in {folder.name} and {others} in {other.name}, which ran in turns"]


def first_repeat_problem(values: Sequence[float]) -> str | None:
    """Why the first of several repeats is left out: by its output throughput, the server had not warmed up. Else None.

    The other repeats still count: something else on the machine may have been the cause.
    """
    if len(values) < 3 or not all(0 < value < math.inf for value in values):
        return None
    first, *others = (math.log(value) for value in values)
    apart, spread = abs(first - statistics.fmean(others)), max(others) - min(others)
    if apart <= math.log(1 + FAR_OFF) or apart <= FAR_OFF_SPREADS * spread:
        return None
    least, most = min(values[1:]), max(values[1:])
    return f"its {values[0]:.4g} tok/s are far off the others' {least:.4g} to {most:.4g}, more num_warmups may help"


def _measurement(
    name: str, repeats: Sequence[Repeat], steady_states: Sequence[Steady], over: OverLooks, source: str, gpus: int
) -> Measurement:
    whole = PER_GPU.get(name, name)
    traced_to = [repeat.line_of(key_of(whole)) for repeat in repeats]
    if name == ACCEPTANCE:
        return _acceptance(repeats, over, source, traced_to)
    if name == PEAK_CHUNKS:
        return _peak(repeats, over, source, traced_to)
    least, needed = min(each.requests for each in steady_states), least_requests(name)
    if least < needed:
        where = "whole run" if source.endswith(WHOLE) else "steady state"
        because = f"{least} requests in a repeat's {where}, and {name} needs {needed}: {steady.REMEDY}"
        return invalid(name, because, source, traced_to=traced_to)
    pairs = zip(repeats, steady_states, strict=True)
    untold = [f"repeat {repeat.number}: {each.untold[name]}" for repeat, each in pairs if name in each.untold]
    if untold:
        return invalid(name, "; ".join(untold), source, traced_to=traced_to)
    values = [each.values[whole] / (gpus if name in PER_GPU else 1) for each in steady_states]
    others = {"sample_count": sum(each.requests for each in steady_states), "traced_to": traced_to}
    if name == GOODPUT and 0 in values:
        return _goodput_with_none(steady_states, over, source, **others)
    return _over_repeats(name, values, over, source, **others)


def _acceptance(repeats: Sequence[Repeat], over: OverLooks, source: str, traced_to: list[str]) -> Measurement:
    """The acceptance length, by the server's own counters over all of every repeat: requests do not show it."""
    values = [float(rate) for repeat in repeats if (rate := repeat.about.get(KEYS[ACCEPTANCE])) is not None]
    if len(values) < len(repeats):
        because = f"only {len(values)} of {len(repeats)} repeats have {KEYS[ACCEPTANCE]}"
        return invalid(ACCEPTANCE, because, source, traced_to=traced_to)
    count = sum(int(repeat.about["completed"]) for repeat in repeats)
    return _over_repeats(ACCEPTANCE, values, over, source, sample_count=count, traced_to=traced_to)


def _peak(repeats: Sequence[Repeat], over: OverLooks, source: str, traced_to: list[str]) -> Measurement:
    """Bench's peak of chunks, over all of every repeat, if its requests show it too."""
    counted = list[float]()
    for repeat in repeats:
        try:
            count, told = _chunks_of(repeat), repeat.about.get(KEYS[PEAK_CHUNKS])
        except UNUSABLE as error:
            return invalid(PEAK_CHUNKS, f"repeat {repeat.number}: {in_words(error)}", source, traced_to=traced_to)
        if told != count:
            because = f"repeat {repeat.number}: {KEYS[PEAK_CHUNKS]} is {told}, and by its requests {count}"
            return invalid(PEAK_CHUNKS, because, source, traced_to=traced_to)
        counted.append(count)
    samples = sum(int(repeat.about["completed"]) for repeat in repeats)
    return _over_repeats(PEAK_CHUNKS, counted, over, source, sample_count=samples, traced_to=traced_to)


def _chunks_of(repeat: Repeat) -> int:
    return repeat.remembered("peak", lambda: peak_chunks(repeat.result))


def _hits(
    folder: Path, place: str, settings: Load, repeats: Sequence[Repeat], kind: EngineName, over: OverLooks
) -> list[Measurement]:
    """The share of the prompts that the prefix cache had, over all of every repeat: requests do not show it.

    Empty if the workload's prompts have nothing in common, or the server has no such cache.
    """
    shares = _shares(folder, settings, repeats, kind)
    if not shares:
        return []
    source, traced_to = f"{place}/metrics-*.txt", [f"{place}/metrics-{repeat.number}-after.txt" for repeat in repeats]
    if len(shares) < len(repeats):
        because = f"the server counts what its prefix cache was asked in only {len(shares)} of {len(repeats)} repeats"
        return [invalid(PREFIX_HIT_SHARE, because, source, traced_to=traced_to)]
    others = {"sample_count": len(repeats) * settings.num_prompts, "traced_to": traced_to}
    value = statistics.fmean(shares) if 0 in shares else geometric_mean(shares)
    interval = over.interval(PREFIX_HIT_SHARE, value, lambda used, at: _of_hits(shares[:used], at))
    return [valid(PREFIX_HIT_SHARE, value, source, repeats=shares, interval=interval, **others)]


def _of_hits(shares: Sequence[float], at: Sides) -> Interval | None:
    if 0 in shares:
        # Zero has no logarithm. All prompts of a repeat can miss for one reason, so a repeat is one trial.
        return share_interval(sum(shares), len(shares), at)
    interval = repeat_interval(shares, at)
    return interval and Interval(lower=min(1.0, interval.lower), upper=min(1.0, interval.upper))


def _shares(folder: Path, settings: Load, repeats: Sequence[Repeat], kind: EngineName) -> list[float]:
    """The share of each repeat whose server had a prefix cache, if the workload's prompts have anything in common."""
    found = [hit_share(folder, repeat.number, kind) for repeat in repeats] if settings.shares_prefixes else []
    return [share for share in found if share is not None]


def _over_repeats(name: str, repeats: Sequence[float], over: OverLooks, source: str, **others: object) -> Measurement:
    if not all(math.isfinite(value) and value > 0 for value in repeats):
        return invalid(name, f"repeats gave {list(repeats)}, which is not a measured time or rate", source)
    value = geometric_mean(repeats)
    interval = over.interval(name, value, lambda used, at: repeat_interval(repeats[:used], at))
    return valid(name, value, source, repeats=list(repeats), interval=interval, **others)


def _goodput_with_none(steady_states: Sequence[Steady], over: OverLooks, source: str, **others: object) -> Measurement:
    """Goodput if in some repeat no request met the SLO: zero has no logarithm, so goodput is taken as a share of the requests.

    All requests of a repeat can miss the SLO for one reason. So a repeat is one trial, and its score is its share. The chance
    of an error is split between the bounds of the share and of the rate.
    """
    goods, rates = ([each.values[name] for each in steady_states] for name in (GOODPUT, "request_throughput_req_s"))
    value = statistics.fmean(goods)
    interval = over.interval(GOODPUT, value, lambda used, at: _of_shares(goods[:used], rates[:used], at))
    return valid(GOODPUT, value, source, repeats=goods, interval=interval, **others)


def _of_shares(goods: Sequence[float], rates: Sequence[float], at: Sides) -> Interval | None:
    half = Sides(at.below / 2, at.above / 2)
    rate = repeat_interval(rates, half)
    if rate is None:
        return None
    share = share_interval(sum(good / rate for good, rate in zip(goods, rates, strict=True)), len(goods), half)
    return around(statistics.fmean(goods), share.lower * rate.lower, share.upper * rate.upper)
