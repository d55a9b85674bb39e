"""The starts stage: the server started again, for what is compared with a baseline."""

import shutil
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from vllm_qualify.engine.process import Progress, Tell
from vllm_qualify.errors import writing
from vllm_qualify.evidence import starts
from vllm_qualify.evidence.load.client import UNFOLLOWED, Following
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, in_words, invalid
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages import accuracy, bench, load
from vllm_qualify.evidence.stages.stage import Commands, StageKind, stage_folder
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.secrets import redact_files

ONCE = accuracy.AskingLimits(repetitions=lambda _: 1, is_decided=lambda _: False)
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
    its answers are this cell's too.

    Returns the commands. Raises QualifyError: as `accuracy_stage` and `load_stage`.
    """
    ours, inside = plan_of_start(plan, evidence, number, undecided), starts.root(evidence, number)
    for task in ours.accuracy:
        folder = inside / "accuracy" / task.name
        if alike and (alike / "accuracy" / task.name).is_dir():
            with writing("starts"):
                shutil.copytree(alike / "accuracy" / task.name, folder)
        else:
            accuracy.ask_questions(served, task, folder, progress, ONCE, number)
    commands = [served.lm_eval[task.name].command for task in ours.accuracy]
    following = UNFOLLOWED._replace(undecided=is_noisy, ended=tell)
    is_loaded = any(gate.against == "load" for gate in undecided)
    return [*commands, *(_run_load(served, ours, evidence, number, progress, following) if is_loaded else [])]


def _run_load(
    served: Served, ours: CellPlan, evidence: Path, number: int, progress: Progress, following: Following
) -> Commands:
    inside = starts.root(evidence, number)
    if why_not := starts.too_long(ours.load, evidence, number):
        following.ended(why_not)
        with writing("starts"):
            (inside / NO_TIME).write_text(f"{why_not}\n")
        return []
    folder = inside / "load"
    with writing("starts"):
        folder.mkdir()
    return load.run_load(served, ours, inside, folder, progress, following, following.ended)


def end_start(served: Served, evidence: Path, number: int, folder: Path) -> None:
    """Leave the files of a stopped server in the start's folder. `folder` has them, of this cell or of another one."""
    inside = starts.root(evidence, number)
    with writing("starts"):
        (folder / "startup_s").write_text(f"{served.server.startup_s:.3f}\n")
        redact_files(folder)
        if folder != inside / "serve":
            # A copy replaces the hard links.
            shutil.rmtree(inside / "serve")
            shutil.copytree(folder, inside / "serve")
        redact_files(inside)


def starts_stage(
    plan: CellPlan, evidence: Path, started_at: datetime, duration_s: float, commands: Commands, before: StageEvidence | None
) -> StageEvidence:
    """The stage with all starts so far. `before` is the stage without the last one. Raises HostError."""
    stage_folder(evidence, "starts")
    finished = STARTS.finish(plan, evidence, started_at, duration_s, commands, bench.bench_tools(plan) if commands else {})
    if before is None:
        return finished
    return finished.model_copy(
        update={
            "started_at": before.started_at,
            "duration_s": before.duration_s + duration_s,
            "commands": [*before.commands, *commands],
            "tools": before.tools | finished.tools,
            "taken_from": before.taken_from,
        }
    )


def is_wanted(plan: CellPlan) -> bool:
    return plan.starts > starts.FIRST and bool(plan.over_starts)


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    try:
        numbers = starts.further(evidence)
    except UNUSABLE as error:
        return _invalid(plan, starts.FIRST + 1, in_words(error))
    return [row for number in numbers for row in _of_start(plan, evidence, number)]


def _of_start(plan: CellPlan, evidence: Path, number: int) -> list[Measurement]:
    """What a further start measured: of the tasks that it asked, and of its load if it ran one."""
    try:
        if problem := starts.problem_of(plan, evidence, number):
            return _invalid(plan, number, problem)
        whole, inside = starts.plan_of(plan, evidence, number), starts.root(evidence, number)
        asked = [task for task in whole.accuracy if (inside / "accuracy" / task.name).is_dir()]
        ours = whole.model_copy(update={"accuracy": asked})
        measured = [*accuracy.ACCURACY.parse(ours, inside), *(load.LOAD.parse(ours, inside) if _has_load(inside) else [])]
    except UNUSABLE as error:
        return _invalid(plan, number, in_words(error))
    return list(map(partial(_in_start, number), measured))


def parse_beside_in(plan: CellPlan, evidence: Path, number: int) -> list[Measurement]:
    """The load of the baseline's server in a further start, in turns with the cell's; empty if there was none.

    Raises one of UNUSABLE.
    """
    inside = starts.root(evidence, number)
    rows = load.parse_beside(starts.plan_of(plan, evidence, number), inside) if _has_load(inside) else []
    return list(map(partial(_in_start, number), rows))


def _has_load(inside: Path) -> bool:
    return (inside / "load").is_dir()


def _in_start(number: int, row: Measurement) -> Measurement:
    """A measurement by the files of a start, with their paths in the evidence folder."""
    place = starts.place(number)
    traced_to = [place + path for path in row.traced_to]
    return row.model_copy(update={"start": number, "source": place + row.source, "traced_to": traced_to})


def _invalid(plan: CellPlan, number: int, because: str) -> list[Measurement]:
    """One measurement for each gate against the baseline."""
    source = f"{starts.STARTS}/{number}"
    return [
        invalid(gate.metric, because, source, task=gate.task, filter=gate.filter, start=number) for gate in plan.over_starts
    ]


def _inputs(plan: CellPlan) -> list[Any]:
    return [kind.inputs(plan) for kind in (accuracy.ACCURACY, load.LOAD) if kind.inputs]


def _longest_s(plan: CellPlan) -> float:
    """One further start: each task is asked once, and the load is at most as long as that of the first start."""
    asked = plan.model_copy(update={"accuracy": [starts.once(task) for task in plan.accuracy]})
    return accuracy.ACCURACY.longest_s(asked) + load.LOAD.longest_s(plan)


STARTS = StageKind(
    name="starts",
    is_wanted=is_wanted,
    needs_server=lambda _: False,
    is_timed=True,
    uses_bench=True,
    grows=True,
    settings=lambda plan: {"starts": {"starts": plan.starts}} if is_wanted(plan) else {},
    inputs=_inputs,
    longest_s=_longest_s,
    parse=_parse,
)
