"""The load stage: the profile's workload, in turns with the baseline's server if that is served too."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_qualify.engine.process import Progress, Tell
from vllm_qualify.errors import QualifyError
from vllm_qualify.evidence.load import client, result
from vllm_qualify.evidence.load.client import Driven, Following
from vllm_qualify.evidence.load.figures import LoadChecks, parse_load
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import Served, serving_other
from vllm_qualify.evidence.stages.stage import Stage, comparing_inputs, keep_watched, load_inputs, server_inputs
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.evidence.watched import watched_in
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.load import Load


class LoadStage(Stage, name="load", is_timed=True, uses_bench=True):
    """The profile's workload; the stage ends when every gate on it is decided."""

    def settings(self, plan: CellPlan) -> dict[str, dict[str, Any]]:
        return {"load": plan.load.model_dump()}

    def inputs(self, plan: CellPlan) -> Any:
        beside = plan.beside and [server_inputs(plan.beside), plan.warms_alike]
        return [load_inputs(plan), beside, *comparing_inputs(plan)]

    def measure(self, world: World, folder: Path) -> Commands:
        return run_load(world.served, world.plan, world.evidence, folder, world.progress, world.following, world.tell_often)

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        folder = evidence / "load"
        checks = LoadChecks(watched_in(folder, evidence / "serve") if plan.watched else None, is_warmed=plan.warms_alike)
        return parse_load(folder, plan.load, levels_for(plan), plan.server, checks)


def run_load(
    served: Served, plan: CellPlan, evidence: Path, folder: Path, progress: Progress, following: Following, tell: Tell
) -> Commands:
    """Run the plan's load into its folder below `evidence`, which has what is watched of the server. Raises QualifyError."""
    with keep_watched(plan, evidence, folder), _serve_beside(served, plan, folder, tell) as other:
        return client.measure_load(served.driven(plan), plan.load, folder, progress, following, other)


def loads_of(plans: Iterable[tuple[CellPlan, Path]]) -> list[tuple[Load, Path, Path | None]]:
    """The loads of cells, each with its evidence folder, as `serving` takes them."""
    return [(plan.load, evidence / "load", plan.prompts) for plan, evidence in plans]


@contextmanager
def _serve_beside(served: Served, plan: CellPlan, folder: Path, tell: Tell) -> Iterator[Driven | None]:
    """Serve the baseline during the block, with a client of the same program."""
    if plan.beside is None:
        yield None
        return
    inside = folder / result.BESIDE
    inside.mkdir()
    try:
        with serving_other(plan.beside, plan, inside, tell, served, loads=[(plan.load, inside, plan.prompts)]) as other:
            yield other.driven(plan)
    except QualifyError as error:
        error.add_note("the baseline was served beside it; --no-in-turns compares with its load as it was then")
        raise


def parse_beside(plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The load of the baseline's server, measured in turns with the cell's; empty if it was not served."""
    if plan.beside is None:
        return []
    checks = LoadChecks(is_warmed=plan.warms_alike)
    return parse_load(evidence / "load" / result.BESIDE, plan.load, levels_for(plan), plan.beside, checks)


LOAD = LoadStage()
