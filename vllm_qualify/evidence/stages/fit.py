"""The fit stage: it finds on the machine what a profile leaves open, before the cell is planned with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_qualify.drift.question import Question
from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import HostError
from vllm_qualify.evidence import startup
from vllm_qualify.evidence.load import client, figures
from vllm_qualify.evidence.load.fitting import FIT_RESULT, MOST_CONFIRMATIONS, SEQUENCES, Fitting, Started, Tried, block_tok
from vllm_qualify.evidence.load.problems import preemptions
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, in_words
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.evidence.serving import Served, another, watched
from vllm_qualify.evidence.stages import bench
from vllm_qualify.evidence.stages.stage import Commands, StageKind, start_s
from vllm_qualify.evidence.startup import KvCache
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.workload import Load


def fit_stage(plan: CellPlan, evidence: Path, tell: Tell, question: Question | None = None) -> StageEvidence:
    """Find what the profile leaves open, and write it to `fit/found.json`. Nothing is measured before `question` is answered.

    Raises:
        QualifyError: as `Fitting.find`, or as `Question.ask`.
    """

    def measure(folder: Path) -> Commands:
        @contextmanager
        def attempt(tried: CellPlan, into: Path) -> Iterator[Started]:
            with another(tried.server, tried, into, tell, question=question) as served:
                yield Started(
                    kv_cache=_kv_cache(served.server, into),
                    throughput=lambda: _throughput(served, tried, into, tell),
                    preemptions=lambda: _preemptions(served, tried, into, tell),
                )

        fitted = Fitting(plan, attempt, folder).find()
        (folder / FIT_RESULT).write_text(fitted.model_dump_json(indent=2))
        return []

    return FIT.run(plan, evidence, measure, bench.bench_tools(plan))


def _kv_cache(server: Server, folder: Path) -> KvCache | None:
    """The KV cache by the log in the folder, and its block size by /metrics. A copy of that page stays in the folder."""
    page = server.metrics_page()
    (folder / "metrics.txt").write_text(page)
    cache = startup.kv_cache((folder / "server.log").read_text(errors="replace"))
    return cache.model_copy(update={"block_tok": block_tok(page)}) if cache else None


def _throughput(served: Served, plan: CellPlan, folder: Path, tell: Tell) -> Measurement:
    """The output throughput over the planned repeats. Requests may wait in a queue: the comparison includes what that costs."""
    settings = _repeated(plan, plan.load.repeats)
    inside = _loaded(served, plan, settings, folder, tell)
    arguments = {name: value for name, value in plan.server.arguments.items() if name != SEQUENCES}
    server, levels = plan.server, levels_for(plan)
    measurements = figures.parse_load(inside, settings, levels, server.kind, arguments, inside, server.served_model_name)
    (throughput,) = (measurement for measurement in measurements if measurement.metric == figures.OUTPUT)
    return throughput


def _preemptions(served: Served, plan: CellPlan, folder: Path, tell: Tell) -> int:
    """The preemptions of one repeat. Raises HostError if the server does not count them, or as `client.measure`."""
    inside = _loaded(served, plan, _repeated(plan, 1), folder, tell)
    try:
        return preemptions(inside, 1)
    except UNUSABLE as error:
        problem = f"it is not known whether requests were preempted: {in_words(error)}"
        raise HostError(problem, "see the server's log, or give max-num-seqs under 'server'", f"fit/{folder.name}") from error


def _repeated(plan: CellPlan, repeats: int) -> Load:
    """The plan's load for a try, with this number of repeats and no budget."""
    return plan.load.model_copy(update={"repeats": repeats, "most_repeats": repeats, "time_budget_s": None})


def _loaded(served: Served, plan: CellPlan, settings: Load, folder: Path, tell: Tell) -> Path:
    """Run the load, and return the folder with its files and what was watched meanwhile."""
    inside = folder / "load"
    inside.mkdir()
    tell(f"fit: measuring {folder.name}")
    with watched(served.server, plan, inside):
        client.measure_load(served.driven(plan), settings, inside, bench.silent, client.UNFOLLOWED)
    return inside


def _longest_s(plan: CellPlan) -> float:
    """A start for each size, and one with a load for each number of sequences or tokens.

    Without sizes, the first number of sequences follows from a start of its own.
    """
    if plan.fit is None:
        return 0.0
    numbers, tokens = MOST_CONFIRMATIONS if plan.fit.max_num_seqs else 0, len(plan.fit.max_num_batched_tokens)
    sizes = max(len(plan.fit.tensor_parallel_sizes), min(1, numbers))
    loads_s = numbers * bench.load_s(plan.load, 1) + tokens * bench.load_s(plan.load, plan.load.repeats)
    return (sizes + numbers + tokens) * start_s(plan.server) + loads_s


def fit_result(evidence: Path) -> Tried:
    """What the fit found. Raises OSError or ValueError if no fit is finished."""
    return Tried.model_validate_json((evidence / "fit" / FIT_RESULT).read_bytes())


FIT = StageKind(
    name="fit",
    is_wanted=lambda plan: plan.fit is not None,
    needs_server=lambda _: False,
    is_timed=False,
    uses_bench=True,
    grows=False,
    settings=lambda plan: {"fit": plan.fit.model_dump()} if plan.fit else {},
    inputs=bench.search_inputs,
    longest_s=_longest_s,
    parse=lambda _plan, _evidence: [],
)
