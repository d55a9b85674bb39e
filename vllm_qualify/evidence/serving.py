"""A server with the tools that measure it. All start together, so that a GPU waits for none of them.

While the server starts, the engine may still be asked whether it takes the recipe. A server is used only after it has said so.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vllm_qualify.drift.question import Question
from vllm_qualify.engine import bench as benches
from vllm_qualify.engine import watch
from vllm_qualify.engine.bench import Bench
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.process import Running, Tell
from vllm_qualify.engine.server import STAGE, Client, Server, ServerPlan, Starting
from vllm_qualify.engine.server_start import await_ready, launch
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES, steady_s
from vllm_qualify.errors import QualifyError, writing
from vllm_qualify.evidence.accuracy.lm_eval_process import LmEval, running_lm_eval
from vllm_qualify.evidence.load.client import Driven, driven_by, prepare_prompts
from vllm_qualify.evidence.request_limits import picture_limits
from vllm_qualify.plan.cell import CellPlan
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.values import Frozen

BENCH_LOG, LM_EVAL, LAUNCHED, ENDED = "bench.log", "lm-eval", "launched_at", "ended_at"
LAUNCHED_BY_CLOCK = "launched_by_clock"
# Twice as often as the reader of the samples needs, because a busy server misses some.
EVERY_S = 0.5


class Served(Frozen):
    """A cell's server with its tools: only addresses, ids and paths, no handle. `lm_eval` is by task.

    `bench` is None where nothing is loaded.
    """

    server: Server
    bench: Bench | None = None
    lm_eval: dict[str, LmEval] = {}

    def driven(self, plan: CellPlan) -> Driven:
        if self.bench is None:
            raise ValueError("this server is not loaded, so no bench was started")
        return driven_by(self.server, self.bench, plan.load, plan.prompts)


def launched_by_clock(folder: Path) -> float:
    """When a server was launched, by the clock that its log has: in s since 1970. Raises one of UNUSABLE."""
    return float((folder / LAUNCHED_BY_CLOCK).read_text())


@contextmanager
def serving(
    plan: CellPlan,
    folder: Path,
    tell: Tell,
    port: int | None = None,
    question: Question | None = None,
    loads: Sequence[tuple[Load, Path, Path | None]] = (),
    *,
    is_loaded: bool = True,
) -> Iterator[Served]:
    """Serve and watch the cell's server during the block. Its tools start while it loads; bench only if it `is_loaded`.

    All files of the server, of the tools and of what is watched go to `folder`. The block begins when `question` is answered.
    `loads` are the loads that will be measured, as `client.prepare_prompts` takes them: their prompts are made meanwhile.
    Raises QualifyError: as `launch` and `await_ready`, or lm-eval refuses a task, or as `Question.ask`.
    """
    with ExitStack() as stack:
        starting = stack.enter_context(_launch_server(plan.server, folder, port, plan.labels))
        stack.enter_context(_machine_watched(starting.process, plan, folder))
        bench = None
        if is_loaded:
            client = stack.enter_context(_start_client(starting, plan.server, plan, folder, plan.labels))
            bench = stack.enter_context(benches.running_bench(client, folder / BENCH_LOG))
            prepare_prompts(bench, plan.server.served_model_name, loads)
        pictures = picture_limits(plan.server, plan.cell.release.engine.version)
        lm_eval = {
            task.name: stack.enter_context(
                running_lm_eval(starting, plan.server.served_model_name, task, folder / LM_EVAL / task.name, pictures)
            )
            for task in plan.accuracy
        }

        def check() -> None:
            for each in lm_eval.values():
                each.check()

        server = _await_server(plan.server, starting, tell, question, check)
        stack.enter_context(_metrics_watched(server, plan, folder))
        yield Served(server=server, bench=bench, lm_eval=lm_eval)


def see_the_same(folder: Path, other: Path) -> None:
    """Link the files of what is watched in `folder` into `other`, another cell's: both get later samples. Raises HostError."""
    with writing(STAGE):
        for name in (SCRAPES, HOST_SAMPLES):
            (other / name).hardlink_to(folder / name)


def _await_server(
    plan: ServerPlan, starting: Starting, tell: Tell, question: Question | None, check: Callable[[], None] = lambda: None
) -> Server:
    """Wait until the server answers and the engine has said that it takes the recipe. Raises as `serving`."""
    if question is None:
        return await_ready(plan, starting, tell, check)

    def check_all() -> None:
        check()
        question.check()

    try:
        server = await_ready(plan, starting, tell, check_all)
    except QualifyError as failure:
        if failure.place == STAGE:
            question.explain(failure)
        raise
    question.wait(server.check_alive)
    return server


@contextmanager
def serving_other(
    other: ServerPlan,
    plan: CellPlan,
    folder: Path,
    tell: Tell,
    like: Served | None = None,
    question: Question | None = None,
    loads: Sequence[tuple[Load, Path, Path | None]] = (),
) -> Iterator[Served]:
    """Serve another server of the cell with a bench only, whose program is that of `like`. The rest is as in `serving`."""
    labels = plan.labels | {"run": f"{plan.run_id}-{folder.name}"}
    with ExitStack() as stack:
        starting = stack.enter_context(_launch_server(other, folder, None, labels))
        client = stack.enter_context(_start_client(starting, other, plan, folder, labels))
        if like:
            # Processes then measure both servers alike. Containers use one name for both.
            ours = like.server.client
            client = client.model_copy(update={"program": ours.program, "python": ours.python})
        bench = stack.enter_context(benches.running_bench(client, folder / BENCH_LOG))
        prepare_prompts(bench, other.served_model_name, loads)
        server = _await_server(other, starting, tell, question)
        tell(f"serving{' another server beside it' if like else ''} at {server.url} after {server.startup_s:.0f} s")
        yield Served(server=server, bench=bench)


@contextmanager
def serving_alone(plan: ServerPlan, folder: Path, labels: dict[str, str], tell: Tell) -> Iterator[Server]:
    """Start a server alone. Raises as `serving`."""
    with _launch_server(plan, folder, None, labels) as starting:
        yield await_ready(plan, starting, tell)


@contextmanager
def _launch_server(plan: ServerPlan, folder: Path, port: int | None, labels: dict[str, str]) -> Iterator[Starting]:
    with writing(STAGE):
        (folder / LAUNCHED).write_text(f"{steady_s():.3f}\n")
        # The log of the server has the machine's own time.
        (folder / LAUNCHED_BY_CLOCK).write_text(f"{time.time():.3f}\n")
    with launch(plan, folder, port, labels) as starting:
        yield starting
    with writing(STAGE):
        (folder / ENDED).write_text(f"{steady_s():.3f}\n")


@contextmanager
def _start_client(starting: Starting, of: ServerPlan, plan: CellPlan, folder: Path, labels: dict[str, str]) -> Iterator[Client]:
    """The client next to the server, or in a container of the client image if the plan names one."""
    if plan.client_image is None:
        yield starting.client
    else:
        with launcher_of(of.engine).client_in(plan.client_image, of, starting, folder, labels) as client:
            yield client


@contextmanager
def watching_server(server: Server, plan: CellPlan, folder: Path) -> Iterator[None]:
    """Watch the plan's server and the machine into `folder` during the block. Raises HostError if that cannot be written."""
    with _machine_watched(server.process, plan, folder), _metrics_watched(server, plan, folder):
        yield


@contextmanager
def _machine_watched(process: Running, plan: CellPlan, folder: Path) -> Iterator[None]:
    with writing(STAGE):
        (folder / HOST_SAMPLES).touch()
    with watch.watching_machine(folder, {"server": process.processes}, plan.server.gpus, EVERY_S):
        yield


@contextmanager
def _metrics_watched(server: Server, plan: CellPlan, folder: Path) -> Iterator[None]:
    families = watch.metric_families(plan.server.engine_kind, plan.cell.release.engine.version)
    with writing(STAGE):
        (folder / SCRAPES).touch()
    with watch.watching_server(f"{server.url}{server.metrics_path}", families, folder, EVERY_S):
        yield
