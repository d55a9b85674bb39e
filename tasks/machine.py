"""A machine belongs to one qualification at a time: by a lease that the whole fleet sees, and by a lock that is certain."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import get_client, get_run_logger
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import get_current_settings

from tasks.step import beginning
from vllm_qualify.engine.host_lock import holding_machine, machine_name
from vllm_qualify.engine.launch import left_behind
from vllm_qualify.engine.launchers import LauncherName

# The shortest that Prefect takes. It is renewed while the machine is held, and ends by itself after a crash.
LEASE_S = 60.0
ALONE_WITHIN_S = 5.0


@contextmanager
def machine(who: str, launcher: LauncherName) -> Iterator[None]:
    """This machine for the length of the block, and nothing of a killed run on it.

    A lease that could not be renewed, for want of a Prefect server, does not end the block: the machine's own lock still holds.

    Raises:
        HostError: Docker Engine does not answer, or the lock cannot be written.
    """
    with beginning("wait for the machine", lambda: _held(who)):
        for line in left_behind(launcher):
            get_run_logger().info(line)
        yield


@contextmanager
def _held(who: str) -> Iterator[None]:
    with _leased(), holding_machine(who, get_run_logger().info):
        yield


@contextmanager
def _leased() -> Iterator[None]:
    """Where there is a server that others use too."""
    if get_current_settings().api.url is None:
        yield
        return
    name = f"vllm-qualify-machine-{machine_name()}"
    _make_limit(name)
    with concurrency(name, occupy=1, lease_duration=LEASE_S, strict=True, raise_on_lease_renewal_failure=False):
        yield


@contextmanager
def alone(name: str) -> Iterator[bool]:
    """Whether no other run is within a block of this name; none is then, for the length of this one."""
    _make_limit(name)
    try:
        with concurrency(name, occupy=1, timeout_seconds=ALONE_WITHIN_S, lease_duration=LEASE_S, strict=True):
            yield True
            return
    except TimeoutError:
        get_run_logger().info("another run does this already")
    yield False


def _make_limit(name: str) -> None:
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            try:
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
            except ObjectAlreadyExists:
                # Another run of this machine's was the first.
                return
