"""The accuracy stage: lm-eval's tasks."""

import hashlib
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_qualify.engine.environment import content_digest
from vllm_qualify.engine.process import Progress
from vllm_qualify.evidence.accuracy import answers, lm_eval_process, measurements, samples
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages.stage import Stage, comparing_inputs
from vllm_qualify.evidence.stages.world import AskingLimits, Commands, World
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.roles import EFFORT, PLACE, WORK, part


class AccuracyStage(Stage, name="accuracy", is_timed=False, counts="questions"):
    """lm-eval's tasks, one after another. Cells of a server that ask the same questions share the answers."""

    def settings(self, plan: CellPlan) -> dict[str, dict[str, Any]]:
        return {
            f"accuracy: {task.name}": part(task.settings, WORK, EFFORT, PLACE)
            # The numbers also where the recipe leaves them to the model.
            | {"sampling": task.sampling.numbers if task.sampling else None}
            for task in plan.accuracy
        }

    def inputs(self, plan: CellPlan) -> Any:
        return [tasks_as_inputs(plan), metadata.version("lm-eval"), *comparing_inputs(plan)]

    def shareable(self, plan: CellPlan) -> Any:
        # The answers have the order in which they were asked.
        tasks = [task.model_copy(update={"order": ""}) for task in plan.accuracy]
        return tasks, plan.baseline, plan.anchor, plan.starts, _score_gates(plan), levels_for(plan)

    def tools(self, _plan: CellPlan) -> dict[str, str]:
        return lm_eval_process.lm_eval_tools()

    def measure(self, world: World, folder: Path) -> Commands:
        for task in world.plan.accuracy:
            ask_questions(world.served, task, folder / task.name, world.progress, world.asking)
        return [world.served.lm_eval[task.name].command for task in world.plan.accuracy]

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        levels, folder = levels_for(plan), evidence / "accuracy"
        return [row for task in plan.accuracy for row in measurements.parse_task(folder / task.name, task, levels)]


def ask_questions(
    served: Served, task: TaskPlan, folder: Path, progress: Progress, asking: AskingLimits, start: int = 1
) -> None:
    """Ask a task in this start of the server, into the task's folder. Raises QualifyError."""
    repetitions = asking.repetitions(task)
    lm_eval = lm_eval_process.prepare_task(served.server, served.lm_eval[task.name], folder, progress, start)
    for step in lm_eval.steps:
        if step.repetition > repetitions:
            break
        lm_eval.ask(step)
        if asking.is_decided(task):
            break
    try:
        answers.write(samples.read_answers(folder, task, start), folder / lm_eval_process.ANSWERS)
    except UNUSABLE as error:
        # The measurements say so too; nothing can be compared with these answers.
        (folder / "unusable.txt").write_text(f"{in_words(error)}\n")


def _score_gates(plan: CellPlan) -> list[tuple[Gate, list[date]]]:
    """The gates on scores, each with the last days of its waivers: until then asking does not wait for that gate."""
    gates = [gate for gate in plan.judged_gates if METRICS[gate.metric].stage == "accuracy"]
    return [(gate, [waiver.expires for waiver in plan.waivers if waiver.gate == gate.label]) for gate in gates]


def tasks_as_inputs(plan: CellPlan) -> list[Any]:
    """The settings and the content of the plan's tasks, as inputs of a stage: files by their content, wherever they are."""
    return [
        [
            part(task, WORK, EFFORT) | {"settings": part(task.settings, WORK, EFFORT)},
            [_content_hash(path) for path in (*(task.questions or ()), *_own_files(task))],
        ]
        for task in plan.accuracy
    ]


def _own_files(task: TaskPlan) -> list[Path]:
    return sorted(path for path in task.folder.rglob("*") if path.is_file()) if task.folder else []


def _content_hash(path: Path) -> str:
    """The hash of a file, or of all files in a folder with their names: a name says which task's the questions are."""
    return content_digest(path) if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()


ACCURACY = AccuracyStage()
