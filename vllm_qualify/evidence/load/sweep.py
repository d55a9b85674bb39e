"""Sweep: one load at many levels, for the curve of throughput against speed, and for the highest level that meets an SLO.

`search` says which level is run next. Here each level is run, and read from its files.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_qualify.evidence.load import result, search, steady
from vllm_qualify.evidence.load.problems import problems_of
from vllm_qualify.evidence.load.result import Repeat
from vllm_qualify.evidence.load.search import Goal, NextRun, Point, SloLevel, SweepLoad, SweepPlan
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid, valid
from vllm_qualify.evidence.watched import WATCHED, watched_in
from vllm_qualify.recipe import metrics
from vllm_qualify.recipe.load import LEAST_PROMPTS_PER_CLIENT, OPEN_LOAD_CLIENTS, Load
from vllm_qualify.recipe.values import Count, Frozen, Number

STAGE, SERVE = "sweep", "serve"
ASKED = "asked.json"
# Requests are sent at a rate for at least so many times their latency: one latency is warm-up, and one is the tail.
LATENCIES_SENT = 5.0
TPOT, SPEECHLESS = "tpot_p50_ms", "its replies show no {}: they have one token, or came in one piece"
RunPoint = Callable[[Load, Path], None]
"""Runs bench once with this load. It writes the same files as repeat 1 of a load into this folder."""


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


def measure_sweep(run: RunPoint, plan: SweepPlan, folder: Path) -> None:
    """Run the sweep. Each point gets its own folder in the stage's, such as `concurrency-8` or `rate-2.5-again`.

    Points that are already there are not run again. Raises ValueError if a folder in it is no point, or OSError.
    """
    points = read_points(folder, plan)
    while step := search.next_step(plan, points):
        before = len(_earlier_runs(step, points))
        again = "" if not before else "-again" if before == 1 else f"-again-{before}"
        into = folder / f"{'rate' if step.purpose == 'request_rate' else 'concurrency'}-{step.level:g}{again}"
        asked = _plan_run(plan, step, points)
        into.mkdir()
        (into / ASKED).write_text(asked.model_dump_json(indent=1))
        run(asked.paced, into)
        points.append(read_point(into, plan))


def _earlier_runs(step: NextRun, points: Sequence[Point]) -> list[Point]:
    is_open = step.purpose == "request_rate"
    return [each for each in points if (each.asked.is_open, each.asked.level) == (is_open, step.level)]


def _plan_run(plan: SweepPlan, step: NextRun, points: Sequence[Point]) -> SweepLoad:
    # Each run has a seed that no other run and no repeat of the load has: repeated prompts would measure the prefix cache.
    seed = plan.load.seed + plan.load.looks[-1] + len(points)
    is_open = step.purpose == "request_rate"
    # Enough prompts for the SLO's percentiles and for the run's duration; twice as many as in an invalid run before.
    before = [each.asked.load.num_prompts for each in _earlier_runs(step, points) if each.invalid_because]
    lasting = (_count_open_prompts if is_open else _count_closed_prompts)(plan, step.level, search.closed_points(points))
    prompts = max(plan.least_prompts, math.ceil(lasting), 2 * max(before, default=0))
    load = _load_at(plan, OPEN_LOAD_CLIENTS if is_open else int(step.level), prompts, seed)
    return SweepLoad(purpose=step.purpose, load=load, request_rate_req_s=step.level if is_open else None)


def _load_at(plan: SweepPlan, clients: int, prompts: int, seed: int) -> Load:
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


def _count_open_prompts(plan: SweepPlan, rate: float, closed: Sequence[Point]) -> float:
    busiest = max((each for each in closed if each.figures), key=lambda point: point.asked.level)
    return rate * max(search.MARGIN * plan.sweep.min_duration_s, LATENCIES_SENT * busiest.figures["e2el_mean_ms"] / 1000)


def _count_closed_prompts(plan: SweepPlan, clients: float, closed: Sequence[Point]) -> float:
    """The prompts for the duration, by the rate of the nearest point.

    It assumes that the rate rises in proportion with more clients, and does not fall with fewer.
    """
    least = LEAST_PROMPTS_PER_CLIENT * clients
    known = [(each.asked.level, each.answered_req_s) for each in closed if each.answered_req_s]
    if not known:
        return least
    near, rate = min(known, key=lambda each: abs(math.log(each[0] / clients)))
    return max(least, search.MARGIN * plan.sweep.min_duration_s * rate * max(1.0, clients / near))


def read_points(folder: Path, plan: SweepPlan) -> list[Point]:
    """The points in the stage's folder, in the order of their runs. Raises one of UNUSABLE."""
    points = [read_point(each, plan) for each in folder.iterdir() if each.is_dir() and each.name != WATCHED]
    return sorted(points, key=lambda point: point.asked.load.seed)


def read_point(folder: Path, plan: SweepPlan) -> Point:
    """Read one point from its files. Raises one of UNUSABLE if they do not say which point it is."""
    asked = SweepLoad.model_validate_json((folder / ASKED).read_bytes())
    about: dict[str, Any] = {"folder": folder.name, "asked": asked}
    try:
        repeat = result.read_repeat(folder, f"{STAGE}/{folder.name}", 1)
        rate = repeat.summary["completed"] / repeat.summary["duration"]
        is_answered = repeat.summary["failed"] == 0 and 0 < rate < math.inf
        about |= {"traced_to": [repeat.line_of("output_throughput")], "answered_req_s": rate if is_answered else None}
        return Point.model_validate(about | _examine_run(folder, repeat, plan, asked))
    except steady.OverloadError as error:
        missed = False if plan.sweep.slo else None
        return Point.model_validate(about | {"overloaded_because": str(error), "meets_slo": missed})
    except steady.UnsteadyError as error:
        return Point.model_validate(about | {"invalid_because": str(error)})
    except UNUSABLE as error:
        return Point(folder=folder.name, asked=asked, invalid_because=f"bench left no usable result: {in_words(error)}")


def _examine_run(folder: Path, repeat: Repeat, plan: SweepPlan, asked: SweepLoad) -> dict[str, Any]:
    """The fields of a point: the figures of its steady state, or why it is invalid. Raises UnsteadyError or OverloadError."""
    watched = watched_in(folder.parent, folder.parents[1] / SERVE) if plan.watched else None
    load, slo = asked.load, plan.sweep.slo
    is_planned = load == _load_at(plan, load.max_concurrency, load.num_prompts, load.seed)
    problems = [] if is_planned else ["its load is not that of the profile"]
    problems += problems_of(repeat, asked.paced, plan.server, watched, may_queue=True)
    if problems:
        return {"invalid_because": "; ".join(problems)}
    figures = repeat.steady(asked.paced)
    if unshown := _why_unshown(slo, figures):
        return {"invalid_because": unshown}
    meets = all(figures.values[name] <= bound for name, bound in slo.items()) if slo else None
    return {"figures": figures.values, "untold": figures.untold, "sample_count": figures.requests, "meets_slo": meets}


def _why_unshown(slo: dict[str, float], figures: result.Steady) -> str | None:
    """Why a point's requests do not show whether it meets the SLO, or None."""
    for name in slo:
        if figures.requests < (needed := metrics.least_requests(name)):
            return f"{figures.requests} requests in its steady state, and {name} needs {needed}: {steady.REMEDY}"
        if name in figures.untold:
            return figures.untold[name]
        if not figures.values[name] > 0:
            return SPEECHLESS.format(name)
    return None


def parse_sweep(folder: Path, plan: SweepPlan) -> Swept:
    """The results of a sweep, only from the files in the stage's folder; without points if one of them cannot be identified."""
    levels: dict[str, Any] = {}
    try:
        points = read_points(folder, plan)
    except UNUSABLE as error:
        because = f"the points cannot be distinguished: {in_words(error)}"
        levels = dict.fromkeys(plan.goals, SloLevel(invalid_because=because))
        return Swept(curve_problems=[because], **levels)
    for goal in plan.goals:
        decided = search.decide_level(plan, goal, points)
        if not isinstance(decided, SloLevel):
            unfinished = f"the search was not finished: {decided:g} {search.UNITS[goal]} would be next"
            decided = SloLevel(invalid_because=unfinished)
        levels[goal] = decided
    return Swept(points=points, curve=curve_points(plan, points), curve_problems=_curve_problems(plan, points), **levels)


def curve_points(plan: SweepPlan, points: Sequence[Point]) -> list[CurvePoint]:
    """The first valid run at each number of clients, also of searches, if its replies show a time per token."""
    chosen: dict[float, Point] = {}
    for point in search.closed_points(points):
        if point.figures.get(TPOT, 0) > 0:
            chosen.setdefault(point.asked.level, point)
    ordered = [chosen[level] for level in sorted(chosen)]
    both = [(each.figures[metrics.OUTPUT_THROUGHPUT] / plan.gpus, 1000 / each.figures[TPOT]) for each in ordered]
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
    shown, problems = {point.clients for point in curve_points(plan, points)}, []
    for clients in plan.curve:
        runs = [each for each in search.closed_points(points) if each.asked.level == clients]
        if clients not in shown:
            last = runs[-1] if runs else None
            because = last and (last.invalid_because or last.untold.get(TPOT) or SPEECHLESS.format(TPOT))
            problems.append(f"{clients} clients: {because or 'they were not measured'}")
    return problems


def sweep_measurements(swept: Swept, plan: SweepPlan) -> list[Measurement]:
    """The metrics of the searches. Goodput and cost are those at the concurrency found, or else at the rate found.

    There is no goodput if the SLO has no percentile of ttft, tpot or e2el, and no cost without a price.
    """
    rows = {"concurrency": metrics.SLO_CONCURRENCY, "request_rate": metrics.SLO_RATE}
    measurements = [_measure_level(rows[goal], swept, goal, None) for goal in plan.goals]
    if plan.goals and plan.slo_of_request:
        measurements.append(_measure_level(metrics.SLO_GOODPUT, swept, plan.goals[0], lambda run: run[metrics.GOODPUT]))
    if plan.goals and plan.price_usd_gpu_hour is not None:
        usd_s = plan.price_usd_gpu_hour * plan.gpus / 3600
        cost = _measure_level(metrics.SLO_COST, swept, plan.goals[0], lambda run: 1e6 * usd_s / run[metrics.OUTPUT_THROUGHPUT])
        measurements.append(cost)
    return measurements


def _measure_level(metric: str, swept: Swept, goal: Goal, figure: Callable[[dict[str, float]], float] | None) -> Measurement:
    """The level that was found; or the mean of a `figure` over the runs at that level."""
    level = swept.level_of(goal)
    if level is None or level.value is None:
        reason = level.invalid_because if level else None
        return invalid(metric, reason or f"the {goal} was not searched for", f"{STAGE}/")
    step = NextRun(goal, level.value)
    at = [each for each in _earlier_runs(step, swept.points) if each.figures]
    traced_to = [line for each in at for line in each.traced_to]
    about = {"sample_count": sum(each.sample_count for each in at), "traced_to": traced_to}
    source = f"{STAGE}/: {level.note}"
    if figure is None:
        return valid(metric, level.value, source, **about)
    values = [figure(each.figures) for each in at]
    return valid(metric, math.fsum(values) / len(values), source, repeats=values, **about)
