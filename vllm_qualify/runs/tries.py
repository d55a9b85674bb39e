"""How often a release was qualified for a cell before, and how that ended."""

from itertools import takewhile

from vllm_qualify.approval.index import read_manifests, read_row
from vllm_qualify.approval.published import PublishedRun
from vllm_qualify.engine.process import Tell
from vllm_qualify.plan.cell import CellPlan, EarlierTry
from vllm_qualify.publish.order import is_newer, order
from vllm_qualify.publish.store import Store


def with_tries(plan: CellPlan, store: Store, tell: Tell) -> CellPlan:
    """The plan, with the earlier tries of its release among the cell's newest reports. Raises StoreError, TamperedError.

    A run that becomes a baseline and is held against none is no try.
    """
    if plan.establishes and not plan.is_compared:
        return plan
    release, lines = plan.cell.release.digest, reversed(read_row(store, plan.cell.id).reports)
    counting = [(line.run_id, line.tried) for line in lines if line.tried and line.tried.release == release]
    tries = [EarlierTry(run_id=run_id, verdict=tried.verdict) for run_id, tried in counting]
    counted = plan.model_copy(update={"tries": tries})
    if counted.unpassed:
        tell(f"{plan.cell.id}: this release did not pass {counted.unpassed} times, so its gates pass less easily")
    return counted


def not_counted(run: PublishedRun, store: Store) -> list[str]:
    """The earlier runs that the plan does not count, though its release did not pass in them and has not passed since.

    They come from the cell's manifests: whoever may publish can change an index and can leave tries out of a plan, and cannot
    remove a manifest. Of two runs at the same time, the one that ends last does not count the other. Raises StoreError.
    """
    release, counted = run.report.plan.cell.release.digest, {tried.run_id for tried in run.report.plan.tries}
    before = sorted((each for each in read_manifests(store, run.cell)[0].values() if is_newer(run.manifest, each)), key=order)
    tries = [(each.run_id, each.tried.verdict) for each in before if each.tried and each.tried.release == release]
    since = takewhile(lambda tried: tried[1] != "pass", reversed(tries))
    return sorted(run_id for run_id, verdict in since if verdict != "invalid" and run_id not in counted)
