"""The stages that need the server, like serve, smoke and load. A stage that was reused is not measured again.

Further starts of the server, which follow when it was stopped, are in `tasks/starts.py`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial

from prefect import Task, get_run_logger

from tasks.progress import counter, line_teller, teller
from tasks.step import FILES_LIMIT_S, MEASURING_LIMIT_S, beginning, step
from vllm_qualify.drift.question import Question
from vllm_qualify.engine.process import Tell
from vllm_qualify.errors import StoreError
from vllm_qualify.evidence.load.client import Following, Made
from vllm_qualify.evidence.measurement import StageEvidence
from vllm_qualify.evidence.serving import Served, see_the_same
from vllm_qualify.evidence.serving import serving as serve
from vllm_qualify.evidence.stages.baseline import BASELINE
from vllm_qualify.evidence.stages.fit import FIT, fit_result
from vllm_qualify.evidence.stages.load import loads_of
from vllm_qualify.evidence.stages.serve import SERVE, warm_starts
from vllm_qualify.evidence.stages.speculation import SPECULATION
from vllm_qualify.evidence.stages.stage import Stage, stage_folder
from vllm_qualify.evidence.stages.table import TABLE, taken_over
from vllm_qualify.evidence.stages.world import AskingLimits, World
from vllm_qualify.judge import estimate, stopping
from vllm_qualify.judge.compare.enough import repetitions
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.plan.cells import plan_fitted
from vllm_qualify.plan.kv_scales import model_warnings
from vllm_qualify.plan.parts import check_unchanged
from vllm_qualify.plan.request import Reuse
from vllm_qualify.publish.kept import keep
from vllm_qualify.publish.stores import open_store
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.runs.baseline import copy_baseline
from vllm_qualify.runs.folder import Run, lacking_stages, start_run
from vllm_qualify.runs.stored import reuse_stage, save_finished


def await_answer(runs: list[Run], question: Question) -> None:
    """Wait until the engine has accepted the recipe. What it could not check is noted in the runs' plans, and warnings.

    Now the model is on this machine, with the file that the warnings are about. Raises RecipeError, HostError.
    """
    for run in runs:
        warnings = model_warnings(run.plan.server, run.plan.cell.release.engine.version)
        for warning in warnings:
            get_run_logger().warning(f"{run.plan.cell.id}: {warning}")
        unasked = list(dict.fromkeys([*run.plan.unasked, *question.unasked]))
        start_run(run.plan.model_copy(update={"unasked": unasked, "warnings": warnings}))


@contextmanager
def serve_cells(runs: list[Run], port: int | None, store: str, question: Question) -> Iterator[Served]:
    """Serve several cells for the length of the block, with the measuring tools; then save each cell's evidence of the server.

    Raises QualifyError if the server does not start or ended on its own; or as `await_answer`, or `check_unchanged` at its end.
    """
    first, started_at, started = runs[0], datetime.now(UTC), time.monotonic()
    folder = stage_folder(first.evidence, "serve")
    lacking = {stage for run in runs for stage in lacking_stages(run)}
    loads = loads_of((run.plan, run.evidence) for run in runs if "load" in lacking_stages(run))

    is_loaded = any(TABLE[stage].uses_bench for stage in lacking)
    start = partial(serve, first.plan, folder, teller(), port, question, loads, is_loaded=is_loaded)
    with beginning("start server", start, MEASURING_LIMIT_S, "serve") as served:
        await_answer(runs, question)
        get_run_logger().info(f"serving at {served.server.url} after {served.server.startup_s:.0f} s")
        for run in runs[1:]:
            see_the_same(folder, stage_folder(run.evidence, "serve"))
        yield served
    if first.plan.warm_starts:
        measure_warm_starts(first, [run.plan for run in runs])
    check_unchanged(first.plan.server, first.plan.cell.release.revision, "serve")
    held_s = time.monotonic() - started
    for run in runs:
        save_stage(run, SERVE.collect(served.server, run.plan, run.evidence, started_at, held_s, folder), store)
    get_run_logger().info("server stopped")


@step("fit", "fit {run.plan.cell.id}", once=True, limit_s=MEASURING_LIMIT_S)
def fit(run: Run, store: str, reuse: Reuse, question: Question) -> Run:
    """Find the server arguments that the profile's fit asks for, and plan with them. Raises QualifyError."""
    reuse_fit(run, store, reuse)
    _measure_once(run, "fit", store, lambda: FIT.find(run.plan, run.evidence, teller(), question))
    options = fit_result(run.evidence).found
    get_run_logger().info(f"fitted: {options}")
    return start_run(plan_fitted(run.plan, options))


@step("warm starts", "warm starts of {run.plan.cell.id}", once=True, limit_s=MEASURING_LIMIT_S, place="serve")
def measure_warm_starts(run: Run, plans: list[CellPlan]) -> None:
    """Start the server of these cells once for each warm start, and send it no load. Raises QualifyError."""
    warm_starts(plans, stage_folder(run.evidence, "serve"), teller())


@step("reuse", "reuse the fit of {run.plan.cell.id}", limit_s=FILES_LIMIT_S)
def reuse_fit(run: Run, store: str, reuse: Reuse) -> None:
    """Take a fit of the same inputs from this machine or the store, if there is one. Raises StoreError."""
    reuse_stage(run, "fit", open_store(store), reuse)


@step("baseline", "baseline {run.plan.cell.id}", limit_s=FILES_LIMIT_S)
def bring_baseline(run: Run, store: str) -> StageEvidence:
    """Fetch the baseline's evidence. Raises StoreError."""
    brought = partial(copy_baseline, run.plan, open_store(store))
    return _measure_once(run, "baseline", store, lambda: BASELINE.bring(run.plan, run.evidence, brought))


def measure_stage(stage: StageName, served: Served, run: Run, first: Run, store: str) -> StageEvidence:
    """Measure a stage on the cell's running server; or take it over from the server's first cell, if that measured the same."""
    return task_of(stage)(served, run, first, store)


@cache
def task_of(stage: StageName) -> Task[[Served, Run, Run, str], StageEvidence]:
    """The task that measures the stage, with the stage's name."""

    @step(stage, f"{stage} {{run.plan.cell.id}}", once=True, limit_s=MEASURING_LIMIT_S)
    def measure(served: Served, run: Run, first: Run, store: str) -> StageEvidence:
        return _measure_once(run, stage, store, lambda: _measure_or_take_over(TABLE[stage], served, run, first))

    return measure


def _measure_or_take_over(stage: Stage, served: Served, run: Run, first: Run) -> StageEvidence:
    if run != first and first.stage(stage.name) and stage.is_shared(run.plan, first.plan):
        return taken_over(stage.name, run.plan, run.evidence, first.evidence, first.stages())
    tell = line_teller()
    if line := estimate.line_before_stage(stage.name, run.plan, run.evidence):
        tell(line)
    return stage.run(_make_world(stage, served, run, tell))


def _make_world(stage: Stage, served: Served, run: Run, tell: Tell) -> World:
    """What the stage is measured with. The log says how much longer a load will take after each of its repeats."""
    plan, evidence = run.plan, run.evidence

    def tell_estimate(made: Made) -> None:
        if line := estimate.line_after_repeat(plan, made):
            tell(line)

    return World(
        served=served,
        plan=plan,
        evidence=evidence,
        tell=tell,
        tell_often=teller(),
        progress=counter(stage.name, stage.counts),
        asking=AskingLimits(
            repetitions=lambda task: repetitions(plan, evidence, task),
            is_decided=lambda task: stopping.accuracy_decided(plan, evidence, task),
        ),
        following=Following(
            undecided=partial(stopping.load_undecided, plan, evidence),
            on_repeat=tell_estimate,
            ended=lambda why: tell(f"{stage.name}: {why}"),
        ),
    )


_IN_TURN = "speculation in turn"


@step(_IN_TURN, f"{_IN_TURN} of {{run.plan.cell.id}}", once=True, limit_s=MEASURING_LIMIT_S, place="speculation")
def measure_speculation_in_turn(run: Run, store: str) -> StageEvidence:
    """Start the server again, and the same server without speculative decoding: the machine has no room for both."""
    return _measure_once(run, "speculation", store, lambda: SPECULATION.run_in_turn(run.plan, run.evidence, teller()))


def _measure_once(run: Run, stage: StageName, store: str, measure: Callable[[], StageEvidence]) -> StageEvidence:
    """The run's stage. If the run does not have it yet, it is measured and kept in the store."""
    return run.stage(stage) or save_stage(run, measure(), store)


def save_stage(run: Run, stage: StageEvidence, store: str) -> StageEvidence:
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
def keep_stage(run: Run, stage: StageName, store: str) -> None:
    """Put a finished stage into the store, so that a later start of this flow run finds it. Raises StoreError."""
    (finished,) = (each for each in run.stages() if each.stage == stage)
    keep(open_store(store), run.plan, finished, run.evidence)
