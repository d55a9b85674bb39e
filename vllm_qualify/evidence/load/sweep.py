"""Sweep: one load at many levels, for the curve of throughput against speed, and for the highest level that meets an SLO.

The next run follows only from the points measured so far (`next_step`). So an interrupted sweep can go on, and its results can
be read from its files at any later time.

A search is a bisection, because latencies rise with the load. Its answer has met the SLO in two runs with different prompts:
the highest of several levels that met it once was probably lucky. An invalid run neither meets nor misses the SLO. It is
repeated once, and if the repetition is invalid too, the search has no answer.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from vllm_qualify.evidence.load import result, steady
from vllm_qualify.evidence.load.problems import problems_of
from vllm_qualify.evidence.load.result import Repeat
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid, valid
from vllm_qualify.evidence.watched import WATCHED, watched_in
from vllm_qualify.recipe.metrics import (
    GOODPUT,
    METRICS,
    SLO_CONCURRENCY,
    SLO_COST,
    SLO_GOODPUT,
    SLO_RATE,
    least_prompts,
    least_requests,
)
from vllm_qualify.recipe.serving import VLLM, EngineName, ServerArguments
from vllm_qualify.recipe.values import Count, CountOrNone, Frozen, Number, Seconds
from vllm_qualify.recipe.workload import LEAST_PROMPTS_PER_CLIENT, Load, Slo, Sweep

STAGE, SERVE = "sweep", "serve"
ASKED = "asked.json"
# A run is planned this many times as long as it must last, because the planned rate is a guess.
MARGIN = 1.25
# Requests are sent at a rate for at least so many times their latency: one latency is warm-up, and one is the tail.
LATENCIES_SENT = 5.0
# A level is measured at most so often without a valid result, each time with twice as many prompts.
MOST_INVALID = 2
# A level is the answer if so many valid runs met the SLO, and none missed it.
RUNS_TO_CONFIRM = 2
RUNS_KEPT = 2
RATE_DIGITS = 4
OUTPUT, REQUESTS, TPOT = "output_throughput_tok_s", "request_throughput_req_s", "tpot_p50_ms"

Purpose = Literal["curve", "concurrency", "request_rate"]
Goal = Literal["concurrency", "request_rate"]
UNITS: dict[Purpose, str] = {"curve": "clients", "concurrency": "clients", "request_rate": "req/s"}
RunPoint = Callable[[Load, float | None, Path], None]
"""Runs bench once, with this load and at this rate in req/s. It writes the same files as repeat 1 of a load into this folder.

Without a rate each client of the load sends its next request when the one before has ended. With a rate, bench must not get
`--max-concurrency`: that of the load means nothing then, and a limit would hold requests back unseen.
"""


class SweepPlan(Frozen):
    """What a sweep needs. `load` is the profile's own, with the lengths and the seed.

    `gpus` is the server's number of GPUs, 1 for a CPU. `most_concurrency` is the sweep's, or else the number of requests that
    the server takes at once. `model` is its served name. With `watched`, a run counts only if it was watched, in the folder
    SERVE next to the stage's.
    """

    sweep: Sweep
    load: Load
    most_concurrency: Count
    gpus: Count
    price_usd_gpu_hour: Seconds | None = None
    kind: EngineName = VLLM
    arguments: ServerArguments = {}
    model: str | None = None
    watched: bool = False

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
        limits: dict[str, float] = {}
        for name in sorted(self.sweep.slo, key=lambda name: METRICS[name].quantile or 0):
            latency = f"{name.split('_')[0]}_ms"
            if METRICS[name].quantile is not None and latency in Slo.model_fields:
                limits[latency] = self.sweep.slo[name]
        return Slo.model_validate(limits) if limits else None


class SweepLoad(Frozen):
    """The purpose of a run, and its load. With a rate, the load's `max_concurrency` means nothing."""

    purpose: Purpose
    load: Load
    request_rate_req_s: Seconds | None = None

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
    sample_count: CountOrNone = 0
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


class CurvePoint(Frozen):
    """Throughput against speed at a number of clients, from the run in `folder`.

    `tok_s_per_user` is 1000 / tpot_p50_ms, as InferenceMAX defines interactivity: how fast the reply of a median request comes
    once it has begun.
    """

    clients: Count
    folder: str
    output_tok_s_per_gpu: Number
    tok_s_per_user: Number
    is_on_front: bool


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


class Swept(Frozen):
    """The results of a sweep: its points in the order of their runs, the curve, and what its searches found.

    `curve_problems` has a sentence for each missing point of the curve.
    """

    points: list[Point] = []
    curve: list[CurvePoint] = []
    curve_problems: list[str] = []
    concurrency: SloLevel | None = None
    request_rate: SloLevel | None = None

    def level_of(self, goal: Goal) -> SloLevel | None:
        return self.concurrency if goal == "concurrency" else self.request_rate


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
    def highest(self) -> float | None:
        return max(self.met, default=None)

    @property
    def confirmed(self) -> float | None:
        """The highest level that met the SLO often enough."""
        return max((level for level, runs in self.met.items() if runs >= RUNS_TO_CONFIRM), default=None)

    def next_missed(self, level: float) -> float | None:
        """The lowest level above `level` that missed the SLO."""
        return min((missed for missed in self.missed if missed > level), default=None)


def search_step(aim: Aim, results: Sequence[LevelResult]) -> float | SloLevel:
    """The next level that a search runs, or its end. The order of the results does not matter."""
    new = [each for each in results if each.is_new]
    bad = [each for each in new if each.meets is None]
    known = _known([each for each in results if each.meets is not None and each.level <= aim.most])
    counts = Counter(each.level for each in bad)
    if twice := [each for each in bad if counts[each.level] >= MOST_INVALID]:
        return SloLevel(invalid_because=_unmeasured(aim, twice[-1], known))
    left = aim.most_runs - len(new)
    level = _next_level(aim, known, left)
    return _end(aim, known, level) if level is None or left <= 0 else level


def _known(valid_runs: Sequence[LevelResult]) -> _Known:
    missed = {each.level for each in valid_runs if not each.meets}
    met = [each.level for each in valid_runs if each.level not in missed]
    return _Known({level: met.count(level) for level in met}, missed)


def _next_level(aim: Aim, known: _Known, left: int) -> float | None:
    """The level of the next run; None if the search is over.

    The last RUNS_KEPT runs are for confirmation, as a level that met the SLO only once is no answer, and for another level if
    that fails.
    """
    between = _between(aim, known)
    if known.highest is not None and known.highest != known.confirmed and (between is None or left <= RUNS_KEPT):
        return known.highest
    return between


def _between(aim: Aim, known: _Known) -> float | None:
    """A level that makes the bracket smaller; None if it is small enough, or ends at the lowest or highest level allowed."""
    if known.highest is None:
        lowest = min(known.missed, default=None)
        if lowest is None:
            return aim.first
        return None if lowest <= aim.least else max(aim.least, _rounded(aim, lowest / 2))
    above = known.next_missed(known.highest)
    if above is None:
        return None if known.highest >= aim.most else min(aim.most, 2 * known.highest)
    if above - known.highest <= _step(aim, known.highest):
        return None
    return _rounded(aim, math.sqrt(known.highest * above))


def _step(aim: Aim, level: float) -> float:
    # The factor allows for rounding in a difference of decimals.
    return max(float(aim.whole), aim.resolution * level) * (1 + 1e-9)


def _rounded(aim: Aim, level: float) -> float:
    """Round a level. The geometric mean of two levels more than a step apart stays between them."""
    return math.floor(level + 0.5) if aim.whole else _short(level)


def _short(rate: float) -> float:
    return float(f"{rate:.{RATE_DIGITS}g}")


def _at(aim: Aim, level: float) -> str:
    return f"{level:g} {aim.unit.removesuffix('s') if aim.whole and level == 1 else aim.unit}"


def _unmeasured(aim: Aim, bad: LevelResult, known: _Known) -> str:
    met = "" if known.highest is None else f"; {_at(aim, known.highest)} met the SLO"
    return f"{MOST_INVALID} runs at {_at(aim, bad.level)} were invalid: {bad.invalid_because}{met}"


def _end(aim: Aim, known: _Known, wanted: float | None) -> SloLevel:
    """The end of a search. `wanted` is the level of the next run if there were one."""
    spent = f"{aim.most_runs} runs were not enough"
    if known.confirmed is not None:
        return SloLevel(
            value=known.confirmed, note=_note(aim, known, known.confirmed, f"; {spent} to come nearer" if wanted else "")
        )
    if known.highest is not None:
        return SloLevel(invalid_because=f"{spent}: {_at(aim, known.highest)} met the SLO in one run, which nothing confirmed")
    missed = f"even {_at(aim, min(known.missed))} missed the SLO" if known.missed else "none was valid"
    return SloLevel(invalid_because=f"{spent}: {missed}" if wanted else missed)


def _note(aim: Aim, known: _Known, value: float, spent: str) -> str:
    met, missed = f"{_at(aim, value)} met the SLO", known.next_missed(value)
    if missed is not None:
        return f"{met}, {missed:g} missed it{spent}"
    if value >= aim.most:
        return f"{met}, the most that were tried: more may meet it too"
    return f"{met}, and nothing missed it{spent}"


def next_step(plan: SweepPlan, points: Sequence[Point]) -> NextRun | None:
    """The next run, which follows from those made so far; None if the sweep is complete."""
    for clients in plan.curve:
        runs = [each for each in points if each.asked.purpose == "curve" and each.asked.level == clients]
        if len(runs) < MOST_INVALID and all(each.invalid_because for each in runs):
            return NextRun("curve", clients)
    for goal in plan.goals:
        level = _decided(plan, goal, points)
        if not isinstance(level, SloLevel):
            return NextRun(goal, level)
    return None


def _decided(plan: SweepPlan, goal: Goal, points: Sequence[Point]) -> float | SloLevel:
    aim = _aim(plan, goal, points)
    return SloLevel(invalid_because=aim) if isinstance(aim, str) else search_step(aim, _results_of(goal, points))


def _results_of(goal: Goal, points: Sequence[Point]) -> list[LevelResult]:
    """The results for a search. For concurrency the curve's runs count as if they had been made before."""
    of = (goal,) if goal == "request_rate" else (goal, "curve")
    return [
        LevelResult(each.asked.level, each.meets_slo, each.asked.purpose == goal, each.invalid_because)
        for each in points
        if each.asked.purpose in of
    ]


def _aim(plan: SweepPlan, goal: Goal, points: Sequence[Point]) -> Aim | str:
    """The aim of a search, or why there can be no search."""
    resolution, most_runs = plan.sweep.resolution, plan.sweep.most_runs
    if goal == "concurrency":
        return Aim(1, 1, plan.most_concurrency, resolution, most_runs, True, UNITS[goal])
    if any(each.meets_slo is False and each.asked.level == 1 for each in _closed(points)):
        return "even 1 client missed the SLO"
    measured = [each for each in _closed(points) if each.figures]
    if not measured:
        return "no valid run with a number of clients shows which rate to begin with"
    rate = max(measured, key=lambda point: point.asked.level).figures[REQUESTS]
    # At a lower rate the prompts would not end within the time limit.
    least = MARGIN * _least_prompts(plan) / plan.load.time_limit_s
    return Aim(max(least, _short(rate)), least, math.inf, resolution, most_runs, False, UNITS[goal])


def _closed(points: Sequence[Point]) -> list[Point]:
    return [each for each in points if not each.asked.is_open]


def measure_sweep(run: RunPoint, plan: SweepPlan, folder: Path) -> None:
    """Run the sweep. Each point gets its own folder in the stage's, such as `concurrency-8` or `rate-2.5-again`.

    Points that are already there are not run again.

    Raises:
        ValueError: a folder in it is no point.
        OSError: it cannot be read or written.
    """
    points = read_points(folder, plan)
    while step := next_step(plan, points):
        asked, into = _asked(plan, step, points), folder / _name(step, points)
        into.mkdir()
        (into / ASKED).write_text(asked.model_dump_json(indent=1))
        run(asked.load, asked.request_rate_req_s, into)
        points.append(read_point(into, plan))


def _name(step: NextRun, points: Sequence[Point]) -> str:
    before = len(_same(step, points))
    again = "" if not before else "-again" if before == 1 else f"-again-{before}"
    return f"{'rate' if step.purpose == 'request_rate' else 'concurrency'}-{step.level:g}{again}"


def _same(step: NextRun, points: Sequence[Point]) -> list[Point]:
    is_open = step.purpose == "request_rate"
    return [each for each in points if (each.asked.is_open, each.asked.level) == (is_open, step.level)]


def _asked(plan: SweepPlan, step: NextRun, points: Sequence[Point]) -> SweepLoad:
    # Each run has a seed that no other run and no repeat of the load has: repeated prompts would measure the prefix cache.
    seed = plan.load.seed + plan.load.looks[-1] + len(points)
    is_open = step.purpose == "request_rate"
    clients = 1 if is_open else int(step.level)
    of = _load(plan, clients, _prompts(plan, step, points), seed)
    return SweepLoad(purpose=step.purpose, load=of, request_rate_req_s=step.level if is_open else None)


def _load(plan: SweepPlan, clients: int, prompts: int, seed: int) -> Load:
    changed = {
        "max_concurrency": clients,
        "num_prompts": prompts,
        "seed": seed,
        "repeats": 1,
        "most_repeats": 1,
        # The sweep compares its levels with each other, and limits its runs by their number.
        "window": "steady",
        "time_budget_s": None,
        "min_duration_s": plan.sweep.min_duration_s,
        "slo": plan.slo_of_request,
    }
    return Load.model_validate(plan.load.model_dump() | changed)


def _prompts(plan: SweepPlan, step: NextRun, points: Sequence[Point]) -> int:
    """Enough prompts for the SLO's percentiles and for the run's duration; twice as many as in an invalid run before."""
    before = [each.asked.load.num_prompts for each in _same(step, points) if each.invalid_because]
    lasting = _open_prompts(plan, step, points) if step.purpose == "request_rate" else _closed_prompts(plan, step, points)
    return max(_least_prompts(plan), math.ceil(lasting), 2 * max(before, default=0))


def _least_prompts(plan: SweepPlan) -> int:
    return max((least_prompts(name) for name in plan.sweep.slo), default=1)


def _open_prompts(plan: SweepPlan, step: NextRun, points: Sequence[Point]) -> float:
    busiest = max((each for each in _closed(points) if each.figures), key=lambda point: point.asked.level)
    latency_s = busiest.figures["e2el_mean_ms"] / 1000
    return step.level * max(MARGIN * plan.sweep.min_duration_s, LATENCIES_SENT * latency_s)


def _closed_prompts(plan: SweepPlan, step: NextRun, points: Sequence[Point]) -> float:
    """The prompts for the duration, by the rate of the nearest point.

    It assumes that the rate rises in proportion with more clients, and does not fall with fewer.
    """
    least = LEAST_PROMPTS_PER_CLIENT * step.level
    known = [(each.asked.level, each.answered_req_s) for each in _closed(points) if each.answered_req_s]
    if not known:
        return least
    clients, rate = min(known, key=lambda each: abs(math.log(each[0] / step.level)))
    return max(least, MARGIN * plan.sweep.min_duration_s * rate * max(1.0, step.level / clients))


def read_points(folder: Path, plan: SweepPlan) -> list[Point]:
    """The points in the stage's folder, in the order of their runs. Raises as `read_point`."""
    points = [read_point(each, plan) for each in folder.iterdir() if each.is_dir() and each.name != WATCHED]
    return sorted(points, key=lambda point: point.asked.load.seed)


def read_point(folder: Path, plan: SweepPlan) -> Point:
    """Read one point from its files. Raises one of UNUSABLE if they do not say which point it is."""
    asked = SweepLoad.model_validate_json((folder / ASKED).read_bytes())
    about: dict[str, Any] = {"folder": folder.name, "asked": asked}
    try:
        repeat = result.read_repeat(folder, f"{STAGE}/{folder.name}", 1)
        about |= {"traced_to": [repeat.line_of("output_throughput")], "answered_req_s": _answered(repeat)}
        return Point.model_validate(about | _examined(folder, repeat, plan, asked))
    except steady.OverloadError as error:
        missed = False if plan.sweep.slo else None
        return Point.model_validate(about | {"overloaded_because": str(error), "meets_slo": missed})
    except steady.UnsteadyError as error:
        return Point.model_validate(about | {"invalid_because": str(error)})
    except UNUSABLE as error:
        return Point(folder=folder.name, asked=asked, invalid_because=f"bench left no usable result: {in_words(error)}")


def _answered(repeat: Repeat) -> float | None:
    result = repeat.about
    rate = result["completed"] / result["duration"]
    return rate if result["failed"] == 0 and 0 < rate < math.inf else None


def _examined(folder: Path, repeat: Repeat, plan: SweepPlan, asked: SweepLoad) -> dict[str, Any]:
    """The fields of a point: the figures of its steady state, or why it is invalid. Raises as `result.steady_of`."""
    others: dict[str, Any] = {"may_queue": True, "model": plan.model, "rate": asked.request_rate_req_s}
    problems = [
        *_other_than_planned(plan, asked.load),
        *problems_of(folder, repeat, asked.load, plan.kind, plan.arguments, _watched(folder, plan), **others),
    ]
    if problems:
        return {"invalid_because": "; ".join(problems)}
    figures = repeat.steady(asked.load, asked.is_open)
    if unshown := _unshown(plan.sweep.slo, figures):
        return {"invalid_because": unshown}
    meets = all(figures.values[name] <= bound for name, bound in plan.sweep.slo.items()) if plan.sweep.slo else None
    return {"figures": figures.values, "untold": figures.untold, "sample_count": figures.requests, "meets_slo": meets}


def _watched(folder: Path, plan: SweepPlan) -> Path | None:
    return watched_in(folder.parent, folder.parents[1] / SERVE) if plan.watched else None


def _other_than_planned(plan: SweepPlan, of: Load) -> list[str]:
    is_planned = of == _load(plan, of.max_concurrency, of.num_prompts, of.seed)
    return [] if is_planned else ["its load is not that of the profile"]


def _unshown(slo: dict[str, float], figures: result.Steady) -> str | None:
    """Why a point's requests do not show whether it meets the SLO, or None."""
    for name in slo:
        if figures.requests < (needed := least_requests(name)):
            return f"{figures.requests} requests in its steady state, and {name} needs {needed}: {steady.REMEDY}"
        if name in figures.untold:
            return figures.untold[name]
        if not figures.values[name] > 0:
            return _speechless(name)
    return None


def _speechless(name: str) -> str:
    return f"its replies show no {name}: they have one token, or came in one piece"


def parse_sweep(folder: Path, plan: SweepPlan) -> Swept:
    """The results of a sweep, only from the files in the stage's folder; without points if one of them cannot be identified."""
    try:
        points = read_points(folder, plan)
    except UNUSABLE as error:
        nothing = SloLevel(invalid_because=f"the points cannot be distinguished: {in_words(error)}")
        searched: dict[str, Any] = dict.fromkeys(plan.goals, nothing)
        return Swept(curve_problems=[str(nothing.invalid_because)], **searched)
    levels: dict[str, Any] = {goal: _finished_level(plan, goal, points) for goal in plan.goals}
    return Swept(points=points, curve=curve(plan, points), curve_problems=_curve_problems(plan, points), **levels)


def _finished_level(plan: SweepPlan, goal: Goal, points: Sequence[Point]) -> SloLevel:
    decided = _decided(plan, goal, points)
    if not isinstance(decided, SloLevel):
        return SloLevel(invalid_because=f"the search was not finished: {decided:g} {UNITS[goal]} would be next")
    return decided


def curve(plan: SweepPlan, points: Sequence[Point]) -> list[CurvePoint]:
    """The first valid run at each number of clients, also of searches, if its replies show a time per token."""
    chosen: dict[float, Point] = {}
    for point in _closed(points):
        if point.figures.get(TPOT, 0) > 0:
            chosen.setdefault(point.asked.level, point)
    ordered = [chosen[level] for level in sorted(chosen)]
    both = [(each.figures[OUTPUT] / plan.gpus, 1000 / each.figures[TPOT]) for each in ordered]
    return [
        CurvePoint(
            clients=int(point.asked.level),
            folder=point.folder,
            output_tok_s_per_gpu=throughput,
            tok_s_per_user=speed,
            is_on_front=on_front,
        )
        for point, (throughput, speed), on_front in zip(ordered, both, pareto_front(both), strict=True)
    ]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each point, whether no other point is as good in both numbers and better in one. More is better."""
    return [not any(other != point and other[0] >= point[0] and other[1] >= point[1] for other in points) for point in points]


def _curve_problems(plan: SweepPlan, points: Sequence[Point]) -> list[str]:
    shown = {point.clients for point in curve(plan, points)}
    missing = [clients for clients in plan.curve if clients not in shown]
    return [f"{clients} clients: {_why_missing([p for p in points if p.asked.level == clients])}" for clients in missing]


def _why_missing(runs: Sequence[Point]) -> str:
    closed = _closed(runs)
    if not closed:
        return "they were not measured"
    return closed[-1].invalid_because or closed[-1].untold.get(TPOT) or _speechless(TPOT)


def sweep_measurements(swept: Swept, plan: SweepPlan) -> list[Measurement]:
    """The metrics of the searches. Goodput and cost are those at the concurrency found, or else at the rate found.

    There is no goodput if the SLO has no percentile of ttft, tpot or e2el, and no cost without a price.
    """
    rows = {"concurrency": SLO_CONCURRENCY, "request_rate": SLO_RATE}
    measurements = [_measurement(rows[goal], swept, goal, None) for goal in plan.goals]
    if plan.goals and plan.slo_of_request:
        measurements.append(_measurement(SLO_GOODPUT, swept, plan.goals[0], lambda figures: figures[GOODPUT]))
    if plan.goals and plan.price_usd_gpu_hour is not None:
        usd_s = plan.price_usd_gpu_hour * plan.gpus / 3600
        measurements.append(_measurement(SLO_COST, swept, plan.goals[0], lambda figures: 1e6 * usd_s / figures[OUTPUT]))
    return measurements


def _measurement(metric: str, swept: Swept, goal: Goal, of: Callable[[dict[str, float]], float] | None) -> Measurement:
    """The level that was found; or, with `of`, its mean over the figures of the runs at that level."""
    level = swept.level_of(goal)
    if level is None or level.value is None:
        reason = level.invalid_because if level else None
        return invalid(metric, reason or f"the {goal} was not searched for", f"{STAGE}/")
    step = NextRun(goal, level.value)
    at = [each for each in _same(step, swept.points) if each.figures]
    traced_to = [line for each in at for line in each.traced_to]
    about = {"sample_count": sum(each.sample_count for each in at), "traced_to": traced_to}
    source = f"{STAGE}/: {level.note}"
    if of is None:
        return valid(metric, level.value, source, **about)
    values = [of(each.figures) for each in at]
    return valid(metric, math.fsum(values) / len(values), source, repeats=values, **about)
