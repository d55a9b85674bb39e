"""The load stage: the profile's workload, in turns with the baseline's server if that is served too."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_qualify.engine.process import Progress, Tell
from vllm_qualify.errors import QualifyError
from vllm_qualify.evidence.load import client, figures, result
from vllm_qualify.evidence.load.client import Driven, Following
from vllm_qualify.evidence.measurement import Measurement, StageEvidence
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import Served, another
from vllm_qualify.evidence.stages import bench
from vllm_qualify.evidence.stages.stage import Commands, StageKind, comparing_inputs, order_s, server_inputs, start_s
from vllm_qualify.evidence.watched import watched_in
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.workload import Load


def load_stage(
    served: Served, plan: CellPlan, evidence: Path, progress: Progress, following: Following, tell: Tell
) -> StageEvidence:
    """Run vllm bench serve, in turns with the baseline's server if the plan has one.

    Raises:
        QualifyError: as `client.measure`, or the baseline's server does not start.
    """

    def measure(folder: Path) -> Commands:
        return run_load(served, plan, evidence, folder, progress, following, tell)

    return LOAD.run(plan, evidence, measure, bench.bench_tools(plan))


def run_load(
    served: Served, plan: CellPlan, evidence: Path, folder: Path, progress: Progress, following: Following, tell: Tell
) -> Commands:
    """Run the plan's load into its folder below `evidence`, which has what is watched of the server. Raises as `load_stage`."""
    with bench.meanwhile(plan, evidence, folder), _beside(served, plan, folder, tell) as other:
        return client.measure_load(served.driven(plan), plan.load, folder, progress, following, other)


def loads_of(plans: Iterable[tuple[CellPlan, Path]]) -> list[tuple[Load, Path, Path | None]]:
    """The loads of cells, each with its evidence folder, as `serving` takes them."""
    return [(plan.load, evidence / "load", plan.prompts) for plan, evidence in plans]


@contextmanager
def _beside(served: Served, plan: CellPlan, folder: Path, tell: Tell) -> Iterator[Driven | None]:
    """Serve the baseline during the block, with a client of the same program."""
    if plan.beside is None:
        yield None
        return
    inside = folder / result.BESIDE
    inside.mkdir()
    try:
        with another(plan.beside, plan, inside, tell, served, loads=[(plan.load, inside, plan.prompts)]) as other:
            yield other.driven(plan)
    except QualifyError as error:
        error.add_note("the baseline was served beside it; --no-in-turns compares with its load as it was then")
        raise


def parse_beside(plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The load of the baseline's server, measured in turns with the cell's; empty if it was not served."""
    if plan.beside is None:
        return []
    folder, server, name = evidence / "load" / result.BESIDE, plan.beside, plan.beside.served_model_name
    about = (server.kind, server.arguments, None, name)
    return figures.parse_load(folder, plan.load, levels_for(plan), *about, gpus=len(server.gpus), warmed=plan.warms_alike)


def _parse(plan: CellPlan, evidence: Path) -> list[Measurement]:
    folder, server, name = evidence / "load", plan.server, plan.server.served_model_name
    samples = watched_in(folder, evidence / "serve") if plan.watched else None
    about = (server.kind, server.arguments, samples, name)
    return figures.parse_load(folder, plan.load, levels_for(plan), *about, gpus=len(server.gpus), warmed=plan.warms_alike)


def _longest_s(plan: CellPlan) -> float:
    """All repeats, without the time budget: it ends a load only between repeats. In turns, two servers run them.

    Both are warmed up at the same time before.
    """
    on_one_s = bench.load_s(plan.load, plan.load.looks[-1])
    return on_one_s if plan.beside is None else start_s(plan.beside) + order_s(plan.load.time_limit_s) + 2 * on_one_s


def _inputs(plan: CellPlan) -> list[Any]:
    beside = plan.beside and [server_inputs(plan.beside), plan.warms_alike]
    return [bench.load_inputs(plan), beside, *comparing_inputs(plan)]


LOAD = StageKind(
    name="load",
    is_wanted=lambda _: True,
    needs_server=lambda _: True,
    is_timed=True,
    uses_bench=True,
    grows=False,
    settings=lambda plan: {"load": plan.load.model_dump()},
    inputs=_inputs,
    longest_s=_longest_s,
    parse=_parse,
)
