"""What a stage is measured with: the server and its tools, the cell, and those whom it tells and asks meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.engine.process import Progress, Tell
from vllm_qualify.evidence.load.client import UNFOLLOWED, Following
from vllm_qualify.evidence.serving import Served
from vllm_qualify.plan.cell import CellPlan, TaskPlan

Commands = list[list[str]]


class AskingLimits(NamedTuple):
    """How long a task's questions are asked: at most `repetitions` times, and until no more answers could change a verdict."""

    repetitions: Callable[[TaskPlan], int]
    is_decided: Callable[[TaskPlan], bool]


EVERYTHING = AskingLimits(lambda task: task.repetitions, lambda _: False)


@dataclass(frozen=True, kw_only=True)
class World:
    """What a stage on the cell's server has around it."""

    served: Served
    plan: CellPlan
    evidence: Path
    """the evidence folder of the cell's run; the stage's own folder is inside"""
    tell: Tell
    """takes a line for the log"""
    tell_often: Tell
    """takes lines that come fast, of which most may be dropped"""
    progress: Progress
    """takes how many are done, of how many"""
    asking: AskingLimits = EVERYTHING
    """how long questions are asked"""
    following: Following = UNFOLLOWED
    """how long a load goes on, and who is told of each repeat"""
