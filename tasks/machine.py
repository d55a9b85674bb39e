"""One qualification at a time holds a machine: by a lease, which the whole fleet sees, and by a lock, which is certain."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from prefect import get_client, get_run_logger
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from tasks.orchestrator import has_lasting_server
from tasks.step import beginning
from vllm_qualify.engine.host import holding_machine, machine_name
from vllm_qualify.engine.launchers import LauncherName
from vllm_qualify.engine.provision import left_behind

# The shortest lease that Prefect allows. It is renewed while the machine is held. After a crash it expires.
LEASE_S = 60.0
ALONE_WITHIN_S = 5.0
# Other runs on this machine go first, and each may take days.
WAIT_LIMIT_S = 14 * 86400.0


@contextmanager
def machine(who: str, launcher: LauncherName) -> Iterator[None]:
    """Hold this machine for the length of the block, and first remove what a killed run left on it.

    If the lease cannot be renewed because Prefect's server is away, the block goes on: the machine's own lock still holds.
    Raises HostError if Docker Engine does not answer, or the lock cannot be written.
    """
    with beginning("wait for the machine", lambda: _hold_machine(who), WAIT_LIMIT_S):
        for line in left_behind(launcher):
            get_run_logger().info(line)
        yield


@contextmanager
def _hold_machine(who: str) -> Iterator[None]:
    lease: AbstractContextManager[None] = nullcontext()
    # Only a lasting Prefect server has other users, who must wait for the machine.
    if has_lasting_server():
        name = f"vllm-qualify-machine-{machine_name()}"
        _make_limit(name)
        lease = concurrency(name, occupy=1, lease_duration=LEASE_S, strict=True, raise_on_lease_renewal_failure=False)
    with lease, holding_machine(who, get_run_logger().info):
        yield


@contextmanager
def alone(name: str) -> Iterator[bool]:
    """True if no other run holds this name. This run then holds it for the length of the block."""
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
            # Another run on this machine may create it first.
            with suppress(ObjectAlreadyExists):
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
