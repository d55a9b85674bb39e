"""The letter box of lm-eval's worker: the documents that go through it, as files."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from vllm_qualify.engine.letter_box import write_plain
from vllm_qualify.evidence.accuracy.picture_limits import NO_LIMITS, PictureLimits
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.values import Count, CountOrZero, Drawn, Frozen, TaskName

TASK, JOB, ORDER, TRIED = "task.json", "job.json", "order", "tried.json"
# How often lm-eval asks at most for a reply whose request failed: its own default, here written down.
MOST_TRIES = 3
GENERATES = "generate_until"
# The parts of a task's configuration that say where its data is, not how it asks and scores. Each question has its own hash.
WHERE = ("task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "metadata")
# If lm-eval has no source of a function, it writes the function's address in memory.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class RefusedError(Exception):
    """A task that cannot be asked: why, and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


class Job(Frozen):
    """The task that is asked, of which server, the name of the model there, and how large pictures it takes."""

    task: TaskPlan
    url: str
    model: str
    pictures: PictureLimits = NO_LIMITS

    @property
    def test(self) -> Path | None:
        """Local questions in place of the task's own: a file, or a folder with a file for each task."""
        return self.task.questions[0] if self.task.questions else None

    @property
    def shots(self) -> Path | None:
        """Local solved examples, as `test`."""
        return self.task.questions[1] if self.task.questions and len(self.task.questions) > 1 else None


class Order(Frozen):
    """A block of questions, by their place in the task's data, and what the seeds of its sampled answers differ by.

    `drawn` is what the order follows in which its requests are sent; where it is empty, lm-eval sends the longest first.
    """

    questions: list[int]
    seeded_by: str = ""
    drawn: str = ""


class Tried(Frozen):
    """What lm-eval does not count itself: the requests of a block that failed and were asked again, and its limit of tries."""

    failed: CountOrZero
    most_tries: Count = MOST_TRIES


class Member(Frozen):
    """A task of a group: how many questions it has, and what its answers must be of."""

    name: TaskName
    questions: Count
    task_version: str
    config_hash: str
    output_type: str


class TaskReply(Frozen):
    """The worker's first answer: how many questions the task has, or `problem` and `remedy` if it refuses the task.

    A group has members. Their questions are one list, in the order of the members. `order` is the plan's, which whoever asks
    adds: another run that takes the answers over has an order of its own.
    """

    available: int = 0
    order: Drawn = ""
    members: tuple[Member, ...] = ()
    problem: str = ""
    remedy: str = ""

    @model_validator(mode="after")
    def _is_of_its_members(self) -> Self:
        if self.members and self.available != sum(member.questions for member in self.members):
            raise ValueError(f"{self.available} questions, where the members have others in all")
        if len({member.name for member in self.members}) != len(self.members):
            raise ValueError("a member is there twice")
        return self


def config_hash(config: dict[str, Any]) -> str:
    """The hash of how a task asks and scores, from lm-eval's record of its configuration."""
    lasting = {name: value for name, value in config.items() if name not in WHERE}
    text = ADDRESS.sub("", json.dumps(lasting, sort_keys=True))
    return hashlib.sha256(text.encode()).hexdigest()


def write_whole(path: Path, document: Frozen) -> None:
    """Write a file so that a reader sees either all of it or no file."""
    write_plain(path, document.model_dump_json(indent=2).encode())
