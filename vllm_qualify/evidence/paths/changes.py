"""How far replies to one prompt are apart, and which of them a path has changed."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from vllm_qualify.evidence.paths.replies import Place, Reply

# A reply that is less far from a cold one than this has not changed, in nat. Of 128 prompts on an H200, asked in five kinds of
# batches, the farthest of a healthy server with peaked random weights was 1.0 (docs/measured.md).
LEAST_NAT = 1.0
# A likelihood that differs by more is another answer, however noisy the server is: 20 times as likely.
MOST_NAT = 3.0
# The median of the noise between two cold replies, times this, is noise too. A fault can have changed many cold replies.
TIMES_NOISE = 8.0
# A reply of more or fewer tokens than were asked for is another's, or two that are mixed up: as far as no likelihood goes.
OTHER_LENGTH_NAT = 100.0
# Each prompt's reply is held against those to so many others.
SHIFTS = 3


def distance_nat(one: Reply, other: Reply) -> float:
    """The largest difference of a token's log-likelihood, up to the first token that differs.

    There, each reply says how much less likely it finds the other's token than its own. A token that a reply does not name is
    at most as likely as the least likely one that it names, so that the distance may be larger. Two tokens that are about
    equally likely are therefore near to each other.
    """
    if not (one.is_whole and other.is_whole):
        return OTHER_LENGTH_NAT
    farthest = 0.0
    for ours, theirs in zip(one.places, other.places, strict=True):
        if ours.token != theirs.token:
            return max(farthest, _lead_nat(ours, theirs.token), _lead_nat(theirs, ours.token))
        farthest = max(farthest, abs(ours.likely[ours.token] - theirs.likely[ours.token]))
    return farthest


def _lead_nat(at: Place, other: int) -> float:
    return at.likely[at.token] - at.likely.get(other, min(at.likely.values()))


class Tolerance(NamedTuple):
    """How far a reply may be from a cold one; `to_the_letter`, it must have the same tokens, too."""

    limit_nat: float
    to_the_letter: bool = False

    def allows(self, reply: Reply, cold: Reply) -> bool:
        is_near = distance_nat(reply, cold) <= self.limit_nat
        return is_near and not (self.to_the_letter and tokens_of(reply) != tokens_of(cold))


def tokens_of(reply: Reply) -> list[int]:
    return [place.token for place in reply.places]


def limit_nat(one: Sequence[Reply], other: Sequence[Reply]) -> float:
    """How far a reply may be from a cold one, by the noise between two cold ones."""
    noise = [distance_nat(*pair) for pair in zip(one, other, strict=True)]
    return min(MOST_NAT, max(LEAST_NAT, TIMES_NOISE * statistics.median(noise)))


def find_changed(replies: Sequence[Reply], colds: Sequence[Sequence[Reply]], tolerance: Tolerance) -> list[int]:
    """Which of the replies, by their places, no cold reply to their prompts allows."""
    return [at for at, reply in enumerate(replies) if not any(tolerance.allows(reply, cold[at]) for cold in colds)]


def power(colds: Sequence[Reply], limit: float) -> float:
    """The share of other prompts' replies, in place of the right ones, that are farther than the limit.

    A model that says the same to every prompt, or finds all words equally likely, shows no change at all.
    """
    others = [(colds[at], colds[at - shift]) for shift in range(1, min(SHIFTS, len(colds) - 1) + 1) for at in range(len(colds))]
    return sum(distance_nat(other, cold) > limit for cold, other in others) / len(others) if others else 0.0


def nll_changes_nat(replies: Sequence[Reply], cold: Sequence[Reply]) -> list[float]:
    """How much less likely the cold one's first token became, less how much more likely the reply's own did, halved.

    One half alone is above zero on every server with noise: the likeliest token of one draw is less likely in another.
    """
    pairs = [(reply.places[0], before.places[0]) for reply, before in zip(replies, cold, strict=True)]
    return [(_loss_nat(before, at) - _loss_nat(at, before)) / 2 for at, before in pairs]


def _loss_nat(best: Place, elsewhere: Place) -> float:
    """How much less likely a place's token is elsewhere."""
    return best.likely[best.token] - elsewhere.likely.get(best.token, min(elsewhere.likely.values()))
