"""Clean-up that a signal cannot interrupt."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# SIGALRM: Prefect ends a task with it when the task's time is over.
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals that would end the program or a task until after the block, for steps that must not be left half done.

    These are Ctrl-C, kill -TERM and the end of a task's time. Python runs signal handlers only in the main thread: in other
    threads nothing needs to be held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (a signal handler's signature)
        came.append(number)

    before = {number: signal.signal(number, note) for number in HELD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in came:
            signal.raise_signal(held)
