"""What forks for the tests goes on whatever becomes of those that ask. Else one killed command would end a whole run."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.warm.fork import FIRST
from tests.warm.forks import Forks, Warm, answering, put_rules, stand_in, write_stand_in

WANTED = {"name": "python", "environment": {"PATH": os.environ["PATH"]}, "cwd": "/"}
TEXT = json.dumps(WANTED | {"arguments": ["-c", "pass"], "files": []}).encode()
LENGTH = len(TEXT).to_bytes(8, "big")


@pytest.fixture
def forks() -> Iterator[Forks]:
    made = Forks(Warm(sys.executable, (), 10.0), lambda _: True)
    with ExitStack() as stack:
        stack.callback(made.end)
        yield made


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Path]:
    address = tmp_path / "socket"
    with answering(Forks(Warm(sys.executable, (), 10.0), lambda _: True), address, put_rules):
        yield address


def asks_in_vain(address: Path, says: Callable[[socket.socket], object]) -> None:
    """Ask from another process, which is killed after it has said so much. Afterwards no process has its number."""
    pid = os.fork()
    if not pid:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(address))
            says(line)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def a_file_comes_first(line: socket.socket) -> None:
    socket.send_fds(line, [LENGTH], [0])


@pytest.mark.parametrize(
    "says",
    [
        lambda _: None,
        lambda line: line.sendall(LENGTH),
        a_file_comes_first,
        lambda line: line.sendall(LENGTH + TEXT[:-1]),
        lambda line: line.sendall(LENGTH + b"T" + TEXT),
    ],
    ids=["nothing", "its-length", "a-file", "half-of-it", "a-signal-between"],
)
def test_one_that_is_killed_as_it_asks_holds_up_no_other(address: Path, says: Callable[[socket.socket], object]) -> None:
    for _ in range(3):
        asks_in_vain(address, says)
    done = subprocess.run([*stand_in(address), "-c", "print(6 * 7)"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "42\n")


def test_one_that_has_ended_is_confined_by_no_rules(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        asks_in_vain(tmp_path / "socket", lambda line: line.sendall(LENGTH + TEXT))
        line, _ = listening.accept()
        with line, pytest.raises(EOFError, match="the one that asked has ended"):
            put_rules({"environment": {}}, line)


def test_one_that_stops_as_it_asks_holds_up_no_other(address: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.connect(str(address))
        stopped.sendall(LENGTH)
        done = subprocess.run([*stand_in(address), "-c", "pass"], timeout=60, check=False)
    assert done.returncode == 0


def test_what_forks_ends_if_its_starter_is_killed_as_it_asks(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "said").open("wb") as said:
        command = Warm(sys.executable, (), 60.0).command(theirs)
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=said) as process:
            theirs.close()
            socket.send_fds(ours, [LENGTH], [0])
            ours.sendall(TEXT[:-1])
            ours.close()
            assert process.wait(30) == 0
    assert not (tmp_path / "said").read_bytes()


def test_many_ask_at_once(tmp_path: Path, address: Path) -> None:
    write_stand_in(tmp_path / "python", address)
    asking = [subprocess.Popen([tmp_path / "python", "-c", f"raise SystemExit({code})"]) for code in range(24)]
    assert [process.wait(60) for process in asking] == [*range(24)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may go before others")
@pytest.mark.parametrize("first", [True, False])
def test_a_fork_that_is_to_be_first_goes_before_others(forks: Forks, first: bool, tmp_path: Path) -> None:
    said, source = tmp_path / "said", "import os; print(os.nice(0))"
    ours, theirs = socket.socketpair()
    with ours, theirs, said.open("wb") as out:
        asked = WANTED | {"arguments": ["-c", source], "files": [1], "first": first}
        forks.fork(asked, theirs, [out.fileno()])
        assert ours.recv(8) == bytes(8)
    assert int(said.read_text()) == (FIRST if first else os.nice(0))
