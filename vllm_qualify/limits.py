"""A limit of time around calls that have none of their own."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


_limited = threading.local()
"""`until` is when the call that this thread was made for must have ended, by the monotonic clock; other threads have none."""


def call_within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, if it does so in time.

    A time limit of a socket is for one read, and a server that sends a byte now and then never reaches it. The call runs in a
    thread, and one that takes too long is left behind there: its connections' own limits end it, or the end of this process.
    Within a call that must end sooner it needs no thread of its own. Raises TimeoutError if it took longer than `limit_s`.
    """
    until = time.monotonic() + limit_s
    if getattr(_limited, "until", math.inf) <= until:
        return call()
    future: Future[T] = Future()

    def work() -> None:
        _limited.until = until
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if not wait([future], timeout=limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return future.result()
