"""What a stage is: when it is part of a run, what determines it, how its files are read, and how it is run."""

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.provision import read_machine
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES
from vllm_qualify.errors import writing
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, describe, in_words, invalid
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.evidence.watched import WATCHED
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.metrics import CONTRACT_METRICS, METRICS, StageName
from vllm_qualify.recipe.roles import EFFORT, WORK, Settings, part
from vllm_qualify.secrets import redact_files

MACHINE = "machine.json"
# How the names of files end that are no evidence.
UNKEPT = ".state"
Settled = TypeVar("Settled")


class Stage(ABC):
    """One stage of a qualification: all that differs between stages.

    A stage that is measured on the cell's running server has `measure`. The others have methods of their own for it.
    """

    name: ClassVar[StageName]
    is_timed: ClassVar[bool]
    """whether it measures only times and rates, which depend on the machine"""
    uses_bench: ClassVar[bool]
    """whether `vllm bench serve` measures it: a comparison then needs the same version of the client and the same load"""
    is_reusable: ClassVar[bool]
    """whether another run may take it over"""
    grows: ClassVar[bool]
    """whether it is saved part by part, so that a run that was broken off need not measure the finished parts again"""
    counts: ClassVar[str]
    """what its progress counts, in words"""
    on_server: ClassVar[bool]
    """whether it is measured while the cell's server runs"""

    def __init_subclass__(
        cls,
        *,
        name: StageName,
        is_timed: bool,
        uses_bench: bool = False,
        is_reusable: bool = True,
        grows: bool = False,
        counts: str = "requests",
        on_server: bool = True,
    ) -> None:
        cls.name, cls.is_timed, cls.uses_bench, cls.on_server = name, is_timed, uses_bench, on_server
        cls.is_reusable, cls.grows, cls.counts = is_reusable, grows, counts

    def is_wanted(self, plan: CellPlan) -> bool:
        """Whether it is part of the run of a plan. One that a profile may ask for is so if it is asked for."""
        return self.name not in plan.asked_stages or plan.asked_stages[self.name] is not None

    def needs_server(self, plan: CellPlan) -> bool:  # noqa: ARG002  (the stages' signature)
        """As `on_server`, by the plan."""
        return self.on_server

    def settings(self, plan: CellPlan) -> dict[str, dict[str, Any]]:
        """The settings of the plan that it follows, for the report: by title, each setting with its value."""
        asked = plan.asked_stages.get(self.name)
        return {self.name: asked.model_dump()} if asked else {}

    def inputs(self, plan: CellPlan) -> Any:
        """JSON of what determines it besides the `common` inputs of all stages."""
        return inputs_of(plan.asked_stages[self.name])

    def shareable(self, plan: CellPlan) -> Any | None:  # noqa: ARG002  (the stages' signature)
        """What must be alike in another cell of the same server that takes the stage over; None if no cell may."""
        return None

    def is_shared(self, ours: CellPlan, theirs: CellPlan) -> bool:
        """Whether one cell's stage can serve the other: both would measure the same of the same server."""
        shared = self.shareable(ours)
        return shared is not None and ours.server == theirs.server and shared == self.shareable(theirs)

    def tools(self, plan: CellPlan) -> dict[str, str]:
        """The versions of the tools that measure it, by their names; of the load client also what it runs in."""
        if not self.uses_bench:
            return {}
        engine = plan.client or plan.cell.release.engine
        return {
            "vllm bench serve": engine.version,
            "client": engine.launcher if engine.image is None else engine.image.reference,
        }

    def measure(self, world: World, folder: Path) -> Commands:
        """Measure the cell's server into the stage's folder, and leave the tools' files untouched; the commands that were run.

        Raises QualifyError if the server has ended, or a tool did not do its work.
        """
        raise TypeError(f"{self.name} is not measured on the cell's server, for {world.plan.cell.id} into {folder}")

    @abstractmethod
    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        """Its measurements, only from files below the evidence folder, so that they are the same at any later judging."""

    @property
    def has_measurements(self) -> bool:
        """Whether the stage has metrics. Other stages find or bring something, and measure nothing themselves."""
        return any(metric.stage == self.name for metric in METRICS.values())

    def run(self, world: World) -> StageEvidence:
        """Measure the stage on the cell's server. Raises as `measure`, or HostError on a full disk."""
        return self.record(world.plan, world.evidence, partial(self.measure, world))

    def record(self, plan: CellPlan, evidence: Path, measure: Callable[[Path], Commands]) -> StageEvidence:
        """Call `measure`, and return what it left in the stage's folder. Raises HostError on a full disk, and as `measure`."""
        folder = stage_folder(evidence, self.name)
        started_at, started = datetime.now(UTC), time.monotonic()
        with writing(self.name):
            try:
                commands = measure(folder)
            finally:
                redact_files(folder)
        return self.finish(plan, evidence, started_at, time.monotonic() - started, commands, self.tools(plan))

    def finish(
        self, plan: CellPlan, evidence: Path, started_at: datetime, duration_s: float, commands: Commands, tools: dict[str, str]
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
        wanted = plan.fingerprint.id
        try:
            machine = Fingerprint.model_validate_json((evidence / self.name / MACHINE).read_bytes()).id
            problem = "" if machine == wanted else f"measured on {machine}, and planned for {wanted}"
        except UNUSABLE as error:
            machine, problem = "", f"it is not known which machine measured: {in_words(error)}"
        rows = [
            invalid(row.metric, problem, row.source, task=row.task, filter=row.filter)
            if problem and row.invalid_because is None
            else row
            for row in self.parse(plan, evidence)
        ]
        return [row.model_copy(update={"fingerprint": machine}) for row in rows]


def stage_folder(evidence: Path, stage: StageName) -> Path:
    """The stage's folder, made on first use. Raises HostError."""
    folder = evidence / stage
    with writing(stage):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def leave_server_files(stage: StageName, startup_s: float, folder: Path, own: Path) -> None:
    """Complete what a stopped server left in `folder`, for the cell whose folder for it is `own`. Raises HostError."""
    with writing(stage):
        (folder / "startup_s").write_text(f"{startup_s:.3f}\n")
        redact_files(folder)
        if folder != own:
            # A copy replaces the hard links.
            shutil.rmtree(own)
            shutil.copytree(folder, own)


@contextmanager
def keep_watched(plan: CellPlan, evidence: Path, folder: Path) -> Iterator[None]:
    """Copy what is watched during the block into the stage's folder, so that it can be judged without the server's files."""
    if not plan.watched:
        yield
        return
    watched = [evidence / "serve" / name for name in (SCRAPES, HOST_SAMPLES)]
    begins = [path.stat().st_size for path in watched]
    yield
    inside = folder / WATCHED
    inside.mkdir()
    for path, begin in zip(watched, begins, strict=True):
        text = path.read_bytes()[begin:]
        # The last line may still be written.
        (inside / path.name).write_bytes(text[: text.rfind(b"\n") + 1])


def settled(setting: Settled | None, problem: str) -> Settled:
    """A part of the plan. Raises ValueError with the problem if the plan lacks it."""
    if setting is None:
        raise ValueError(problem)
    return setting


def inputs_of(settings: Settings | None) -> dict[str, Any] | None:
    """What of the settings determines the measurements, as JSON; None without settings."""
    return part(settings, WORK, EFFORT) if settings else None


def server_inputs(server: ServerPlan) -> dict[str, Any]:
    """The parts of a server's plan that determine its measurements."""
    # A local model is identified by its content: on another host it may have another path.
    return part(server, WORK) | {"gpus": len(server.gpus)} | ({"model": None} if server.is_local else {})


def load_inputs(plan: CellPlan) -> dict[str, Any]:
    return {"load": inputs_of(plan.load), "speculative": bool(plan.undrafted)}


def search_inputs(plan: CellPlan) -> list[Any]:
    """The inputs of the stages that run loads other than the profile's own."""
    planned = {"sweep": inputs_of(plan.sweep), "fit": inputs_of(plan.fit), "workload": inputs_of(plan.workload)}
    return [load_inputs(plan), planned, *_judging_inputs(plan)]


def comparing_inputs(plan: CellPlan) -> list[Any]:
    """The `_judging_inputs` of a stage that is compared with a baseline, which also decides how often the server is started."""
    return [*_judging_inputs(plan), plan.starts, [known.model_dump(mode="json") for known in plan.between]]


def _judging_inputs(plan: CellPlan) -> list[Any]:
    """The inputs that decide when enough was measured."""
    # What the API's contract asks of a server decides nothing about the other stages.
    gates = [gate.model_dump(mode="json") for gate in plan.judged_gates if METRICS[gate.metric].stage != "contract"]
    waived = sorted((waiver.gate, str(waiver.expires)) for waiver in plan.waivers if waiver.gate not in CONTRACT_METRICS)
    compared = [each.run_id if each else None for each in (plan.baseline, plan.anchor)]
    return [gates, waived, compared, plan.establishes, plan.unpassed]
