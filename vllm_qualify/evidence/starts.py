"""Further starts of a server: where their files are, how much each measures, and whether it was a start of its own.

Two starts of one build differ by more than the noise within each. So what is compared with a baseline is measured on several
starts. A further start has the folder `starts/N`, with N from 2 on. Below it the files are where those of the first start are.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.metrics_page import sums_of
from vllm_qualify.evidence import accuracy, answers
from vllm_qualify.evidence.answers import Answered
from vllm_qualify.evidence.load import agreement
from vllm_qualify.evidence.load.problems import took_s
from vllm_qualify.evidence.load.result import BESIDE, Repeat, count_of, read_repeat
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.serving import EngineName
from vllm_qualify.recipe.workload import Load

STARTS, FIRST = "starts", 1
# Of a further start's load, unless the first has fewer: two show noise. While they are noisy there are more, up to so many.
REPEATS, MOST_REPEATS = 2, 5
# A run that becomes a baseline is started so often at most: then a candidate's starts are known from it, too.
OF_A_BASELINE = 4
# Each page of a step or of a repeat, from before and from after it.
BEFORE = ("accuracy/*/r*-b*/metrics-before.txt", "load/metrics-*-before.txt")
AFTER = ("accuracy/*/r*-b*/metrics-after.txt", "load/metrics-*-after.txt")


def root(evidence: Path, number: int) -> Path:
    """The folder of one start: for the first it is the evidence folder itself."""
    return evidence / place(number)


def place(number: int) -> str:
    """The same as the beginning of paths in the evidence folder: `starts/2/`, and nothing for the first."""
    return "" if number == FIRST else f"{STARTS}/{number}/"


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

    Raises one of UNUSABLE if it is not known what is left of the budget.
    """
    tasks = [once(task) for task in plan.accuracy if is_compared(plan.over_starts, task)]
    return plan.model_copy(update={"accuracy": tasks, "load": _load_of(plan.load, evidence, number)})


def once(task: TaskPlan) -> TaskPlan:
    return task.model_copy(update={"repetitions": 1, "sequential": False})


def is_compared(gates: Sequence[Gate], task: TaskPlan) -> bool:
    return any(gate.against == "answers" and gate.task == task.name for gate in gates)


def repeats_of(settings: Load) -> range:
    """How often the load may be run in a further start."""
    least = min(REPEATS, settings.repeats)
    return range(least, max(least, min(MOST_REPEATS, settings.looks[-1])) + 1)


def _load_of(settings: Load, evidence: Path, number: int) -> Load:
    looks, left_s = repeats_of(settings), _left_s(settings, evidence, number)
    return settings.model_copy(update={"repeats": looks[0], "most_repeats": looks[-1], "time_budget_s": left_s})


def _left_s(settings: Load, evidence: Path, number: int) -> float | None:
    """What the earlier starts' loads left of the budget, in s; None without a budget."""
    if settings.time_budget_s is None:
        return None
    return settings.time_budget_s - sum(_took_s(evidence, number))


def _took_s(evidence: Path, number: int) -> list[float]:
    """How long each repeat took before this start, in s."""
    loads = [root(evidence, earlier) / "load" for earlier in range(FIRST, number)]
    return [seconds for load in loads if load.is_dir() for seconds in took_s(load)]


def repeats_of_all(plan: CellPlan, count: int) -> range:
    """The numbers of repeats of all starts together after which a load may be looked at. `count` were run, perhaps more."""
    looks = plan.load.looks
    planned = looks[-1] if plan.starts == FIRST else looks[0] + (plan.starts - FIRST) * repeats_of(plan.load)[0]
    return range(looks.start, max(planned, count) + 1)


def too_long(load: Load, evidence: Path, number: int) -> str | None:
    """Why a start's `load`, as `plan_of` gives it, is not begun: not even one repeat would end within what is left. Else None.

    Raises one of UNUSABLE.
    """
    if load.time_budget_s is None:
        return None
    longest_s = max(_took_s(evidence, number), default=0.0)
    if longest_s <= load.time_budget_s:
        return None
    left_s = max(0.0, load.time_budget_s)
    return f"time_budget_s leaves {left_s:.0f} s for the load of start {number}, and a repeat may take {longest_s:.0f} s"


def answers_of(evidence: Path, task: TaskPlan) -> Answered:
    """A task's answers from lm-eval's files, of all starts that asked it. Raises as `read_answers`."""
    parts = [answers.read_answers(evidence / "accuracy" / task.name, task)]
    for number in further(evidence):
        folder = root(evidence, number) / "accuracy" / task.name
        parts += [answers.read_answers(folder, once(task), number)] if folder.is_dir() else []
    return _together(parts)


def kept_answers(evidence: Path, task: str) -> Answered:
    """A task's answers of all starts, from the files that were made of lm-eval's. Raises one of UNUSABLE."""
    inside = Path("accuracy") / task / accuracy.ANSWERS
    parts = [answers.load(evidence / inside)]
    for number in further(evidence):
        path = root(evidence, number) / inside
        kept = answers.load(path) if path.is_file() else None
        if kept and any(answer.start != number for answer in kept.answers):
            raise ValueError(f"{inside} of start {number} has answers of another start")
        parts += [kept] if kept else []
    return _together(parts)


def _together(parts: Sequence[Answered]) -> Answered:
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
    return next(_problems(plan.server.kind, evidence, number), None)


def _problems(kind: EngineName, evidence: Path, number: int) -> Iterator[str]:
    ours, earlier = root(evidence, number), [root(evidence, other) for other in range(FIRST, number)]
    if any(_results(ours) & _results(other) for other in earlier):
        yield f"the answers of start {number} are a copy of an earlier start's"
    if any(agreement.share_requests(_repeats(ours), _repeats(other)) for other in earlier):
        yield f"the load of start {number} has the requests of an earlier start's, or ran at the same time"
    if not _began_anew(kind, earlier[-1], ours):
        yield f"the server's counts go on in start {number} from the start before it: it was not started again"


def _results(start: Path) -> set[bytes]:
    """The digests of lm-eval's results, which have the time at which they were measured."""
    return {hashlib.sha256(path.read_bytes()).digest() for path in start.glob("accuracy/*/r*-b*/results_*.json")}


def _repeats(start: Path) -> list[Repeat]:
    folders = [folder for folder in (start / "load", start / "load" / BESIDE) if folder.is_dir()]
    return [read_repeat(folder, folder.name, number) for folder in folders for number in range(1, count_of(folder) + 1)]


def _began_anew(kind: EngineName, before: Path, ours: Path) -> bool:
    """Whether the server had answered less when this start was first measured than when the one before was last measured."""
    if "succeeded" not in KINDS[kind].counters:
        return True
    name = KINDS[kind].total("succeeded")
    then = [_count(page, name) for page in _edge(before, AFTER, -1)]
    now = [_count(page, name) for page in _edge(ours, BEFORE, 0)]
    # Without the count, answers and loads are invalid anyway.
    return not then or not now or max(then) == 0 or min(now) < max(then)


def _edge(start: Path, patterns: Sequence[str], which: int) -> list[Path]:
    """The first or the last page of each task, and that of the load."""
    by_folder: dict[Path, list[Path]] = {}
    for path in (path for pattern in patterns for path in start.glob(pattern)):
        by_folder.setdefault(path.parent if path.parent.name == "load" else path.parent.parent, []).append(path)
    return [sorted(pages, key=_numbers)[which] for pages in by_folder.values()]


def _numbers(page: Path) -> list[int]:
    """The numbers in the names of a page and of its folder, so that repeat 10 comes after repeat 9."""
    return [int(number) for number in re.findall(r"\d+", f"{page.parent.name}/{page.name}")]


def _count(page: Path, name: str) -> float:
    return sums_of(page.read_text(), (name,)).get(name, 0.0)
