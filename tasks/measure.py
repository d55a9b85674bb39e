"""The stages that need the server: serve, smoke, accuracy, load."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.progress import counter, teller
from vllm_qualify.baseline import bring
from vllm_qualify.engine.plan import fitted
from vllm_qualify.evidence import stages
from vllm_qualify.evidence.measurement import StageEvidence
from vllm_qualify.evidence.serving import Served, see_the_same
from vllm_qualify.evidence.serving import serving as serve
from vllm_qualify.judge import compare, stopping
from vllm_qualify.publish.store import open_store
from vllm_qualify.qualification import Run, start_run


@contextmanager
def serving(runs: list[Run], port: int | None) -> Iterator[Served]:
    """The server of several cells, with its tools, for the length of the block; then each one's evidence of it.

    Raises:
        QualifyError: it does not start, or ended by itself.
    """
    first, started_at = runs[0], datetime.now(UTC)
    folder = stages.stage_folder(first.evidence, "serve")
    with serve(first.plan, folder, teller(), port) as served:
        get_run_logger().info(f"serving at {served.server.url} after {served.server.startup_s:.0f} s")
        for run in runs[1:]:
            see_the_same(folder, stages.stage_folder(run.evidence, "serve"))
        yield served
    stages.start_again(first.plan, folder, teller())
    for run in runs:
        run.save_stage(stages.serve_stage(served.server, run.plan, run.evidence, started_at, folder))
    get_run_logger().info("server stopped")


@task(name="fit", task_run_name="fit", cache_policy=NO_CACHE)
def fit(run: Run) -> Run:
    """Find what the profile leaves open, and plan with it. Raises QualifyError."""
    _saved(run, stages.fit_stage(run.plan, run.evidence, teller()))
    found = stages.found_by_fit(run.evidence).found
    get_run_logger().info(f"found: {found}")
    return start_run(fitted(run.plan, found))


@task(name="baseline", task_run_name="baseline", cache_policy=NO_CACHE)
def bring_baseline(run: Run, store: str) -> StageEvidence:
    """The evidence of the run that this one is compared with. Raises StoreError."""
    return _saved(run, stages.baseline_stage(run.plan, run.evidence, lambda folder: bring(run.plan, open_store(store), folder)))


@task(name="smoke", task_run_name="smoke", cache_policy=NO_CACHE)
def smoke_test(served: Served, run: Run) -> StageEvidence:
    return _saved(run, stages.smoke_stage(served, run.plan, run.evidence))


@task(name="accuracy", task_run_name="accuracy", cache_policy=NO_CACHE)
def measure_accuracy(served: Served, run: Run, first: Run) -> StageEvidence:
    """Of the server's first cell, where all that determines it is the same, the answers are taken over."""
    plan, evidence = run.plan, run.evidence
    if run != first and stages.asks_alike(plan, first.plan):
        return _saved(run, stages.taken_over("accuracy", plan, evidence, first.evidence, first.stages()))
    asking = stages.Asking(
        repetitions=lambda task: compare.repetitions(plan, evidence, task),
        is_decided=lambda task: stopping.accuracy_decided(plan, evidence, task),
    )
    return _saved(run, stages.accuracy_stage(served, plan, evidence, counter("accuracy", "questions"), asking))


@task(name="load", task_run_name="load", cache_policy=NO_CACHE)
def measure_load(served: Served, run: Run) -> StageEvidence:
    plan, evidence = run.plan, run.evidence
    progress = counter("load", "requests")
    decided = partial(stopping.load_decided, plan, evidence)
    return _saved(run, stages.load_stage(served, plan, evidence, progress, decided, teller()))


@task(name="speculation", task_run_name="speculation", cache_policy=NO_CACHE)
def measure_speculation(served: Served, run: Run) -> StageEvidence:
    return _saved(run, stages.speculation_stage(served, run.plan, run.evidence, teller()))


@task(name="sweep", task_run_name="sweep", cache_policy=NO_CACHE)
def measure_sweep(served: Served, run: Run) -> StageEvidence:
    return _saved(run, stages.sweep_stage(served, run.plan, run.evidence, teller()))


def _saved(run: Run, stage: StageEvidence) -> StageEvidence:
    run.save_stage(stage)
    get_run_logger().info(f"{stage.stage} done in {stage.duration_s:.0f} s, {len(stage.files)} files of evidence")
    return stage
