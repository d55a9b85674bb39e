"""How a server ended, apart from what tells why: that takes half a second to import, and most commands need none of it."""

from pydantic import Field

from vllm_qualify.recipe.values import Frozen

HIGHEST_SIGNAL = 64


class End(Frozen):
    """How a server ended, or that it was given up."""

    exit_code: int | None = Field(
        description="None: it still ran when it was given up; below zero, or 128 and a signal: that signal"
    )
    oom_killed: bool = Field(default=False, description="the container runtime says that the memory limit killed a process")
    waited_s: float | None = Field(default=None, description="how long it was waited for, if it was given up")

    @property
    def signal(self) -> int | None:
        """The signal that ended it. A container and a shell report it as 128 plus the signal."""
        code = self.exit_code or 0
        if code < 0:
            return -code
        return code - 128 if 128 < code <= 128 + HIGHEST_SIGNAL else None
