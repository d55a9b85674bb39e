"""A group of lm-eval's tasks that is measured as one task: the questions of its members are one list, member after member."""

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from vllm_qualify.recipe.values import Count, Frozen, TaskName

# The parts of a task's configuration that say where its data is, not how it asks and scores. Each question has its own hash.
WHERE = ("task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "metadata")
# If lm-eval has no source of a function, it writes the function's address in memory.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Member(Frozen):
    """A task of a group: how many questions it has, and what its answers must be of."""

    name: TaskName
    questions: Count
    task_version: str
    config_hash: str
    output_type: str


class Part(NamedTuple):
    """What is asked of one member: questions by their place in its own data. The group's numbers are `offset` higher."""

    member: Member
    offset: int
    questions: list[int]


def parts_of(members: Sequence[Member], questions: Sequence[int]) -> list[Part]:
    """The parts of a block of a group's questions, in ascending order. A member without a question in it has none."""
    ends = list(accumulate(member.questions for member in members))
    parts = []
    for member, end in zip(members, ends, strict=True):
        offset = end - member.questions
        if within := sorted(question - offset for question in questions if offset <= question < end):
            parts.append(Part(member, offset, within))
    return parts


def is_task_name(name: str) -> bool:
    try:
        TypeAdapter(TaskName).validate_python(name)
    except ValidationError:
        return False
    return True


def config_hash(config: dict[str, Any]) -> str:
    """The hash of how a task asks and scores, from lm-eval's record of its configuration."""
    lasting = {name: value for name, value in config.items() if name not in WHERE}
    text = ADDRESS.sub("", json.dumps(lasting, sort_keys=True))
    return hashlib.sha256(text.encode()).hexdigest()


def group_hash(members: Sequence[Member]) -> str:
    """The hash of how all members ask and score, whichever of them were asked."""
    text = json.dumps([[member.name, member.task_version, member.config_hash] for member in members])
    return hashlib.sha256(text.encode()).hexdigest()
