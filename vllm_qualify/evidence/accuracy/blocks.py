"""Blocks: the steps in which a task's questions are asked: the same questions in every run, in an order drawn for each."""

import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.evidence.accuracy.letters import TASK, Member, TaskReply
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.accuracy import Accuracy

BLOCKS, LEAST_BLOCK = 5, 2
# The most questions that a task may have: the order of so many takes seconds, and far more would take all memory.
MOST_QUESTIONS = 1_000_000


class QuestionBlock(NamedTuple):
    """A block of questions that are asked together. Repetitions, the blocks in them and the server's starts count from 1."""

    repetition: int
    block: int
    questions: list[int]
    start: int = 1
    order: str = ""

    @property
    def folder(self) -> str:
        return f"r{self.repetition}-b{self.block}"

    @property
    def seeded_by(self) -> str:
        """What the seeds of sampled answers differ by: with the same seed a server gives the same answer again.

        What is drawn for the run is part of it, so that no code of a model can know the seeds beforehand.
        """
        return f"{self.start} {self.repetition} {self.order}".rstrip()

    @property
    def drawn(self) -> str:
        """What the order of the block's requests follows; empty where no order was drawn."""
        return f"{self.order} {self.start} {self.folder}" if self.order else ""


def plan_steps(
    settings: Accuracy, available: int, repetitions: int, *, sequential: bool, order: str = ""
) -> list[QuestionBlock]:
    """All steps of a task with `available` questions. With the same settings, every run asks the same questions.

    Each repetition asks them in another order, and with `sequential` in blocks. The order follows what was drawn for the run,
    or the settings' seed where nothing was drawn.
    """
    asked = _shuffle_by_hash(list(range(available)), settings.seed, "asked")[: settings.num_questions]
    bounds = _bounds_of(len(asked), sequential=sequential)
    steps: list[QuestionBlock] = []
    for repetition in range(1, repetitions + 1):
        shuffled = _shuffle_by_hash(asked, order or settings.seed, repetition)
        parts = enumerate(pairwise(bounds), start=1)
        steps += [QuestionBlock(repetition, block, shuffled[begin:end], order=order) for block, (begin, end) in parts]
    return steps


def largest_block(questions: int, *, sequential: bool) -> int:
    """How many of the questions are asked together at most. Repetitions come one after another."""
    return max(end - begin for begin, end in pairwise(_bounds_of(questions, sequential=sequential)))


def _bounds_of(questions: int, *, sequential: bool) -> list[int]:
    blocks = max(1, min(BLOCKS, questions // LEAST_BLOCK)) if sequential else 1
    return [questions * block // blocks for block in range(blocks + 1)]


def _shuffle_by_hash(questions: list[int], seed: int | str, what: object) -> list[int]:
    """The questions in the order of a hash, which is the same with every version of Python and of libraries."""
    return sorted(questions, key=lambda question: hashlib.sha256(f"{seed} {what} {question}".encode()).digest())


def read_planned(folder: Path, task: TaskPlan, start: int = 1) -> list[QuestionBlock]:
    """The steps of a task that was begun, from the files in its folder. `start` is the server's. Raises one of UNUSABLE."""
    reply = TaskReply.model_validate_json((folder / TASK).read_bytes())
    least = task.settings.num_questions
    if not least <= reply.available <= MOST_QUESTIONS:
        raise ValueError(f"the task has {reply.available} questions, where {least} to {MOST_QUESTIONS} were expected")
    steps = plan_steps(task.settings, reply.available, task.repetitions, sequential=task.sequential, order=reply.order)
    return [step._replace(start=start) for step in steps]


def read_finished(folder: Path, task: TaskPlan, start: int = 1) -> list[QuestionBlock]:
    """The planned steps that have a folder. Raises one of UNUSABLE if they are not the first ones."""
    all_steps = read_planned(folder, task, start)
    folders = {path.name for path in folder.glob("r*-b*")}
    done = all_steps[: len(folders)]
    if not folders or folders != {step.folder for step in done}:
        there = ", ".join(sorted(folders)) or "no blocks"
        raise ValueError(f"{there} where the first blocks from {all_steps[0].folder} on were expected")
    return done


class Part(NamedTuple):
    """What is asked of one of lm-eval's tasks: questions by their place in its data, which has `available` of them.

    Of a member of a group, the group's numbers are `offset` higher.
    """

    task: str
    questions: list[int]
    available: int
    offset: int = 0
    member: Member | None = None


def parts_of(members: Sequence[Member], questions: Sequence[int]) -> list[Part]:
    """The parts of a block of a group's questions, in ascending order. A member without a question in it has none."""
    ends = accumulate(member.questions for member in members)
    parts = []
    for member, end in zip(members, ends, strict=True):
        offset = end - member.questions
        if within := sorted(question - offset for question in questions if offset <= question < end):
            parts.append(Part(member.name, within, member.questions, offset, member))
    return parts


def split_by_member(step: QuestionBlock, task: TaskPlan, reply: TaskReply) -> list[Part]:
    if not reply.members:
        return [Part(task.name, step.questions, reply.available)]
    return parts_of(reply.members, step.questions)
