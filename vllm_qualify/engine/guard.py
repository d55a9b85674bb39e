"""Run one command and leave nothing of it behind, whatever happens to the program that started it.

A script that uses only the standard library: it starts in milliseconds, and survives when its parent is killed.

    guard.py STATE_FILE GRACE_S RULES COMMAND [ARGUMENT …]

RULES are those of `landlock.py` as JSON, or `null`. The command runs in its own process group. Standard input is a pipe from
the parent. It closes when the parent asks for a stop or is killed. Then the group gets SIGTERM, and SIGKILL after GRACE_S
seconds. When the command ends on its own, the rest of its group is killed; of an isolated one all that it started. STATE_FILE
holds {"pid": …}, and at the end {"pid": …, "exit_code": …}, where an exit code below zero is a signal.
"""

import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REFUSED = "this process could not be confined: "
LIBC = ctypes.CDLL(None, use_errno=True)


def preparing_child(rules: Any) -> Callable[[], None]:
    """For the child, before exec: restore the default signal handlers, die with a guard that is killed with -9, be confined."""

    confine = import_confinement().confine_child if rules is not None else lambda _: None

    def prepare() -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            confine(rules)
        except OSError as error:
            # The parent's own error does not say why.
            os.write(2, refusal(rules, error).encode())
            raise

    return prepare


def signal_group(group: int, number: signal.Signals) -> bool:
    """Send a signal to the group. Returns False if the group has no member left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def waking_at_ends() -> int:
    """A pipe that can be read when a child has ended."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    return woken


def await_end(child: subprocess.Popen[bytes], woken: int, grace_s: float) -> int:
    """Wait until the command has ended, or stop it when the parent leaves. No thread: see `namespaces.start_first_process`."""
    while child.poll() is None:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        elif not os.read(0, 4096):
            return stop_command(child, grace_s)
    return child.returncode


def stop_command(child: subprocess.Popen[bytes], grace_s: float) -> int:
    signal_group(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        return child.wait(grace_s)
    signal_group(child.pid, signal.SIGKILL)
    return child.wait()


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
    woken, first = waking_at_ends(), start_namespace(rules)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=preparing_child(rules))
    write_state(state_file, pid=child.pid)
    exit_code = await_end(child, woken, grace_s)
    reap_orphans(child.pid)
    if first is not None:
        # The kernel ends all others of the namespace first.
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    write_state(state_file, pid=child.pid, exit_code=exit_code)


def start_namespace(rules: Any) -> int | None:
    """The id of the first process of a namespace, if the rules ask for one."""
    try:
        return import_confinement().start_first_process() if rules is not None and rules["isolated"] else None
    except OSError as error:
        sys.exit(refusal(rules, error))


def refusal(rules: Any, error: OSError) -> str:
    remedy = "with VLLM_QUALIFY_NAMESPACES=off it starts without namespaces of its own\n" if rules["isolated"] else ""
    return f"{REFUSED}{error.strerror or error}\n{remedy}"


def import_confinement() -> Any:
    """What confines, which is imported only where it is needed. It needs the standard library alone."""
    # The folder that holds this package, and not that of this file, whose modules have names that others have, too.
    sys.path.append(str(Path(__file__).parents[2]))
    return importlib.import_module("vllm_qualify.engine.landlock")


if __name__ == "__main__":
    main()
