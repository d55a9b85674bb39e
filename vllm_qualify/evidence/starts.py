"""Further starts of a server: where their files are, how much each measures, and whether it was a start of its own.

Two starts of one build differ by more than the noise within each. So what is compared with a baseline is measured on several
starts. A further start has the folder `starts/N`, with N from 2 on. Below it the files are where those of the first start are.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from vllm_qualify.engine.kinds.registry import KINDS
from vllm_qualify.engine.metrics_page import sums_of
from vllm_qualify.evidence.accuracy import answers, blocks, lm_eval_process, samples, scored_again
from vllm_qualify.evidence.accuracy.answers import Answered
from vllm_qualify.evidence.load import agreement
from vllm_qualify.evidence.load.problems import took_s
from vllm_qualify.evidence.load.result import BESIDE, Repeat, count_of, read_repeat
from vllm_qualify.evidence.measurement import UNUSABLE
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.serving import EngineName

STARTS, FIRST = "starts", 1
# Of a further start's load, unless the first has fewer: two show noise. While they are noisy there are more, up to so many.
REPEATS, MOST_REPEATS = 2, 5
# So many starts at least decide a gate: fewer show badly how much starts differ. A gate fails sooner where it surely fails.
LEAST = 3
# A run that becomes a baseline is started so often at least: then a candidate's starts are known from it, too.
LEAST_OF_A_BASELINE: Mapping[str, int] = {"answers": 3, "load": 4}
# Each page of a step or of a repeat, from before and from after it.
BEFORE = ("accuracy/*/r*-b*/metrics-before.txt", "load/metrics-*-before.txt")
AFTER = ("accuracy/*/r*-b*/metrics-after.txt", "load/metrics-*-after.txt")


def place(number: int) -> str:
    """How the paths of a start begin in the evidence folder: with `starts/2/`, and of the first with nothing."""
    return "" if number == FIRST else f"{STARTS}/{number}/"


def root(evidence: Path, number: int) -> Path:
    """The folder of one start: for the first it is the evidence folder itself."""
    return evidence / place(number)


def further(evidence: Path) -> list[int]:
    """The numbers of the further starts. Raises ValueError if they are not counted on from 2."""
    folder = evidence / STARTS
    names = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    numbers = list(range(FIRST + 1, FIRST + 1 + len(names)))
    if names != set(map(str, numbers)):
        raise ValueError(f"the further starts are {', '.join(sorted(names))}, and not counted on from {FIRST + 1}")
    return numbers


def plan_of(plan: CellPlan, evidence: Path, number: int) -> CellPlan:
    """What a further start measures at most: each compared task once, and a few repeats of the load within its budget.

    A task of samples is asked for all samples. A baseline asks more often: see `repetitions_of_further_start`.

    Raises one of UNUSABLE if it is not known what is left of the budget.
    """
    tasks = [task_of_further_start(task, plan) for task in plan.accuracy if is_compared(plan.gates_over_starts, task)]
    looks, left_s = repeats_of(plan.load), plan.load.time_budget_s
    if left_s is not None:
        left_s -= sum(_took_s(evidence, number))
    load = plan.load.model_copy(update={"repeats": looks[0], "most_repeats": looks[-1], "time_budget_s": left_s})
    return plan.model_copy(update={"accuracy": tasks, "load": load})


def task_of_further_start(task: TaskPlan, plan: CellPlan) -> TaskPlan:
    """A task as a further start may ask it at most."""
    times = task.repetitions if plan.establishes else task.least_repetitions
    return task.model_copy(update={"repetitions": times, "sequential": False})


def repetitions_of_further_start(task: TaskPlan, plan: CellPlan, evidence: Path) -> int:
    """How often a further start asks a task: of a run that becomes a baseline once less than its first start did.

    Raises one of UNUSABLE if the first start left no answers.
    """
    if not plan.establishes:
        return task.least_repetitions
    asked = max(step.repetition for step in blocks.read_finished(evidence / "accuracy" / task.name, task))
    return max(task.least_repetitions, asked - 1)


def is_compared(gates: Sequence[Gate], task: TaskPlan) -> bool:
    return any(gate.against == "answers" and gate.task == task.name for gate in gates)


def repeats_of(settings: Load) -> range:
    """How often the load may be run in a further start."""
    least = min(REPEATS, settings.repeats)
    return range(least, max(least, min(MOST_REPEATS, settings.looks[-1])) + 1)


def _took_s(evidence: Path, number: int) -> list[float]:
    """How long each repeat took before this start, in s."""
    loads = [root(evidence, earlier) / "load" for earlier in range(FIRST, number)]
    return [seconds for load in loads if load.is_dir() for seconds in took_s(load)]


def repeats_of_all(plan: CellPlan, count: int) -> range:
    """The numbers of repeats of all starts together after which a load may be looked at. `count` were run."""
    looks = plan.load.looks
    planned = looks[-1] + (plan.starts - FIRST) * repeats_of(plan.load)[-1]
    return range(looks.start, max(planned, count) + 1)


def too_long(load: Load, evidence: Path, number: int) -> str | None:
    """Why a start's `load`, as `plan_of` gives it, is not begun: not even one repeat would end within what is left. Else None.

    Raises one of UNUSABLE.
    """
    if load.time_budget_s is None or (longest_s := max(_took_s(evidence, number), default=0.0)) <= load.time_budget_s:
        return None
    left_s = max(0.0, load.time_budget_s)
    return f"time_budget_s leaves {left_s:.0f} s for the load of start {number}, and a repeat may take {longest_s:.0f} s"


def answers_of(plan: CellPlan, evidence: Path, task: TaskPlan) -> Answered:
    """A task's answers from lm-eval's files, of all starts that asked it. Raises as `read_answers`."""
    return _join_starts([samples.read_answers(folder, asked, number) for number, folder, asked in _asked(plan, evidence, task)])


def _asked(plan: CellPlan, evidence: Path, task: TaskPlan) -> Iterator[tuple[int, Path, TaskPlan]]:
    """Each start that asked a task, with the folder of its answers and the task as that start may ask it."""
    yield FIRST, evidence / "accuracy" / task.name, task
    for number in further(evidence):
        folder = root(evidence, number) / "accuracy" / task.name
        if folder.is_dir():
            yield number, folder, task_of_further_start(task, plan)


def scored_otherwise(plan: CellPlan, evidence: Path) -> str:
    """The first answer whose reply gives another score than the evidence says, in words; empty if there is none.

    What cannot be read is passed over: its measurements are invalid. So are tasks that cannot be scored again.
    """
    return next(filter(None, (_task_scored_otherwise(plan, evidence, task) for task in plan.accuracy)), "")


def _task_scored_otherwise(plan: CellPlan, evidence: Path, task: TaskPlan) -> str:
    try:
        answered = answers_of(plan, evidence, task)
    except UNUSABLE:
        return ""
    for number, folder, asked in _asked(plan, evidence, task):
        if scored_again.can_be_scored_again(folder, task) and (problem := scored_again.find_wrong_score(folder, asked, number)):
            return f"{problem}, in start {number}" if number != FIRST else problem
    # Without them, or with others, no run can be compared with this one.
    with suppress(*UNUSABLE):
        if _are_other_answers(kept_answers(evidence, task.name), answered):
            return f"accuracy/{task.name}/{lm_eval_process.ANSWERS} has other answers than lm-eval's files"
    return ""


def _are_other_answers(kept: Answered, answered: Answered) -> bool:
    """Whether kept answers differ in what runs are compared by. Another version may judge an answer's text otherwise."""
    said = {"question", "repetition", "start", "doc_hash", "prompt_hash", "target_hash", "scores", "unanswered", "length"}
    ours, theirs = ([answer.model_dump(include=said) for answer in each.answers] for each in (answered, kept))
    return ours != theirs


def scored_by_lm_eval_alone(plan: CellPlan, evidence: Path) -> list[str]:
    """The tasks whose scores are not made again from the replies: each has a way of scoring of its own."""
    names = []
    for task in plan.accuracy:
        with suppress(*UNUSABLE):
            if not scored_again.can_be_scored_again(evidence / "accuracy" / task.name, task):
                names.append(task.name)
    return names


def kept_answers(evidence: Path, task: str) -> Answered:
    """A task's answers of all starts, from the files that were made of lm-eval's. Raises one of UNUSABLE."""
    inside = Path("accuracy") / task / lm_eval_process.ANSWERS
    parts = [answers.load(evidence / inside)]
    for number in further(evidence):
        path = root(evidence, number) / inside
        kept = answers.load(path) if path.is_file() else None
        if kept and any(answer.start != number for answer in kept.answers):
            raise ValueError(f"{inside} of start {number} has answers of another start")
        parts += [kept] if kept else []
    return _join_starts(parts)


def _join_starts(parts: Sequence[Answered]) -> Answered:
    first, *others = parts
    if any(other.model_copy(update={"answers": first.answers}) != first for other in others):
        raise ValueError("the starts were not asked one version of the task")
    return first.model_copy(update={"answers": [answer for part in parts for answer in part.answers]})


def problem_of(plan: CellPlan, evidence: Path, number: int) -> str | None:
    """Why a further start does not count: it was not planned, or it is no start of its own. Else None.

    Raises one of UNUSABLE.
    """
    if number > plan.starts:
        return f"start {number}, where at most {plan.starts} were planned"
    ours, earlier = root(evidence, number), [root(evidence, other) for other in range(FIRST, number)]
    if any(_digest_results(ours) & _digest_results(other) for other in earlier):
        return f"the answers of start {number} are a copy of an earlier start's"
    if any(agreement.share_requests(_read_repeats(ours), _read_repeats(other)) for other in earlier):
        return f"the load of start {number} has the requests of an earlier start's, or ran at the same time"
    if not _began_anew(plan.server.kind, earlier[-1], ours):
        return f"the server's counts go on in start {number} from the start before it: it was not started again"
    return None


def _digest_results(start: Path) -> set[bytes]:
    """The digests of lm-eval's results, which have the time at which they were measured."""
    return {hashlib.sha256(path.read_bytes()).digest() for path in start.glob("accuracy/*/r*-b*/results_*.json")}


def _read_repeats(start: Path) -> list[Repeat]:
    folders = [folder for folder in (start / "load", start / "load" / BESIDE) if folder.is_dir()]
    return [read_repeat(folder, folder.name, number) for folder in folders for number in range(1, count_of(folder) + 1)]


def _began_anew(kind: EngineName, before: Path, ours: Path) -> bool:
    """Whether the server had answered less when this start was first measured than when the one before was last measured."""
    if "succeeded" not in KINDS[kind].counters:
        return True
    name = KINDS[kind].total("succeeded")
    then, now = (
        [sums_of(page.read_text(), (name,)).get(name, 0.0) for page in pages]
        for pages in (_edge_pages(before, AFTER, -1), _edge_pages(ours, BEFORE, 0))
    )
    # Without the count, answers and loads are invalid anyway.
    return not then or not now or max(then) == 0 or min(now) < max(then)


def _edge_pages(start: Path, patterns: Sequence[str], which: int) -> list[Path]:
    """The first or the last page of each task, and that of the load."""
    by_folder: dict[Path, list[Path]] = {}
    for path in (path for pattern in patterns for path in start.glob(pattern)):
        by_folder.setdefault(path.parent if path.parent.name == "load" else path.parent.parent, []).append(path)
    return [sorted(pages, key=_path_numbers)[which] for pages in by_folder.values()]


def _path_numbers(page: Path) -> list[int]:
    """The numbers in the names of a page and of its folder, so that repeat 10 comes after repeat 9."""
    return [int(number) for number in re.findall(r"\d+", f"{page.parent.name}/{page.name}")]
