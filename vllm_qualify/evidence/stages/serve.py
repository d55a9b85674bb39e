"""The serve stage: what the server itself left after it was stopped."""

import math
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import LOG, Server
from vllm_qualify.engine.watch import HOST_SAMPLES
from vllm_qualify.errors import writing
from vllm_qualify.evidence import idle, startup
from vllm_qualify.evidence.idle import Idle
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, in_words, invalid, valid
from vllm_qualify.evidence.network import infiniband
from vllm_qualify.evidence.paths.reordered import measure_reordered, parse_reordered
from vllm_qualify.evidence.serving import ENDED, LAUNCHED, LAUNCHED_BY_CLOCK, launched_by_clock, serving_alone
from vllm_qualify.evidence.stages.stage import Stage, leave_server_files
from vllm_qualify.evidence.watched import read_host
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import GPU_IDLE, NCCL_INFINIBAND, REORDERED, path_metric

WARM, WARM_START = "warm", "startup_warm_s"


class ServeStage(Stage, name="serve", is_timed=True, on_server=False):
    """How the server started and used its GPUs, by the files that it left when it was stopped."""

    def inputs(self, plan: CellPlan) -> Any:
        return [plan.warm_starts, asks_reordered(plan)]

    def collect(
        self, server: Server, plan: CellPlan, evidence: Path, started_at: datetime, held_s: float, folder: Path
    ) -> StageEvidence:
        """What a stopped server left: its config file, its log, its start-up time and what was watched.

        It began at `started_at`, and took `held_s` with its warm starts. The files are in `folder`, which belongs to this cell
        or to another one that the same server served.
        """
        leave_server_files("serve", server.startup_s, folder, evidence / "serve")
        return self.finish(plan, evidence, started_at, held_s, [server.command], plan.cell.release.engine.packages)

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        folder, no_time = evidence / "serve", "no usable start-up time"
        rows = _try_to("startup_s", no_time, "startup_s", partial(_measure_startup, folder, plan))
        if plan.warm_starts:
            rows += _try_to(WARM_START, no_time, f"{WARM}-*/startup_s", partial(_measure_warm_starts, folder, plan))
        rows += _try_to(GPU_IDLE, "it is not known how long GPUs idled", HOST_SAMPLES, partial(_measure_idle, folder, plan))
        if asks_reordered(plan):
            rows.append(_parse_reordered(plan, evidence))
        if any(gate.metric == NCCL_INFINIBAND for gate in plan.gates):
            rows += _try_to(NCCL_INFINIBAND, "no usable log", LOG, lambda source: [infiniband(_read_log(folder), source)])
        return rows


def asks_reordered(plan: CellPlan) -> bool:
    """Whether the first warm start of the plan's server is asked for replies with a form."""
    return any(gate.metric == path_metric(REORDERED) for gate in plan.gates)


def _parse_reordered(plan: CellPlan, evidence: Path) -> Measurement:
    place = f"serve/{WARM}-1/{REORDERED}"
    server = plan.server
    return parse_reordered(evidence / place, server.served_model_name, plan.promised, server.engine_kind, place)


def warm_starts(plans: Sequence[CellPlan], folder: Path, tell: Tell) -> None:
    """Start the server of these cells again for each warm start, each in a folder `warm-N` of the stage. Raises QualifyError.

    The first one is asked for replies with a form, if a plan says so.
    """
    plan = plans[0]
    asking = next((each for each in plans if each.paths and asks_reordered(each)), None)
    for number in range(1, plan.warm_starts + 1):
        inside = folder / f"{WARM}-{number}"
        with writing("serve"):
            inside.mkdir()
        with serving_alone(plan.server, inside, plan.labels, tell) as server, writing("serve"):
            (inside / "startup_s").write_text(f"{server.startup_s:.3f}\n")
            if number == 1 and asking and asking.paths:
                tell("warm start 1: replies with a form, after another form")
                measure_reordered(server, asking.paths, asking.promised, inside / REORDERED)
        tell(f"warm start {number}: {server.startup_s:.1f} s")


def _try_to(metric: str, problem: str, file: str, measure: Callable[[str], list[Measurement]]) -> list[Measurement]:
    """What `measure` reads from a file of the stage; if that is unusable, the metric alone, with the problem."""
    source = f"serve/{file}"
    try:
        return measure(source)
    except UNUSABLE as error:
        return [invalid(metric, f"{problem}: {in_words(error)}", source)]


def _read_log(folder: Path) -> str:
    return (folder / LOG).read_text(errors="replace")


def _measure_startup(folder: Path, plan: CellPlan, source: str) -> list[Measurement]:
    """The whole start, and its parts as far as the log reports them."""
    whole_s, wording = float((folder / "startup_s").read_text()), plan.server.engine_kind.start_log
    whole = valid("startup_s", whole_s, source, sample_count=1)
    if wording is None or not (folder / LAUNCHED_BY_CLOCK).exists():
        return [whole]
    parts = startup.startup(_read_log(folder), whole_s, launched_by_clock(folder), plan.pulled_s, wording=wording)
    return [whole, *(row for row in startup.startup_measurements(parts, f"serve/{LOG}") if row.metric != WARM_START)]


def _measure_warm_starts(folder: Path, plan: CellPlan, source: str) -> list[Measurement]:
    each_s = [float((folder / f"{WARM}-{number}" / "startup_s").read_text()) for number in range(1, plan.warm_starts + 1)]
    return [valid(WARM_START, statistics.fmean(each_s), source, sample_count=len(each_s), repeats=each_s)]


def _measure_idle(folder: Path, plan: CellPlan, source: str) -> list[Measurement]:
    idleness = idle_gpus(folder, plan)
    return [] if idleness is None else [idle.measurement(idleness, source)]


def idle_gpus(folder: Path, plan: CellPlan) -> Idle | None:
    """How long the server's GPUs were idle, by the files of its stage; None without GPUs. Raises one of UNUSABLE."""
    if not plan.server.gpus:
        return None
    launched, startup_s, ended = (_seconds_in(folder / name) for name in (LAUNCHED, "startup_s", ENDED))
    return idle.idle(read_host(folder), plan.server.gpus, launched, launched + startup_s, ended)


def _seconds_in(path: Path) -> float:
    """The number in a file. Raises one of UNUSABLE."""
    if not math.isfinite(seconds := float(path.read_text())):
        raise ValueError(f"{path.name}: {seconds} is not a time")
    return seconds


SERVE = ServeStage()
