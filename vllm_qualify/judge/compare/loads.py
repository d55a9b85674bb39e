"""The loads of a cell beside those of its baseline: in turns with these, or as they were measured at another time."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from vllm_qualify.evidence import starts
from vllm_qualify.evidence.load import figures, result
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, invalid, valid
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.stages.load import parse_beside
from vllm_qualify.evidence.stages.starts import parse_beside_in
from vllm_qualify.judge import loads, relative, steadiness
from vllm_qualify.judge.compare import places
from vllm_qualify.judge.compare.noise import DAYS, find_history, history_words, lacking_with_starts, restless_words
from vllm_qualify.judge.compare.settings import load_differs
from vllm_qualify.judge.loads import LoadPlan, Repeats
from vllm_qualify.judge.relative import EarlierRuns
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS

# Whether a load is steady is judged by this: every load has it, and also at a rate it tells how busy the server is.
STEADY_BY = "e2el_mean_ms"
LEANING = "it comes nearer to the baseline with time, as a server that warms up: raise num_warmups, or allow more starts"

BaselineLoad = Callable[[], list[Measurement]]


def baseline_load_reader(plan: CellPlan, evidence: Path) -> BaselineLoad:
    """What reads the baseline's load: as it was measured in turns with the cell's, or else at its own time."""
    return partial(parse_beside if plan.beside else _read_history, plan, evidence)


def _read_history(plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The baseline's load as it was measured at its own time. Raises UnlikeError unless it was measured as this one was."""
    if problem := load_differs(plan):
        raise places.UnlikeError(problem)
    return StageEvidence.model_validate_json((evidence / places.BASELINE / places.LOAD_STAGE).read_bytes()).measurements


def compare_loads(
    gate: Gate, plan: CellPlan, evidence: Path, ours: list[Measurement], baseline_load: BaselineLoad, about: dict[str, Any]
) -> Measurement:
    """How many times worse the cell's load is, less 1, from its measurements of each start, the first one first."""
    theirs = _find_baseline_rows(gate, plan, evidence, baseline_load, ours)
    if spoiled := next((row for row in theirs if row.invalid_because is not None), None):
        return invalid(gate.metric, f"the baseline's: {spoiled.invalid_because}", spoiled.source, **about)
    ours, theirs = _pair_rows(plan, ours, theirs)
    mine, others, compared = _join_repeats(ours), _join_repeats(theirs), plan_comparison(gate, plan)
    history = find_history(plan, gate)
    known = [history.get(of) for of in (("pair",) if plan.beside else ("start", "day"))]
    look = loads.look(compared, mine, others, _count_left_out(evidence, ours))
    return valid(
        gate.metric,
        relative.without_noise(mine.values, others.values, compared.direction),
        f"{ours[-1].source} beside {theirs[-1].source}{history_words(known)}",
        sample_count=sum(row.sample_count for row in (*ours, *theirs)),
        interval=look.interval,
        finding=LEANING if look.is_leaning else "",
        ended_because=ours[0].ended_because or why_no_time(plan, evidence, len(starts.further(evidence)) + starts.FIRST + 1),
        not_in_interval=_lacking_noise(plan, compared, mine, others),
        is_history=plan.beside is None,
        traced_to=[path for row in (*ours, *theirs) for path in row.traced_to],
        **about,
    )


def loads_of_gate(
    gate: Gate, plan: CellPlan, evidence: Path, measurements: Sequence[Measurement]
) -> tuple[LoadPlan, Repeats, Repeats]:
    """How a gate's loads are compared, and the repeats of the cell and of its baseline. Raises one of UNUSABLE."""
    ours = [places.find_first_start(gate, measurements), *places.find_further_starts(gate, measurements)]
    theirs = _find_baseline_rows(gate, plan, evidence, baseline_load_reader(plan, evidence), ours)
    if spoiled := next((row for row in (*ours, *theirs) if row.invalid_because is not None), None):
        raise ValueError(spoiled.invalid_because)
    ours, theirs = _pair_rows(plan, ours, theirs)
    return plan_comparison(gate, plan), _join_repeats(ours), _join_repeats(theirs)


def plan_comparison(gate: Gate, plan: CellPlan) -> LoadPlan:
    """How a gate's loads are compared. Raises ValueError if the gate has no margin."""
    history = find_history(plan, gate)
    alone = EarlierRuns(starts=history.get("start"), days=history.get("day"))
    return LoadPlan(
        direction=METRICS[gate.metric].direction,
        margin=places.largest_loss(gate),
        levels=levels_for(plan),
        looks=plan.load.looks,
        most_starts=plan.starts,
        in_turns=plan.beside is not None,
        known=EarlierRuns(starts=history.get("pair")) if plan.beside else alone,
    )


def find_unsteadiness(
    plan: CellPlan, evidence: Path, measurements: Iterable[Measurement], baseline_load: BaselineLoad
) -> str | None:
    """Why the load's repeats are not those of steady servers; None if they are, or if it is not known.

    In turns, what both servers share is no reason. Raises one of UNUSABLE.
    """
    ours = [row for row in measurements if row.metric == STEADY_BY and row.against is None]
    theirs = _find_rows_in_turns(STEADY_BY, plan, evidence, baseline_load, ours) if plan.beside else []
    if not ours or any(row.invalid_because for row in (*ours, *theirs)):
        # Each gate says it of its own metric.
        return None
    ours, theirs = _pair_rows(plan, ours, theirs)
    mine, others = ([row.repeats for row in side] for side in (ours, theirs))
    looks = starts.repeats_of_all(plan, sum(map(len, mine)))
    return steadiness.problem(mine, others, range(looks.start - _count_left_out(evidence, ours), looks.stop), STEADY_BY)


def why_no_time(plan: CellPlan, evidence: Path, number: int) -> str | None:
    """Why the budget allows no load in a start, if it may be made; else None."""
    with suppress(*UNUSABLE):
        if number <= plan.starts:
            return starts.too_long(starts.plan_of(plan, evidence, number).load, evidence, number)
    # It is not known how long the load took. Its own measurements say so.
    return None


def keep_common_repeats(ours: Measurement, theirs: Measurement) -> tuple[Measurement, Measurement]:
    """Both measurements with only the repeats that both have: the first of either may have been left out as warm-up."""
    count = min(len(ours.repeats), len(theirs.repeats))
    one, other = (
        row.model_copy(update={"repeats": row.repeats[-count:], "traced_to": row.traced_to[-count:]}) for row in (ours, theirs)
    )
    return one, other


def _pair_rows(
    plan: CellPlan, ours: list[Measurement], theirs: list[Measurement]
) -> tuple[list[Measurement], list[Measurement]]:
    """The measurements of each start, in turns with only the repeats that both sides have."""
    if plan.beside is None:
        return ours, theirs
    pairs = [keep_common_repeats(*pair) for pair in zip(ours, theirs, strict=True)]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _find_baseline_rows(
    gate: Gate, plan: CellPlan, evidence: Path, baseline_load: BaselineLoad, ours: Sequence[Measurement]
) -> list[Measurement]:
    """The baseline's measurements by start: those in turns, else those of its own starts that count. Raises one of UNUSABLE."""
    if plan.beside:
        return _find_rows_in_turns(gate.metric, plan, evidence, baseline_load, ours)
    first, further = _find_metric(baseline_load(), gate.metric), places.read_further_starts(evidence / places.BASELINE, gate)
    return [first, *(row for row in further if row.invalid_because is None)]


def _find_rows_in_turns(
    metric: str, plan: CellPlan, evidence: Path, baseline_load: BaselineLoad, ours: Sequence[Measurement]
) -> list[Measurement]:
    first, numbers = _find_metric(baseline_load(), metric), [row.start for row in ours if row.start]
    return [first, *(_find_metric(parse_beside_in(plan, evidence, number), metric) for number in numbers)]


def _find_metric(measurements: Iterable[Measurement], metric: str) -> Measurement:
    rows = [measurement for measurement in measurements if measurement.metric == metric and measurement.against is None]
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} measurements of {metric}")
    return rows[0]


def _join_repeats(rows: Sequence[Measurement]) -> Repeats:
    repeats = [(repeat, row.start or starts.FIRST) for row in rows for repeat in row.repeats]
    return Repeats([repeat for repeat, _ in repeats], [start for _, start in repeats])


def _count_left_out(evidence: Path, ours: Sequence[Measurement]) -> int:
    """How many repeats of the cell's load do not count."""
    folders = [starts.root(evidence, row.start or starts.FIRST) / figures.STAGE for row in ours]
    return sum(map(result.count_of, folders)) - sum(len(row.repeats) for row in ours)


def _lacking_noise(plan: CellPlan, compared: LoadPlan, ours: Repeats, theirs: Repeats) -> list[str]:
    known = compared.known
    days = [DAYS] if plan.beside is None and known.days is None else []
    if plan.starts > starts.FIRST and (deviation := loads.restless(compared, ours, theirs)):
        days.append(restless_words(f"{deviation:.1%}"))
    theirs_alone = starts.FIRST if plan.beside else len(theirs.starts)
    return days if known.starts or known.days else [*lacking_with_starts(plan, len(ours.starts), theirs_alone), *days]
