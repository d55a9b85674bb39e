"""How much less likely a candidate finds texts than its baseline does, and how often both find the same token likeliest.

Both scored the same tokens. The scored passages stand for all of their kind, so the interval has what differs from passage to
passage: how much a change of the build does to each, and the noise of kernels that differs between requests. What all passages
of one start of a server have in common is not in it.
"""

from collections.abc import Sequence

from vllm_qualify.evidence.likelihood import Scored, per_token, share_per_token
from vllm_qualify.evidence.measurement import Interval
from vllm_qualify.evidence.sequential import Sides


def unlike(theirs: Sequence[Scored], ours: Sequence[Scored]) -> str | None:
    """Why the scores of two builds do not belong to the same tokens, or None."""
    if [passage.identity for passage in theirs] != [passage.identity for passage in ours]:
        return "the baseline scored other texts"
    other = [mine.identity for old, mine in zip(theirs, ours, strict=True) if old.tokens != mine.tokens]
    if not other:
        return None
    first = other[0]
    return (
        f"{len(other)} texts have other tokens than for the baseline, {first.of} {first.number} among them: another tokenizer"
    )


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
