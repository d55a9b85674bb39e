"""What a stage is: when it is part of a run, what determines it, how its files are read, and how it is run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.launch import read_machine
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.errors import writing
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, describe, in_words, invalid
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import CONTRACT_METRICS, METRICS, Stage
from vllm_qualify.secrets import redact_files

Commands = list[list[str]]
MACHINE = "machine.json"
# How the names of files end that are no evidence.
UNKEPT = ".state"
# Fields of a server's plan that do not determine what is measured: where the server is, and how long its start may take.
NOT_OF_THE_SERVER = {"engine", "gpus", "startup_timeout_s"}
# In addition to the recipe's startup_timeout_s: up to ten minutes for the drift check, and the time to stop the server.
OTHER_WAITS_S = 900.0
# Around an order to a tool in a container: five answers of Docker Engine (180 s each) and three of the server (30 s each).
AROUND_ORDER_S = 1000.0


@dataclass(frozen=True, kw_only=True)
class StageKind:
    """One stage of a qualification. No field has a default, so that a new stage must answer each of them."""

    name: Stage
    is_wanted: Callable[[CellPlan], bool]
    """whether it is part of the run of a plan"""
    needs_server: Callable[[CellPlan], bool]
    """whether it is measured while the server runs"""
    is_timed: bool
    """whether it measures only times and rates, which depend on the machine"""
    uses_bench: bool
    """whether `vllm bench serve` measures it: a comparison then needs the same version of the client and the same load"""
    grows: bool
    """whether it is saved part by part, so that a run that was broken off need not measure the finished parts again"""
    settings: Callable[[CellPlan], dict[str, dict[str, Any]]]
    """the settings of the plan that it follows, for the report: by title, each setting with its value"""
    inputs: Callable[[CellPlan], Any] | None
    """JSON of what determines it besides the `common` inputs; None if no other run may take the stage over"""
    longest_s: Callable[[CellPlan], float]
    """the most that all its waits may take together, in s, if each ends by its own limit; see `longest_s` of the table"""
    parse: Callable[[CellPlan, Path], list[Measurement]]
    """its measurements, only from files below the evidence folder, so that they are the same at any later judging"""

    @property
    def has_measurements(self) -> bool:
        """Whether the stage has metrics. Other stages find or bring something, and measure nothing themselves."""
        return any(metric.stage == self.name for metric in METRICS.values())

    def run(self, plan: CellPlan, evidence: Path, measure: Callable[[Path], Commands], tools: dict[str, str]) -> StageEvidence:
        """Run `measure`, and return what it left in the stage's folder. Raises HostError on a full disk, and as `measure`."""
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
        """The stage's evidence: its files, its measurements and the machine that measured. Raises HostError."""
        folder = evidence / self.name
        with writing(self.name):
            machine = read_machine(plan.server.engine, plan.cell.gpu_type)
            (folder / MACHINE).write_text(machine.model_dump_json(indent=2))
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != UNKEPT)
        return StageEvidence(
            stage=self.name,
            started_at=started_at,
            duration_s=duration_s,
            commands=commands,
            tools=tools,
            files=[describe(path, evidence) for path in files],
            measurements=self.measurements(plan, evidence),
            run_id=plan.run_id,
        )

    def measurements(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        """The measurements of a finished stage, from its files alone. They count only if the planned machine measured them."""
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
    """The fingerprint of the machine that measured, and why its measurements do not count, or None."""
    try:
        machine = Fingerprint.model_validate_json((folder / MACHINE).read_bytes()).id
    except UNUSABLE as error:
        return "", f"it is not known which machine measured: {in_words(error)}"
    wanted = plan.fingerprint.id
    return machine, None if machine == wanted else f"measured on {machine}, and planned for {wanted}"


def _on(measured_on: str, problem: str | None, row: Measurement) -> Measurement:
    if problem and row.invalid_because is None:
        row = invalid(row.metric, problem, row.source, task=row.task, filter=row.filter)
    return row.model_copy(update={"fingerprint": measured_on})


def start_s(server: ServerPlan) -> float:
    """The most that a server's start and end may take, in s."""
    return server.startup_timeout_s + OTHER_WAITS_S


def order_s(time_limit_s: float) -> float:
    """The most that an order to a tool with this limit may take, in s, with what is read and copied around it."""
    return time_limit_s + AROUND_ORDER_S


def dumped(settings: Any) -> Any:
    """A document as JSON; None if there is no document."""
    return settings.model_dump(mode="json") if settings else None


def server_inputs(server: ServerPlan) -> dict[str, Any]:
    """The parts of a server's plan that determine its measurements."""
    # A local model is identified by its content: on another host it may have another path.
    without = NOT_OF_THE_SERVER | ({"model"} if server.is_local else set())
    inputs = server.model_dump(mode="json", exclude=without | ({"aliases"} if not server.aliases else set()))
    return inputs | {"gpus": len(server.gpus)}


def comparing_inputs(plan: CellPlan) -> list[Any]:
    """The same for a stage that is compared with a baseline: its looks follow from how often the server may be started, too."""
    return [*judging_inputs(plan), plan.starts, [known.model_dump(mode="json") for known in plan.between]]


def judging_inputs(plan: CellPlan) -> list[Any]:
    """The inputs that decide when enough was measured."""
    # What the API's contract asks of a server decides nothing about the other stages.
    gates = [gate.model_dump(mode="json") for gate in plan.judged if METRICS[gate.metric].stage != "contract"]
    waived = sorted((waiver.gate, str(waiver.expires)) for waiver in plan.waivers if waiver.gate not in CONTRACT_METRICS)
    compared = [each.run_id if each else None for each in (plan.baseline, plan.anchor)]
    return [gates, waived, compared, plan.establishes, plan.unpassed]
