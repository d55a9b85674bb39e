"""The stages that need the server: serve, smoke, accuracy, load. One that was taken over is not measured again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.progress import counter, line_teller, teller
from vllm_qualify.baseline import bring
from vllm_qualify.engine.plan import fitted
from vllm_qualify.engine.question import Question
from vllm_qualify.evidence import stages
from vllm_qualify.evidence.load import Following, Made
from vllm_qualify.evidence.measurement import StageEvidence
from vllm_qualify.evidence.serving import Served, see_the_same
from vllm_qualify.evidence.serving import serving as serve
from vllm_qualify.judge import compare, estimate, stopping
from vllm_qualify.publish.kept import Reuse, keep, take_over
from vllm_qualify.publish.store import open_store
from vllm_qualify.qualification import Run, lacking, start_run
from vllm_qualify.recipe.metrics import Stage


def answered(runs: list[Run], question: Question) -> None:
    """Wait until the engine has said that it takes the recipe; what it could not tell goes to the runs' plans.

    Raises:
        RecipeError, HostError: as `Question.ask`.
    """
    for run in runs:
        start_run(run.plan.model_copy(update={"unasked": question.unasked}))


@contextmanager
def serving(runs: list[Run], port: int | None, store: str, question: Question) -> Iterator[Served]:
    """The server of several cells, with its tools, for the length of the block; then each one's evidence of it.

    Raises:
        QualifyError: it does not start, or ended by itself, or as `answered`.
    """
    first, started_at = runs[0], datetime.now(UTC)
    folder = stages.stage_folder(first.evidence, "serve")
    loads = stages.loads_of((run.plan, run.evidence) for run in runs if "load" in lacking(run))
    with serve(first.plan, folder, teller(), port, question, loads) as served:
        answered(runs, question)
        get_run_logger().info(f"serving at {served.server.url} after {served.server.startup_s:.0f} s")
        for run in runs[1:]:
            see_the_same(folder, stages.stage_folder(run.evidence, "serve"))
        yield served
    stages.start_again(first.plan, folder, teller())
    for run in runs:
        _keep(run, stages.serve_stage(served.server, run.plan, run.evidence, started_at, folder), store)
    get_run_logger().info("server stopped")


@task(name="fit", task_run_name="fit {run.plan.cell.id}", cache_policy=NO_CACHE)
def fit(run: Run, store: str, reuse: Reuse, question: Question) -> Run:
    """Find what the profile leaves open, and plan with it. Raises QualifyError."""
    if before := take_over(open_store(store), "fit", run.plan, run.evidence, reuse):
        run.save_stage(before)
    _once(run, "fit", store, lambda: stages.fit_stage(run.plan, run.evidence, teller(), question))
    found = stages.found_by_fit(run.evidence).found
    get_run_logger().info(f"found: {found}")
    return start_run(fitted(run.plan, found))


@task(name="baseline", task_run_name="baseline {run.plan.cell.id}", cache_policy=NO_CACHE)
def bring_baseline(run: Run, store: str) -> StageEvidence:
    """The evidence of the run that this one is compared with. Raises StoreError."""
    brought = partial(bring, run.plan, open_store(store))
    return _once(run, "baseline", store, lambda: stages.baseline_stage(run.plan, run.evidence, brought))


@task(name="smoke", task_run_name="smoke {run.plan.cell.id}", cache_policy=NO_CACHE)
def smoke_test(served: Served, run: Run, store: str) -> StageEvidence:
    return _once(run, "smoke", store, lambda: stages.smoke_stage(served, run.plan, run.evidence))


@task(name="accuracy", task_run_name="accuracy {run.plan.cell.id}", cache_policy=NO_CACHE)
def measure_accuracy(served: Served, run: Run, first: Run, store: str) -> StageEvidence:
    """Of the server's first cell, where all that determines it is the same, the answers are taken over."""
    plan, evidence = run.plan, run.evidence

    def measure() -> StageEvidence:
        if run != first and stages.asks_alike(plan, first.plan):
            return stages.taken_over("accuracy", plan, evidence, first.evidence, first.stages())
        asking = stages.Asking(
            repetitions=lambda task: compare.repetitions(plan, evidence, task),
            is_decided=lambda task: stopping.accuracy_decided(plan, evidence, task),
        )
        return stages.accuracy_stage(served, plan, evidence, counter("accuracy", "questions"), asking)

    return _once(run, "accuracy", store, measure)


@task(name="load", task_run_name="load {run.plan.cell.id}", cache_policy=NO_CACHE)
def measure_load(served: Served, run: Run, store: str) -> StageEvidence:
    """The log says how long the load will take: before it starts, after the first repeat and at each look."""
    plan, evidence, tell = run.plan, run.evidence, line_teller()

    def told(made: Made) -> None:
        if line := estimate.after(plan, made):
            tell(line)

    def measure() -> StageEvidence:
        tell(estimate.before(plan, evidence))
        following = Following(
            undecided=partial(stopping.load_undecided, plan, evidence), told=told, ended=lambda why: tell(f"load: {why}")
        )
        return stages.load_stage(served, plan, evidence, counter("load", "requests"), following, teller())

    return _once(run, "load", store, measure)


@task(name="speculation", task_run_name="speculation {run.plan.cell.id}", cache_policy=NO_CACHE)
def measure_speculation(served: Served, run: Run, store: str) -> StageEvidence:
    return _once(run, "speculation", store, lambda: stages.speculation_stage(served, run.plan, run.evidence, teller()))


@task(name="sweep", task_run_name="sweep {run.plan.cell.id}", cache_policy=NO_CACHE)
def measure_sweep(served: Served, run: Run, store: str) -> StageEvidence:
    return _once(run, "sweep", store, lambda: stages.sweep_stage(served, run.plan, run.evidence, teller()))


def _once(run: Run, stage: Stage, store: str, measure: Callable[[], StageEvidence]) -> StageEvidence:
    """The run's stage; measured, and kept in the store, where the run does not have it yet."""
    return run.stage(stage) or _keep(run, measure(), store)


def _keep(run: Run, stage: StageEvidence, store: str) -> StageEvidence:
    run.save_stage(stage)
    keep(open_store(store), run.plan, stage, run.evidence)
    get_run_logger().info(f"{stage.stage} done in {stage.duration_s:.0f} s, {len(stage.files)} files of evidence")
    return stage
