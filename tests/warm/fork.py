"""A process that has imported what takes long, and forks itself for each program that it is asked for.

    fork.py SOCKET WANTED

Over SOCKET, the number of an open one, come requests: JSON, with a line to the one that asked, and the standard output and
error that the program shall have. If the request says `first`, the fork gets a core before other processes do.

A `T` on the line ends the fork by SIGTERM. If the line is cut, the fork is killed. The line gets the fork's exit code, below
zero for a signal. This process ends, with its forks, when SOCKET is closed, and after some time without forks.

WANTED is JSON: the modules `imports`, the functions `calls` (MODULE:NAME), of the imports those that each fork `reloads`,
`idle_s`, `ends_group` (whether what a fork leaves of its process group ends with it), and `confine`, the file confine.py. It
runs in any Python, also the engine's, and so imports nothing of this project by itself.
"""

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

# A priority before all that has the usual one. It takes a privilege.
FIRST = -10
# Of a fork, for the processes that it starts: the rules by which it is confined. Where copies of open files may lie.
RULES, ABOVE = "OF_THE_FORK_RULES", 512
MOST_FILES = 64


def main() -> None:
    requests, wanted = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    for name in wanted["imports"]:
        importlib.import_module(name)
    for call in wanted["calls"]:
        module, _, name = call.partition(":")
        getattr(importlib.import_module(module), name)()
    gc.freeze()
    asked = serve(requests, wanted["idle_s"], wanted["ends_group"])
    if asked is not None:
        end(partial(become, asked, wanted))


def end(program: Callable[[], None]) -> None:
    """Run it, and end as a Python does, but for clearing its memory: that takes as long as many a command."""
    code: Any = None
    try:
        program()
    except SystemExit as ended:
        code = ended.code
    except Exception:  # as Python does at its end
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def serve(requests: socket.socket, idle_s: float, ends_group: bool) -> dict[str, Any] | None:
    """Fork until there is nobody to ask. Returns None then, and in each fork what was asked for."""
    forks: set[Fork] = set()
    is_ending = False
    with selectors.DefaultSelector() as ready:
        ready.register(requests, selectors.EVENT_READ)
        while forks or requests in ready.get_map():
            found = ready.select(None if forks or is_ending else idle_s)
            if not found:
                # What comes from now on is refused, and what came before is still read.
                requests.shutdown(socket.SHUT_RD)
                is_ending = True
            for key, _ in found:
                if key.fileobj is not requests:
                    if key.data in forks:
                        (tell_end if key.fileobj == key.data.end else pass_on)(key.data, forks, ready, ends_group)
                    continue
                try:
                    asked, files = receive(requests)
                except EOFError:
                    ready.unregister(requests)
                    for fork in set() if is_ending else forks:
                        kill(fork.pid, signal.SIGKILL)
                    continue
                pid = os.fork()
                if not pid:
                    for file in (
                        requests.fileno(),
                        files[0],
                        *(file for fork in forks for file in (fork.line.fileno(), fork.end)),
                    ):
                        os.close(file)
                    return asked | {"given": files[1:]}
                for file in files[1:]:
                    os.close(file)
                fork = Fork(pid, files[0])
                forks.add(fork)
                ready.register(fork.line, selectors.EVENT_READ, fork)
                ready.register(fork.end, selectors.EVENT_READ, fork)
    return None


class Fork:
    """A fork with its line, and the file that tells its end."""

    def __init__(self, pid: int, line: int) -> None:
        self.pid, self.line, self.end = pid, socket.socket(fileno=line), os.pidfd_open(pid)


def pass_on(fork: Fork, _forks: set[Fork], ready: selectors.BaseSelector, _ends_group: bool) -> None:
    """Signal the fork."""
    with suppress(ConnectionError):
        if fork.line.recv(64):
            kill(fork.pid, signal.SIGTERM)
            return
    ready.unregister(fork.line)
    kill(fork.pid, signal.SIGKILL)


def tell_end(fork: Fork, forks: set[Fork], ready: selectors.BaseSelector, ends_group: bool) -> None:
    """Say on its line with which exit code it ended."""
    _, status = os.waitpid(fork.pid, 0)
    if ends_group:
        kill(fork.pid, signal.SIGKILL)
    forks.remove(fork)
    with suppress(KeyError):
        ready.unregister(fork.line)
    ready.unregister(fork.end)
    os.close(fork.end)
    with fork.line as line, suppress(OSError):
        line.send(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))


def kill(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What is asked for, and the open files that came with it.

    Raises EOFError if the line is cut before all has come, or if a signal came between: the one that asked is ending then.
    """
    with ExitStack() as unused:
        try:
            length, files, _, _ = socket.recv_fds(line, 8, MOST_FILES)
            for file in files:
                unused.callback(os.close, file)
            text = exactly(line, int.from_bytes(length, "big")) if length else b""
        except ConnectionError:
            text = b""
        try:
            asked = dict(json.loads(text))
        except ValueError as error:
            raise EOFError("the line was cut") from error
        unused.pop_all()
    return asked, files


def exactly(line: socket.socket, length: int) -> bytes:
    """So many bytes, or none if the line is cut before."""
    text = b""
    while len(text) < length:
        more = line.recv(length - len(text))
        if not more:
            return b""
        text += more
    return text


def become(asked: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Run the program, as its own Python would have started it."""
    os.setsid()
    if asked.get("first"):
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    put(asked["given"], asked["files"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    tempfile.tempdir = None
    sys.path[1:1] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    for name in wanted["reloads"]:
        importlib.reload(sys.modules[name])
    if "python" in asked:
        multiprocessing.set_executable(asked["python"])
    if "rules" in asked:
        os.environ[RULES] = json.dumps(asked["rules"])
        if asked["rules"] is not None:
            runpy.run_path(wanted["confine"])["confining"](asked["rules"])()
    run(asked["name"], asked["arguments"])


def run(name: str, arguments: list[str]) -> None:
    """A script that lies beside this Python, or what this Python is to run."""
    if name == "python" and arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    if name != "python":
        file = program.__file__ = str(Path(sys.executable).with_name(name))
        source, sys.argv = Path(file).read_text(), [file, *arguments]
    elif arguments[0] == "-I":
        file = program.__file__ = arguments[1]
        source, sys.argv = Path(file).read_text(), arguments[1:]
    else:
        at = arguments.index("-c")
        file, source, sys.argv = "<string>", arguments[at + 1], ["-c", *arguments[at + 2 :]]
    exec(compile(source, file, "exec"), program.__dict__)  # noqa: S102  (the program is vLLM's own, or ours)


def put(given: list[int], numbers: list[int]) -> None:
    """Have open files under the numbers that they had."""
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in given]
    for file in given:
        os.close(file)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


if __name__ == "__main__":
    main()
