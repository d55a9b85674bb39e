"""Judge, publish, show."""

from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.client.schemas.objects import State, TaskRun

from vllm_qualify.errors import StoreBusyError
from vllm_qualify.publish.store import open_store
from vllm_qualify.qualification import Published, Run, judge_run, publish_run
from vllm_qualify.report.model import Report


@task(name="judge", task_run_name="judge")
def judge(run: Run) -> Report:
    """The report of the stages that the run has."""
    get_run_logger().info("judging (Great Expectations takes some seconds to load)")
    return judge_run(run, run.stages())


def _store_is_busy(task: Any, task_run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001  (Prefect's signature)
    return isinstance(state.data, StoreBusyError)


@task(name="publish", task_run_name="publish", retries=3, retry_delay_seconds=[2, 10, 30], retry_condition_fn=_store_is_busy)
def publish(report: Report, run: Run, store: str) -> Published:
    """Raises StoreError; a busy store is tried again."""
    return publish_run(report, run, open_store(store))


@task(name="show", task_run_name="show")
def show(report: Report, published: Published) -> None:
    """The verdict table and the page's link as artifacts in Prefect's UI."""
    rows = [
        {
            "verdict": gate.verdict,
            "gate": gate.gate.label,
            "value": gate.value,
            "bound": gate.gate.bound,
            "unit": gate.gate.unit,
        }
        | {"smallest visible change": gate.smallest_visible_change, "because": gate.because}
        for gate in report.judgement.gates
    ]
    create_table_artifact(key="verdicts", table=rows, description=f"{report.outcome}: {report.plan.cell.id}")
    create_link_artifact(key="report", link=published.page, link_text=f"report of {report.run_id}")
    get_run_logger().info(f"{report.outcome}: {report.plan.cell.id}")
