"""A limit of time around calls that have none of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, if it does so in time.

    A time limit of a socket is for one read, and a server that sends a byte now and then never reaches it. The call runs in a
    thread, and one that takes too long is left behind there: its connections' own limits end it, or the end of this process.

    Raises:
        TimeoutError: it took longer than `limit_s`.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if not wait([future], timeout=limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return future.result()
