"""Further starts of a server that was stopped: as many as the gates against the baseline need, and the plan allows."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prefect import get_run_logger

from tasks.measure import save
from tasks.progress import counter, line_teller, teller
from tasks.step import beginning, step
from vllm_qualify.evidence import stages, starts
from vllm_qualify.evidence.serving import Served, see_the_same
from vllm_qualify.evidence.serving import serving as serve
from vllm_qualify.evidence.stages.stage import Commands
from vllm_qualify.evidence.stages.starts import is_wanted
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

    Raises:
        QualifyError: the server does not start this time, or ended on its own; or as `check_unchanged` after the last one.
    """
    began_again = False
    while waiting := [stage for run in runs if (stage := _waiting(run))]:
        _start_again(waiting, store)
        began_again = True
    if began_again:
        check_unchanged(runs[0].plan.server, runs[0].plan.cell.release.revision, "starts")
    for run in runs:
        if is_wanted(run.plan) and run.stage("starts") is None:
            save(run, stages.starts_stage(run.plan, run.evidence, datetime.now(UTC), 0.0, [], None), store)


def _waiting(run: Run) -> Waiting | None:
    if not is_wanted(run.plan):
        return None
    measured = [row for stage in run.stages() for row in stage.measurements]
    gates = stopping.another_start(run.plan, run.evidence, measured)
    return Waiting(run, len(starts.further(run.evidence)) + starts.FIRST + 1, gates) if gates else None


def _start_again(waiting: list[Waiting], store: str) -> None:
    """One more start, saved for each cell when the server was stopped."""
    started_at, started = datetime.now(UTC), time.monotonic()
    for each in waiting:
        line_teller()(estimate.line_before_start(each.run.plan, each.number, each.gates))
    folders = [stages.begin_start(each.run.evidence, each.number) for each in waiting]
    with _serving(waiting, folders[0]) as served:
        for folder in folders[1:]:
            see_the_same(folders[0], folder)
        commands = [measure_start(served, each, waiting[0]) for each in waiting]
    for each, of_cell in zip(waiting, commands, strict=True):
        run = each.run
        stages.end_start(served, run.evidence, each.number, folders[0])
        took_s = time.monotonic() - started
        every = [served.server.command, *of_cell]
        save(run, stages.starts_stage(run.plan, run.evidence, started_at, took_s, every, run.stage("starts")), store)


@contextmanager
def _serving(waiting: list[Waiting], folder: Path) -> Iterator[Served]:
    """The server with the tools for all that these cells measure in this start."""
    plans = [stages.plan_of_start(each.run.plan, each.run.evidence, each.number, each.gates) for each in waiting]
    tasks = {task.name: task for plan in reversed(plans) for task in plan.accuracy}
    first = plans[0].model_copy(update={"accuracy": list(tasks.values())})
    loaded = [each for each in zip(plans, waiting, strict=True) if any(gate.against == "load" for gate in each[1].gates)]
    loads = stages.loads_of((plan, each.run.evidence) for plan, each in loaded)

    def start() -> AbstractContextManager[Served]:
        return serve(first, folder, teller(), loads=loads)

    with beginning(f"start server, {waiting[0].number}", start, stages.start_s(first.server), "starts") as served:
        get_run_logger().info(f"serving again at {served.server.url} after {served.server.startup_s:.0f} s")
        yield served


def _limit_s(given: Mapping[str, Any]) -> float:
    return stages.longest_s(given["waiting"].run.plan, "starts")


@step("further start", "start {waiting.number} of {waiting.run.plan.cell.id}", once=True, place="starts", limit_s=_limit_s)
def measure_start(served: Served, waiting: Waiting, first: Waiting) -> Commands:
    """Measure one cell in a further start; answers that it shares with the server's first cell are copied."""
    run, number = waiting.run, waiting.number
    is_alike = run != first.run and stages.asks_alike(run.plan, first.run.plan)
    measured = partial(stages.measure_start, served, run.plan, run.evidence, number, waiting.gates)
    so_far = [row for stage in run.stages() for row in stage.measurements]
    is_noisy = partial(stopping.start_undecided, run.plan, run.evidence, so_far, waiting.gates)
    alike = starts.root(first.run.evidence, first.number) if is_alike else None
    return measured(counter(f"start {number}", "requests"), line_teller(), is_noisy, alike)
