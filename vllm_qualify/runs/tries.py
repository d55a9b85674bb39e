"""How often a release was qualified for a cell before, and how that ended."""

from collections.abc import Callable, Iterator, Sequence

from vllm_qualify.approval.index import read_manifests, read_row
from vllm_qualify.approval.published import PublishedRun, read_run
from vllm_qualify.engine.process import Tell
from vllm_qualify.plan.cell import CellPlan, EarlierTry
from vllm_qualify.plan.tried import digest_tried
from vllm_qualify.publish.bundle import UnreadableError
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


def departures_of_tries(run: PublishedRun, store: Store, is_signed: Callable[[str], bool]) -> Iterator[str]:
    """The other runs of a cell that a plan leaves out or that cannot be believed, in words that follow the run.

    Whoever may publish can change an index, leave tries out of a plan and choose a run's number, and cannot remove a manifest.
    So runs with larger numbers count, too. What a manifest says counts only as far as its report says so. `is_signed` says
    whether a run of the cell has an approval that can be trusted. Raises StoreError.
    """
    manifests, unreadable = read_manifests(store, run.cell)
    believed = []
    for run_id in manifests.keys() - {run.run_id}:
        try:
            believed.append(read_run(store, run.cell, run_id))
        except (UnreadableError, MissingObjectError):
            unreadable.append(run_id)
    if unreadable:
        yield f"is of a cell with runs that are not what they say: {', '.join(sorted(unreadable))}"
    if left_out := _not_counted(run, believed, is_signed):
        yield f"does not count {', '.join(left_out)}, in which its release did not pass"


def _not_counted(run: PublishedRun, others: Sequence[PublishedRun], is_signed: Callable[[str], bool]) -> list[str]:
    """The runs in which the release did not pass, and which neither the plan counts nor that of an approved run.

    A plan that names a run before a pass does not count it: that pass may be made up. Of two runs at the same time, the one
    that ends last does not count the other.
    """
    release = digest_tried(run.report.plan)
    tried = {each.run_id: each.manifest.tried for each in others if each.manifest.tried}
    verdicts = {run_id: each.verdict for run_id, each in tried.items() if each.release == release}
    left_out = {run_id for run_id, verdict in verdicts.items() if verdict not in ("pass", "invalid")}
    left_out -= {*run.report.plan.unpassed_tries}
    for other in others:
        counted = left_out.intersection(other.report.plan.unpassed_tries)
        if counted and verdicts.get(other.run_id) == "pass" and is_signed(other.run_id):
            left_out -= counted
    return sorted(left_out)
