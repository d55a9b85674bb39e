"""The engine environment with its imports paid once: each server and each client is a fork of a process that has imported vLLM.

An import takes a core for 7 s to 10 s, and a run needs several. What is forked runs vLLM's own programs, with the arguments,
environment, files and confinement that they were started with. Their starter sees a small process that stands for the fork: it
lives as long, passes SIGTERM on, and ends with the fork's exit code; if it is killed, so is the fork. So tests that look at
processes or at their memory, kill them, or need what an import does, take `engine` itself.
"""

import hashlib
import json
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests import engine_fork
from vllm_qualify.drift import probe
from vllm_qualify.engine import confine, guard
from vllm_qualify.engine.environment import EngineEnvironment

MOST_FILES = 64
# Each process, or test, has its own, and no import looks at them.
OF_ONE_PROCESS = ("TMPDIR", "HF_MODULES_CACHE", "HF_TOKEN_PATH", "PYTEST_", "VLLM_QUALIFY_")
STAND_IN = """\
#!{python} -IS
import json, os, signal, socket, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
source = arguments[arguments.index("-c") + 1] if "-c" in arguments else ""
# The probe imitates a GPU before it imports vLLM.
is_probe = arguments[1:2] == [{probe!r}] and '"device": {{' not in arguments[2]
if name == "python" and not is_probe and ("-I" in arguments or not source or "resource_tracker" in source):
    os.execv({python!r}, [{python!r}, *arguments])
# Else the client starts itself again, to have it.
os.environ.setdefault("PYTHONHASHSEED", "0")
def is_open(file):
    try:
        os.fstat(file)
        return True
    except OSError:
        return False
files = [1, 2, *filter(is_open, range(3, 256))]
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    signal.signal(signal.SIGTERM, lambda *_: line.send(b"T"))
    asked = {{"name": name, "arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd(), "files": files}}
    text = json.dumps(asked).encode()
    socket.send_fds(line, [len(text).to_bytes(8, "big")], files)
    line.sendall(text)
    code = line.recv(8)
end = int.from_bytes(code, "big", signed=True) if code else -signal.SIGKILL
if end < 0:
    if -end != signal.SIGKILL:
        signal.signal(-end, signal.SIG_DFL)
    os.kill(os.getpid(), -end)
sys.exit(end)
"""


@pytest.fixture(scope="session")
def warm_engine(engine: EngineEnvironment) -> Iterator[EngineEnvironment]:
    """As `engine`, but servers and clients are forks, and start at once."""
    # A short name: a path of a socket has at most 107 letters.
    with TemporaryDirectory(prefix="vq-warm-") as folder, _forking(engine, Path(folder) / "socket") as address:
        programs = _programs(Path(folder))
        programs.mkdir(parents=True)
        for name in ("python", "vllm"):
            text = STAND_IN.format(python=str(engine.python), address=str(address), probe=probe.__file__)
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        yield EngineEnvironment(python=programs / "python")


def _programs(folder: Path) -> Path:
    return folder / "engine" / "bin"


@contextmanager
def _forking(engine: EngineEnvironment, address: Path) -> Iterator[Path]:
    """Answer at the socket with forks, during the block."""
    forks = _Forks(engine, _programs(address.parent) / "python")
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(address))
        listening.listen()
        thread = threading.Thread(target=_answer, args=(listening, forks), daemon=True)
        thread.start()
        try:
            yield address
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            forks.end()


def _answer(listening: socket.socket, forks: "_Forks") -> None:
    while True:
        try:
            line, _ = listening.accept()
        except OSError:
            return
        with line:
            forks.fork(line)


class _Forks:
    """Processes that have imported vLLM, one for each environment: some variables are read by an import, and only then."""

    def __init__(self, engine: EngineEnvironment, stand_in: Path) -> None:
        self._engine, self._stand_in = engine, str(stand_in)
        self._by_environment: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def fork(self, line: socket.socket) -> None:
        """Hand the one at the other end of the line over to a process that forks it."""
        length, files, _, _ = socket.recv_fds(line, 8, MOST_FILES)
        asked = json.loads(_exactly(line, int.from_bytes(length, "big")))
        asked["rules"] = json.loads(asked["environment"].pop(engine_fork.RULES, None) or _rules_of(line))
        asked["python"] = self._stand_in
        text = json.dumps(asked).encode()
        while True:
            to = self._of(asked["environment"])
            # It may just have ended, since it had nothing to do.
            with suppress(ConnectionError):
                socket.send_fds(to, [len(text).to_bytes(8, "big")], [line.fileno(), *files])
                to.sendall(text)
                break
        for file in files:
            os.close(file)

    def _of(self, environment: dict[str, str]) -> socket.socket:
        kept = {name: value for name, value in sorted(environment.items()) if not name.startswith(OF_ONE_PROCESS)}
        key = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
        if key in self._by_environment and self._by_environment[key][0].poll() is not None:
            self._by_environment.pop(key)[1].close()
        if key not in self._by_environment:
            ours, theirs = socket.socketpair()
            command = [str(self._engine.python), "-P", "-u", engine_fork.__file__, str(theirs.fileno()), confine.__file__]
            with theirs:
                started = subprocess.Popen(command, env=kept, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self._by_environment[key] = started, ours
        return self._by_environment[key][1]

    def end(self) -> None:
        for process, to in self._by_environment.values():
            to.close()
            process.wait()


def _exactly(line: socket.socket, length: int) -> bytes:
    text = b""
    while len(text) < length:
        part = line.recv(length - len(text))
        assert part, "the line was cut"
        text += part
    return text


def _rules_of(line: socket.socket) -> str:
    """The rules that the guard of the one at the other end confines it by: it cannot know them itself."""
    pid, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    started = Path(f"/proc/{parent}/cmdline").read_bytes().decode().split("\0")
    if guard.__file__ not in started:
        return "null"
    return started[started.index(guard.__file__) + 3]
