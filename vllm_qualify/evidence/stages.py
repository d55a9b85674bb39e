"""The stages of a qualification: each measures into its own folder, and is parsed from there, now or again later."""

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.engine.gpu import Fingerprint
from vllm_qualify.engine.launch import read_machine
from vllm_qualify.engine.plan import CellPlan, TaskPlan
from vllm_qualify.engine.process import Progress
from vllm_qualify.engine.question import Question
from vllm_qualify.engine.server import Server
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES
from vllm_qualify.errors import HostError, QualifyError, writing
from vllm_qualify.evidence import accuracy, answers, idle, load, network, smoke, speculation, startup, sweep
from vllm_qualify.evidence.fitting import FOUND, SEQUENCES, Fitting, Started, Tried, block_tok
from vllm_qualify.evidence.idle import Idle
from vllm_qualify.evidence.load import Driven, Following
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, StageEvidence, describe, in_words, invalid, valid
from vllm_qualify.evidence.sequential import Levels, levels_of
from vllm_qualify.evidence.serving import ENDED, LAUNCHED, Served, Tell, another, started, watched
from vllm_qualify.evidence.startup import KvCache
from vllm_qualify.evidence.watched import WATCHED, read_host, watched_in
from vllm_qualify.recipe.metrics import GPU_IDLE, METRICS, NCCL_INFINIBAND, SAME_TEXT, SPEEDUP, SPEEDUP_BATCH1, Stage
from vllm_qualify.recipe.model import Gate, Load
from vllm_qualify.secrets import redact_files

Commands = list[list[str]]
MACHINE = "machine.json"
WARM, WARM_START, NO_ROOM = "warm", "startup_warm_s", "no-room.txt"
# What both servers of a pair are asked besides the smoke prompt.
GREEDY_PROMPTS, GREEDY_TOKENS = 8, 64


def smoke_stage(served: Served, plan: CellPlan, evidence: Path) -> StageEvidence:
    """Ask the fixed prompt. Raises ReleaseError if the server has ended."""

    def measure(folder: Path) -> Commands:
        smoke.measure(served.server, plan.smoke, folder)
        return []

    return _run("smoke", plan, evidence, measure, {})


def baseline_stage(plan: CellPlan, evidence: Path, bring: Callable[[Path], None]) -> StageEvidence:
    """What `bring` puts into the stage's folder: the evidence of the run that this one is compared with."""

    def measure(folder: Path) -> Commands:
        bring(folder)
        return []

    return _run("baseline", plan, evidence, measure, {})


class Asking(NamedTuple):
    """How long a task's questions are asked: at most `repetitions` times, and until nothing more could change a verdict."""

    repetitions: Callable[[TaskPlan], int]
    is_decided: Callable[[TaskPlan], bool]


def accuracy_stage(served: Served, plan: CellPlan, evidence: Path, progress: Progress, asking: Asking) -> StageEvidence:
    """Ask lm-eval's tasks, one after another.

    Raises:
        QualifyError: as `accuracy.asking` and its `ask` do.
    """

    def measure(folder: Path) -> Commands:
        for task in plan.accuracy:
            _ask(served, task, folder / task.name, progress, asking)
        return [served.lm_eval[task.name].command for task in plan.accuracy]

    return _run("accuracy", plan, evidence, measure, accuracy.tools())


def _ask(served: Served, task: TaskPlan, folder: Path, progress: Progress, asking: Asking) -> None:
    repetitions = asking.repetitions(task)
    lm_eval = accuracy.asking(served.server, served.lm_eval[task.name], folder, progress)
    for step in lm_eval.steps:
        if step.repetition > repetitions:
            break
        lm_eval.ask(step)
        if asking.is_decided(task):
            break
    try:
        answers.write(answers.read(folder, task), folder / accuracy.ANSWERS)
    except UNUSABLE as error:
        # The measurements say so too; nothing can be compared with these answers.
        (folder / "unusable.txt").write_text(f"{in_words(error)}\n")


def asks_alike(ours: CellPlan, theirs: CellPlan) -> bool:
    """Whether the answers of one cell are those that the other would be given, asked as often."""
    return (
        (ours.server, ours.accuracy, ours.baseline) == (theirs.server, theirs.accuracy, theirs.baseline)
        and _scores(ours) == _scores(theirs)
        and levels_of(ours.judged) == levels_of(theirs.judged)
    )


def _scores(plan: CellPlan) -> list[tuple[Gate, list[date]]]:
    """The gates on scores, each with the last days of its waivers: until then asking does not wait for it."""
    gates = [gate for gate in plan.judged if METRICS[gate.metric].stage == "accuracy"]
    return [(gate, [waiver.expires for waiver in plan.waivers if waiver.gate == gate.label]) for gate in gates]


def taken_over(stage: Stage, plan: CellPlan, evidence: Path, other: Path, finished: list[StageEvidence]) -> StageEvidence:
    """A stage of another cell, whose evidence is the folder `other`, as this one's own."""
    (theirs,) = (each for each in finished if each.stage == stage)
    with writing(stage):
        shutil.copytree(other / stage, evidence / stage)
    return theirs.model_copy(update={"measurements": parse(stage, plan, evidence)})


def load_stage(
    served: Served, plan: CellPlan, evidence: Path, progress: Progress, following: Following, tell: Tell
) -> StageEvidence:
    """Run vllm bench serve, in turns with the baseline's server where the plan has it.

    Raises:
        QualifyError: as `load.measure`, or the baseline's server does not start.
    """

    def measure(folder: Path) -> Commands:
        with _meanwhile(plan, evidence, folder), _beside(served, plan, folder, tell) as other:
            return load.measure(served.driven(plan), plan.load, folder, progress, following, other)

    return _run("load", plan, evidence, measure, _bench_tools(plan))


def loads_of(plans: Iterable[tuple[CellPlan, Path]]) -> list[tuple[Load, Path, Path | None]]:
    """The loads of cells, each with its evidence folder, as `serving` takes them."""
    return [(plan.load, evidence / "load", plan.prompts) for plan, evidence in plans]


def _bench_tools(plan: CellPlan) -> dict[str, str]:
    engine = plan.client or plan.cell.release.engine
    return {"vllm bench serve": engine.version, "client": engine.launcher if engine.image is None else engine.image.reference}


@contextmanager
def _beside(served: Served, plan: CellPlan, folder: Path, tell: Tell) -> Iterator[Driven | None]:
    """The baseline's server for the length of the block, and the same client for it."""
    if plan.beside is None:
        yield None
        return
    inside = folder / load.BESIDE
    inside.mkdir()
    try:
        with another(plan.beside, plan, inside, tell, served, loads=[(plan.load, inside, plan.prompts)]) as other:
            yield other.driven(plan)
    except QualifyError as error:
        error.add_note("the baseline was served beside it; --no-in-turns compares with its load as it was then")
        raise


@contextmanager
def _meanwhile(plan: CellPlan, evidence: Path, folder: Path) -> Iterator[None]:
    """What is watched during the block is in the stage's folder too: it can be judged without the server's then."""
    if not plan.watched:
        yield
        return
    watched = [evidence / "serve" / name for name in (SCRAPES, HOST_SAMPLES)]
    begins = [path.stat().st_size for path in watched]
    yield
    inside = folder / WATCHED
    inside.mkdir()
    for path, begin in zip(watched, begins, strict=True):
        (inside / path.name).write_bytes(_whole_lines(path.read_bytes()[begin:]))


def _whole_lines(text: bytes) -> bytes:
    """Without the one that is still being written."""
    return text[: text.rfind(b"\n") + 1]


def sweep_stage(served: Served, plan: CellPlan, evidence: Path, tell: Tell) -> StageEvidence:
    """Run the sweep's points, one after another. Raises QualifyError as `load.run`."""

    def measure(folder: Path) -> Commands:
        driven = served.driven(plan)
        commands: Commands = []

        def run(settings: Load, request_rate: float | None, into: Path) -> None:
            tell(f"sweep: {into.name}, {settings.num_prompts} requests")
            commands.append(load.run(driven, settings, into, 1, _silent, request_rate))

        with _meanwhile(plan, evidence, folder):
            sweep.measure(run, sweep_plan(plan), folder)
        return commands

    return _run("sweep", plan, evidence, measure, _bench_tools(plan))


def _silent(_done: int, _total: int) -> None:
    """What is told is each run, not its requests."""


def sweep_plan(plan: CellPlan) -> sweep.Plan:
    """What the sweep of a cell needs. Raises ValueError for a cell without one."""
    if plan.sweep is None:
        raise ValueError("the profile has no sweep")
    return sweep.Plan(
        sweep=plan.sweep,
        load=plan.load,
        most_concurrency=plan.sweep.most_concurrency or plan.server.most_requests or plan.load.max_concurrency,
        gpus=max(1, len(plan.server.gpus)),
        price_usd_gpu_hour=plan.price_usd_gpu_hour,
        kind=plan.server.kind,
        arguments=plan.server.arguments,
        watched=plan.watched,
    )


def speculation_stage(served: Served, plan: CellPlan, evidence: Path, tell: Tell) -> StageEvidence:
    """Measure the server beside the same one without its speculative decoding, where the machine has room for both.

    Raises:
        QualifyError: the other server does not start, or as `load.run`.
    """

    def measure(folder: Path) -> Commands:
        if plan.undrafted is None:
            (folder / NO_ROOM).write_text("both servers need more GPUs than this machine has\n")
            return []
        commands: Commands = []
        inside = folder / "undrafted"
        inside.mkdir()
        with another(plan.undrafted, plan, inside, tell, served) as other:
            sides = {each.server.url: each.driven(plan) for each in (served, other)}

            def run(server: Server, settings: Load, into: Path, repeat: int) -> None:
                tell(f"speculation: {into.relative_to(folder)}, repeat {repeat}")
                commands.append(load.run(sides[server.url], settings, into, repeat, _silent))

            servers = speculation.Pair(served.server, other.server)
            speculation.measure(servers, _greedy(plan, evidence), plan.load, folder, run)
        return commands

    return _run("speculation", plan, evidence, measure, _bench_tools(plan))


def _greedy(plan: CellPlan, evidence: Path) -> speculation.Greedy:
    """The smoke prompt, and the first prompts of the accuracy's tasks that generate."""
    asked = [plan.smoke.prompt]
    for task in plan.accuracy:
        asked += accuracy.prompts(evidence / "accuracy" / task.name, GREEDY_PROMPTS)
    return speculation.Greedy(prompts=asked[: 1 + GREEDY_PROMPTS], max_tokens=GREEDY_TOKENS)


def fit_stage(plan: CellPlan, evidence: Path, tell: Tell, question: Question | None = None) -> StageEvidence:
    """Find what the profile leaves open; `fit/found.json` has it. Nothing is measured before `question` is answered.

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

        found = Fitting(plan, attempt, folder).find()
        (folder / FOUND).write_text(found.model_dump_json(indent=2))
        return []

    return _run("fit", plan, evidence, measure, _bench_tools(plan))


def _kv_cache(server: Server, folder: Path) -> KvCache | None:
    """By the log in the folder, and its block by /metrics, of which a copy is left there."""
    page = server.metrics_page()
    (folder / "metrics.txt").write_text(page)
    found = startup.kv_cache((folder / "server.log").read_text(errors="replace"))
    return found.model_copy(update={"block_tok": block_tok(page)}) if found else None


def _throughput(served: Served, plan: CellPlan, folder: Path, tell: Tell) -> Measurement:
    """Over the planned repeats. Requests may wait: how much that costs is compared."""
    settings = _repeated(plan, plan.load.repeats)
    inside = _loaded(served, plan, settings, folder, tell)
    arguments = {name: value for name, value in plan.server.arguments.items() if name != SEQUENCES}
    found = load.parse(inside, settings, levels_of(plan.judged), plan.server.kind, arguments, inside)
    (throughput,) = (measurement for measurement in found if measurement.metric == load.OUTPUT)
    return throughput


def _preemptions(served: Served, plan: CellPlan, folder: Path, tell: Tell) -> int:
    """Of one repeat. Raises HostError where the server does not tell them, or as `load.measure`."""
    inside = _loaded(served, plan, _repeated(plan, 1), folder, tell)
    try:
        return load.preemptions(inside, 1)
    except UNUSABLE as error:
        problem = f"nobody knows whether requests were preempted: {in_words(error)}"
        raise HostError(problem, "see the server's log, or give max-num-seqs under 'server'", f"fit/{folder.name}") from error


def _repeated(plan: CellPlan, repeats: int) -> Load:
    """The plan's load for a try, which has so many repeats and no budget."""
    return plan.load.model_copy(update={"repeats": repeats, "most_repeats": repeats, "time_budget_s": None})


def _loaded(served: Served, plan: CellPlan, settings: Load, folder: Path, tell: Tell) -> Path:
    """Where the load's files are, with what was watched meanwhile."""
    inside = folder / "load"
    inside.mkdir()
    tell(f"fit: measuring {folder.name}")
    with watched(served.server, plan, inside):
        load.measure(served.driven(plan), settings, inside, _silent, load.UNFOLLOWED)
    return inside


def found_by_fit(evidence: Path) -> Tried:
    """Raises OSError or ValueError without a finished fit."""
    return Tried.model_validate_json((evidence / "fit" / FOUND).read_bytes())


def serve_stage(server: Server, plan: CellPlan, evidence: Path, started_at: datetime, folder: Path) -> StageEvidence:
    """What the server itself left: its config file, its log, its start-up time and what was watched.

    `folder` has it, of this cell or of another that the server served too. For a server that has been stopped.
    """
    held_s = (datetime.now(UTC) - started_at).total_seconds()
    with writing("serve"):
        (folder / "startup_s").write_text(f"{server.startup_s:.3f}\n")
        redact_files(folder)
        if folder != evidence / "serve":
            # With a copy in place of what was only linked to.
            shutil.rmtree(evidence / "serve")
            shutil.copytree(folder, evidence / "serve")
    return _evidence("serve", plan, evidence, started_at, held_s, [server.command], plan.cell.release.engine.packages)


def start_again(plan: CellPlan, folder: Path, tell: Tell) -> None:
    """As often as the plan measures warm starts; each into a folder `warm-N` of the serve stage. Raises QualifyError."""
    for number in range(1, plan.warm_starts + 1):
        inside = folder / f"{WARM}-{number}"
        with writing("serve"):
            inside.mkdir()
        with started(plan.server, inside, plan.labels, tell) as server, writing("serve"):
            (inside / "startup_s").write_text(f"{server.startup_s:.3f}\n")
        tell(f"warm start {number}: {server.startup_s:.1f} s")


def stage_folder(evidence: Path, stage: Stage) -> Path:
    """The stage's folder, made on first use.

    Raises:
        HostError: it cannot be made.
    """
    folder = evidence / stage
    with writing(stage):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def parse(stage: Stage, plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The measurements of a stage from its files alone: the same now and at any later judging."""
    measured_on, problem = _measured_on(evidence / stage, plan)
    return [_on(measured_on, problem, measurement) for measurement in parse_unfinished(stage, plan, evidence)]


def _measured_on(folder: Path, plan: CellPlan) -> tuple[str, str | None]:
    """The fingerprint of the machine that measured, and why its measurements do not count."""
    try:
        found = Fingerprint.model_validate_json((folder / MACHINE).read_bytes()).id
    except UNUSABLE as error:
        return "", f"nobody knows which machine measured: {in_words(error)}"
    wanted = plan.fingerprint.id
    return found, None if found == wanted else f"measured on {found}, and planned for {wanted}"


def _on(measured_on: str, problem: str | None, found: Measurement) -> Measurement:
    if problem and found.invalid_because is None:
        found = invalid(found.metric, problem, found.source, task=found.task, filter=found.filter)
    return found.model_copy(update={"fingerprint": measured_on})


def parse_unfinished(stage: Stage, plan: CellPlan, evidence: Path) -> list[Measurement]:
    """The measurements of a stage that may still go on, of which nobody has recorded yet on which machine it was."""
    folder, levels = evidence / stage, levels_of(plan.judged)
    if stage == "smoke":
        return smoke.parse(folder, plan.smoke, plan.server.served_model_name, plan.smoke_golden)
    if stage == "accuracy":
        return [found for task in plan.accuracy for found in accuracy.parse(folder / task.name, task, levels)]
    if stage == "load":
        samples = watched_in(folder, evidence / "serve") if plan.watched else None
        return load.parse(folder, plan.load, levels, plan.server.kind, plan.server.arguments, samples)
    if stage == "sweep":
        planned = sweep_plan(plan)
        return sweep.measurements(sweep.parse(folder, planned), planned)
    if stage == "speculation":
        return _speculation(folder, plan, levels)
    if stage in ("baseline", "fit"):
        return []
    return [*_startups(folder, plan), *_idle_share(folder, plan), *([_network(folder)] if _asks_for_infiniband(plan) else [])]


def _speculation(folder: Path, plan: CellPlan, levels: Levels) -> list[Measurement]:
    if plan.undrafted is None:
        because = "the machine has no room for the same server without speculative decoding beside it: use one with more GPUs"
        return [invalid(metric, because, f"speculation/{NO_ROOM}") for metric in (SPEEDUP, SPEEDUP_BATCH1, SAME_TEXT)]
    return speculation.parse(folder, plan.load, levels, plan.server)


def _asks_for_infiniband(plan: CellPlan) -> bool:
    return any(gate.metric == NCCL_INFINIBAND for gate in plan.gates)


def _network(folder: Path) -> Measurement:
    source = "serve/server.log"
    try:
        return network.infiniband((folder / "server.log").read_text(errors="replace"), source)
    except UNUSABLE as error:
        return invalid(NCCL_INFINIBAND, f"no usable log: {in_words(error)}", source)


def _startups(folder: Path, plan: CellPlan) -> list[Measurement]:
    """The whole of the start, its parts where the log tells them, and the warm starts."""
    source = "serve/startup_s"
    try:
        whole_s = float((folder / "startup_s").read_text())
        found = [valid("startup_s", whole_s, source, sample_count=1), *_parts(folder, plan, whole_s)]
    except UNUSABLE as error:
        found = [invalid("startup_s", f"no usable start-up time: {in_words(error)}", source)]
    return [*found, *([_warm(folder, plan)] if plan.warm_starts else [])]


def _parts(folder: Path, plan: CellPlan, whole_s: float) -> list[Measurement]:
    wording = plan.server.engine_kind.start_log
    if wording is None or not (folder / LAUNCHED).exists():
        return []
    launched = float((folder / LAUNCHED).read_text())
    log = (folder / "server.log").read_text(errors="replace")
    parts = startup.startup(log, whole_s, launched, plan.pulled_s, wording=wording)
    return [found for found in startup.measurements(parts, "serve/server.log") if found.metric != WARM_START]


def _idle_share(folder: Path, plan: CellPlan) -> list[Measurement]:
    source = f"serve/{HOST_SAMPLES}"
    try:
        found = idle_gpus(folder, plan)
    except UNUSABLE as error:
        return [invalid(GPU_IDLE, f"nobody knows how long GPUs idled: {in_words(error)}", source)]
    return [] if found is None else [idle.measurement(found, source)]


def idle_gpus(folder: Path, plan: CellPlan) -> Idle | None:
    """How long the server's GPUs idled, by the files of its stage. Raises one of UNUSABLE.

    None without GPUs, and for a run of a version that did not record when it ended.
    """
    if not plan.server.gpus or not (folder / ENDED).exists():
        return None
    launched, startup_s, ended = (_seconds_in(folder / name) for name in (LAUNCHED, "startup_s", ENDED))
    return idle.idle(read_host(folder), plan.server.gpus, launched, launched + startup_s, ended)


def _seconds_in(path: Path) -> float:
    """Raises one of UNUSABLE."""
    if not math.isfinite(seconds := float(path.read_text())):
        raise ValueError(f"{path.name}: {seconds} is no time")
    return seconds


def _warm(folder: Path, plan: CellPlan) -> Measurement:
    source = f"serve/{WARM}-*/startup_s"
    try:
        each_s = [float((folder / f"{WARM}-{number}" / "startup_s").read_text()) for number in range(1, plan.warm_starts + 1)]
        value = statistics.fmean(each_s)
        return valid(WARM_START, value, source, sample_count=len(each_s), repeats=each_s)
    except UNUSABLE as error:
        return invalid(WARM_START, f"no usable start-up time: {in_words(error)}", source)


def _run(
    stage: Stage, plan: CellPlan, evidence: Path, measure: Callable[[Path], Commands], tools: dict[str, str]
) -> StageEvidence:
    folder = stage_folder(evidence, stage)
    started_at, started = datetime.now(UTC), time.monotonic()
    with writing(stage):
        try:
            commands = measure(folder)
        finally:
            redact_files(folder)
    return _evidence(stage, plan, evidence, started_at, time.monotonic() - started, commands, tools)


def _evidence(
    stage: Stage,
    plan: CellPlan,
    evidence: Path,
    started_at: datetime,
    duration_s: float,
    commands: Commands,
    tools: dict[str, str],
) -> StageEvidence:
    with writing(stage):
        machine = read_machine(plan.server.engine, plan.cell.gpu_type)
        (evidence / stage / MACHINE).write_text(machine.model_dump_json(indent=2))
    files = sorted(path for path in (evidence / stage).rglob("*") if path.is_file() and path.suffix != ".state")
    return StageEvidence(
        stage=stage,
        started_at=started_at,
        duration_s=duration_s,
        commands=commands,
        tools=tools,
        files=[describe(path, evidence) for path in files],
        measurements=parse(stage, plan, evidence),
    )
