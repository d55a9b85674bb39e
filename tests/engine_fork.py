"""A process in the engine's Python that has imported vLLM, and forks itself for each program that it is asked for.

    engine_fork.py SOCKET CONFINE

Over SOCKET, the number of an open one, come requests: JSON, with a line to the one that asked, and the standard output and
error that the program shall have. On the line the fork gets `T` for SIGTERM, and it is killed when the line is cut. The line
gets its exit code, below zero for a signal. CONFINE is the file `confine.py`. It ends, with its forks, when SOCKET is closed.
Since it takes 650 MB, it also ends after a minute without forks.
"""

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
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

IMPORTS = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.benchmarks.serve",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)
POLL_S, IDLE_S = 0.02, 60.0
# Of a fork, for the processes that it starts: the rules by which it is confined. Where copies of open files may lie.
RULES, ABOVE = "OF_THE_FORK_RULES", 512


def main() -> None:
    requests, confine = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    asked = serve(requests)
    if asked is not None:
        become(asked, confine)


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork until there is nobody to ask. Returns None then, and in each fork what was asked for."""
    lines: dict[int, socket.socket] = {}
    is_ending = False
    with selectors.DefaultSelector() as ready:
        ready.register(requests, selectors.EVENT_READ)
        while True:
            found = ready.select(POLL_S if lines or is_ending else IDLE_S)
            if not found and not lines:
                if is_ending:
                    return None
                # What comes from now on is refused, and what came before is still read.
                requests.shutdown(socket.SHUT_RD)
                is_ending = True
            for key, _ in found:
                if key.fileobj is not requests:
                    pass_on(lines, key.fileobj, ready)
                    continue
                length, files, _, _ = socket.recv_fds(requests, 8, 64)
                if not length and is_ending and lines:
                    ready.unregister(requests)
                    continue
                if not length:
                    for pid in lines:
                        kill(pid, signal.SIGKILL)
                    return None
                asked = json.loads(exactly(requests, int.from_bytes(length, "big")))
                line = socket.socket(fileno=files[0])
                pid = os.fork()
                if not pid:
                    for each in (requests, line, *lines.values()):
                        each.close()
                    return dict(asked) | {"given": files[1:]}
                for file in files[1:]:
                    os.close(file)
                lines[pid] = line
                ready.register(line, selectors.EVENT_READ)
            tell_ends(lines, ready)


def pass_on(lines: dict[int, socket.socket], line: object, ready: selectors.BaseSelector) -> None:
    """Signal the fork of this line."""
    pid = next(pid for pid, each in lines.items() if each is line)
    with suppress(ConnectionError):
        if lines[pid].recv(64):
            kill(pid, signal.SIGTERM)
            return
    ready.unregister(lines[pid])
    kill(pid, signal.SIGKILL)


def tell_ends(lines: dict[int, socket.socket], ready: selectors.BaseSelector) -> None:
    while lines:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        kill(pid, signal.SIGKILL)
        line = lines.pop(pid)
        with suppress(KeyError):
            ready.unregister(line)
        with line, suppress(OSError):
            line.send(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))


def kill(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def exactly(line: socket.socket, length: int) -> bytes:
    text = b""
    while len(text) < length:
        text += line.recv(length - len(text))
    return text


def become(asked: dict[str, Any], confine: str) -> None:
    """Run the program, as its own Python would have started it."""
    os.setsid()
    put(asked["given"], asked["files"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    tempfile.tempdir = None
    multiprocessing.set_executable(asked["python"])
    os.environ[RULES] = json.dumps(asked["rules"])
    if asked["rules"] is not None:
        runpy.run_path(confine)["confining"](asked["rules"])()
    program, arguments = types.ModuleType("__main__"), asked["arguments"]
    sys.modules["__main__"] = program
    if asked["name"] == "vllm":
        file = program.__file__ = str(Path(sys.executable).with_name("vllm"))
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
