"""The sweep stage: it runs the profile's workload at other levels."""

from pathlib import Path

from vllm_qualify.engine.process import Tell
from vllm_qualify.evidence.load import client, sweep
from vllm_qualify.evidence.measurement import Measurement, StageEvidence
from vllm_qualify.evidence.serving import Served
from vllm_qualify.evidence.stages import bench
from vllm_qualify.evidence.stages.stage import Commands, StageKind, order_s
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.workload import Load


def sweep_stage(served: Served, plan: CellPlan, evidence: Path, tell: Tell) -> StageEvidence:
    """Run the sweep's points, one after another. Raises QualifyError as `client.run`."""

    def measure(folder: Path) -> Commands:
        driven = served.driven(plan)
        commands: Commands = []

        def point(settings: Load, request_rate: float | None, into: Path) -> None:
            tell(f"sweep: {into.name}, {settings.num_prompts} requests")
            commands.append(client.run_repeat(driven, settings, into, 1, bench.silent, request_rate))

        with bench.meanwhile(plan, evidence, folder):
            sweep.measure_sweep(point, sweep_plan(plan), folder)
        return commands

    return SWEEP.run(plan, evidence, measure, bench.bench_tools(plan))


def sweep_plan(plan: CellPlan) -> sweep.SweepPlan:
    """What the sweep of a cell needs. Raises ValueError if the cell has no sweep."""
    if plan.sweep is None:
        raise ValueError("the profile has no sweep")
    return sweep.SweepPlan(
        sweep=plan.sweep,
        load=plan.load,
        most_concurrency=plan.sweep.most_concurrency or plan.server.most_requests or plan.load.max_concurrency,
        gpus=max(1, len(plan.server.gpus)),
        price_usd_gpu_hour=plan.price_usd_gpu_hour,
        kind=plan.server.kind,
        arguments=plan.server.arguments,
        model=plan.server.served_model_name,
        watched=plan.watched,
    )


def _longest_s(plan: CellPlan) -> float:
    """Each point of the curve as often as it may be invalid, and all runs of each search; each run is one repeat."""
    if plan.sweep is None:
        return 0.0
    planned = sweep_plan(plan)
    most_runs = sweep.MOST_INVALID * len(planned.curve) + plan.sweep.most_runs * len(planned.goals)
    return most_runs * order_s(plan.load.time_limit_s)


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    planned = sweep_plan(plan)
    return sweep.sweep_measurements(sweep.parse_sweep(evidence / "sweep", planned), planned)


SWEEP = StageKind(
    name="sweep",
    is_wanted=lambda plan: plan.sweep is not None,
    needs_server=lambda _: True,
    is_timed=True,
    uses_bench=True,
    grows=False,
    settings=lambda plan: {"sweep": plan.sweep.model_dump()} if plan.sweep else {},
    inputs=bench.search_inputs,
    longest_s=_longest_s,
    parse=_parse,
)
