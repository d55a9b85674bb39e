"""Judge and publish. Tasks pass a run's folder to each other: Prefect inspects every part of a larger parameter."""

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.step import FILES_LIMIT_S, PATIENT, step
from vllm_qualify.publish.stores import open_store
from vllm_qualify.report.markdown import artifact_key, first_screen
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.judging import judge_run
from vllm_qualify.runs.publishing import Published, publish_run


@step("judge", "judge {run.plan.cell.id}")
def judge(run: Run) -> None:
    """Judge the run's stages: the report goes to the run's folder, and the verdicts to a table in Prefect's UI."""
    get_run_logger().info("judging (Great Expectations takes some seconds to load)")
    report = judge_run(run, run.stages())
    for gate in report.judgement.gates:
        if gate.expired:
            expired = f"the waiver of {gate.gate.label} by {gate.expired.owner} expired on {gate.expired.expires}"
            get_run_logger().warning(f"{expired}: it is ignored")
    verdicts = [
        {
            "verdict": gate.verdict,
            "gate": gate.gate.label,
            "value": gate.value,
            "bound": gate.gate.bound,
            "unit": gate.gate.unit,
            "smallest visible change": gate.smallest_visible_change,
            "because": gate.because,
            "waived by": gate.waiver.owner if gate.waiver else None,
        }
        for gate in report.judgement.gates
    ]
    cell = report.plan.cell.id
    create_table_artifact(key=artifact_key("verdicts", cell), table=verdicts, description=f"{report.outcome}: {cell}")


@step("publish", "publish {run.plan.cell.id}", retries=PATIENT, limit_s=FILES_LIMIT_S)
def publish(run: Run, store: str) -> Published:
    """Publish the run; Prefect's UI then shows the report's first screen and a link to its page. Raises StoreError."""
    report = run.report()
    published = publish_run(report, run, open_store(store))
    cell = report.plan.cell.id
    create_markdown_artifact(key=artifact_key("report", cell), markdown=first_screen(report, published.page), description=cell)
    get_run_logger().info(f"{published.outcome}: {cell}")
    if published.index_problem:
        get_run_logger().warning(published.index_problem)
    return published
