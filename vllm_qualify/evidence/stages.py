"""The stages of a qualification: each measures into its own folder, and is parsed from there, now or again later."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.launch import read_machine
from vllm_qualify.engine.plan import CellPlan
from vllm_qualify.engine.process import Progress
from vllm_qualify.engine.server import Client, Server, client_in
from vllm_qualify.errors import writing
from vllm_qualify.evidence import accuracy, load, network, smoke
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, describe, in_words, invalid, valid
from vllm_qualify.recipe.metrics import NCCL_INFINIBAND, Stage
from vllm_qualify.secrets import redact_files

Commands = list[list[str]]
MACHINE = "machine.json"


def smoke_stage(server: Server, plan: CellPlan, evidence: Path) -> StageEvidence:
    """Ask the fixed prompt. Raises ReleaseError if the server has ended."""

    def measure(folder: Path) -> Commands:
        smoke.measure(server, plan.smoke, folder)
        return []

    return _run("smoke", plan, evidence, measure, {})


def accuracy_stage(server: Server, plan: CellPlan, evidence: Path, progress: Progress) -> StageEvidence:
    """Run lm-eval. Raises HostError or ReleaseError as `accuracy.measure` does."""

    def measure(folder: Path) -> Commands:
        return [accuracy.measure(server, plan.accuracy, plan.questions, folder, progress)]

    return _run("accuracy", plan, evidence, measure, accuracy.tools())


def load_stage(server: Server, plan: CellPlan, evidence: Path, progress: Progress) -> StageEvidence:
    """Run vllm bench serve. Raises HostError or ReleaseError as `load.measure` does."""

    def measure(folder: Path) -> Commands:
        with _client(server, plan, folder) as client:
            return load.measure(server, client, plan.load, folder, progress)

    engine = plan.client or plan.cell.release.engine
    tools = {"vllm bench serve": engine.version, "client": engine.launcher if engine.image is None else engine.image.reference}
    return _run("load", plan, evidence, measure, tools)


@contextmanager
def _client(server: Server, plan: CellPlan, folder: Path) -> Iterator[Client]:
    """Beside the server, or in a container of the client image where one is named."""
    if plan.client_image is None:
        yield server.client
    else:
        with client_in(plan.client_image, plan.server, server, folder, plan.labels) as client:
            yield client


def serve_stage(server: Server, plan: CellPlan, evidence: Path, started_at: datetime) -> StageEvidence:
    """What the server itself left: its config file, its log and its start-up time. For a server that has been stopped."""
    held_s = (datetime.now(UTC) - started_at).total_seconds()
    with writing("serve"):
        (evidence / "serve" / "startup_s").write_text(f"{server.startup_s:.3f}\n")
    return _evidence("serve", plan, evidence, started_at, held_s, [server.command], plan.cell.release.engine.packages)


def stage_folder(evidence: Path, stage: Stage) -> Path:
    """The stage's folder, made on first use.

    Raises:
        HostError: it cannot be made.
    """
    folder = evidence / stage
    with writing(stage):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def parse(stage: Stage, plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The measurements of a stage from its files alone: the same now and at any later judging."""
    measured_on, problem = _measured_on(evidence / stage, plan)
    return [_on(measured_on, problem, measurement) for measurement in _parsed(stage, plan, evidence)]


def _measured_on(folder: Path, plan: CellPlan) -> tuple[str, str | None]:
    """The fingerprint of the machine that measured, and why its measurements do not count."""
    try:
        found = Fingerprint.model_validate_json((folder / MACHINE).read_bytes()).id
    except UNUSABLE as error:
        return "", f"nobody knows which machine measured: {in_words(error)}"
    wanted = plan.fingerprint.id
    return found, None if found == wanted else f"measured on {found}, and planned for {wanted}"


def _on(measured_on: str, problem: str | None, found: Measurement) -> Measurement:
    if problem and found.invalid_because is None:
        found = invalid(found.metric, problem, found.source, filter=found.filter)
    return found.model_copy(update={"fingerprint": measured_on})


def _parsed(stage: Stage, plan: CellPlan, evidence: Path) -> list[Measurement]:
    folder = evidence / stage
    if stage == "smoke":
        return smoke.parse(folder, plan.smoke, plan.server.served_model_name, plan.smoke_golden)
    if stage == "accuracy":
        return accuracy.parse(folder, plan.accuracy)
    if stage == "load":
        return load.parse(folder, plan.load, plan.server.kind, plan.server.arguments)
    return [_startup(folder), *([_network(folder)] if _asks_for_infiniband(plan) else [])]


def _asks_for_infiniband(plan: CellPlan) -> bool:
    return any(gate.metric == NCCL_INFINIBAND for gate in plan.gates)


def _network(folder: Path) -> Measurement:
    source = "serve/server.log"
    try:
        return network.infiniband((folder / "server.log").read_text(errors="replace"), source)
    except UNUSABLE as error:
        return invalid(NCCL_INFINIBAND, f"no usable log: {in_words(error)}", source)


def _startup(folder: Path) -> Measurement:
    source = "serve/startup_s"
    try:
        return valid("startup_s", float((folder / "startup_s").read_text()), source, sample_count=1)
    except UNUSABLE as error:
        return invalid("startup_s", f"no usable start-up time: {in_words(error)}", source)


def _run(
    stage: Stage, plan: CellPlan, evidence: Path, measure: Callable[[Path], Commands], tools: dict[str, str]
) -> StageEvidence:
    folder = stage_folder(evidence, stage)
    started_at, started = datetime.now(UTC), time.monotonic()
    with writing(stage):
        try:
            commands = measure(folder)
        finally:
            redact_files(folder)
    return _evidence(stage, plan, evidence, started_at, time.monotonic() - started, commands, tools)


def _evidence(
    stage: Stage,
    plan: CellPlan,
    evidence: Path,
    started_at: datetime,
    duration_s: float,
    commands: Commands,
    tools: dict[str, str],
) -> StageEvidence:
    with writing(stage):
        machine = read_machine(plan.server.engine, plan.cell.gpu_type)
        (evidence / stage / MACHINE).write_text(machine.model_dump_json(indent=2))
    files = sorted(path for path in (evidence / stage).rglob("*") if path.is_file() and path.suffix != ".state")
    return StageEvidence(
        stage=stage,
        started_at=started_at,
        duration_s=duration_s,
        commands=commands,
        tools=tools,
        files=[describe(path, evidence) for path in files],
        measurements=parse(stage, plan, evidence),
    )
