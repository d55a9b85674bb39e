"""What a rerun need not do again: finished stages, published runs, cells whose approval still covers them."""

from datetime import UTC, datetime

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.settings import get_current_settings

from vllm_qualify.approval.covering import covering
from vllm_qualify.approval.pointer import Entry
from vllm_qualify.engine.plan import CellPlan
from vllm_qualify.errors import CallerError
from vllm_qualify.publish.kept import Reuse
from vllm_qualify.publish.store import open_store
from vllm_qualify.qualification import (
    Published,
    Run,
    attempts,
    fetch_run,
    find_run,
    note_attempt,
    published_as,
    take_over_stages,
)


@task(name="take over", task_run_name="take over {run.plan.cell.id}", cache_policy=NO_CACHE)
def take_over(run: Run, store: str, reuse: Reuse) -> None:
    """Finished stages of the same inputs, from the store. Raises StoreError."""
    for stage in take_over_stages(run, open_store(store), reuse):
        get_run_logger().info(f"{stage.stage} was measured by run {stage.taken_from}, and is taken over")


@task(name="still to do", task_run_name="still to do", cache_policy=NO_CACHE)
def not_covered(plans: list[CellPlan], store: str, renew_days: int | None) -> list[CellPlan]:
    """The cells without an approval that holds for more than `renew_days`; all of them for None. Raises StoreError."""
    if renew_days is None:
        return plans
    opened, today, left = open_store(store), datetime.now(UTC).date(), list[CellPlan]()
    for plan in plans:
        found = covering(opened, plan, today, renew_days)
        if isinstance(found, Entry):
            get_run_logger().info(f"{plan.cell.id}: run {found.run_id} is {found.done}, until {found.expires}: nothing to do")
        else:
            get_run_logger().info(f"{plan.cell.id} is to be qualified: {found}")
            left.append(plan)
    return left


@task(name="published before", task_run_name="published before", cache_policy=NO_CACHE)
def published_before(plans: list[CellPlan], store: str) -> list[Published]:
    """What this flow run had published before it was broken off, and started again. Raises StoreError."""
    if not has_server() or not (flow_run.run_count or 0) > 1:
        return []
    opened = open_store(store)
    found = [(plan.cell.id, run_id) for plan in plans for run_id in attempts(opened, flow_run.id, plan.cell.id)]
    return [published_as(_here_or_fetched(store, run_id), opened) for _, run_id in found]


@task(name="attempt", task_run_name="attempt", cache_policy=NO_CACHE)
def begin_attempt(plans: list[CellPlan], store: str) -> None:
    """Note which runs are this flow run's. Raises StoreError."""
    if has_server():
        for plan in plans:
            note_attempt(open_store(store), flow_run.id, plan)


def has_server() -> bool:
    """Whether Prefect's server outlives this flow run, so that a broken-off run can be started again."""
    return get_current_settings().api.url is not None


def _here_or_fetched(store: str, run_id: str) -> Run:
    try:
        run = find_run(run_id)
        run.report()
    except CallerError:
        return fetch_run(store, run_id)
    return run
