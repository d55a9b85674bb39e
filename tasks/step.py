"""How every task is run: when it is tried again, how long it may take, and contexts that begin with a task.

No task is cached. A cache would make Prefect hash all inputs of every call, plans and reports too. It is not needed: a run's
measurements are in its folder.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.task_engine import TaskRunTimeoutError
from prefect.tasks import exponential_backoff

from tasks.patience import is_away
from vllm_qualify.errors import HostError, QualifyError, ReleaseError

P = ParamSpec("P")
R = TypeVar("R")

# 4, 8, 16 and 32 s on average, with jitter, so that hosts do not all retry at the same moment.
RETRIES, FIRST_DELAY_S, JITTER = 4, 4.0, 0.5
# Each further delay is twice the one before: eight and a half minutes in all. Nothing waits for it, but the work of hours does.
PATIENT = 7
# If an error asks for a longer wait, the task is not tried again.
LONGEST_WAIT_S = 300.0


def step(
    name: str, run_name: str | None = None, *, once: bool = False, retries: int = RETRIES
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A task that is tried again if its error says that this may help (`may_pass`).

    With `once` it is never tried again. Measuring tasks use it, since a second measurement would hide how the first one ended.

    There is no time limit here. Everything that a task waits for (a request, a tool, a server's start) has a limit of its own,
    and its error says what did not answer. Use `in_time` for work with a time limit from the plan.
    """
    return task(
        name=name,
        task_run_name=run_name or name,
        cache_policy=NO_CACHE,
        retries=0 if once else retries,
        retry_delay_seconds=exponential_backoff(FIRST_DELAY_S),
        retry_jitter_factor=JITTER,
        retry_condition_fn=may_pass,
    )


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


def in_time(work: Task[P, R], timeout_s: float) -> Callable[P, R]:
    """The task with a time limit. Prefect can end a task only in the main thread, which runs the flow.

    The task's contexts are closed, as after any other error.

    Raises:
        HostError: the time was over. Any error of the task is raised too.
    """
    limited = work.with_options(timeout_seconds=timeout_s)

    def called(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return limited(*arguments, **named)
        except TaskRunTimeoutError as error:
            problem = f"'{work.name}' did not end within {timeout_s:.0f} s, after the limits of all that it waits for"
            raise HostError(problem, "see the run's log for the last that it did, and report it", "serve") from error

    return called


@contextmanager
def beginning(name: str, enter: Callable[[], AbstractContextManager[R]], timeout_s: float | None = None) -> Iterator[R]:
    """Hold the context that `enter` makes for the length of the block. Its beginning is a task, with a name and a duration.

    The context and its logs belong to the flow: when a task ends, Prefect ends all leases that the task's context took.

    Raises:
        QualifyError: as the context, or as `in_time`.
    """
    with ExitStack() as stack:
        flow_context = copy_context()

        @step(name, once=True)
        def begin() -> R:
            return flow_context.run(lambda: stack.enter_context(enter()))

        yield (in_time(begin, timeout_s) if timeout_s else begin)()
