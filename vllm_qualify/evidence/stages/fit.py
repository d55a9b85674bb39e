"""The fit stage: it finds on the machine what a profile leaves open, before the cell is planned with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_qualify.drift.question import Question
from vllm_qualify.engine.bench import no_progress
from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import HostError
from vllm_qualify.evidence import startup
from vllm_qualify.evidence.load import client, figures
from vllm_qualify.evidence.load.fitting import FIT_RESULT, SEQUENCES, Fitting, Started, Tried, block_tok
from vllm_qualify.evidence.load.problems import preemptions
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, in_words
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import Served, serving_other, watching_server
from vllm_qualify.evidence.stages.stage import Stage, search_inputs
from vllm_qualify.evidence.stages.world import Commands
from vllm_qualify.evidence.startup import KvCache
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.metrics import OUTPUT_THROUGHPUT


class FitStage(Stage, name="fit", is_timed=False, uses_bench=True, on_server=False):
    """What a profile leaves open. It has no measurements: the plan has what it found."""

    def inputs(self, plan: CellPlan) -> Any:
        return search_inputs(plan)

    def find(self, plan: CellPlan, evidence: Path, tell: Tell, question: Question | None = None) -> StageEvidence:
        """Find what is open, and write it to `fit/found.json`. Nothing is measured before `question` is answered.

        Raises QualifyError if nothing fits, the server fails for another reason than its memory, or the recipe is refused.
        """

        def measure(folder: Path) -> Commands:
            @contextmanager
            def attempt(tried: CellPlan, into: Path) -> Iterator[Started]:
                with serving_other(tried.server, tried, into, tell, question=question) as served:
                    yield Started(
                        kv_cache=_read_kv_cache(served.server, into),
                        throughput=lambda: _measure_throughput(served, tried, into, tell),
                        preemptions=lambda: _count_preemptions(served, tried, into, tell),
                    )

            fitted = Fitting(plan, attempt, folder).find()
            (folder / FIT_RESULT).write_text(fitted.model_dump_json(indent=2))
            return []

        return self.record(plan, evidence, measure)

    def parse(self, _plan: CellPlan, _evidence: Path) -> list[Measurement]:
        return []


def _read_kv_cache(server: Server, folder: Path) -> KvCache | None:
    """The KV cache by the log in the folder, and its block size by /metrics. A copy of that page stays in the folder."""
    page = server.metrics_page()
    (folder / "metrics.txt").write_text(page)
    cache = startup.kv_cache((folder / "server.log").read_text(errors="replace"))
    return cache.model_copy(update={"block_tok": block_tok(page)}) if cache else None


def _measure_throughput(served: Served, plan: CellPlan, folder: Path, tell: Tell) -> Measurement:
    """The output throughput over the planned repeats. Requests may wait in a queue: the comparison includes what that costs."""
    settings, inside = _run_load(served, plan, plan.load.repeats, folder, tell)
    arguments = {name: value for name, value in plan.server.arguments.items() if name != SEQUENCES}
    server = plan.server.model_copy(update={"arguments": arguments})
    rows = figures.parse_load(inside, settings, levels_for(plan), server, figures.LoadChecks(watched=inside))
    return next(row for row in rows if row.metric == OUTPUT_THROUGHPUT)


def _count_preemptions(served: Served, plan: CellPlan, folder: Path, tell: Tell) -> int:
    """The preemptions of one repeat. Raises HostError if the server does not count them, or QualifyError."""
    _, inside = _run_load(served, plan, 1, folder, tell)
    try:
        return preemptions(inside, 1)
    except UNUSABLE as error:
        problem = f"it is not known whether requests were preempted: {in_words(error)}"
        raise HostError(problem, "see the server's log, or give max-num-seqs under 'server'", f"fit/{folder.name}") from error


def _run_load(served: Served, plan: CellPlan, repeats: int, folder: Path, tell: Tell) -> tuple[Load, Path]:
    """Run the plan's load with so many repeats and no budget: its settings, and its folder, with what was watched meanwhile."""
    settings = plan.load.model_copy(update={"repeats": repeats, "most_repeats": repeats, "time_budget_s": None})
    inside = folder / "load"
    inside.mkdir()
    tell(f"fit: measuring {folder.name}")
    with watching_server(served.server, plan, inside):
        client.measure_load(served.driven(plan), settings, inside, no_progress, client.UNFOLLOWED)
    return settings, inside


def fit_result(evidence: Path) -> Tried:
    """What the fit found. Raises OSError or ValueError if no fit is finished."""
    return Tried.model_validate_json((evidence / "fit" / FIT_RESULT).read_bytes())


FIT = FitStage()
