"""How often a release was qualified for a cell before, and how that ended."""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from vllm_qualify.approval.index import read_manifests, read_row
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.engine.process import Tell
from vllm_qualify.plan.cell import CellPlan, EarlierTry
from vllm_qualify.plan.tried import digest_tried
from vllm_qualify.publish.bundle import Manifest, UnreadableError
from vllm_qualify.publish.order import is_newer, order
from vllm_qualify.publish.store import MissingObjectError, Store


def with_tries(plan: CellPlan, store: Store, tell: Tell) -> CellPlan:
    """The plan, with the earlier tries of its release among the cell's newest reports. Raises StoreError, TamperedError.

    A run that becomes a baseline and is held against none is no try.
    """
    if plan.establishes and not plan.is_compared:
        return plan
    release, lines = digest_tried(plan), reversed(read_row(store, plan.cell.id).reports)
    counting = [(line.run_id, line.tried) for line in lines if line.tried and line.tried.release == release]
    tries = [EarlierTry(run_id=run_id, verdict=tried.verdict) for run_id, tried in counting]
    counted = plan.model_copy(update={"tries": tries})
    if counted.unpassed:
        tell(f"{plan.cell.id}: this release did not pass {counted.unpassed} times, so its gates pass less easily")
    return counted


def departures_of_tries(run: PublishedRun, store: Store) -> Iterator[str]:
    """What of a cell's earlier runs a plan does not count, or nobody can believe, in words that follow the run.

    Whoever may publish can change an index and can leave tries out of a plan, and cannot remove a manifest. What a manifest
    says counts only as far as its report says so, too. Raises StoreError.
    """
    manifests, unreadable = read_manifests(store, run.cell)
    believed = []
    for run_id in [each.run_id for each in sorted(manifests.values(), key=order) if is_newer(run.manifest, each)]:
        try:
            believed.append(read_run(store, run.cell, run_id).manifest)
        except (UnreadableError, MissingObjectError):
            unreadable.append(run_id)
    if unreadable:
        yield f"is of a cell with runs that are not what they say: {', '.join(sorted(unreadable))}"
    if left_out := _not_counted(run, believed):
        yield f"does not count {', '.join(left_out)}, in which its release did not pass"


def _not_counted(run: PublishedRun, before: Sequence[Manifest]) -> list[str]:
    """The earlier runs that the plan does not count, though its release did not pass in them and has not passed since.

    Of two runs at the same time, the one that ends last does not count the other.
    """
    release, counted = digest_tried(run.report.plan), {tried.run_id for tried in run.report.plan.tries}
    tries = [(each.run_id, each.tried.verdict) for each in before if each.tried and each.tried.release == release]
    since = takewhile(lambda tried: tried[1] != "pass", reversed(tries))
    return sorted(run_id for run_id, verdict in since if verdict != "invalid" and run_id not in counted)
