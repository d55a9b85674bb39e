"""The `World` of a stage in a test: its messages go nowhere, and it measures everything."""

from pathlib import Path
from typing import Any

from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages.world import World
from vllm_qualify.plan.cell import CellPlan


def world_of(served: Served, plan: CellPlan, evidence: Path, **others: Any) -> World:
    silent = {"tell": lambda _: None, "tell_often": lambda _: None, "progress": lambda _done, _total: None}
    return World(served=served, plan=plan, evidence=evidence, **silent | others)
