"""The search of a sweep: which level is run next, and which is the highest that meets the SLO. It reads no files.

The next run follows only from the points measured so far (`next_step`). So an interrupted sweep can go on, and its results can
be read from its files at any later time.

A search is a bisection, because latencies rise with the load. Its answer has met the SLO in two runs with different prompts:
the highest of several levels that met it once was probably lucky. An invalid run neither meets nor misses the SLO. It is
repeated once, and if the repetition is invalid too, the search has no answer.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import model_validator

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.recipe.load import Load, Slo
from vllm_qualify.recipe.metrics import METRICS, least_prompts
from vllm_qualify.recipe.searches import Sweep
from vllm_qualify.recipe.values import CountOrZero, Frozen, Number, Positive

# A run is planned this many times as long as it must last, because the planned rate is a guess.
MARGIN = 1.25
# A level is measured at most so often without a valid result, each time with twice as many prompts.
MOST_INVALID = 2
# A level is the answer if so many valid runs met the SLO, and none missed it.
RUNS_TO_CONFIRM = 2
RUNS_KEPT = 2
RATE_DIGITS = 4
REQUESTS = "request_throughput_req_s"

Purpose = Literal["curve", "concurrency", "request_rate"]
Goal = Literal["concurrency", "request_rate"]
UNITS: dict[Purpose, str] = {"curve": "clients", "concurrency": "clients", "request_rate": "req/s"}


class SweepPlan(Frozen):
    sweep: Sweep
    load: Load
    """The profile's own, with the lengths and the seed."""
    server: ServerPlan
    price_usd_gpu_hour: Positive | None = None
    watched: bool = False
    """Whether a run counts only if it was watched."""

    @property
    def most_concurrency(self) -> int:
        return self.sweep.most_concurrency or self.server.most_requests or self.load.max_concurrency

    @property
    def gpus(self) -> int:
        """The server's number of GPUs, 1 for a CPU."""
        return max(1, len(self.server.gpus))

    @property
    def least_prompts(self) -> int:
        """The fewest prompts of a run that show the SLO's percentiles."""
        return max((least_prompts(name) for name in self.sweep.slo), default=1)

    @property
    def goals(self) -> list[Goal]:
        """What the sweep searches for. Concurrency comes first, because the search for the rate begins with its result."""
        goals: tuple[Goal, ...] = ("concurrency", "request_rate")
        return [goal for goal in goals if self.sweep.slo and goal in self.sweep.search]

    @property
    def curve(self) -> list[int]:
        """The curve's numbers of clients. A search for the rate alone begins with the throughput of the profile's own load."""
        if not self.sweep.concurrencies and self.goals == ["request_rate"]:
            return [min(self.load.max_concurrency, self.most_concurrency)]
        return self.sweep.concurrencies

    @property
    def slo_of_request(self) -> Slo | None:
        """The limits for one request: for each latency, the bound on its highest percentile. None if the SLO has no such."""
        percentiles = [name for name in self.sweep.slo if METRICS[name].quantile is not None]
        ordered = sorted(percentiles, key=lambda name: METRICS[name].quantile or 0)
        limits = {f"{name.split('_')[0]}_ms": self.sweep.slo[name] for name in ordered}
        limits = {latency: limit for latency, limit in limits.items() if latency in Slo.model_fields}
        return Slo.model_validate(limits) if limits else None


class SweepLoad(Frozen):
    """The purpose of a run, and its load. With a rate, the load's `max_concurrency` means nothing."""

    purpose: Purpose
    load: Load
    request_rate_req_s: Positive | None = None

    @property
    def paced(self) -> Load:
        """The load as it is sent: at the run's rate, if it has one."""
        if self.request_rate_req_s is None:
            return self.load
        return self.load.model_copy(update={"request_rate": self.request_rate_req_s})

    @property
    def level(self) -> float:
        """Clients, or requests per second."""
        return self.load.max_concurrency if self.request_rate_req_s is None else self.request_rate_req_s

    @property
    def is_open(self) -> bool:
        return self.request_rate_req_s is not None


class Point(Frozen):
    """One run. It has its steady state's figures by metric, or the reason why there are none.

    With `overloaded_because` there are no figures, but there is a result: the server does not keep up with the rate, which
    misses any SLO. `meets_slo` is None if the run is invalid, or if there is no SLO. `answered_req_s` is over the whole run,
    and None unless all requests were answered. `untold` says why single metrics have no figure.
    """

    folder: str
    asked: SweepLoad
    figures: dict[str, Number] = {}
    untold: dict[str, str] = {}
    sample_count: CountOrZero = 0
    answered_req_s: Number | None = None
    meets_slo: bool | None = None
    overloaded_because: str | None = None
    invalid_because: str | None = None
    traced_to: list[str] = []

    @model_validator(mode="after")
    def _figures_or_reason(self) -> "Point":
        if sum((bool(self.figures), self.overloaded_because is not None, self.invalid_because is not None)) != 1:
            raise ValueError("a point has either figures or the reason why it has none")
        return self


class SloLevel(Frozen):
    """The highest level that meets the SLO, or why none is known. `note` gives the next level that misses it."""

    value: Number | None = None
    note: str = ""
    invalid_because: str | None = None

    @model_validator(mode="after")
    def _value_or_reason(self) -> "SloLevel":
        if (self.value is None) != (self.invalid_because is not None):
            raise ValueError("a search has either an answer or the reason why it has none")
        return self


class NextRun(NamedTuple):
    """The next run: at so many clients, or so many requests per second."""

    purpose: Purpose
    level: float


@dataclass(frozen=True)
class Aim:
    """A search for the highest level from `least` to `most` that meets the SLO. It tries `first` first.

    It ends when the next level that misses the SLO is no further away than `resolution` times the level, or than 1 if levels
    are `whole`. It makes at most `most_runs` runs.
    """

    first: float
    least: float
    most: float
    resolution: float
    most_runs: int
    whole: bool
    unit: str


@dataclass(frozen=True)
class LevelResult:
    """Whether a run at a level met the SLO; None if it was invalid, and why. `is_new`: the search itself made the run."""

    level: float
    meets: bool | None
    is_new: bool = True
    invalid_because: str | None = None


@dataclass(frozen=True)
class _Known:
    """Levels that met the SLO in all valid runs, with the number of these; and levels that missed it in any."""

    met: dict[float, int]
    missed: set[float]

    @property
    def highest_met(self) -> float | None:
        return max(self.met, default=None)

    @property
    def confirmed_level(self) -> float | None:
        """The highest level that met the SLO often enough."""
        return max((level for level, runs in self.met.items() if runs >= RUNS_TO_CONFIRM), default=None)

    def next_missed(self, level: float) -> float | None:
        return min((missed for missed in self.missed if missed > level), default=None)


def search_step(aim: Aim, results: Sequence[LevelResult]) -> float | SloLevel:
    """The next level that a search runs, or its end. The order of the results does not matter."""
    valid = [each for each in results if each.meets is not None and each.level <= aim.most]
    missed = {each.level for each in valid if not each.meets}
    known = _Known(Counter(each.level for each in valid if each.level not in missed), missed)
    new, highest = [each for each in results if each.is_new], known.highest_met
    bad = [each for each in new if each.meets is None]
    counts = Counter(each.level for each in bad)
    if twice := [each for each in bad if counts[each.level] >= MOST_INVALID]:
        met = "" if highest is None else f"; {_name_level(aim, highest)} met the SLO"
        runs = f"{MOST_INVALID} runs at {_name_level(aim, twice[-1].level)}"
        return SloLevel(invalid_because=f"{runs} were invalid: {twice[-1].invalid_because}{met}")
    level, left = _narrow_bracket(aim, known), aim.most_runs - len(new)
    # A level that met the SLO only once is no answer: the last RUNS_KEPT runs confirm it, or another one if that fails.
    if highest is not None and highest != known.confirmed_level and (level is None or left <= RUNS_KEPT):
        level = highest
    return _end_search(aim, known, level) if level is None or left <= 0 else level


def _narrow_bracket(aim: Aim, known: _Known) -> float | None:
    """A level that makes the bracket smaller; None if it is small enough, or ends at the lowest or highest level allowed."""
    if known.highest_met is None:
        lowest = min(known.missed, default=None)
        if lowest is None:
            return aim.first
        return None if lowest <= aim.least else max(aim.least, _round_level(lowest / 2, whole=aim.whole))
    above = known.next_missed(known.highest_met)
    if above is None:
        return None if known.highest_met >= aim.most else min(aim.most, 2 * known.highest_met)
    # The factor allows for rounding in a difference of decimals.
    if above - known.highest_met <= max(float(aim.whole), aim.resolution * known.highest_met) * (1 + 1e-9):
        return None
    return _round_level(math.sqrt(known.highest_met * above), whole=aim.whole)


def _round_level(level: float, *, whole: bool) -> float:
    """Round a level. The geometric mean of two levels more than a step apart stays between them."""
    return math.floor(level + 0.5) if whole else float(f"{level:.{RATE_DIGITS}g}")


def _name_level(aim: Aim, level: float) -> str:
    return f"{level:g} {aim.unit.removesuffix('s') if aim.whole and level == 1 else aim.unit}"


def _end_search(aim: Aim, known: _Known, wanted: float | None) -> SloLevel:
    """The end of a search. `wanted` is the level of the next run if there were one."""
    spent, value = f"{aim.most_runs} runs were not enough", known.confirmed_level
    if value is not None:
        missed, more = known.next_missed(value), f"; {spent} to come nearer" if wanted else ""
        tried = "the most that were tried: more may meet it too" if value >= aim.most else f"and nothing missed it{more}"
        beyond = tried if missed is None else f"{missed:g} missed it{more}"
        return SloLevel(value=value, note=f"{_name_level(aim, value)} met the SLO, {beyond}")
    if known.highest_met is not None:
        met_once = f"{_name_level(aim, known.highest_met)} met the SLO in one run, which nothing confirmed"
        return SloLevel(invalid_because=f"{spent}: {met_once}")
    because = f"even {_name_level(aim, min(known.missed))} missed the SLO" if known.missed else "none was valid"
    return SloLevel(invalid_because=f"{spent}: {because}" if wanted else because)


def next_step(plan: SweepPlan, points: Sequence[Point]) -> NextRun | None:
    """The next run, which follows from those made so far; None if the sweep is complete."""
    for clients in plan.curve:
        runs = [each for each in points if each.asked.purpose == "curve" and each.asked.level == clients]
        if len(runs) < MOST_INVALID and all(each.invalid_because for each in runs):
            return NextRun("curve", clients)
    for goal in plan.goals:
        level = decide_level(plan, goal, points)
        if not isinstance(level, SloLevel):
            return NextRun(goal, level)
    return None


def decide_level(plan: SweepPlan, goal: Goal, points: Sequence[Point]) -> float | SloLevel:
    """The next level that the search for a goal runs, or its end."""
    aim = _set_aim(plan, goal, points)
    if isinstance(aim, str):
        return SloLevel(invalid_because=aim)
    # For concurrency the curve's runs count as if they had been made before.
    counted = [each for each in points if each.asked.purpose in ((goal,) if goal == "request_rate" else (goal, "curve"))]
    results = [LevelResult(p.asked.level, p.meets_slo, p.asked.purpose == goal, p.invalid_because) for p in counted]
    return search_step(aim, results)


def _set_aim(plan: SweepPlan, goal: Goal, points: Sequence[Point]) -> Aim | str:
    resolution, most_runs, closed = plan.sweep.resolution, plan.sweep.most_runs, closed_points(points)
    if goal == "concurrency":
        return Aim(1, 1, plan.most_concurrency, resolution, most_runs, True, UNITS[goal])
    if any(each.meets_slo is False and each.asked.level == 1 for each in closed):
        return "even 1 client missed the SLO"
    measured = [each for each in closed if each.figures]
    if not measured:
        return "no valid run with a number of clients shows which rate to begin with"
    rate = max(measured, key=lambda point: point.asked.level).figures[REQUESTS]
    # At a lower rate the prompts would not end within the time limit.
    least = MARGIN * plan.least_prompts / plan.load.time_limit_s
    return Aim(max(least, _round_level(rate, whole=False)), least, math.inf, resolution, most_runs, False, UNITS[goal])


def closed_points(points: Sequence[Point]) -> list[Point]:
    """The runs at a number of clients."""
    return [each for each in points if not each.asked.is_open]
