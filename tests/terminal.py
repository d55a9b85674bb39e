"""A command on a terminal of its own, as a person sees it and types into it."""

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import Sequence

WAIT_S = 60.0


def typed(arguments: Sequence[str], answers: Sequence[tuple[str, str]]) -> tuple[int, str]:
    """Run `vllm-qualify` and type each answer after its question is shown. Returns the exit code and all that was shown."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_qualify", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    try:
        shown = ""
        for question, answer in answers:
            # The space comes when what is typed is no longer shown; what was typed before is thrown away.
            shown += _until(ours, f"{question}: ")
            os.write(ours, f"{answer}\n".encode())
        shown += _until(ours, None)
        return process.wait(WAIT_S), shown
    finally:
        process.kill()
        os.close(ours)


def _until(terminal: int, wanted: str | None) -> str:
    """What is shown up to `wanted`, or to the end."""
    shown = ""
    while wanted is None or wanted not in shown:
        ready, _, _ = select.select([terminal], [], [], WAIT_S)
        assert ready, f"nothing follows {shown!r}"
        try:
            read = os.read(terminal, 4096)
        except OSError:
            # Linux says so where the other side is closed.
            read = b""
        if not read:
            assert wanted is None, f"no {wanted!r} in {shown!r}"
            break
        shown += read.decode(errors="replace")
    return shown
