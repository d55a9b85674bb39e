"""The stages that need the server, like serve, smoke and load. A stage that was reused is not measured again.

Further starts of the server, which follow when it was stopped, are in `tasks/starts.py`.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from prefect import get_run_logger

from tasks.progress import counter, line_teller, teller
from tasks.step import FILES_LIMIT_S, Limit, beginning, step
from vllm_qualify.drift.question import Question
from vllm_qualify.errors import StoreError
from vllm_qualify.evidence import stages
from vllm_qualify.evidence.load.client import Following, Made
from vllm_qualify.evidence.measurement import StageEvidence
from vllm_qualify.evidence.serving import Served, see_the_same
from vllm_qualify.evidence.serving import serving as serve
from vllm_qualify.judge import compare, estimate, stopping
from vllm_qualify.plan.cells import fitted
from vllm_qualify.plan.generation import generation_warnings
from vllm_qualify.plan.parts import check_unchanged
from vllm_qualify.publish.kept import Reuse, keep
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.metrics import Stage
from vllm_qualify.runs.baseline import bring
from vllm_qualify.runs.folder import Run, lacking, start_run
from vllm_qualify.runs.stored import reuse_stage, save_finished


def of_plan(stage: Stage) -> Limit:
    """The time limit of a measuring task: by the plan of its parameter `run`."""

    def limit_s(given: Mapping[str, Any]) -> float:
        return stages.longest_s(given["run"].plan, stage)

    return limit_s


def answered(runs: list[Run], question: Question) -> None:
    """Wait until the engine has accepted the recipe. What it could not check is noted in the runs' plans, and warnings.

    Now the model is on this machine, with the file that the warnings are about.

    Raises:
        RecipeError, HostError: as `Question.ask`.
    """
    for run in runs:
        warnings = generation_warnings(run.plan.server, run.plan.cell.release.engine.version)
        for warning in warnings:
            get_run_logger().warning(f"{run.plan.cell.id}: {warning}")
        start_run(run.plan.model_copy(update={"unasked": question.unasked, "warnings": warnings}))


@contextmanager
def serve_cells(runs: list[Run], port: int | None, store: str, question: Question) -> Iterator[Served]:
    """Serve several cells for the length of the block, with the measuring tools; then save each cell's evidence of the server.

    Raises:
        QualifyError: the server does not start, or ended on its own; or as `answered`, or `check_unchanged` when it has ended.
    """
    first, started_at, started = runs[0], datetime.now(UTC), time.monotonic()
    folder = stages.stage_folder(first.evidence, "serve")
    loads = stages.loads_of((run.plan, run.evidence) for run in runs if "load" in lacking(run))

    def start() -> AbstractContextManager[Served]:
        return serve(first.plan, folder, teller(), port, question, loads)

    with beginning("start server", start, stages.start_s(first.plan.server), "serve") as served:
        answered(runs, question)
        get_run_logger().info(f"serving at {served.server.url} after {served.server.startup_s:.0f} s")
        for run in runs[1:]:
            see_the_same(folder, stages.stage_folder(run.evidence, "serve"))
        yield served
    if first.plan.warm_starts:
        measure_warm_starts(first)
    check_unchanged(first.plan.server, first.plan.cell.release.revision, "serve")
    held_s = time.monotonic() - started
    for run in runs:
        save(run, stages.serve_stage(served.server, run.plan, run.evidence, started_at, held_s, folder), store)
    get_run_logger().info("server stopped")


@step("fit", "fit {run.plan.cell.id}", once=True, limit_s=of_plan("fit"))
def fit(run: Run, store: str, reuse: Reuse, question: Question) -> Run:
    """Find the server arguments that the profile's fit asks for, and plan with them. Raises QualifyError."""
    reuse_fit(run, store, reuse)
    _once(run, "fit", store, lambda: stages.fit_stage(run.plan, run.evidence, teller(), question))
    options = stages.fit_result(run.evidence).found
    get_run_logger().info(f"fitted: {options}")
    return start_run(fitted(run.plan, options))


@step("warm starts", "warm starts of {run.plan.cell.id}", once=True, limit_s=of_plan("serve"), place="serve")
def measure_warm_starts(run: Run) -> None:
    """Start the server once for each warm start, and send it no load. Raises QualifyError."""
    stages.warm_starts(run.plan, stages.stage_folder(run.evidence, "serve"), teller())


@step("reuse", "reuse the fit of {run.plan.cell.id}", limit_s=FILES_LIMIT_S)
def reuse_fit(run: Run, store: str, reuse: Reuse) -> None:
    """Take a fit of the same inputs from this machine or the store, if there is one. Raises StoreError."""
    reuse_stage(run, "fit", open_store(store), reuse)


@step("baseline", "baseline {run.plan.cell.id}", limit_s=of_plan("baseline"))
def bring_baseline(run: Run, store: str) -> StageEvidence:
    """Fetch the baseline's evidence. Raises StoreError."""
    brought = partial(bring, run.plan, open_store(store))
    return _once(run, "baseline", store, lambda: stages.baseline_stage(run.plan, run.evidence, brought))


@step("smoke", "smoke {run.plan.cell.id}", once=True, limit_s=of_plan("smoke"))
def smoke_test(served: Served, run: Run, store: str) -> StageEvidence:
    return _once(run, "smoke", store, lambda: stages.smoke_stage(served, run.plan, run.evidence))


@step("contract", "contract {run.plan.cell.id}", once=True, limit_s=of_plan("contract"))
def check_contract(served: Served, run: Run, store: str) -> StageEvidence:
    return _once(run, "contract", store, lambda: stages.contract_stage(served, run.plan, run.evidence))


@step("accuracy", "accuracy {run.plan.cell.id}", once=True, limit_s=of_plan("accuracy"))
def measure_accuracy(served: Served, run: Run, first: Run, store: str) -> StageEvidence:
    """Measure accuracy; or reuse the answers of the server's first cell, if everything that determines them is the same."""
    plan, evidence, tell = run.plan, run.evidence, line_teller()

    def measure() -> StageEvidence:
        if run != first and stages.asks_alike(plan, first.plan):
            return stages.taken_over("accuracy", plan, evidence, first.evidence, first.stages())
        tell(estimate.line_before_accuracy(plan, evidence))
        asking = stages.AskingLimits(
            repetitions=lambda task: compare.repetitions(plan, evidence, task),
            is_decided=lambda task: stopping.accuracy_decided(plan, evidence, task),
        )
        return stages.accuracy_stage(served, plan, evidence, counter("accuracy", "questions"), asking)

    return _once(run, "accuracy", store, measure)


@step("likelihood", "likelihood {run.plan.cell.id}", once=True, limit_s=of_plan("likelihood"))
def measure_likelihood(served: Served, run: Run, first: Run, store: str) -> StageEvidence:
    """Score the answers and texts; or reuse the scores of the server's first cell, if it scored the same ones."""
    plan, evidence = run.plan, run.evidence

    def measure() -> StageEvidence:
        if run != first and first.stage("likelihood") and stages.scores_alike(plan, first.plan):
            return stages.taken_over("likelihood", plan, evidence, first.evidence, first.stages())
        return stages.likelihood_stage(served, plan, evidence, counter("likelihood", "texts"))

    return _once(run, "likelihood", store, measure)


@step("load", "load {run.plan.cell.id}", once=True, limit_s=of_plan("load"))
def measure_load(served: Served, run: Run, store: str) -> StageEvidence:
    """The log says how long the load will take: before it starts, after the first repeat and at each look."""
    plan, evidence, tell = run.plan, run.evidence, line_teller()

    def show_estimate(made: Made) -> None:
        if line := estimate.after(plan, made):
            tell(line)

    def measure() -> StageEvidence:
        tell(estimate.line_before(plan, evidence))
        following = Following(
            undecided=partial(stopping.load_undecided, plan, evidence),
            on_repeat=show_estimate,
            ended=lambda why: tell(f"load: {why}"),
        )
        return stages.load_stage(served, plan, evidence, counter("load", "requests"), following, teller())

    return _once(run, "load", store, measure)


@step("speculation", "speculation {run.plan.cell.id}", once=True, limit_s=of_plan("speculation"))
def measure_speculation(served: Served, run: Run, store: str) -> StageEvidence:
    return _once(run, "speculation", store, lambda: stages.speculation_stage(served, run.plan, run.evidence, teller()))


@step(
    "speculation in turn",
    "speculation in turn of {run.plan.cell.id}",
    once=True,
    limit_s=of_plan("speculation"),
    place="speculation",
)
def measure_speculation_in_turn(run: Run, store: str) -> StageEvidence:
    """Start the server again, and the same server without speculative decoding: the machine has no room for both."""
    return _once(run, "speculation", store, lambda: stages.speculation_in_turn(run.plan, run.evidence, teller()))


@step("sweep", "sweep {run.plan.cell.id}", once=True, limit_s=of_plan("sweep"))
def measure_sweep(served: Served, run: Run, store: str) -> StageEvidence:
    return _once(run, "sweep", store, lambda: stages.sweep_stage(served, run.plan, run.evidence, teller()))


@step("soak", "soak {run.plan.cell.id}", once=True, limit_s=of_plan("soak"))
def measure_soak(served: Served, run: Run, store: str) -> StageEvidence:
    plan, tell = run.plan, line_teller()

    def measure() -> StageEvidence:
        tell(estimate.line_before_soak(plan))
        return stages.soak_stage(served, plan, run.evidence, tell)

    return _once(run, "soak", store, measure)


def _once(run: Run, stage: Stage, store: str, measure: Callable[[], StageEvidence]) -> StageEvidence:
    """The run's stage. If the run does not have it yet, it is measured and kept in the store."""
    return run.stage(stage) or save(run, measure(), store)


def save(run: Run, stage: StageEvidence, store: str) -> StageEvidence:
    """Save a finished stage in its run, and keep it in the store if that answers. Raises HostError."""
    save_finished(run, stage)
    get_run_logger().info(f"{stage.stage} done in {stage.duration_s:.0f} s, {len(stage.files)} files of evidence")
    try:
        keep_stage(run, stage.stage, store)
    except StoreError as error:
        # The run publishes it at its end. Until then another start on this machine finds it.
        get_run_logger().warning(f"{stage.stage} is kept on this machine alone, in {run.folder}: {error.problem}")
    return stage


@step("keep", "keep {stage} of {run.plan.cell.id}", limit_s=FILES_LIMIT_S)
def keep_stage(run: Run, stage: Stage, store: str) -> None:
    """Put a finished stage into the store, so that a later start of this flow run finds it. Raises StoreError."""
    (finished,) = (each for each in run.stages() if each.stage == stage)
    keep(open_store(store), run.plan, finished, run.evidence)
