"""Whether the settings of the cell and of the run that it is compared with are alike, and what differs."""

from typing import Any

from vllm_qualify.judge.compare.places import OtherRun, find_other_run
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.accuracy import USUAL_TOKENS, Accuracy
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import GOODPUT
from vllm_qualify.recipe.roles import WORK, part
from vllm_qualify.recipe.sampling import Sampling


def gates_on_answers(plan: CellPlan, task: TaskPlan) -> list[Gate]:
    """The judged gates that compare the answers to a task with another run's, by their scores or by their tokens."""
    return [gate for gate in plan.judged_gates if gate.task == task.name and gate.against in ("answers", "anchor", "tokens")]


def task_differs(plan: CellPlan, task: TaskPlan) -> str | None:
    """Why the baseline's or the anchor's answers to a task cannot be compared with the cell's, by their settings; else None."""
    problems = (find_task_difference(find_other_run(gate, plan), task) for gate in gates_on_answers(plan, task))
    return next((problem for problem in problems if problem), None)


def find_task_difference(other: OtherRun, task: TaskPlan) -> str | None:
    """How another run was asked a task otherwise; None if it was asked alike."""
    before = next((settings for settings in other.accuracy if settings.task == task.name), None)
    if before is None:
        return f"the {other.word} was not asked {task.name}"
    then, now = _settings_of_questions(before), _settings_of_questions(task.asked_settings)
    changed = [f"{name} {then[name]}, now {now[name]}" for name in now if then[name] != now[name]]
    return f"the {other.word} was asked {task.name} in another way: {'; '.join(changed)}" if changed else None


def _settings_of_questions(settings: Accuracy) -> dict[str, Any]:
    """What the answers depend on; hashes identify the questions. A task's own longest reply is in the hash of the task."""
    numbers = settings.sampling.numbers if isinstance(settings.sampling, Sampling) else settings.sampling
    return part(settings, WORK) | {"max_gen_toks": settings.max_gen_toks or USUAL_TOKENS, "sampling": numbers}


def load_differs(plan: CellPlan) -> str | None:
    """Why the baseline's load, as it was measured at its own time, cannot be compared with the cell's; else None."""
    then = plan.compared_with
    if then.fingerprint.id != plan.fingerprint.id:
        return f"the baseline was measured on {then.fingerprint.id}, and this is {plan.fingerprint.id}"
    if then.client_version != plan.client_version:
        return f"the baseline's load client was vLLM {then.client_version}, and this one is {plan.client_version}"
    if _settings_of_load(then.load, plan) != _settings_of_load(plan.load, plan):
        return (
            "the baseline's load was another one: other lengths, concurrency, number of prompts, window, first token of chats,"
            " seed or SLO"
        )
    return None


def _settings_of_load(load: Load, plan: CellPlan) -> dict[str, Any]:
    """The settings that a load's measurements depend on: of a file its content, and the SLO only if goodput is compared."""
    compares_goodput = any(gate.metric == GOODPUT and gate.is_against_baseline for gate in plan.gates)
    return part(load, WORK) | ({} if compares_goodput else {"slo": None})


def likelihood_differs(plan: CellPlan) -> str | None:
    """Why the baseline's likelihoods cannot be compared with the cell's; else None. The other way round nothing is compared."""
    if not any(gate.against == "likelihood" for gate in plan.gates):
        return None
    then, now = plan.compared_with.likelihood, plan.likelihood
    if then is None:
        return "the baseline scored no texts"
    if now is None or not now.covers(then):
        return "the baseline scored other texts, or more answers"
    return None
