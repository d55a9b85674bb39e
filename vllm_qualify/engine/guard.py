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
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
DRAINED_WITHIN_S = 1.0
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


class Relay:
    """Copies the command's output to the log. The command has a pipe, as in a container: it sees no path of a run's log.

    No thread does so: see `namespaces.start_first_process`.
    """

    def __init__(self, output: int) -> None:
        self.sources = [output]
        """none when all that wrote have ended"""

    def wait(self, others: Sequence[int], limit_s: float | None = None) -> list[int]:
        """Copy what there is until one of the others can be read, or the time is over. Returns those that can be read."""
        ready, _, _ = select.select([*others, *self.sources], [], [], limit_s)
        for output in self.sources:
            if output in ready:
                self._copy_piece(output)
        return [each for each in ready if each in others]

    def drain(self, limit_s: float) -> None:
        """Copy the rest. A process that left the group may hold the pipe for ever."""
        deadline = time.monotonic() + limit_s
        while self.sources and (left_s := deadline - time.monotonic()) > 0:
            self.wait([], left_s)

    def _copy_piece(self, output: int) -> None:
        piece = os.read(output, 65_536)
        if not piece:
            self.sources = []
        # A full disk loses lines. It must not hold the command up.
        with suppress(OSError):
            os.write(1, piece)


def await_end(child: subprocess.Popen[bytes], woken: int, relay: Relay, grace_s: float) -> int:
    """Wait until the command has ended, or stop it when the parent leaves."""
    while child.poll() is None:
        ready = relay.wait([0, woken])
        if woken in ready:
            os.read(woken, 4096)
        elif 0 in ready and not os.read(0, 4096):
            return stop_command(child, woken, relay, grace_s)
    return child.returncode


def stop_command(child: subprocess.Popen[bytes], woken: int, relay: Relay, grace_s: float) -> int:
    signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while child.poll() is None and (left_s := deadline - time.monotonic()) > 0:
        if relay.wait([woken], left_s):
            os.read(woken, 4096)
    signal_group(child.pid, signal.SIGKILL)
    return child.wait()


def reap_orphans(group: int) -> None:
    """Kill and reap the group's other members, which became this process's children when their parent ended."""
    while signal_group(group, signal.SIGKILL):
        try:
            os.waitpid(-group, 0)
        except ChildProcessError:
            return


def start_command(command: Sequence[str], rules: Any) -> tuple[subprocess.Popen[bytes], Relay]:
    output, into = os.pipe()
    relay, prepare, nothing = Relay(output), preparing_child(rules), subprocess.DEVNULL
    try:
        child = subprocess.Popen(command, stdin=nothing, stdout=into, stderr=into, start_new_session=True, preexec_fn=prepare)
    except (OSError, subprocess.SubprocessError):
        os.close(into)
        # The child has written why.
        relay.drain(DRAINED_WITHIN_S)
        raise
    os.close(into)
    return child, relay


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
    child, relay = start_command(command, rules)
    write_state(state_file, pid=child.pid)
    exit_code = await_end(child, woken, relay, grace_s)
    reap_orphans(child.pid)
    if first is not None:
        # The kernel ends all others of the namespace first.
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    # Who reads the exit code finds the whole log.
    relay.drain(DRAINED_WITHIN_S)
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
