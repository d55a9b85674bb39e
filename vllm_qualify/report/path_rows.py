"""The paths of a report as rows: how each was taken, its measures, and the replies that differ. Text is not escaped yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.paths.details import DifferingReply, PathsDetails, PathTaken
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import CHANGED, CONSTRAINED, FIRST_TOKEN, PATHS, REORDERED, path_metric
from vllm_qualify.recipe.paths import FORMS_OPTION, names_backend
from vllm_qualify.report import words
from vllm_qualify.report.flips import Pieces, mark_differences
from vllm_qualify.report.model import Report
from vllm_qualify.report.words import DASH

# What the requests of each path have gone through.
THROUGH = PATHS | {
    CONSTRAINED: "JSON of a schema and calls of tools, plain and streamed, beside requests without a form",
    REORDERED: "the same forms from a server that was started again, and was asked for another form first",
}
ONE_START = (
    "the first form after a start decides which backend keeps all forms, and the server was started once: set `warm_starts: 1`,"
    f" or name the `backend` in `{FORMS_OPTION}`"
)


@dataclass(frozen=True)
class ReplyBlock:
    """A reply that differs, with what is wrong in words. A path of answers has the cold one beside it."""

    line: int
    wrong: str
    asked: str
    cold: Pieces
    reply: Pieces


@dataclass(frozen=True)
class PathRow:
    """One path and its measures. What is not known is DASH; `note` says what is wrong, or why the path is not judged."""

    path: str
    verdict: str
    note: str
    requests: str = DASH
    took: str = DASH
    cached: str = DASH
    beside: str = DASH
    differing: str = DASH
    first_token: str = DASH
    replies: list[ReplyBlock] = field(default_factory=list)
    more: int = 0
    """how many more replies differ than `replies` has"""

    @property
    def through(self) -> str:
        return THROUGH[self.path]


def path_rows(report: Report) -> list[PathRow]:
    """The paths of the plan, in their order, and after them those that the recipe leaves out."""
    details = report.details.paths or PathsDetails(taken=[], left_out={})
    measured = {row.metric: row for row in report.measurements}
    taken = {each.path: each for each in details.taken}
    paths = report.plan.paths
    unproven = "invalid" if paths is None or paths.must_be_proven else "not judged"
    rows = [_make_row(path, taken.get(path), measured, unproven) for path in THROUGH if path_metric(path) in measured]
    rows += [PathRow(path, "not judged", f"the recipe leaves it out: {why}") for path, why in details.left_out.items()]
    return [*rows, PathRow(REORDERED, "not judged", ONE_START)] if _lacks_start(report.plan) else rows


def _lacks_start(plan: CellPlan) -> bool:
    """Whether another start could show replies with a form that this one does not."""
    reorders = plan.paths is not None and plan.paths.reorders(plan.promised)
    return reorders and not (plan.warm_starts or names_backend(plan.server.arguments))


def _make_row(path: str, taken: PathTaken | None, measured: Mapping[str, Measurement], unproven: str) -> PathRow:
    row = measured[path_metric(path)]
    verdict = unproven if row.value is None else "held" if row.value else "not held"
    note = row.invalid_because or row.finding
    if taken is None:
        return PathRow(path, verdict, note)
    share, first_token = (measured.get(path_metric(path, of)) for of in (CHANGED, FIRST_TOKEN))
    return PathRow(
        path=path,
        verdict=verdict,
        note=note,
        requests=f"{taken.num_requests:,}",
        took=words.duration(taken.took_s),
        cached=words.value(taken.cached_share, "fraction"),
        beside=DASH if taken.beside is None else f"{taken.beside:g}",
        differing=_differing_words(taken, share),
        first_token=_with_interval(first_token),
        replies=[_reply_block(reply) for reply in taken.differing],
        more=taken.num_differing - len(taken.differing),
    )


def _differing_words(taken: PathTaken, share: Measurement | None) -> str:
    said = f"{taken.num_differing:,}"
    if share is None or share.interval is None:
        return said
    return f"{said}; at most {words.value(share.interval.upper, 'fraction')} of all such"


def _with_interval(row: Measurement | None) -> str:
    if row is None or row.value is None:
        return DASH
    return f"{words.value(row.value, row.unit)}; {words.interval(row.interval, row.unit)}"


def _reply_block(reply: DifferingReply) -> ReplyBlock:
    wrong = reply.problem or f"{reply.distance_nat or 0:.1f} nat from the cold reply"
    marked = mark_differences(reply.cold, reply.reply) if reply.cold else None
    cold, ours = marked or ([(reply.cold, False)] if reply.cold else [], [(reply.reply, False)])
    return ReplyBlock(reply.line, wrong, reply.asked, cold, ours)
