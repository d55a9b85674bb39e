"""What people read of the paths: how each was taken, and the replies that differ, beside the cold ones."""

from collections.abc import Sequence
from pathlib import Path

from vllm_qualify.engine.kinds.base import EngineKind
from vllm_qualify.evidence.contract.replies import MissingError
from vllm_qualify.evidence.measurement import UNUSABLE
from vllm_qualify.evidence.paths.changes import distance_nat
from vllm_qualify.evidence.paths.constrained import EXCHANGES, judge_replies, read_timed
from vllm_qualify.evidence.paths.kinds import Seen, UnderWay, count_company
from vllm_qualify.evidence.paths.measure import Asker
from vllm_qualify.evidence.paths.parse import Colds, find_changed_on, see_path
from vllm_qualify.evidence.paths.replies import Content
from vllm_qualify.recipe.metrics import CONSTRAINED
from vllm_qualify.recipe.values import Count, CountOrZero, Frozen, NotNegative, Share

# How many replies that differ are shown of each path, and how much of a text.
MOST_REPLIES, MOST_LETTERS = 5, 600


class DifferingReply(Frozen):
    """A reply that a path changed, or one without its form. Texts are cut."""

    line: Count
    """its line in the path's file"""
    asked: str
    """the end of the prompt, or the form that the reply must have"""
    cold: str = ""
    """what was answered cold; a reply that must have a form has none"""
    reply: str
    distance_nat: NotNegative | None = None
    """how far it is from the first cold reply"""
    problem: str = ""
    """what is wrong with its form"""


class PathTaken(Frozen):
    """How one path was taken, by the replies and the server's counters. What is not known is None."""

    path: str
    num_requests: CountOrZero
    took_s: NotNegative
    cached_share: Share | None = None
    """which share of the prompts' tokens came from the prefix cache"""
    beside: NotNegative | None = None
    """how many other requests were under way beside half of the requests, or more"""
    differing: list[DifferingReply] = []
    """the first ones"""
    num_differing: CountOrZero = 0


class PathsDetails(Frozen):
    """The paths that left usable files, and those that the recipe leaves out, each with its reason."""

    limit_nat: NotNegative | None = None
    """how far a reply may be from a cold one, by the noise between two cold ones"""
    power: Share | None = None
    """the share of other prompts' replies that would be seen in place of the right ones"""
    taken: list[PathTaken]
    left_out: dict[str, str]


def read_details(folder: Path, asker: Asker, at_once: int, kind: EngineKind) -> PathsDetails:
    """The details of what is usable; the measurements say why other paths are not."""
    left_out = {path: why for path, why in asker.settings.leave_out.items() if path in asker.offered}
    try:
        colds = Colds(folder, asker, at_once, kind)
    except UNUSABLE:
        colds = None
    taken = []
    for path in asker.taken:
        try:
            if path == CONSTRAINED:
                taken.append(_read_constrained(folder / path, asker, kind))
            elif colds:
                taken.append(_read_path(path, see_path(path, folder, asker, at_once, kind), asker, colds))
        except (*UNUSABLE, MissingError):
            continue
    known = {"limit_nat": colds.limit_nat, "power": colds.power} if colds else {}
    return PathsDetails(**known, taken=taken, left_out=left_out)


def _read_path(path: str, seen: Seen, asker: Asker, colds: Colds) -> PathTaken:
    replies, changed = find_changed_on(path, seen.replies, asker, colds)
    differing = [
        DifferingReply(
            line=at + 1,
            asked=_end_of(asker.prompts[at].content),
            cold=_cut(colds.first[at].text),
            reply=_cut(replies[at].text),
            distance_nat=distance_nat(replies[at], colds.first[at]),
        )
        for at in changed[:MOST_REPLIES]
    ]
    return PathTaken(
        path=path,
        num_requests=len(replies),
        took_s=_span_s(replies),
        cached_share=seen.hit_share(),
        beside=count_company(seen.folder, replies),
        differing=differing,
        num_differing=len(changed),
    )


def _read_constrained(folder: Path, asker: Asker, kind: EngineKind) -> PathTaken:
    timed = read_timed(folder / EXCHANGES)
    broken = [
        each for each in judge_replies(folder / EXCHANGES, asker.forms, asker.requests, kind, asker.asking) if each.problem
    ]
    differing = [
        DifferingReply(
            line=each.line, asked=each.form.words, reply=_cut(timed[each.line - 1].exchange.reply), problem=each.problem
        )
        for each in broken[:MOST_REPLIES]
    ]
    return PathTaken(
        path=CONSTRAINED,
        num_requests=len(timed),
        took_s=_span_s(timed),
        beside=count_company(folder, timed),
        differing=differing,
        num_differing=len(broken),
    )


def _span_s(requests: Sequence[UnderWay]) -> float:
    return max(request.ended_s for request in requests) - min(request.began_s for request in requests)


def _end_of(content: Content) -> str:
    text = content if isinstance(content, str) else str(content[-1].get("content", ""))
    return text if len(text) <= MOST_LETTERS else f"… {text[-MOST_LETTERS:]}"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} …"
