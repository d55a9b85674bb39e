"""The measurements of a load."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence import measurement
from vllm_qualify.evidence.load import agreement, steady
from vllm_qualify.evidence.load.ended import end_of
from vllm_qualify.evidence.load.problems import counters_of, problems_of
from vllm_qualify.evidence.load.repeats import interval_over_looks
from vllm_qualify.evidence.load.result import BESIDE, KEYS, Repeat, Steady, count_of, key_of, metrics_pages, read_repeat
from vllm_qualify.evidence.load.told import why_untold
from vllm_qualify.evidence.load.warm_up import warm_up_problems
from vllm_qualify.evidence.measurement import UNUSABLE, Interval, Measurement, in_words, invalid, valid
from vllm_qualify.evidence.restarts import moments_of_repeats, restart_problems
from vllm_qualify.evidence.sequential import Levels, Sides
from vllm_qualify.recipe import metrics
from vllm_qualify.recipe.load import Load

STAGE = "load"
ACCEPTANCE = "acceptance_length_tok"
# It needs two servers, one with a draft model and one without. One run of bench cannot give it.
OF_TWO_SERVERS = "speculative_speedup"
# The first repeat is far off if it differs so much from the others' mean, and by so many times their spread.
FAR_OFF, FAR_OFF_SPREADS = 0.25, 5.0
OVERLOAD_REMEDY = "lower request_rate, or set `window: whole`, which shows how late its replies became"
OF_A_TRACE = ", from each late request's time in the trace on"
WHOLE = ", over whole runs with their ramp-up and tail"

AtLook = Callable[[int, Sides], Interval | None]
"""The interval of one look, see `interval_over_looks`."""


class LoadChecks(NamedTuple):
    """What a load is held against beside its settings."""

    watched: Path | None = None
    """the folder with what was watched of the server; None if nothing was"""
    is_warmed: bool = False
    """whether the load counts only if the server was warmed up like the one that it ran in turns with"""
    is_one_start: bool = True
    """whether one start of the server must have answered all repeats"""


def parse_load(
    folder: Path, settings: Load, levels: Levels, server: ServerPlan, checks: LoadChecks | None = None
) -> list[Measurement]:
    """One measurement per load metric, over the steady state of every repeat. All are invalid if any repeat is.

    A first repeat that is far off the others counts as warm-up. `folder` is the stage's or its BESIDE, `server` the one that
    answered. If the budget ended a load before the first look, its values have no interval.
    """
    checks, gpus = checks or LoadChecks(), len(server.gpus)
    place = f"{folder.parent.name}/{folder.name}" if folder.name == BESIDE else folder.name
    source = f"{place}/bench-*.json"
    try:
        count = count_of(folder)
        repeats = [read_repeat(folder, place, number) for number in range(1, count + 1)]
        ended, why_not = end_of(folder.parent if folder.name == BESIDE else folder, count, settings)
        steady_states, problems = _examine_repeats(repeats, settings, server, checks.watched)
        cold = warm_up_problems(folder, settings, server) if checks.is_warmed else []
        if not problems and checks.is_one_start:
            problems = restart_problems(moments_of_repeats(folder, [repeat.number for repeat in repeats]))
        names = _list_metrics(settings, repeats, gpus)
        if problems := why_not + _turns_problems(folder, count) + cold + problems:
            hits = [metrics.PREFIX_HIT_SHARE] if _hit_shares(settings, repeats, server) else []
            return [invalid(name, "; ".join(problems), source) for name in names + hits]
        if problem := first_repeat_problem([each.values[metrics.OUTPUT_THROUGHPUT] for each in steady_states]):
            repeats, steady_states = repeats[1:], steady_states[1:]
            names = _list_metrics(settings, repeats, gpus)
            source += f" without the first: {problem}"
        if any(each.rebuilt for each in steady_states):
            source += ", the requests' start times from their latencies"
        if why_not_told := next(filter(None, (why_untold(each, server) for each in repeats)), ""):
            source += f", {why_not_told}"
        source += OF_A_TRACE if settings.trace else ""
        source += WHOLE if settings.window == "whole" else ""
        valid_load = _ValidLoad(settings, server, repeats, steady_states, source, levels, count)
        measured = [*(valid_load.measure(name) for name in names), *valid_load.measure_hits()]
        because = ended.because if ended else None
        return [row if row.invalid_because else row.model_copy(update={"ended_because": because}) for row in measured]
    except UNUSABLE as error:
        because = f"bench left no usable result: {in_words(error)}"
        return [invalid(name, because, source) for name in _list_metrics(settings, [], gpus)]


def _list_metrics(settings: Load, repeats: Sequence[Repeat], gpus: int) -> list[str]:
    """The metrics of a load: goodput only with an SLO, and some only where bench tells them, as of a draft model."""
    names = [metric.name for metric in metrics.METRICS.values() if metric.stage == STAGE and metric.name != OF_TWO_SERVERS]
    told = {key for repeat in repeats if isinstance(repeat.summary, dict) for key in repeat.summary}
    unasked = {metrics.PREFIX_HIT_SHARE, *(() if settings.slo else (metrics.GOODPUT,)), *(() if gpus else metrics.PER_GPU)}
    unasked |= set(metrics.TURN_TTFTS if settings.turns == 1 else ())
    unasked |= {name for name in (ACCEPTANCE, metrics.PEAK_CHUNKS) if KEYS[name] not in told}
    return [name for name in names if name not in unasked]


def _examine_repeats(
    repeats: Sequence[Repeat], settings: Load, server: ServerPlan, watched: Path | None
) -> tuple[list[Steady], list[str]]:
    steady_states: list[Steady] = []
    problems: list[str] = []
    for repeat in repeats:
        reasons = problems_of(repeat, settings, server, watched)
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
    others = count_of(other) if other.is_dir() else count
    return [f"{count} repeats in {folder.name} and {others} in {other.name}, which ran in turns"] if others != count else []


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


def _hit_shares(settings: Load, repeats: Sequence[Repeat], server: ServerPlan) -> list[float]:
    """The share of its prompts that the prefix cache had, of each repeat whose server has one. Empty if they share nothing."""
    counted = [counters_of(*metrics_pages(each.folder, each.number))[1] for each in repeats if settings.shares_prefixes]
    return [share for each in counted if (share := server.engine_kind.hit_share(each)) is not None]


@dataclass(frozen=True)
class _ValidLoad:
    """A load that counts, with the repeats that count: of `count` the first may be left out, as warm-up."""

    settings: Load
    server: ServerPlan
    repeats: Sequence[Repeat]
    steady_states: Sequence[Steady]
    source: str
    levels: Levels
    count: int

    def measure(self, name: str) -> Measurement:
        if name in (ACCEPTANCE, metrics.PEAK_CHUNKS):
            return self._measure_counts(name)
        least, needed = min(each.requests for each in self.steady_states), metrics.least_requests(name)
        if least < needed:
            where = "whole run" if self.settings.window == "whole" else "steady state"
            return self._refuse(name, f"{least} requests in a repeat's {where}, and {name} needs {needed}: {steady.REMEDY}")
        pairs = zip(self.repeats, self.steady_states, strict=True)
        if untold := [f"repeat {repeat.number}: {each.untold[name]}" for repeat, each in pairs if name in each.untold]:
            return self._refuse(name, "; ".join(untold))
        whole, gpus = (metrics.PER_GPU[name], len(self.server.gpus)) if name in metrics.PER_GPU else (name, 1)
        values = [each.values[whole] / gpus for each in self.steady_states]
        count = sum(each.requests for each in self.steady_states)
        if name == metrics.GOODPUT and 0 in values:
            # Zero has no logarithm, so goodput is taken as a share of the requests.
            rates = [each.values["request_throughput_req_s"] for each in self.steady_states]
            mean = statistics.fmean(values)
            return self._state(name, mean, values, count, lambda used, at: _bound_goodput(values[:used], rates[:used], at))
        return self._average(name, values, count)

    def _measure_counts(self, name: str) -> Measurement:
        """What bench tells of all of a repeat: the peak, if the requests show it too, and drafts by the server's counters."""
        told = [repeat.summary.get(KEYS[name]) for repeat in self.repeats]
        if name == metrics.PEAK_CHUNKS and (because := next(filter(None, map(_why_no_peak, self.repeats)), None)):
            return self._refuse(name, because)
        values = [float(value) for value in told if value is not None]
        if len(values) < len(told):
            return self._refuse(name, f"only {len(values)} of {len(told)} repeats have {KEYS[name]}")
        return self._average(name, values, sum(int(repeat.summary["completed"]) for repeat in self.repeats))

    def measure_hits(self) -> list[Measurement]:
        """The share of the prompts that the prefix cache had, over all of every repeat: requests do not show it.

        Empty if the workload's prompts have nothing in common, or the server has no such cache.
        """
        name, shares = metrics.PREFIX_HIT_SHARE, _hit_shares(self.settings, self.repeats, self.server)
        if not shares:
            return []
        place, asked = self.repeats[0].path.rpartition("/")[0], len(self.repeats)
        pages = [f"{place}/metrics-{repeat.number}-after.txt" for repeat in self.repeats]
        at_pages: Any = {"source": f"{place}/metrics-*.txt", "traced_to": pages}
        if len(shares) < asked:
            because = f"the server counts what its prefix cache was asked in only {len(shares)} of {asked} repeats"
            return [invalid(name, because, **at_pages)]
        value = statistics.fmean(shares) if 0 in shares else measurement.geometric_mean(shares)
        samples = asked * self.settings.num_prompts
        return [self._state(name, value, shares, samples, lambda used, at: _bound_hits(shares[:used], at), **at_pages)]

    def _average(self, name: str, values: Sequence[float], count: int) -> Measurement:
        if not all(math.isfinite(value) and value > 0 for value in values):
            return invalid(name, f"repeats gave {values}, which is not a measured time or rate", self.source)
        mean = measurement.geometric_mean(values)
        return self._state(name, mean, values, count, lambda used, at: measurement.repeat_interval(values[:used], at))

    def _state(
        self, name: str, value: float, values: Sequence[float], sample_count: int, at_look: AtLook, **place: Any
    ) -> Measurement:
        """With the interval over the looks. Its `place` is bench's results, unless it is said."""
        looks, left_out = self.settings.looks, self.count - len(self.repeats)
        direction = metrics.METRICS[name].direction
        interval = interval_over_looks(value, at_look, direction, self.levels, looks, self.count, left_out=left_out)
        about = place or {"source": self.source, "traced_to": self._trace(name)}
        return valid(name, value, repeats=values, sample_count=sample_count, interval=interval, **about)

    def _refuse(self, name: str, because: str) -> Measurement:
        return invalid(name, because, self.source, traced_to=self._trace(name))

    def _trace(self, name: str) -> list[str]:
        return [repeat.line_of(key_of(metrics.PER_GPU.get(name, name))) for repeat in self.repeats]


def _why_no_peak(repeat: Repeat) -> str | None:
    told = repeat.summary.get(KEYS[metrics.PEAK_CHUNKS])
    try:
        if told == repeat.peak_chunks:
            return None
        return f"repeat {repeat.number}: {KEYS[metrics.PEAK_CHUNKS]} is {told}, and by its requests {repeat.peak_chunks}"
    except UNUSABLE as error:
        return f"repeat {repeat.number}: {in_words(error)}"


def _bound_hits(shares: Sequence[float], at: Sides) -> Interval | None:
    if 0 in shares:
        # Zero has no logarithm. All prompts of a repeat can miss for one reason, so a repeat is one trial.
        return measurement.share_interval(sum(shares), len(shares), at)
    interval = measurement.repeat_interval(shares, at)
    return interval and Interval(lower=min(1.0, interval.lower), upper=min(1.0, interval.upper))


def _bound_goodput(goods: Sequence[float], rates: Sequence[float], at: Sides) -> Interval | None:
    """All requests of a repeat can miss the SLO for one reason. So a repeat is one trial, and its score is its share.

    The chance of an error is split between the bounds of the share and of the rate.
    """
    half = Sides(at.below / 2, at.above / 2)
    rate = measurement.repeat_interval(rates, half)
    if rate is None:
        return None
    share = measurement.share_interval(sum(good / rate for good, rate in zip(goods, rates, strict=True)), len(goods), half)
    return measurement.around(statistics.fmean(goods), share.lower * rate.lower, share.upper * rate.upper)
