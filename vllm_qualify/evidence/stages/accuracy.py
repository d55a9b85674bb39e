"""The accuracy stage: lm-eval's tasks."""

import hashlib
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from vllm_qualify.engine.environment import content_digest
from vllm_qualify.engine.process import Progress
from vllm_qualify.evidence import accuracy, answers
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, in_words
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages.stage import Commands, StageKind, comparing_inputs, order_s
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.metrics import METRICS


class AskingLimits(NamedTuple):
    """How long a task's questions are asked: at most `repetitions` times, and until no more answers could change a verdict."""

    repetitions: Callable[[TaskPlan], int]
    is_decided: Callable[[TaskPlan], bool]


def accuracy_stage(served: Served, plan: CellPlan, evidence: Path, progress: Progress, asking: AskingLimits) -> StageEvidence:
    """Ask lm-eval's tasks, one after another.

    Raises:
        QualifyError: as `accuracy.asking` and its `ask` do.
    """

    def measure(folder: Path) -> Commands:
        for task in plan.accuracy:
            ask_questions(served, task, folder / task.name, progress, asking)
        return [served.lm_eval[task.name].command for task in plan.accuracy]

    return ACCURACY.run(plan, evidence, measure, accuracy.lm_eval_tools())


def ask_questions(
    served: Served, task: TaskPlan, folder: Path, progress: Progress, asking: AskingLimits, start: int = 1
) -> None:
    """Ask a task in this start of the server, into the task's folder. Raises as `accuracy_stage`."""
    repetitions = asking.repetitions(task)
    lm_eval = accuracy.prepare_task(served.server, served.lm_eval[task.name], folder, progress, start)
    for step in lm_eval.steps:
        if step.repetition > repetitions:
            break
        lm_eval.ask(step)
        if asking.is_decided(task):
            break
    try:
        answers.write(answers.read_answers(folder, task, start), folder / accuracy.ANSWERS)
    except UNUSABLE as error:
        # The measurements say so too; nothing can be compared with these answers.
        (folder / "unusable.txt").write_text(f"{in_words(error)}\n")


def asks_alike(ours: CellPlan, theirs: CellPlan) -> bool:
    """Whether one cell's answers can serve the other: both ask the same server the same questions, equally often."""
    return (
        (ours.server, ours.accuracy, ours.baseline, ours.anchor, ours.starts)
        == (theirs.server, theirs.accuracy, theirs.baseline, theirs.anchor, theirs.starts)
        and _scores(ours) == _scores(theirs)
        and levels_for(ours) == levels_for(theirs)
    )


def _scores(plan: CellPlan) -> list[tuple[Gate, list[date]]]:
    """The gates on scores, each with the last days of its waivers: until then asking does not wait for that gate."""
    gates = [gate for gate in plan.judged if METRICS[gate.metric].stage == "accuracy"]
    return [(gate, [waiver.expires for waiver in plan.waivers if waiver.gate == gate.label]) for gate in gates]


def _settings(plan: CellPlan) -> dict[str, dict[str, Any]]:
    return {
        f"accuracy: {task.name}": task.settings.model_dump(exclude={"published"}) | _sampling(task) for task in plan.accuracy
    }


def _sampling(task: TaskPlan) -> dict[str, Any]:
    """The numbers, also where the recipe leaves them to the model."""
    return {"sampling": task.sampling.numbers if task.sampling else None}


def _inputs(plan: CellPlan) -> list[Any]:
    return [tasks_as_inputs(plan), metadata.version("lm-eval"), *comparing_inputs(plan)]


def tasks_as_inputs(plan: CellPlan) -> list[Any]:
    """The settings and the content of the plan's tasks, as inputs of a stage."""
    return [_task(task) for task in plan.accuracy]


def _task(task: TaskPlan) -> Any:
    """A task's settings, and its files by their content, wherever they are."""
    folder = sorted(path for path in task.folder.rglob("*") if path.is_file()) if task.folder else []
    files = [_digest(path) for path in (*(task.questions or ()), *folder)]
    settings = task.model_dump(
        mode="json", exclude={"questions": True, "folder": True, "settings": {"questions", "task_folder", "published"}}
    )
    return [settings, files]


def _digest(path: Path) -> str:
    """The hash of a file, or of all files in a folder with their names: a name says which task's the questions are."""
    return content_digest(path) if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()


def _longest_s(plan: CellPlan) -> float:
    """Each task is loaded, and then asked in all its steps. Both have the task's time limit."""
    return sum((1 + _most_steps(task)) * order_s(task.settings.time_limit_s) for task in plan.accuracy)


def _most_steps(task: TaskPlan) -> int:
    settings = task.settings
    return len(answers.steps(settings, settings.num_questions, task.repetitions, sequential=task.sequential))


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    levels = levels_for(plan)
    return [row for task in plan.accuracy for row in accuracy.parse_task(evidence / "accuracy" / task.name, task, levels)]


ACCURACY = StageKind(
    name="accuracy",
    is_wanted=lambda _: True,
    needs_server=lambda _: True,
    is_timed=False,
    uses_bench=False,
    grows=False,
    settings=_settings,
    inputs=_inputs,
    longest_s=_longest_s,
    parse=_parse,
)
