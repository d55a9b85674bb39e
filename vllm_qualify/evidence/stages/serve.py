"""The serve stage: what the server itself left after it was stopped."""

import math
import shutil
import statistics
from datetime import datetime
from pathlib import Path

from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import Server
from vllm_qualify.engine.watch import HOST_SAMPLES
from vllm_qualify.errors import writing
from vllm_qualify.evidence import idle, network, startup
from vllm_qualify.evidence.idle import Idle
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, in_words, invalid, valid
from vllm_qualify.evidence.serving import ENDED, LAUNCHED, launched_by_clock, started
from vllm_qualify.evidence.stages.stage import StageKind, start_s
from vllm_qualify.evidence.watched import read_host
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import GPU_IDLE, NCCL_INFINIBAND
from vllm_qualify.secrets import redact_files

WARM, WARM_START = "warm", "startup_warm_s"


def serve_stage(
    server: Server, plan: CellPlan, evidence: Path, started_at: datetime, held_s: float, folder: Path
) -> StageEvidence:
    """What a stopped server left: its config file, its log, its start-up time and what was watched.

    It began at `started_at`, and took `held_s` with its warm starts.

    These files are in `folder`, which belongs to this cell or to another one that the same server served.
    """
    with writing("serve"):
        (folder / "startup_s").write_text(f"{server.startup_s:.3f}\n")
        redact_files(folder)
        if folder != evidence / "serve":
            # A copy replaces the hard links.
            shutil.rmtree(evidence / "serve")
            shutil.copytree(folder, evidence / "serve")
    return SERVE.finish(plan, evidence, started_at, held_s, [server.command], plan.cell.release.engine.packages)


def warm_starts(plan: CellPlan, folder: Path, tell: Tell) -> None:
    """Start the server again for each warm start of the plan, each in a folder `warm-N` of the stage. Raises QualifyError."""
    for number in range(1, plan.warm_starts + 1):
        inside = folder / f"{WARM}-{number}"
        with writing("serve"):
            inside.mkdir()
        with started(plan.server, inside, plan.labels, tell) as server, writing("serve"):
            (inside / "startup_s").write_text(f"{server.startup_s:.3f}\n")
        tell(f"warm start {number}: {server.startup_s:.1f} s")


def _asks_for_infiniband(plan: CellPlan) -> bool:
    return any(gate.metric == NCCL_INFINIBAND for gate in plan.gates)


def _network(folder: Path) -> Measurement:
    source = "serve/server.log"
    try:
        return network.infiniband((folder / "server.log").read_text(errors="replace"), source)
    except UNUSABLE as error:
        return invalid(NCCL_INFINIBAND, f"no usable log: {in_words(error)}", source)


def _startups(folder: Path, plan: CellPlan) -> list[Measurement]:
    """The whole start, its parts as far as the log reports them, and the warm starts."""
    source = "serve/startup_s"
    try:
        whole_s = float((folder / "startup_s").read_text())
        rows = [valid("startup_s", whole_s, source, sample_count=1), *_parts(folder, plan, whole_s)]
    except UNUSABLE as error:
        rows = [invalid("startup_s", f"no usable start-up time: {in_words(error)}", source)]
    return [*rows, *([_warm(folder, plan)] if plan.warm_starts else [])]


def _parts(folder: Path, plan: CellPlan, whole_s: float) -> list[Measurement]:
    wording = plan.server.engine_kind.start_log
    if wording is None or not (folder / LAUNCHED).exists():
        return []
    launched = launched_by_clock(folder)
    log = (folder / "server.log").read_text(errors="replace")
    parts = startup.startup(log, whole_s, launched, plan.pulled_s, wording=wording)
    return [row for row in startup.startup_measurements(parts, "serve/server.log") if row.metric != WARM_START]


def _idle_share(folder: Path, plan: CellPlan) -> list[Measurement]:
    source = f"serve/{HOST_SAMPLES}"
    try:
        idleness = idle_gpus(folder, plan)
    except UNUSABLE as error:
        return [invalid(GPU_IDLE, f"it is not known how long GPUs idled: {in_words(error)}", source)]
    return [] if idleness is None else [idle.measurement(idleness, source)]


def idle_gpus(folder: Path, plan: CellPlan) -> Idle | None:
    """How long the server's GPUs were idle, by the files of its stage. Raises one of UNUSABLE.

    None if the server has no GPUs, or if an older version made the run and did not record when the server ended.
    """
    if not plan.server.gpus or not (folder / ENDED).exists():
        return None
    launched, startup_s, ended = (_seconds_in(folder / name) for name in (LAUNCHED, "startup_s", ENDED))
    return idle.idle(read_host(folder), plan.server.gpus, launched, launched + startup_s, ended)


def _seconds_in(path: Path) -> float:
    """The number in a file. Raises one of UNUSABLE."""
    if not math.isfinite(seconds := float(path.read_text())):
        raise ValueError(f"{path.name}: {seconds} is not a time")
    return seconds


def _warm(folder: Path, plan: CellPlan) -> Measurement:
    source = f"serve/{WARM}-*/startup_s"
    try:
        each_s = [float((folder / f"{WARM}-{number}" / "startup_s").read_text()) for number in range(1, plan.warm_starts + 1)]
        value = statistics.fmean(each_s)
        return valid(WARM_START, value, source, sample_count=len(each_s), repeats=each_s)
    except UNUSABLE as error:
        return invalid(WARM_START, f"no usable start-up time: {in_words(error)}", source)


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    folder = evidence / "serve"
    asked = [_network(folder)] if _asks_for_infiniband(plan) else []
    return [*_startups(folder, plan), *_idle_share(folder, plan), *asked]


SERVE = StageKind(
    name="serve",
    is_wanted=lambda _: True,
    needs_server=lambda _: False,
    is_timed=True,
    uses_bench=False,
    grows=False,
    settings=lambda _: {},
    inputs=lambda plan: plan.warm_starts,
    # The first start has a task of its own, and the server then serves the other stages.
    longest_s=lambda plan: plan.warm_starts * start_s(plan.server),
    parse=_parse,
)
