"""How many random schedules a test takes, and in how many parts, so that each core can have one."""

import os

PART = 250


def parts_and_size(usual: int) -> tuple[int, int]:
    """How many parts there are, and how many schedules each has. `make chaos` sets a number; else it is the usual one."""
    schedules = int(os.environ.get("VLLM_QUALIFY_CHAOS", usual))
    parts = max(1, schedules // PART)
    return parts, schedules // parts
