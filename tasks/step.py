"""How every task is run: when it is tried again, how long it may take, and contexts that begin with a task.

No task is cached. A cache would make Prefect hash all inputs of every call, plans and reports too. It is not needed: a run's
measurements are in its folder.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff
from prefect.utilities.timeout import timeout

from vllm_qualify.errors import HostError, QualifyError, ReleaseError

P = ParamSpec("P")
R = TypeVar("R")

# 4, 8, 16 and 32 s on average, with jitter, so that hosts do not all retry at the same moment.
RETRIES, FIRST_DELAY_S, JITTER = 4, 4.0, 0.5
# Each further delay is twice the one before: eight and a half minutes in all. Nothing waits for it, but the work of hours does.
PATIENT = 7
# If an error asks for a longer wait, the task is not tried again.
LONGEST_WAIT_S = 300.0
# How long requests to Prefect's server are tried again while it is away, and how often.
PATIENCE_S, ASK_EVERY_S = 1800.0, 5.0
# For a try of a task that asks the store, Prefect, a registry or the hub, or computes for some minutes. If an answer does not
# come, the try ends by the limit of that answer: the store's is the longest, a quarter of an hour.
LIMIT_S = 3600.0
# For a try of a task that moves all files of a run: 30 GB at 2 MB/s.
FILES_LIMIT_S = 4 * 3600.0
# For a task that measures, or starts a server: a week. All that it waits for has a limit of its own, which the recipe says.
MEASURING_LIMIT_S = 7 * 24 * 3600.0

Limit = float | Callable[[Mapping[str, Any]], float]
"""A task's time limit in s, or how it follows from the task's parameters, which are given by name."""

_has_limit: ContextVar[bool] = ContextVar("has_limit", default=False)


class _OverError(TimeoutError):
    """The time of a task is over."""


def step(
    name: str,
    run_name: str | None = None,
    *,
    once: bool = False,
    retries: int = RETRIES,
    limit_s: Limit = LIMIT_S,
    place: str = "",
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A task that is tried again if its error says that this may help (`may_pass`).

    With `once` it is never tried again. Measuring tasks use it, since a second measurement would hide how the first one ended.

    Everything that a task waits for (a request, a tool, a server's start) has a limit of its own, and its error says what did
    not answer. `limit_s` is the net below, for a wait that has none. It is for each try; the waits between tries do not count.
    When it is over, the task's contexts are closed, and it ends with a HostError at `place`, by default the task's name.

    A task within a task has no limit of its own: it lives in that of the outer one, which ends both.
    """

    def decorate(work: Callable[P, R]) -> Task[P, R]:
        parameters = signature(work)

        @wraps(work)
        def work_in_time(*arguments: P.args, **named: P.kwargs) -> R:
            most_s = limit_s(parameters.bind(*arguments, **named).arguments) if callable(limit_s) else limit_s
            with _end_in_time(most_s, name, place or name):
                return work(*arguments, **named)

        return task(
            name=name,
            task_run_name=run_name or name,
            cache_policy=NO_CACHE,
            retries=0 if once else retries,
            retry_delay_seconds=exponential_backoff(FIRST_DELAY_S),
            retry_jitter_factor=JITTER,
            retry_condition_fn=may_pass,
        )(work_in_time)

    return decorate


@contextmanager
def _end_in_time(limit_s: float, name: str, place: str) -> Iterator[None]:
    """End the block when its time is over, unless it has a limit already. Raises HostError then.

    Prefect interrupts the main thread, which runs the flow, by an alarm, also in the midst of a call. Another thread it
    interrupts between two calls. Prefect's `timeout_seconds` is not used, because it cannot follow from a task's parameters,
    its error does not say what to do, and it logs a warning for each task in another thread.
    """
    if _has_limit.get():
        # There is one alarm in a process. A second one would be a thread that watches, for each task within a task.
        yield
        return
    token = _has_limit.set(True)
    try:
        with timeout(limit_s, _OverError):
            yield
    except _OverError as error:
        problem = f"'{name}' did not end within {limit_s:.0f} s, though all that it waits for has shorter limits"
        remedy = "see in the run's log what it did last, and report that; a new start reuses the stages that are finished"
        raise HostError(problem, remedy, place) from error
    finally:
        _has_limit.reset(token)


def may_pass(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001  (Prefect's signature)
    """Whether to try a task again, as its error says. If the error names a wait, this function waits first."""
    error = state.data
    if isinstance(error, httpx.TransportError | httpx.HTTPStatusError):
        return is_away(error)
    if not isinstance(error, QualifyError) or isinstance(error, ReleaseError):
        return False
    if not error.retry or error.retry_after_s > LONGEST_WAIT_S:
        return False
    # Prefect's own delay comes on top, and cannot follow from an error.
    time.sleep(error.retry_after_s)
    return True


@contextmanager
def beginning(name: str, enter: Callable[[], AbstractContextManager[R]], limit_s: float, place: str = "") -> Iterator[R]:
    """Hold the context that `enter` makes for the length of the block. Its beginning is a task, with a name and a duration.

    `limit_s` and `place` are those of the task; the block has no limit. The context and its logs belong to the flow: when a
    task ends, Prefect ends all leases that the task's context took. Raises as the context, and HostError if it is not in time.
    """
    with ExitStack() as stack:
        flow_context = copy_context()

        @step(name, once=True, limit_s=limit_s, place=place)
        def begin() -> R:
            return flow_context.run(lambda: stack.enter_context(enter()))

        yield begin()


def patiently(ask: Callable[[], R]) -> R:
    """The result of `ask`, as soon as Prefect's server answers: its restart must not end a run of several hours.

    After half an hour without an answer, raises the error of `ask`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            if not is_away(error) or time.monotonic() > deadline:
                raise
            get_run_logger().warning(f"Prefect's server does not answer ({type(error).__name__}); asking again")
            time.sleep(ASK_EVERY_S)  # a server needs some seconds to start


def is_away(error: httpx.TransportError | httpx.HTTPStatusError) -> bool:
    """Whether the error says that Prefect's server is away for the moment."""
    return isinstance(error, httpx.TransportError) or error.response.status_code >= 500
