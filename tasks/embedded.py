"""Prefect as `vllm-qualify run` has it: its server lives in the same process tree, and only as long as the flow."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings


@contextmanager
def without_heartbeats() -> Iterator[None]:
    """Flows within the block send none to an embedded server, which would be gone with them; to another they do.

    Prefect looks once a second whether to stop sending them, so that each flow's end would wait for half a second.
    """
    if get_current_settings().api.url is not None:
        yield
        return
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield
