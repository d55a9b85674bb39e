"""The speedup by speculative decoding: the cell's server beside the same one without it."""

from collections.abc import Sequence
from pathlib import Path

from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.load import speculation
from vllm_qualify.evidence.measurement import UNUSABLE, Interval, Measurement, in_words, invalid, valid
from vllm_qualify.evidence.sequential import levels_for, sides_at_once
from vllm_qualify.judge import relative
from vllm_qualify.judge.compare.loads import keep_common_repeats
from vllm_qualify.judge.compare.noise import STARTS_OF_TWO
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import METRICS, OUTPUT_THROUGHPUT, SPEEDUP, SPEEDUP_BATCH1


def speedup(plan: CellPlan, evidence: Path, measurements: Sequence[Measurement]) -> list[Measurement]:
    """The speedup by speculative decoding at the profile's load and at batch 1, if its stage is among the `measurements`."""
    measured_on = [row.fingerprint for row in measurements if METRICS[row.metric].stage == speculation.STAGE]
    if plan.undrafted is None or not measured_on:
        return []
    on = {"fingerprint": measured_on[0]}
    problem = None if measured_on[0] == plan.fingerprint.id else "it was not measured on the planned machine"
    rows = [
        _compare_rates(metric, name, plan.undrafted, plan, evidence) if problem is None else invalid(metric, problem, "")
        for metric, name in ((SPEEDUP, speculation.PROFILE), (SPEEDUP_BATCH1, speculation.BATCH1))
    ]
    return [row.model_copy(update=on) for row in rows]


def _compare_rates(metric: str, name: str, undrafted: ServerPlan, plan: CellPlan, evidence: Path) -> Measurement:
    levels = levels_for(plan)
    try:
        ours, theirs = speculation.rates(evidence / speculation.STAGE, name, plan.load, levels, (plan.server, undrafted))
        for whose, rate in (("", ours), ("without it: ", theirs)):
            if rate.invalid_because is not None:
                return invalid(metric, f"{whose}{rate.invalid_because}", rate.source)
        ours, theirs = keep_common_repeats(ours, theirs)
        # The speedup is how much worse the server without speculative decoding is.
        at = sides_at_once(metric, levels)
        gained = relative.in_turns(theirs.repeats, ours.repeats, METRICS[OUTPUT_THROUGHPUT].direction, at)
    except UNUSABLE as error:
        return invalid(metric, f"no usable comparison: {in_words(error)}", "")
    return valid(
        metric,
        1 + gained.value,
        f"{ours.source} beside {theirs.source}",
        sample_count=ours.sample_count + theirs.sample_count,
        repeats=[with_it / without for with_it, without in zip(ours.repeats, theirs.repeats, strict=True)],
        interval=Interval(lower=1 + gained.interval.lower, upper=1 + gained.interval.upper),
        traced_to=[*ours.traced_to, *theirs.traced_to],
        not_in_interval=[STARTS_OF_TWO],
    )
