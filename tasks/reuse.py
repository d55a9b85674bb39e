"""What a rerun need not repeat: finished stages, published runs, and cells that an approval still covers."""

from datetime import UTC, datetime

from prefect import get_run_logger
from prefect.runtime import flow_run

from tasks.orchestrator import has_lasting_server
from tasks.step import FILES_LIMIT_S, step
from vllm_qualify.approval.covering import find_covering
from vllm_qualify.approval.pointer import Entry
from vllm_qualify.errors import CallerError
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.request import Reuse
from vllm_qualify.publish.stores import open_store
from vllm_qualify.runs.folder import Run, find_run
from vllm_qualify.runs.publishing import Published, attempts, note_attempt, published_as
from vllm_qualify.runs.stored import fetch_run, reuse_stages


@step("reuse", "reuse finished stages of {run.plan.cell.id}", limit_s=FILES_LIMIT_S)
def reuse_finished(run: Run, store: str, reuse: Reuse) -> None:
    """Take finished stages of the same inputs from this machine or the store. Raises StoreError."""
    for stage in reuse_stages(run, open_store(store), reuse):
        get_run_logger().info(f"{stage.stage} was measured by run {stage.taken_from}, and is reused")


@step("still to do")
def still_to_do(plans: list[CellPlan], published: list[Published], store: str, renew_days: int | None) -> list[CellPlan]:
    """The cells that are not published yet, without those whose approval holds for more than `renew_days`.

    If `renew_days` is None, approvals are ignored. Raises StoreError.
    """
    done = {each.run.plan.cell.id for each in published}
    unpublished = [plan for plan in plans if plan.cell.id not in done]
    if renew_days is None:
        return unpublished
    opened, today, left = open_store(store), datetime.now(UTC).date(), list[CellPlan]()
    for plan in unpublished:
        entry = find_covering(opened, plan, today, renew_days)
        if isinstance(entry, Entry):
            get_run_logger().info(
                f"{plan.cell.id}: run {entry.run_id} is {entry.summary}, until {entry.expires}: nothing to do"
            )
        else:
            get_run_logger().info(f"{plan.cell.id} will be qualified: {entry}")
            left.append(plan)
    return left


@step("published before", limit_s=FILES_LIMIT_S)
def published_before(plans: list[CellPlan], store: str) -> list[Published]:
    """The runs that an earlier start of this flow run published. Raises StoreError."""
    if not has_lasting_server() or not (flow_run.run_count or 0) > 1:
        return []
    opened = open_store(store)
    run_ids = [run_id for plan in plans for run_id in attempts(opened, flow_run.id, plan.cell.id)]
    return [published_as(_here_or_fetched(store, run_id), opened) for run_id in run_ids]


@step("attempt")
def begin_attempt(plans: list[CellPlan], store: str) -> None:
    """Note in the store which runs belong to this flow run. Raises StoreError."""
    if has_lasting_server():
        for plan in plans:
            note_attempt(open_store(store), flow_run.id, plan)


def _here_or_fetched(store: str, run_id: str) -> Run:
    try:
        run = find_run(run_id)
        run.report()
    except CallerError:
        return fetch_run(store, run_id)
    return run
