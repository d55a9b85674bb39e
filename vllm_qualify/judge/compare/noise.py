"""What earlier runs showed of a cell's noise, and the sources of noise that an interval lacks, in the words of reports."""

import math
from collections.abc import Iterable

from vllm_qualify.evidence import starts
from vllm_qualify.judge.compare.places import own_label
from vllm_qualify.plan.cell import BetweenStarts, CellPlan
from vllm_qualify.recipe.gates import Gate

STARTS = "what differs from start to start of a server, since each build was started once"
ASSUMED = "what differs from start to start of this server: it is assumed, since the server was started once"
STARTS_OF_TWO = "what differs from start to start of a server, since one of the two was started once"
FIRST_STARTS = "what differs from start to start of a server, since only the answers of each build's first one are compared"
SAMPLES = "what the samples of one question and one start have in common, so that they count as if they had nothing"
TOGETHER = "what the answers of one repetition have in common beyond their topics"
DAYS = "what differs from day to day, since each build was measured on one"


def find_history(plan: CellPlan, gate: Gate) -> dict[str, BetweenStarts]:
    """What earlier runs on this GPU type showed of a gate's metric: of its `start`s, `pair`s of starts in turns, and `day`s."""
    return {known.of: known for known in plan.between if known.label == own_label(gate)}


def history_words(known: Iterable[BetweenStarts | None]) -> str:
    """How many approved runs show how much starts and days differ; empty if only the comparison's own starts do."""
    runs = max((len(each.runs) for each in known if each), default=0)
    return f"; how much starts differ, by {runs} approved run{'' if runs == 1 else 's'} too" if runs else ""


def restless_words(deviation: str) -> str:
    """What an interval lacks of starts that differ by so much."""
    by = f"that is about {deviation}, far more than is assumed, and so few show it badly"
    return f"all of what starts of this server differ by: {by}"


def lacking_with_starts(plan: CellPlan, ours: int, theirs: int) -> list[str]:
    """What an interval lacks with so many starts of the cell's server, and of its baseline's."""
    if ours > starts.FIRST:
        return []
    if plan.starts > starts.FIRST:
        return [ASSUMED]
    return [] if theirs > starts.FIRST else [STARTS]


def share_unseen(number: int, alpha: float) -> float:
    """The smallest share that so many draws hit at least once with the chance 1 - `alpha`.

    It is the bound of Clopper & Pearson 1934 (Biometrika 26) for a share of which nothing was seen.
    """
    return float(-math.expm1(math.log(alpha) / number))


def rare_changes(number: int, alpha: float, of: str) -> str:
    """The change that an interval over so many texts or questions does not have, and how many more would show."""
    fewer, half = (f"{100 * share_unseen(each, alpha):.2g} %" for each in (number, 2 * number))
    return (
        f"a change that hits fewer than {fewer} of the {of}, which {number:,} cannot show: {2 * number:,} would show one that"
        f" hits {half}"
    )
