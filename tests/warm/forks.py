"""Ask processes that have imported much to fork themselves: for a program here, or for one that another process starts."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests.warm import fork
from vllm_qualify.engine import confine, guard

# It stands for the fork, before the eyes of the one that started it.
STAND_IN = """\
#!{python} -IS
import json, os, signal, socket, sys
name, arguments = {name}, sys.argv[1:]
{but}
def is_open(file):
    try:
        os.fstat(file)
        return True
    except OSError:
        return False
files = [*filter(is_open, range(256))]
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    asked = {{"name": name, "arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd(), "files": files}}
    text = json.dumps(asked).encode()
    socket.send_fds(line, [len(text).to_bytes(8, "big")], files)
    line.sendall(text)
    # Not before: it would send its letter into what is asked for.
    signal.signal(signal.SIGTERM, lambda *_: line.send(b"T"))
    code = line.recv(8)
end = int.from_bytes(code, "big", signed=True) if code else -signal.SIGKILL
if end < 0:
    if -end != signal.SIGKILL:
        signal.signal(-end, signal.SIG_DFL)
    os.kill(os.getpid(), -end)
sys.exit(end)
"""


@dataclass(frozen=True)
class Warm:
    """What is forked: the Python, what it imports and calls before, and after how long without forks it ends.

    Each fork `reloads` those of its imports that read the environment. With `ends_group`, what a fork leaves of its process
    group ends with it, as a guard would see to.
    """

    python: str
    imports: Sequence[str]
    idle_s: float
    calls: Sequence[str] = ()
    reloads: Sequence[str] = ()
    ends_group: bool = False

    def command(self, requests: socket.socket) -> list[str]:
        wanted = asdict(self) | {"confine": confine.__file__}
        return [self.python, "-P", "-u", fork.__file__, str(requests.fileno()), json.dumps(wanted)]


class Forks:
    """Processes to fork, one for each environment: some variables are read by an import, and only then.

    `is_read` says of a variable's name whether an import may read it. The others are each fork's own. Those that are read and
    not set are `usual`, so that programs that do not care share a process with those that do.
    """

    def __init__(self, warm: Warm, is_read: Callable[[str], bool], usual: Mapping[str, str] | None = None) -> None:
        self._warm, self._is_read, self._usual = warm, is_read, usual or {}
        # What imports warn of. A fork writes elsewhere.
        self._log = TemporaryFile()  # noqa: SIM115  (`end` closes it)
        self._by_environment: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}
        self._one_at_a_time = threading.Lock()

    def fork(self, asked: Mapping[str, Any], line: socket.socket, files: Sequence[int]) -> None:
        """Hand `asked` to a process that forks; `fork` says what is asked for. The line gets its exit code."""
        with self._one_at_a_time:
            # The first may just have ended, since it had nothing to do.
            for _ in range(2):
                to = self._of(asked["environment"])
                with suppress(ConnectionError):
                    ask(to, asked, [line.fileno(), *files])
                    return
            self._log.seek(0)
            raise AssertionError(f"the process to fork did not start: {self._log.read()[-2000:].decode(errors='replace')}")

    def _of(self, environment: Mapping[str, str]) -> socket.socket:
        read = {**self._usual, **{name: value for name, value in environment.items() if self._is_read(name)}}
        key = json.dumps(read, sort_keys=True)
        if key in self._by_environment and self._by_environment[key][0].poll() is not None:
            self._by_environment.pop(key)[1].close()
        if key not in self._by_environment:
            ours, theirs = socket.socketpair()
            with theirs:
                started = subprocess.Popen(
                    self._warm.command(theirs),
                    env=read,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                )
            self._by_environment[key] = started, ours
        return self._by_environment[key][1]

    def end(self) -> None:
        for process, to in self._by_environment.values():
            to.close()
            process.wait()
        self._log.close()


def write_stand_in(path: Path, address: Path, python: str = sys.executable, but: str = "") -> None:
    """A program that stands for a fork. `but` is code that runs before, and may start something else in its place."""
    path.write_text(STAND_IN.format(python=python, address=str(address), but=but, name="os.path.basename(sys.argv[0])"))
    path.chmod(0o755)


def stand_in(address: Path) -> list[str]:
    """A command that stands for a fork, in place of Python's name."""
    return [sys.executable, "-IS", "-c", STAND_IN.format(python="", address=str(address), but="", name="'python'")]


def ask(line: socket.socket, asked: Mapping[str, Any], files: Sequence[int]) -> None:
    """As a stand-in asks."""
    text = json.dumps(asked).encode()
    socket.send_fds(line, [len(text).to_bytes(8, "big")], files)
    line.sendall(text)


@contextmanager
def answering(forks: Forks, address: Path, adjust: Callable[[dict[str, Any], socket.socket], None]) -> Iterator[None]:
    """Answer stand-ins at the socket with forks, during the block. `adjust` changes what a line's stand-in asks for."""
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(address))
        listening.listen()
        thread = threading.Thread(target=_answer, args=(listening, forks, adjust), daemon=True)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            forks.end()


def _answer(listening: socket.socket, forks: Forks, adjust: Callable[[dict[str, Any], socket.socket], None]) -> None:
    """Each stand-in by a thread of its own: one that is stopped, or killed as it asks, holds up no other."""
    while True:
        try:
            line, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=_answer_one, args=(line, forks, adjust), daemon=True).start()


def _answer_one(line: socket.socket, forks: Forks, adjust: Callable[[dict[str, Any], socket.socket], None]) -> None:
    with line, suppress(EOFError), ExitStack() as stack:
        asked, files = fork.receive(line)
        for file in files:
            stack.callback(os.close, file)
        adjust(asked, line)
        forks.fork(asked, line, files)


def put_rules(asked: dict[str, Any], line: socket.socket) -> None:
    """Confine the fork as its starter is confined: by the rules that the line's stand-in was given, or by its guard's."""
    asked["rules"] = json.loads(asked["environment"].pop(fork.RULES, None) or _rules_of(line))


def _rules_of(line: socket.socket) -> str:
    """The rules that the guard of the one at the other end confines it by: it cannot know them itself.

    Raises EOFError if that one has ended.
    """
    pid, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        started = Path(f"/proc/{parent}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise EOFError("the one that asked has ended") from error
    if guard.__file__ not in started:
        return "null"
    return started[started.index(guard.__file__) + 3]
