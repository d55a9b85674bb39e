"""Progress of long steps, in the run's log."""

import time
from collections.abc import Callable

from prefect import get_run_logger

from vllm_qualify.engine.process import Progress
from vllm_qualify.report.live_view import ATTRIBUTE, Counted, Waited
from vllm_qualify.secrets import safe_text

TELL_EVERY_S = 5.0


def counter(what: str, things: str) -> Progress:
    """Logs `what: 225 of 500 things, 31 s` at most every TELL_EVERY_S, and at the end; of a part `what, part: …`."""
    logger = get_run_logger()
    started = last = time.monotonic()

    def log_count(done: int, total: int, part: str = "", /) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= TELL_EVERY_S or done == total:
            name = f"{what}, {part}" if part else what
            counted = Counted(name, things, done, total, now - started)
            logger.info(f"{name}: {done} of {total} {things}, {now - started:.0f} s", extra={ATTRIBUTE: counted})
            last = now

    return log_count


def line_teller() -> Callable[[str], None]:
    """Logs every line, whole."""
    logger = get_run_logger()
    return lambda line: logger.info(safe_text(line))


def teller() -> Callable[[str], None]:
    """Logs at most one line every TELL_EVERY_S, and drops the others. A line is cut after 160 characters."""
    logger = get_run_logger()
    last = 0.0

    def show(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_EVERY_S:
            short = safe_text(line)[:160]
            logger.info(short, extra={ATTRIBUTE: Waited(short)})
            last = time.monotonic()

    return show
