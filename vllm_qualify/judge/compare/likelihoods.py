"""How much less likely a candidate finds texts than its baseline does, and how often both find the same token likeliest.

Both scored the same tokens. The scored passages stand for all of their kind, so the interval has what differs from passage to
passage: how much a change of the build does to each, and the noise of kernels that differs between requests. What all passages
of one start of a server have in common is not in it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_qualify.evidence.likelihood import Scored, per_token, share_per_token
from vllm_qualify.evidence.measurement import Interval, Measurement, valid
from vllm_qualify.evidence.sequential import Sides, levels_for, sides_of
from vllm_qualify.evidence.stages.likelihood import scored_answers, scored_texts
from vllm_qualify.judge.compare.noise import rare_changes
from vllm_qualify.judge.compare.places import BASELINE, UnlikeError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import ANSWER_NLL, ANSWER_TOP1, METRICS, TOP1_SHARES


def _why_unlike(theirs: Sequence[Scored], ours: Sequence[Scored]) -> str | None:
    """Why the scores of two builds do not belong to the same tokens, or None."""
    if [passage.identity for passage in theirs] != [passage.identity for passage in ours]:
        return "the baseline scored other texts"
    other = [mine.identity for old, mine in zip(theirs, ours, strict=True) if old.tokens != mine.tokens]
    if not other:
        return None
    which = f"{other[0].of} {other[0].number} among them"
    return f"{len(other)} texts have other tokens than for the baseline, {which}: another tokenizer"


def nll_increase(theirs: Sequence[Scored], ours: Sequence[Scored], at: Sides) -> tuple[float, Interval | None]:
    """The increase of the negative log-likelihood, in nats per token; below 0 if the candidate finds the texts likelier."""
    gained = [mine.nll_nat - old.nll_nat for old, mine in zip(theirs, ours, strict=True)]
    return per_token(gained, [len(mine.tokens) for mine in ours], at)


def top1_agreement(theirs: Sequence[Scored], ours: Sequence[Scored], at: Sides) -> tuple[float, Interval | None]:
    """The share of tokens at which both builds find the same token likeliest."""
    same = [
        sum(one == other for one, other in zip(old.likeliest, mine.likeliest, strict=True))
        for old, mine in zip(theirs, ours, strict=True)
    ]
    return share_per_token(same, [len(mine.tokens) for mine in ours], at)


def compare_likelihoods(gate: Gate, plan: CellPlan, evidence: Path, ours: Measurement, about: dict[str, Any]) -> Measurement:
    """The increase of the negative log-likelihood of answers or texts, or the agreement about the likeliest token."""
    read = scored_answers if gate.metric in (ANSWER_NLL, ANSWER_TOP1) else scored_texts
    mine, theirs = read(plan, evidence), read(plan, evidence, of_baseline=True)
    if problem := _why_unlike(theirs, mine):
        raise UnlikeError(problem)
    levels = levels_for(plan)
    at = sides_of(METRICS[gate.metric].compared_direction, levels.false_pass, levels.false_fail)
    compare_scores = top1_agreement if gate.metric in TOP1_SHARES else nll_increase
    value, interval = compare_scores(theirs, mine, at)
    return valid(
        gate.metric,
        value,
        f"{ours.source} beside {BASELINE}/{ours.source}",
        sample_count=len(mine),
        interval=interval,
        traced_to=[ours.source],
        not_in_interval=[rare_changes(len(mine), levels.false_pass, "texts")],
        **about,
    )
