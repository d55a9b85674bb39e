"""Unix time that never jumps: what the machine's clock said when this process began, carried on by the monotonic clock.

What is watched during a load is put together by it. If the machine's clock is set meanwhile, every sample still lies where it
was taken. Another process takes over the time of this one, by its `handed_over`.
"""

import time
from pathlib import Path

OFFSET_S = time.time() - time.monotonic()
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def steady_s() -> float:
    """The time in s since 1970, as if the machine's clock had not been set since this process began."""
    return OFFSET_S + time.monotonic()


def handed_over() -> list[str]:
    """Arguments for another process: how far this time is ahead of the monotonic clock, in s, and whose clock that is.

    All processes of a kernel have the same monotonic clock. A kernel is known by the id of its boot, also in a container.
    """
    return [repr(OFFSET_S), BOOT_ID.read_text().strip()]
