"""The stages that need the server: serve, smoke, accuracy, load."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from prefect import get_run_logger, task

from tasks.progress import counter, teller
from vllm_qualify.engine.server import Server, serve
from vllm_qualify.evidence import stages
from vllm_qualify.evidence.measurement import StageEvidence
from vllm_qualify.qualification import Run


@contextmanager
def served(run: Run, port: int | None) -> Iterator[Server]:
    """The cell's server for the length of the block, and its evidence after it. Raises HostError, ReleaseError."""
    plan, started_at = run.plan, datetime.now(UTC)
    folder = stages.stage_folder(run.evidence, "serve")
    with serve(plan.server, folder, teller(), port, plan.labels) as server:
        get_run_logger().info(f"serving at {server.url} after {server.startup_s:.0f} s")
        yield server
    run.save_stage(stages.serve_stage(server, plan, run.evidence, started_at))
    get_run_logger().info("server stopped")


@task(name="smoke", task_run_name="smoke")
def smoke_test(server: Server, run: Run) -> StageEvidence:
    return _saved(run, stages.smoke_stage(server, run.plan, run.evidence))


@task(name="accuracy", task_run_name="accuracy")
def measure_accuracy(server: Server, run: Run) -> StageEvidence:
    return _saved(run, stages.accuracy_stage(server, run.plan, run.evidence, counter("accuracy", "questions")))


@task(name="load", task_run_name="load")
def measure_load(server: Server, run: Run) -> StageEvidence:
    return _saved(run, stages.load_stage(server, run.plan, run.evidence, counter("load", "requests")))


def _saved(run: Run, stage: StageEvidence) -> StageEvidence:
    run.save_stage(stage)
    get_run_logger().info(f"{stage.stage} done in {stage.duration_s:.0f} s, {len(stage.files)} files of evidence")
    return stage
