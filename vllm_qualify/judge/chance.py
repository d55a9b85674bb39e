"""How likely chance alone refuses: the p-value of a gate, and what stands out among the refusals of a release.

A gate's hypothesis is that its bound is met, or of a gate against another run that nothing was lost; `fail` rejects it. Its
p-value is the smallest chance of a wrong `fail` with which the gate, at the look at which it ended, would still fail. That is a
repeated p-value (Jennison & Turnbull 2000, "Group Sequential Methods", chapter 9): if the hypothesis holds, it is p or less
with a chance of at most p, whatever ended the looks.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_qualify.evidence.sequential import FALSE_FAIL_OF_RELEASE
from vllm_qualify.judge.verdict import GateVerdict
from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.gates import Verdict
from vllm_qualify.recipe.values import Frozen, Share

if TYPE_CHECKING:
    from scipy import stats
else:
    stats = Lazy("scipy.stats")

# The search ends where its bounds are so near to each other; it returns the upper one, with which the gate still fails.
NEAR, LEAST = 1.1, 1e-9
# A bound that a one-sided interval of half a chance meets is not missed by the value itself.
MOST = 0.499


def p_value(still_fails: Callable[[float], bool]) -> float:
    """The p-value of a gate, at most 10 % too large: `still_fails` says whether it fails with this chance of a wrong `fail`.

    1 for a gate that no chance below a half would fail, as one whose value meets the bound. Never below LEAST.
    """
    if not still_fails(MOST):
        return 1.0
    if still_fails(LEAST):
        return LEAST
    passes, fails = LEAST, MOST
    while fails / passes > NEAR:
        middle = math.sqrt(passes * fails)
        passes, fails = (passes, middle) if still_fails(middle) else (middle, fails)
    return fails


class CellChance(Frozen):
    """A judged cell with its p-value: the chance at most with which it would be refused like this had it lost nothing."""

    cell: str
    verdict: Verdict
    p_value: Share | None


def p_of_cell(gates: Sequence[GateVerdict], verdict: Verdict) -> float | None:
    """The p-value of a cell: the least of its gates', times how many gates with noise there are (Bonferroni).

    0 if a gate without noise, such as a yes-or-no check, was missed. 1 if nothing was. None if no verdict could be trusted.
    """
    if verdict == "invalid":
        return None
    missed = [verdict for verdict in gates if verdict.counts_as == "fail"]
    if any(not verdict.gate.has_noise for verdict in missed):
        return 0.0
    noisy = sum(verdict.gate.has_noise for verdict in gates)
    return min([1.0, *(noisy * verdict.p_value for verdict in missed if verdict.p_value is not None)])


class Refusals(Frozen):
    """The refused cells of a release, of `judged` ones.

    On average, chance alone refuses `by_chance` at most, and of those that stand out, a share of `rate` at most is chance.
    """

    judged: int
    rate: float
    by_chance: float
    standing_out: list[CellChance]
    perhaps_chance: list[CellChance]


def refusals(cells: Sequence[CellChance]) -> Refusals:
    """Which refusals of a release stand out, by Benjamini & Hochberg (1995, JRSS B 57). No verdict changes by it.

    It holds for cells that are independent or go together, as those of one release do (Benjamini & Yekutieli 2001).
    """
    judged = [(cell, cell.p_value) for cell in cells if cell.p_value is not None]
    adjusted: list[float] = stats.false_discovery_control([p for _, p in judged]).tolist() if judged else []
    refused = [(cell, p) for (cell, _), p in zip(judged, adjusted, strict=True) if cell.verdict == "fail"]
    return Refusals(
        judged=len(judged),
        rate=FALSE_FAIL_OF_RELEASE,
        by_chance=FALSE_FAIL_OF_RELEASE * len(judged),
        standing_out=[cell for cell, p in refused if p <= FALSE_FAIL_OF_RELEASE],
        perhaps_chance=[cell for cell, p in refused if p > FALSE_FAIL_OF_RELEASE],
    )
