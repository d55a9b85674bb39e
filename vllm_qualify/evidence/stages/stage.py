"""What a stage is: when it is part of a run, what determines it, and how its files are read. And how any stage is run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.launch import read_machine
from vllm_qualify.engine.plan import CellPlan
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import writing
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, describe, in_words, invalid
from vllm_qualify.recipe.metrics import METRICS, Stage
from vllm_qualify.secrets import redact_files

Commands = list[list[str]]
MACHINE = "machine.json"
# What of a plan's server does not determine what is measured: where it is, and how long its start may take.
NOT_OF_THE_SERVER = {"engine", "gpus", "startup_timeout_s"}


@dataclass(frozen=True, kw_only=True)
class StageKind:
    """One stage of a qualification. Whoever adds one has to answer all of this, so that nothing has a default."""

    name: Stage
    is_wanted: Callable[[CellPlan], bool]
    """whether it is part of the run of a plan"""
    needs_server: bool
    """whether it is measured while the server runs"""
    is_timed: bool
    """whether all that it measures are times and rates, which depend on the machine"""
    uses_bench: bool
    """whether `vllm bench serve` measures it, so that the client's version and the load must be alike for a comparison"""
    settings: Callable[[CellPlan], dict[str, dict[str, Any]]]
    """what of the plan it follows, for the report: by title, each setting with its value"""
    inputs: Callable[[CellPlan], Any] | None
    """JSON of what determines it beside `common` inputs; None for a stage that no other run takes over"""
    parse: Callable[[CellPlan, Path], list[Measurement]]
    """its measurements, from the files below the evidence folder alone: the same now and at any later judging"""

    @property
    def has_measurements(self) -> bool:
        """Others find or bring something, and measure nothing themselves."""
        return any(metric.stage == self.name for metric in METRICS.values())

    def run(self, plan: CellPlan, evidence: Path, measure: Callable[[Path], Commands], tools: dict[str, str]) -> StageEvidence:
        """What `measure` leaves in the stage's folder, as evidence. Raises HostError on a full disk, and as `measure`."""
        folder = stage_folder(evidence, self.name)
        started_at, started = datetime.now(UTC), time.monotonic()
        with writing(self.name):
            try:
                commands = measure(folder)
            finally:
                redact_files(folder)
        return self.finish(plan, evidence, started_at, time.monotonic() - started, commands, tools)

    def finish(
        self,
        plan: CellPlan,
        evidence: Path,
        started_at: datetime,
        duration_s: float,
        commands: Commands,
        tools: dict[str, str],
    ) -> StageEvidence:
        """The stage with its files and measurements, and the machine on which it was measured. Raises HostError."""
        folder = evidence / self.name
        with writing(self.name):
            machine = read_machine(plan.server.engine, plan.cell.gpu_type)
            (folder / MACHINE).write_text(machine.model_dump_json(indent=2))
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".state")
        return StageEvidence(
            stage=self.name,
            started_at=started_at,
            duration_s=duration_s,
            commands=commands,
            tools=tools,
            files=[describe(path, evidence) for path in files],
            measurements=self.measurements(plan, evidence),
        )

    def measurements(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        """Of a finished stage, by its files alone. They count only if they are of the machine that was planned for."""
        measured_on, problem = _measured_on(evidence / self.name, plan)
        return [_on(measured_on, problem, measurement) for measurement in self.parse(plan, evidence)]


def stage_folder(evidence: Path, stage: Stage) -> Path:
    """The stage's folder, made on first use.

    Raises:
        HostError: it cannot be made.
    """
    folder = evidence / stage
    with writing(stage):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


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
        found = invalid(found.metric, problem, found.source, task=found.task, filter=found.filter)
    return found.model_copy(update={"fingerprint": measured_on})


def dumped(settings: Any) -> Any:
    """A document as JSON; None for none."""
    return settings.model_dump(mode="json") if settings else None


def server_inputs(server: ServerPlan) -> dict[str, Any]:
    """What of a server determines what is measured of it."""
    # A local model is known by its content, and may lie elsewhere on another host.
    without = NOT_OF_THE_SERVER | ({"model"} if server.is_local else set())
    return server.model_dump(mode="json", exclude=without) | {"gpus": len(server.gpus)}


def judging_inputs(plan: CellPlan) -> list[Any]:
    """What decides when enough was measured."""
    gates = [gate.model_dump(mode="json") for gate in plan.judged]
    waived = sorted((waiver.gate, str(waiver.expires)) for waiver in plan.waivers)
    return [gates, waived, plan.baseline.run_id if plan.baseline else None, plan.establishes]
