"""How often a release was qualified for a cell before, and how that ended."""

from vllm_qualify.approval.index import read_row
from vllm_qualify.engine.process import Tell
from vllm_qualify.plan.cell import CellPlan, Try
from vllm_qualify.publish.store import Store


def with_tries(plan: CellPlan, store: Store, tell: Tell) -> CellPlan:
    """The plan, with the earlier tries of its release that are among the cell's newest reports.

    A run that becomes a baseline is no try.

    Raises:
        TamperedError: the cell's pointer is not as it was written.
        StoreError: the store cannot be read.
    """
    if plan.establishes:
        return plan
    release, lines = plan.cell.release.digest, reversed(read_row(store, plan.cell.id).reports)
    tries = [
        Try(run_id=line.run_id, verdict=line.tried.verdict) for line in lines if line.tried and line.tried.release == release
    ]
    found = plan.model_copy(update={"tries": tries})
    if found.unpassed:
        tell(f"{plan.cell.id}: this release did not pass {found.unpassed} times, so its gates pass less easily")
    return found
