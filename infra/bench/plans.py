"""The plans that recipes have: how gates against a baseline are measured by default, read from the catalog and the README."""

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

from vllm_qualify.evidence.sequential import FALSE_FAIL_AT_MARGIN, Levels, levels_of
from vllm_qualify.recipe.accuracy import Accuracy
from vllm_qualify.recipe.gates import Gate
from vllm_qualify.recipe.load import LoadSettings
from vllm_qualify.recipe.loading import load_recipe
from vllm_qualify.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]


class Task(NamedTuple):
    """A task that a gate compares. `margin` is the largest loss, as a share of the questions."""

    questions: int
    most_repetitions: int
    margin: float

    @property
    def settings(self) -> Accuracy:
        return Accuracy(num_questions=self.questions, most_repetitions=self.most_repetitions)


class AnswerPlan(NamedTuple):
    """How answers are compared: the server's starts at most, the tasks, and the chances of a wrong verdict of each gate."""

    starts: int
    tasks: tuple[Task, ...]
    false_pass: float
    false_fail: float
    false_fail_at_margin: float = FALSE_FAIL_AT_MARGIN

    @property
    def levels(self) -> Levels:
        return Levels(false_pass=self.false_pass, false_fail=self.false_fail, false_fail_at_margin=self.false_fail_at_margin)


class RepeatPlan(NamedTuple):
    """How loads are compared: as `AnswerPlan`, with the repeats of the first start, and the margin of each gate."""

    starts: int
    repeats: int
    most_repeats: int
    margins: tuple[float, ...]
    false_pass: float
    false_fail: float
    false_fail_at_margin: float = FALSE_FAIL_AT_MARGIN

    @property
    def levels(self) -> Levels:
        return Levels(false_pass=self.false_pass, false_fail=self.false_fail, false_fail_at_margin=self.false_fail_at_margin)


P = TypeVar("P", AnswerPlan, RepeatPlan)


def answer_plans() -> dict[AnswerPlan, str]:
    """Each plan for answers, once, with the first recipe that has it."""
    return _first(_answer_plans())


def repeat_plans() -> dict[RepeatPlan, str]:
    """Each plan for loads, once, with the first recipe that has it."""
    return _first(_repeat_plans())


def _first(found: Iterator[tuple[P, str]]) -> dict[P, str]:
    first: dict[P, str] = {}
    for plan, recipe in found:
        first.setdefault(plan, recipe)
    return first


def _answer_plans() -> Iterator[tuple[AnswerPlan, str]]:
    for recipe, starts, _, gates in _cells():
        asked = {settings.task: settings for settings in recipe.accuracy}
        tasks = []
        for gate in (gate for gate in gates if gate.against == "answers"):
            settings = asked[gate.task or recipe.accuracy[0].task]
            tasks.append(Task(settings.num_questions, settings.most_repetitions, _margin(gate)))
        if tasks:
            yield AnswerPlan(starts, tuple(tasks), *_levels(gates)), recipe.name


def _repeat_plans() -> Iterator[tuple[RepeatPlan, str]]:
    for recipe, starts, load, gates in _cells():
        margins = tuple(_margin(gate) for gate in gates if gate.against == "load")
        if margins:
            yield RepeatPlan(starts, load.repeats, load.most_repeats, margins, *_levels(gates)), recipe.name


def _levels(gates: list[Gate]) -> tuple[float, float]:
    levels = levels_of(gates)
    return levels.false_pass, levels.false_fail


def _margin(gate: Gate) -> float:
    if gate.limits.at_most is None:
        raise ValueError(f"{gate.label} does not say what may be lost at most")
    return gate.limits.at_most


def _cells() -> Iterator[tuple[Recipe, int, LoadSettings, list[Gate]]]:
    """Each cell's recipe, its starts, its load and its gates."""
    for recipe in _recipes():
        for gpu_type, _, name in recipe.cells():
            serving = recipe.gpu_types[gpu_type]
            profile = serving.profiles[name]
            yield recipe, serving.starts, profile.load, list(recipe.gates_of(profile))


def _recipes() -> Iterator[Recipe]:
    """The catalog's, and the README's."""
    for path in sorted((ROOT / "vllm_qualify" / "catalog").glob("*.yaml")):
        yield load_recipe(str(path)).recipe
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "readme.yaml"
        path.write_text(example, encoding="utf-8")
        yield load_recipe(str(path)).recipe
