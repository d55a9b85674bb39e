"""Further starts of a server that was stopped: as many as the gates against the baseline need, and the plan allows."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from prefect import get_run_logger

from tasks.measure import save_stage
from tasks.progress import counter, line_teller, teller
from tasks.step import MEASURING_LIMIT_S, beginning, step
from vllm_qualify.evidence import starts
from vllm_qualify.evidence.serving import Served, see_the_same
from vllm_qualify.evidence.serving import serving as serve
from vllm_qualify.evidence.stages import starts as stage
from vllm_qualify.evidence.stages.accuracy import ACCURACY
from vllm_qualify.evidence.stages.load import loads_of
from vllm_qualify.evidence.stages.starts import STARTS
from vllm_qualify.evidence.stages.world import Commands
from vllm_qualify.judge import estimate, stopping
from vllm_qualify.plan.parts import check_unchanged
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.runs.folder import Run


class Waiting(NamedTuple):
    """A cell that needs another start of its server, for these gates. `number` is that of the start."""

    run: Run
    number: int
    gates: list[Gate]


def measure_starts(runs: list[Run], store: str) -> None:
    """Start the server of these cells again and again, until no cell needs another start. Cells share each start.

    Raises QualifyError if the server does not start this time or ended on its own; or as `check_unchanged` after the last one.
    """
    began_again = False
    while waiting := [each for run in runs if (each := _find_waiting(run))]:
        _start_again(waiting, store)
        began_again = True
    if began_again:
        check_unchanged(runs[0].plan.server, runs[0].plan.cell.release.revision, "starts")
    for run in runs:
        if STARTS.is_wanted(run.plan) and run.stage("starts") is None:
            save_stage(run, STARTS.collect(run.plan, run.evidence, datetime.now(UTC), 0.0, [], None), store)


def _find_waiting(run: Run) -> Waiting | None:
    if not STARTS.is_wanted(run.plan):
        return None
    measured = [row for finished in run.stages() for row in finished.measurements]
    gates = stopping.another_start(run.plan, run.evidence, measured)
    return Waiting(run, len(starts.further(run.evidence)) + starts.FIRST + 1, gates) if gates else None


def _start_again(waiting: list[Waiting], store: str) -> None:
    """One more start, saved for each cell when the server was stopped."""
    started_at, started = datetime.now(UTC), time.monotonic()
    for each in waiting:
        line_teller()(estimate.line_before_start(each.run.plan, each.number, each.gates))
    folders = [stage.begin_start(each.run.evidence, each.number) for each in waiting]
    with _serve_again(waiting, folders[0]) as served:
        for folder in folders[1:]:
            see_the_same(folders[0], folder)
        commands = [measure_start(served, each, waiting[0]) for each in waiting]
    for each, of_cell in zip(waiting, commands, strict=True):
        run = each.run
        stage.end_start(served, run.evidence, each.number, folders[0])
        took_s = time.monotonic() - started
        every = [served.server.command, *of_cell]
        save_stage(run, STARTS.collect(run.plan, run.evidence, started_at, took_s, every, run.stage("starts")), store)


@contextmanager
def _serve_again(waiting: list[Waiting], folder: Path) -> Iterator[Served]:
    """The server with the tools for all that these cells measure in this start."""
    plans = [stage.plan_of_start(each.run.plan, each.run.evidence, each.number, each.gates) for each in waiting]
    tasks = {task.name: task for plan in reversed(plans) for task in plan.accuracy}
    first = plans[0].model_copy(update={"accuracy": list(tasks.values())})
    loaded = [each for each in zip(plans, waiting, strict=True) if any(gate.against == "load" for gate in each[1].gates)]
    loads = loads_of((plan, each.run.evidence) for plan, each in loaded)

    start = partial(serve, first, folder, teller(), loads=loads, is_loaded=bool(loaded))
    with beginning(f"start server, {waiting[0].number}", start, MEASURING_LIMIT_S, "starts") as served:
        get_run_logger().info(f"serving again at {served.server.url} after {served.server.startup_s:.0f} s")
        yield served


@step(
    "further start",
    "start {waiting.number} of {waiting.run.plan.cell.id}",
    once=True,
    limit_s=MEASURING_LIMIT_S,
    place="starts",
)
def measure_start(served: Served, waiting: Waiting, first: Waiting) -> Commands:
    """Measure one cell in a further start; answers that it shares with the server's first cell are copied."""
    run, number = waiting.run, waiting.number
    is_alike = run != first.run and ACCURACY.is_shared(run.plan, first.run.plan)
    measured = partial(stage.measure_start, served, run.plan, run.evidence, number, waiting.gates)
    so_far = [row for finished in run.stages() for row in finished.measurements]
    is_noisy = partial(stopping.start_undecided, run.plan, run.evidence, so_far, waiting.gates)
    alike = starts.root(first.run.evidence, first.number) if is_alike else None
    return measured(counter(f"start {number}", "requests"), line_teller(), is_noisy, alike)
