"""The starts stage: the server started again, for what is compared with a baseline."""

import shutil
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from vllm_qualify.engine.process import Progress, Tell
from vllm_qualify.errors import writing
from vllm_qualify.evidence import starts
from vllm_qualify.evidence.load.client import UNFOLLOWED
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, in_words, invalid
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages import accuracy, load
from vllm_qualify.evidence.stages.stage import Stage, leave_server_files, stage_folder
from vllm_qualify.evidence.stages.world import AskingLimits, Commands
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.secrets import redact_files

# Says why the budget left out the load of a start.
NO_TIME = "no-time.txt"


def begin_start(evidence: Path, number: int) -> Path:
    """The folder of a further start's server, made now. Raises HostError."""
    folder = starts.root(stage_folder(evidence, "starts").parent, number) / "serve"
    with writing("starts"):
        folder.mkdir(parents=True)
    return folder


def plan_of_start(plan: CellPlan, evidence: Path, number: int, undecided: Sequence[Gate]) -> CellPlan:
    """What a further start measures for these gates. Raises one of UNUSABLE: see `starts.plan_of`."""
    whole = starts.plan_of(plan, evidence, number)
    return whole.model_copy(update={"accuracy": [task for task in whole.accuracy if starts.is_compared(undecided, task)]})


def measure_start(
    served: Served,
    plan: CellPlan,
    evidence: Path,
    number: int,
    undecided: Sequence[Gate],
    progress: Progress,
    tell: Tell,
    is_noisy: Callable[[], Sequence[str]],
    alike: Path | None = None,
) -> Commands:
    """Ask the tasks and run the load of a further start, as far as the undecided gates are about them.

    `is_noisy` gives the gates for which the load goes on. `alike` is the folder of this start in another cell of the server, if
    its answers are this cell's too. Raises QualifyError: as the stages accuracy and load do.
    """
    ours, inside = plan_of_start(plan, evidence, number, undecided), starts.root(evidence, number)
    of_first_start = {task.name: task for task in plan.accuracy}

    def repetitions_to_ask(task: TaskPlan) -> int:
        return starts.repetitions_of_further_start(of_first_start[task.name], plan, evidence)

    asking = AskingLimits(repetitions_to_ask, is_decided=lambda _: False)
    for task in ours.accuracy:
        folder = inside / "accuracy" / task.name
        if alike and (alike / "accuracy" / task.name).is_dir():
            with writing("starts"):
                shutil.copytree(alike / "accuracy" / task.name, folder)
        else:
            accuracy.ask_questions(served, task, folder, progress, asking, number)
    commands = [served.lm_eval[task.name].command for task in ours.accuracy]
    if not any(gate.against == "load" for gate in undecided):
        return commands
    if why_not := starts.too_long(ours.load, evidence, number):
        tell(why_not)
        with writing("starts"):
            (inside / NO_TIME).write_text(f"{why_not}\n")
        return commands
    with writing("starts"):
        (inside / "load").mkdir()
    following = UNFOLLOWED._replace(undecided=is_noisy, ended=tell)
    return [*commands, *load.run_load(served, ours, inside, inside / "load", progress, following, tell)]


def end_start(served: Served, evidence: Path, number: int, folder: Path) -> None:
    """Leave the files of a stopped server in the start's folder. `folder` has them, of this cell or of another one."""
    inside = starts.root(evidence, number)
    leave_server_files("starts", served.server.startup_s, folder, inside / "serve")
    with writing("starts"):
        redact_files(inside)


class StartsStage(Stage, name="starts", is_timed=True, uses_bench=True, grows=True, on_server=False):
    """All further starts of the server, for what is compared with a baseline."""

    def is_wanted(self, plan: CellPlan) -> bool:
        return plan.starts > starts.FIRST and bool(plan.gates_over_starts)

    def settings(self, plan: CellPlan) -> dict[str, dict[str, Any]]:
        return {"starts": {"starts": plan.starts}} if self.is_wanted(plan) else {}

    def inputs(self, plan: CellPlan) -> Any:
        return [accuracy.ACCURACY.inputs(plan), load.LOAD.inputs(plan)]

    def collect(
        self,
        plan: CellPlan,
        evidence: Path,
        started_at: datetime,
        duration_s: float,
        commands: Commands,
        before: StageEvidence | None,
    ) -> StageEvidence:
        """The stage with all starts so far. `before` is the stage without the last one. Raises HostError."""
        stage_folder(evidence, "starts")
        finished = self.finish(plan, evidence, started_at, duration_s, commands, self.tools(plan) if commands else {})
        if before is None:
            return finished
        whole = {
            "started_at": before.started_at,
            "duration_s": before.duration_s + duration_s,
            "commands": [*before.commands, *commands],
            "tools": before.tools | finished.tools,
            "taken_from": before.taken_from,
        }
        return finished.model_copy(update=whole)

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        try:
            numbers = starts.further(evidence)
        except UNUSABLE as error:
            return _invalid_rows(plan, starts.FIRST + 1, in_words(error))
        return [row for number in numbers for row in _parse_start(plan, evidence, number)]


def _parse_start(plan: CellPlan, evidence: Path, number: int) -> list[Measurement]:
    """What a further start measured: of the tasks that it asked, and of its load if it ran one."""
    try:
        if problem := starts.problem_of(plan, evidence, number):
            return _invalid_rows(plan, number, problem)
        whole, inside = starts.plan_of(plan, evidence, number), starts.root(evidence, number)
        asked = [task for task in whole.accuracy if (inside / "accuracy" / task.name).is_dir()]
        ours = whole.model_copy(update={"accuracy": asked})
        rows = accuracy.ACCURACY.parse(ours, inside)
        rows += load.LOAD.parse(ours, inside) if (inside / "load").is_dir() else []
    except UNUSABLE as error:
        return _invalid_rows(plan, number, in_words(error))
    return _place_in_start(number, rows)


def parse_beside_in(plan: CellPlan, evidence: Path, number: int) -> list[Measurement]:
    """The load of the baseline's server in a further start, in turns with the cell's; empty if there was none.

    Raises one of UNUSABLE.
    """
    inside = starts.root(evidence, number)
    if not (inside / "load").is_dir():
        return []
    return _place_in_start(number, load.parse_beside(starts.plan_of(plan, evidence, number), inside))


def _place_in_start(number: int, rows: Sequence[Measurement]) -> list[Measurement]:
    """Measurements by the files of a start, with their paths in the evidence folder."""
    place = starts.place(number)
    return [
        row.model_copy(
            update={"start": number, "source": place + row.source, "traced_to": [place + path for path in row.traced_to]}
        )
        for row in rows
    ]


def _invalid_rows(plan: CellPlan, number: int, because: str) -> list[Measurement]:
    """One measurement for each gate against the baseline."""
    source = f"{starts.STARTS}/{number}"
    return [
        invalid(gate.metric, because, source, task=gate.task, filter=gate.filter, start=number)
        for gate in plan.gates_over_starts
    ]


STARTS = StartsStage()
