"""Run one command and leave nothing of it behind, whatever happens to the program that started it.

A script that uses only the standard library: it starts in milliseconds, and survives when its parent is killed.

    guard.py STATE_FILE GRACE_S RULES COMMAND [ARGUMENT …]

RULES are those of `landlock.py` as JSON, or `null`. The command runs in its own process group. Standard input is a pipe from
the parent. It closes when the parent asks for a stop or is killed. Then the group gets SIGTERM, and SIGKILL after GRACE_S
seconds. When the command ends on its own, the rest of its group is killed. STATE_FILE holds {"pid": …}, and at the end
{"pid": …, "exit_code": …}, where an exit code below zero is a signal.
"""

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Beside this file. Its folder is not on this process's import path.
LANDLOCK = str(Path(__file__).with_name("landlock.py"))
LIBC = ctypes.CDLL(None, use_errno=True)


def preparing_child(rules: Any) -> Callable[[], None]:
    """For the child, before exec: restore the default signal handlers, die with a guard that is killed with -9, be confined."""
    confine = runpy.run_path(LANDLOCK)["confining_child"](rules) if rules is not None else lambda: None

    def prepare() -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        confine()

    return prepare


def signal_group(group: int, number: signal.Signals) -> bool:
    """Send a signal to the group. Returns False if the group has no member left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def stop_when_parent_leaves(child: subprocess.Popen[bytes], grace_s: float) -> None:
    # Not sys.stdin: a thread that still reads it makes Python abort at its end.
    while os.read(0, 4096):
        pass
    signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while child.returncode is None and time.monotonic() < deadline:
        time.sleep(0.05)
    signal_group(child.pid, signal.SIGKILL)


def reap_orphans(group: int) -> None:
    """Kill and reap the group's other members, which became this process's children when their parent ended."""
    while signal_group(group, signal.SIGKILL):
        try:
            os.waitpid(-group, 0)
        except ChildProcessError:
            return


def write_state(path: Path, **state: Any) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(state))
    fresh.replace(path)


def main() -> None:
    state_file, grace_s, rules, command = Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:]
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=preparing_child(rules))
    write_state(state_file, pid=child.pid)
    threading.Thread(target=stop_when_parent_leaves, args=(child, grace_s), daemon=True).start()
    exit_code = child.wait()
    reap_orphans(child.pid)
    write_state(state_file, pid=child.pid, exit_code=exit_code)


if __name__ == "__main__":
    main()
