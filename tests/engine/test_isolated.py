"""Guarded processes in namespaces of their own: ended whole, seen by their ids on this machine, and where none are given."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.builders.hostile_models import run_confined
from tests.builders.processes import alive, until
from vllm_qualify.engine.confinement import NAMESPACES, confining_process, isolation_problem
from vllm_qualify.engine.process import RunningProcess, running_guarded
from vllm_qualify.engine.process_tree import engine_processes

HERE = [Path(sys.prefix), Path(sys.base_prefix)]
# A process that has left the command's group, and whose parent has ended: no signal to the group reaches it.
LEAVES_ITS_GROUP = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(600)
os.wait()
print(os.getpid(), os.path.realpath(os.getcwd()) == os.path.realpath(os.environ["TMPDIR"]), flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    if problem := isolation_problem():
        pytest.skip(problem)


@contextmanager
def isolated(folder: Path, code: str, grace_s: float = 0.5) -> Iterator[RunningProcess]:
    command = [sys.executable, "-I", "-c", code]
    with (
        confining_process({}, readable=HERE) as confinement,
        running_guarded(command, confinement.environment, folder / "log", grace_s, confinement.rules) as process,
    ):
        yield process


def tree_of(process: RunningProcess) -> list[int]:
    """All that the guard has, when the command has printed something."""
    assert until(lambda: process.log.read_text().endswith("\n"))
    return [each.pid for each in psutil.Process(process.guard_pid).children(recursive=True)]


def test_leaving_the_block_ends_also_what_has_left_the_group(tmp_path: Path) -> None:
    with isolated(tmp_path, LEAVES_ITS_GROUP) as process:
        pids = tree_of(process)
        # The first of the namespace, the command, and what left.
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


def test_the_death_of_the_guard_ends_all(tmp_path: Path) -> None:
    with isolated(tmp_path, LEAVES_ITS_GROUP) as process:
        pids = tree_of(process)
        os.kill(process.guard_pid, signal.SIGKILL)
        assert until(lambda: not any(alive(pid) for pid in pids))
        assert process.exit_code() == -signal.SIGKILL


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_exit_codes_are_reported(tmp_path: Path, code: str, expected: int) -> None:
    with isolated(tmp_path, code) as process:
        assert until(lambda: process.exit_code() is not None)
        assert process.exit_code() == expected


def test_a_stop_ends_the_command_at_once(tmp_path: Path) -> None:
    """The first process of a namespace gets no SIGTERM that it has no handler for."""
    with isolated(tmp_path, "import time; print(flush=True); time.sleep(600)", grace_s=60) as process:
        tree_of(process)
        began = time.monotonic()
    assert time.monotonic() - began < 30
    assert process.exit_code() == -signal.SIGTERM


def test_a_command_is_known_by_its_id_on_this_machine_and_its_own(tmp_path: Path) -> None:
    with isolated(tmp_path, LEAVES_ITS_GROUP) as process:
        tree_of(process)
        (pid,) = process.commands()
        own, is_at_home = process.log.read_text().split()
        assert psutil.Process(pid).cmdline()[-1] == LEAVES_ITS_GROUP
        assert until(lambda: int(own) in [each.pid for each in engine_processes([pid]) or ()])
    assert (own != str(pid), is_at_home) == (True, "True")


IN_SHARED_MEMORY = """
import os, sys, tempfile
model = {model!r}
print(open(model).read(), sorted(os.listdir("/dev/shm")) == sorted({beneath!r}))
open(os.environ["TMPDIR"] + "/own", "w").write("own")
os.chmod(os.environ["TMPDIR"] + "/own", 0o640)
for attempt in (lambda: os.chmod(model, 0o777), lambda: open(model, "w"), lambda: os.chmod({folder!r}, 0o777)):
    try:
        attempt()
        print("reached")
    except OSError:
        print("refused")
"""


def test_a_model_and_a_temporary_folder_in_shared_memory_stay_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/dev/shm", f"vq-test-{os.getpid()}")
    try:
        (folder / "model").mkdir(parents=True)
        model = folder / "model" / "config.json"
        model.write_text("{}")
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        script = IN_SHARED_MEMORY.format(model=str(model), folder=str(folder / "model"), beneath=[folder.name])
        assert run_confined(tmp_path, script, folder / "model").splitlines() == ["{} True", "refused", "refused", "refused"]
    finally:
        shutil.rmtree(folder)


def test_a_trial_that_succeeded_is_no_excuse_for_a_process_that_is_not_isolated(tmp_path: Path) -> None:
    """A plan says that its processes are isolated: one that cannot be does not start."""
    with confining_process({}) as confinement:
        rules = confinement.rules.model_copy(update={"isolated": True})
        command = [sys.executable, "-c", REFUSING, rules.model_dump_json(), str(tmp_path / "it.log")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "could not be started" in done.stdout, done.stderr
    assert "unshare: Operation not permitted" in (tmp_path / "it.log").read_text()


# As in a container whose runtime gives no namespaces: /proc is closed there, and a filter refuses unshare.
REFUSING = """
import ctypes, os, sys
from pathlib import Path
from vllm_qualify.engine.confinement import Confinement, isolation_problem
from vllm_qualify.engine.namespaces import close_the_machine
from vllm_qualify.engine.process import running_guarded
from vllm_qualify.engine.seccomp import filter_calls
from vllm_qualify.errors import HostError
from tests.builders.hostile_models import run_confined
if os.geteuid() == 0:
    close_the_machine()
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
filter_calls()
try:
    if sys.argv[1]:
        with running_guarded(["true"], {}, Path(sys.argv[2]), rules=Confinement.model_validate_json(sys.argv[1])):
            pass
    else:
        print(isolation_problem())
        print(run_confined(Path(sys.argv[2]), "import os; print(os.getppid() > 0)"))
except HostError as error:
    print(error)
"""


def test_where_no_namespaces_are_given_a_process_is_confined_without_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REFUSING, "", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["unshare: Operation not permitted", "True"]


AS_A_USER = """
import sys
from pathlib import Path
from tests.builders.hostile_models import run_confined
from vllm_qualify.engine.confinement import isolation_problem
print(isolation_problem())
print(run_confined(Path(sys.argv[1]), "import os; print(os.getppid(), len([x for x in os.listdir('/proc') if x.isdigit()]))"))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, who gives up a right, and setpriv")
def test_a_user_who_may_not_make_namespaces_makes_a_user_namespace_first(tmp_path: Path) -> None:
    command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", AS_A_USER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    problem, outcome, *_ = done.stdout.split("\n")
    if problem:
        pytest.skip(problem)
    assert outcome == "0 2"


def test_namespaces_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMESPACES, "off")
    assert run_confined(tmp_path, "import os; print(os.getppid() > 0)").strip() == "True"
