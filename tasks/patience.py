"""Try requests to Prefect's server again while it is away: a restart of the server must not end a run of several hours."""

import time
from collections.abc import Callable
from typing import TypeVar

import httpx
from prefect import get_run_logger

T = TypeVar("T")

PATIENCE_S, ASK_EVERY_S = 1800.0, 5.0


def patiently(ask: Callable[[], T]) -> T:
    """The result of `ask`, as soon as the server answers. After half an hour without an answer, raises the error of `ask`."""
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
