"""The sweep stage: it runs the profile's workload at other levels."""

from pathlib import Path
from typing import Any

from vllm_qualify.engine.bench import no_progress
from vllm_qualify.evidence.load import client, sweep
from vllm_qualify.evidence.load.search import SweepPlan
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.stages.stage import Stage, keep_watched, search_inputs, settled
from vllm_qualify.evidence.stages.world import Commands, World
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.load import Load


class SweepStage(Stage, name="sweep", is_timed=True, uses_bench=True):
    """A curve of throughput against speed, and the highest load that meets an SLO."""

    def inputs(self, plan: CellPlan) -> Any:
        return search_inputs(plan)

    def measure(self, world: World, folder: Path) -> Commands:
        driven, commands = world.served.driven(world.plan), Commands()

        def measure_point(settings: Load, into: Path) -> None:
            world.tell_often(f"sweep: {into.name}, {settings.num_prompts} requests")
            commands.append(client.run_repeat(driven, settings, into, 1, no_progress))

        with keep_watched(world.plan, world.evidence, folder):
            sweep.measure_sweep(measure_point, sweep_plan(world.plan), folder)
        return commands

    def parse(self, plan: CellPlan, evidence: Path) -> list[Measurement]:
        planned = sweep_plan(plan)
        return sweep.sweep_measurements(sweep.parse_sweep(evidence / "sweep", planned), planned)


def sweep_plan(plan: CellPlan) -> SweepPlan:
    """What the sweep of a cell needs. Raises ValueError if the cell has no sweep."""
    asked, price = settled(plan.sweep, "the profile has no sweep"), plan.price_usd_gpu_hour
    return SweepPlan(sweep=asked, load=plan.load, server=plan.server, price_usd_gpu_hour=price, watched=plan.watched)


SWEEP = SweepStage()
