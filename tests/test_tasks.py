"""What Prefect adds around the package: what asks the world is asked again, and nothing is measured twice."""

import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest
from prefect import Task, get_client
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.runtime import flow_run

import tasks.decide
import tasks.measure
from tasks import machine, step
from tasks.fleet import resolve
from tasks.step import LONGEST_WAIT_S, RETRIES, beginning
from tests.builders.flows import in_flow
from tests.releases.service import Answer, Asked, serving
from tests.report.builder import passed_report
from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.engine.hub import wait_asked_s
from vllm_qualify.engine.process import running_guarded
from vllm_qualify.engine.provision import Launch
from vllm_qualify.errors import HostError, ReleaseError, StoreBusyError, StoreError
from vllm_qualify.evidence.measurement import StageEvidence
from vllm_qualify.evidence.stages.smoke import SMOKE
from vllm_qualify.recipe.metrics import StageName
from vllm_qualify.runs.folder import Run
from vllm_qualify.runs.publishing import Published
from vllm_qualify.runs.stored import save_finished

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("on_prefect")]

CELL = SimpleNamespace(cell=SimpleNamespace(id="reference/bf16"))
RUN: Any = SimpleNamespace(id="run", report=passed_report, plan=CELL, stage=lambda _: None)
PUBLISHED = Published(outcome="passed", passed=True, run=Run(folder=Path("run")), page="https://store/page", manifest="m")
DIGEST = "sha256:" + "a" * 64
HAS_IT = Answer(headers={"Docker-Content-Digest": DIGEST})
# In its own words, not those of the code: what runs tools on a server, or starts it.
ON_THE_SERVER: list[StageName] = ["smoke", "contract", "accuracy", "likelihood", "load", "speculation", "sweep", "soak"]
MEASURES = ["fit", *ON_THE_SERVER, "speculation in turn", "warm starts", "further start"]
HOUR_S, DAY_S = 3600, 86_400
# Tasks with another limit than an hour: what they may wait for. The parameters are those of `GIVEN`.
LIMITS_S = {
    "provide": 6 * HOUR_S,
    "plan": 2 * DAY_S,
    "models": 2 * DAY_S,
    "wait": 30 * DAY_S,
    "publish": 4 * HOUR_S,
    "reuse": 4 * HOUR_S,
    "published before": 4 * HOUR_S,
    "keep": 4 * HOUR_S,
    "baseline": 4 * HOUR_S,
    "lost runs": HOUR_S + 100,
    "decision": HOUR_S + 1000,
}
GIVEN: Mapping[str, Any] = {
    "run": SimpleNamespace(plan=passed_report().plan),
    "waiting": SimpleNamespace(run=SimpleNamespace(plan=passed_report().plan)),
    "confirm_s": 100.0,
    "timeout_s": 1000.0,
}


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long an error asked to wait, in seconds, each time that its task was to be tried again; nothing is waited for."""
    waits: list[float] = []
    monkeypatch.setattr(step, "time", SimpleNamespace(sleep=waits.append))
    return waits


def at_once(task: Task[..., Any]) -> Any:
    """The task without its delays."""
    return task.with_options(retry_delay_seconds=0)


def resolved(*refusals: Answer) -> tuple[str | None, int]:
    """An image's digest from a registry that refuses so often, and how often it was asked for it."""
    left = list(refusals)

    def answer(asked: Asked) -> Answer:
        return left.pop(0) if asked.method == "HEAD" and left else HAS_IT

    with serving(answer) as registry:
        launch = Launch(launcher="docker", image=f"{registry.address}/vllm:v1.0.0")
        try:
            digest = in_flow(lambda: at_once(resolve)(launch)).image.rpartition("@")[2]
        except HostError:
            digest = None
    return digest, [asked.method for asked in registry.asked].count("HEAD")


def test_a_registry_that_is_busy_is_asked_again_and_one_that_refuses_is_not() -> None:
    assert resolved(Answer(429), Answer(503)) == (DIGEST, 3)
    assert resolved(*[Answer(429)] * 20) == (None, 1 + RETRIES), "the tries end"
    assert resolved(Answer(403)) == (None, 1)


def test_it_is_asked_no_sooner_than_it_wants_and_not_at_all_if_it_wants_hours(waited: list[float]) -> None:
    assert resolved(Answer(429, headers={"Retry-After": f"{LONGEST_WAIT_S + 1:.0f}"})) == (None, 1)
    assert waited == []
    assert resolved(Answer(429, headers={"Retry-After": "7"})) == (DIGEST, 2)
    assert waited == [7.0]


def test_a_wait_is_reported_in_seconds_or_as_a_date() -> None:
    assert wait_asked_s({"Retry-After": "12"}) == 12
    assert 50 < wait_asked_s({"Retry-After": format_datetime(datetime.now(UTC) + timedelta(minutes=1), usegmt=True)}) <= 60
    for nothing in ({}, {"Retry-After": "soon"}, {"Retry-After": "-1"}, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 -0000"}):
        assert wait_asked_s(nothing) == 0


def tries(error: Exception, once: bool = False) -> int:
    """How often a task is tried that always ends so."""
    tried = []

    @step.step("always fails", once=once)
    def work() -> None:
        tried.append(1)
        raise error

    with pytest.raises(type(error)):
        in_flow(at_once(work))
    return len(tried)


def test_only_what_may_pass_is_tried_again() -> None:
    """By the error's own word; a release that failed is never tried again, whatever its log says."""
    away = HostError("no answer", "wait", retry=True)
    for error in (away, StoreBusyError("slow down", "wait"), httpx.ConnectError("Prefect's server is away")):
        assert tries(error) == 1 + RETRIES
    lasting = (HostError("no driver", "install one"), StoreError("no permission", "ask"), ValueError("a defect"))
    for final in (*lasting, ReleaseError("killed", "see its log", retry=True)):
        assert tries(final) == 1
    assert tries(away, once=True) == 1


def all_tasks() -> Iterator[Task[..., Any]]:
    for path in Path(tasks.__file__).parent.glob("*.py"):
        module = importlib.import_module(f"tasks.{path.stem}" if path.stem != "__init__" else "tasks")
        yield from (each for each in vars(module).values() if isinstance(each, Task))
    yield from map(tasks.measure.task_of, ON_THE_SERVER)


def test_no_task_measures_twice_or_is_cached() -> None:
    tasks_by_name = {task.name: task for task in all_tasks()}
    assert len(tasks_by_name) > 25
    assert {name for name, task in tasks_by_name.items() if not task.retries} == {*MEASURES, "drift", "wait"}
    for task in tasks_by_name.values():
        assert (task.cache_policy, task.retry_condition_fn) == (NO_CACHE, step.may_pass)


class _LimitError(Exception):
    """The limit is known, and the work need not begin."""


def limit_of(task: Task[..., Any], monkeypatch: pytest.MonkeyPatch) -> float:
    """The seconds that a task's work may take; fails if it begins without a limit."""
    noted = []

    @contextmanager
    def noting(limit_s: float, _: type[TimeoutError]) -> Iterator[None]:
        noted.append(limit_s)
        raise _LimitError
        yield

    monkeypatch.setattr(step, "timeout", noting)
    with pytest.raises(_LimitError):
        task.fn(**{name: GIVEN.get(name) for name in signature(task.fn).parameters})
    (limit_s,) = noted
    return limit_s


def test_every_task_has_a_time_limit_and_what_measures_has_a_week(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(task.name, limit_of(task, monkeypatch)) for task in all_tasks()]
    assert len(limits) > 25
    assert {name for name, _ in limits} >= {*LIMITS_S, *MEASURES}
    for name, limit_s in limits:
        assert limit_s == (7 * DAY_S if name in MEASURES else LIMITS_S.get(name, HOUR_S)), name


def test_a_stage_is_kept_within_the_limit_of_what_measured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks that run within others, by hand: they set no limit of their own there."""
    set_s = []

    @contextmanager
    def noting(limit_s: float, _: type[TimeoutError]) -> Iterator[None]:
        set_s.append(limit_s)
        yield

    @step.step("measures", once=True, limit_s=77)
    def measures() -> None:
        for nested in (tasks.measure.keep_stage, tasks.measure.reuse_fit):
            with pytest.raises(AttributeError):
                at_once(nested)(*[None] * len(signature(nested.fn).parameters))

    monkeypatch.setattr(step, "timeout", noting)
    in_flow(measures)
    assert set_s == [77]


def publish_with(monkeypatch: pytest.MonkeyPatch, outcomes: list[Any], store: str) -> Any:
    def publish_run(*_: object) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(tasks.decide, "publish_run", publish_run)
    return in_flow(lambda: at_once(tasks.decide.publish)(RUN, store))


def test_a_busy_store_is_tried_again_and_one_that_refuses_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    busy = [StoreBusyError("slow down", "wait"), StoreBusyError("slow down", "wait"), PUBLISHED]
    assert publish_with(monkeypatch, busy, tmp_path.as_uri()) == PUBLISHED
    outcomes = [StoreError("no permission", "ask"), PUBLISHED]
    with pytest.raises(StoreError, match="no permission"):
        publish_with(monkeypatch, outcomes, tmp_path.as_uri())
    assert outcomes == [PUBLISHED]


def test_what_was_measured_is_kept_again_though_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, measured, kept = Run(folder=tmp_path / "run"), [], [StoreBusyError("slow down", "wait"), None]
    (stage,) = (each for each in passed_report().stages if each.stage == "smoke")

    def measure(*_: object) -> StageEvidence:
        measured.append(1)
        return stage

    def keep(*_: object) -> None:
        if error := kept.pop(0):
            raise error

    monkeypatch.setattr(Run, "plan", passed_report().plan)
    monkeypatch.setattr(SMOKE, "run", measure)
    monkeypatch.setattr(tasks.measure, "keep", keep)
    monkeypatch.setattr(tasks.measure, "keep_stage", at_once(tasks.measure.keep_stage))
    served: Any = SimpleNamespace()
    assert in_flow(lambda: tasks.measure.measure_stage("smoke", served, run, run, tmp_path.as_uri())) == stage
    assert (measured, kept) == ([1], [])


def sleeper(first: str = "pass") -> list[str]:
    """A program that runs for an hour, unless it is killed."""
    return [sys.executable, "-c", f"import signal, time; {first}; print('runs', flush=True); time.sleep(3600)"]


class Tool:
    """A guarded program, started in a task. Whoever ends the task in between must end it too."""

    def __init__(self, folder: Path) -> None:
        self.log, self.pids = folder / "tool.log", list[int]()

    @contextmanager
    def running(self, command: list[str], grace_s: float = 10.0) -> Iterator[None]:
        with running_guarded(command, quiet_environment(), self.log, grace_s) as process:
            while "runs" not in self.log.read_text():
                assert process.end() is None, self.log.read_text()
                time.sleep(0.05)  # the program needs a moment to begin
            self.pids = [process.guard_pid, json.loads(process.state_file.read_text())["pid"]]
            yield

    @property
    def left(self) -> list[int]:
        return [pid for pid in self.pids if psutil.pid_exists(pid)]

    @property
    def ran_and_left_nothing(self) -> bool:
        return bool(self.pids) and not self.left


# pytest-timeout's other method takes SIGALRM, which Prefect needs for a task's time.
by_alarm = pytest.mark.timeout(300, method="thread")


@by_alarm
def test_a_task_whose_time_is_over_leaves_no_process_behind_and_is_not_tried_again(tmp_path: Path) -> None:
    tool, tried = Tool(tmp_path), list[int]()

    @step.step("hangs", limit_s=2.0, place="load")
    def hangs() -> None:
        tried.append(1)
        with tool.running(sleeper()):
            time.sleep(3600)  # as what waits for a tool that never answers; the limit ends it

    with pytest.raises(HostError, match="'hangs' did not end within 2 s") as raised:
        in_flow(hangs)
    assert (raised.value.place, "reuses the stages" in raised.value.remedy) == ("load", True)
    assert tool.ran_and_left_nothing
    assert tried == [1]


@by_alarm
def test_each_try_has_the_whole_limit() -> None:
    """Three tries together take longer than the limit of one."""
    left = [HostError("no answer", "wait", retry=True)] * 2

    @step.step("slow", limit_s=1.5)
    def slow() -> str:
        time.sleep(0.8)  # more than half of the limit
        if left:
            raise left.pop()
        return "done"

    assert in_flow(at_once(slow)) == "done"


@by_alarm
def test_a_task_within_a_task_ends_with_it_and_leaves_it_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tool, begun = Tool(tmp_path), list[str]()

    @step.step("inner", limit_s=3600)
    def inner(what: str) -> None:
        begun.append(what)
        if what == "hangs":
            with tool.running(sleeper()):
                time.sleep(3600)  # the outer limit ends it

    @step.step("outer", once=True, limit_s=3.0)
    def outer() -> None:
        inner("ends")
        inner("hangs")

    with pytest.raises(HostError, match="'outer' did not end within 3 s"):
        in_flow(outer)
    assert begun == ["ends", "hangs"]
    assert tool.ran_and_left_nothing
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


@by_alarm
def test_a_task_in_a_thread_has_its_limit_too_and_prefect_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    closed = []

    @step.step("hangs", once=True, limit_s=1.0)
    def hangs() -> None:
        try:
            while True:
                time.sleep(0.05)  # as what looks again and again for an answer
        finally:
            closed.append(1)

    with pytest.raises(HostError, match="'hangs' did not end within 1 s"):
        in_flow(lambda: hangs.submit().result())
    assert closed == [1]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


@by_alarm
def test_a_limit_does_not_interrupt_the_cleaning_up(tmp_path: Path) -> None:
    """The program ignores SIGTERM, so that its end takes longer than what is left of the limit."""
    tool, limit_s = Tool(tmp_path), 3.0

    @step.step("cleans up", once=True, limit_s=limit_s)
    def cleans_up() -> None:
        with tool.running(sleeper("signal.signal(signal.SIGTERM, signal.SIG_IGN)"), grace_s=2 * limit_s):
            raise HostError("something else", "mend it")

    with pytest.raises(HostError):
        in_flow(cleans_up)
    assert tool.ran_and_left_nothing


def test_a_context_begins_in_a_task_and_ends_with_its_block(tmp_path: Path) -> None:
    tool, seen = Tool(tmp_path), list[list[int]]()

    def block() -> str:
        with beginning("start tool", lambda: tool.running(sleeper()), limit_s=60):
            seen.append(tool.left)
        return str(flow_run.id)

    names = task_names(in_flow(block))
    assert seen == [tool.pids]
    assert tool.left == []
    assert names == ["start tool"]


def test_a_context_that_cannot_begin_is_the_tasks_own_error_and_is_not_begun_again() -> None:
    begun = []

    @contextmanager
    def broken() -> Iterator[None]:
        begun.append(1)
        raise HostError("no server", "start one", retry=True)
        yield

    def block() -> None:
        with beginning("start server", broken, limit_s=60):
            raise AssertionError("nothing has begun")

    with pytest.raises(HostError, match="no server"):
        in_flow(block)
    assert begun == [1]


def task_names(run: str) -> list[str]:
    """As the UI shows them."""
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + 30
        while not (task_runs := client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[UUID(run)])))):
            assert time.monotonic() < deadline, "the server has not heard of the task"
            time.sleep(0.2)  # task runs come to the server as events
    return [task.name for task in task_runs]


def test_the_machine_is_ours_until_the_blocks_end_not_only_the_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prefect ends the leases that were taken in a task's context together with the task."""
    monkeypatch.setenv("VLLM_QUALIFY_LOCKS", str(tmp_path))
    monkeypatch.setenv("VLLM_QUALIFY_HOST", "a-host-of-the-tests")
    taken = []

    def is_taken() -> bool:
        with get_client(sync_client=True) as client:
            limit = client.read_global_concurrency_limit_by_name("vllm-qualify-machine-a-host-of-the-tests")
        return bool(limit.active_slots)

    def block() -> str:
        with machine.machine("run r", "process"):
            taken.append(is_taken())
        taken.append(is_taken())
        return str(flow_run.id)

    assert task_names(in_flow(block)) == ["wait for the machine"]
    assert taken == [True, False]


def test_what_is_unknown_of_tasks_stays_beside_what_the_engine_could_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, started = passed_report().plan.model_copy(update={"unasked": ["of a task"]}), list[list[str]]()
    monkeypatch.setattr(tasks.measure, "start_run", lambda plan: started.append(plan.unasked))
    monkeypatch.setattr(tasks.measure, "model_warnings", lambda *_: [])
    question: Any = SimpleNamespace(unasked=["of the engine", "of a task"])
    run: Any = SimpleNamespace(plan=plan)
    tasks.measure.await_answer([run], question)
    assert started == [["of a task", "of the engine"]]


def test_bench_is_started_only_where_something_is_still_to_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that goes on and has its load needs none: its start takes as long as half a server."""
    run, asked = Run(folder=tmp_path / "run"), list[bool]()

    @contextmanager
    def serve(*_: object, is_loaded: bool) -> Iterator[None]:
        asked.append(is_loaded)
        raise HostError("as far as this test goes", "none")
        yield

    question: Any = SimpleNamespace()

    def serve_run() -> None:
        with tasks.measure.serve_cells([run], None, tmp_path.as_uri(), question):
            raise AssertionError("nothing is served")

    monkeypatch.setattr(Run, "plan", passed_report().plan)
    monkeypatch.setattr(tasks.measure, "serve", serve)
    for stages in ([], ["smoke", "contract", "accuracy"], ["load"]):
        for stage in (each for each in passed_report().stages if each.stage in stages):
            save_finished(run, stage)
        with pytest.raises(HostError, match="as far as"):
            in_flow(serve_run)
    assert asked == [True, True, False]
