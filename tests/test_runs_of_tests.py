"""What holds for a run of the tests as a whole: CI reports a failure at once, and a run cleans up after one that was killed."""

import os
import subprocess
import sys
import time
from mmap import mmap
from pathlib import Path
from uuid import uuid4

import pytest

from tests.ci import IN_CI
from tests.in_memory import NEW_S, SEGMENTS, WANTED, remove_unused_segments

ROOT = Path(__file__).parents[1]
FAILS = """
import time
from pathlib import Path

def test_fails():
    assert 1 == 2, "so it is told"

def test_goes_on():
    deadline = time.monotonic() + 60
    while not Path({go!r}).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
"""
WRITES = """
import tempfile, time
from pathlib import Path

def test_writes():
    Path({told!r}).write_text(tempfile.gettempdir())
    time.sleep({seconds})
"""


def command(file: Path, *options: str) -> list[str]:
    """A run of pytest as CI's, but for its tests."""
    plugins = ("-p", "tests.ci", "-p", "tests.in_memory")
    return [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(file.parent), *plugins, *options, str(file)]


def environment(**others: str) -> dict[str, str]:
    """Of a run of its own: it is no process of this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_") and name not in ("CI", WANTED)}
    return kept | others


@pytest.mark.parametrize("options", [(), ("--numprocesses", "1")], ids=["alone", "with-xdist"])
def test_ci_reports_a_failure_at_once(options: tuple[str, ...], tmp_path: Path) -> None:
    file, go = tmp_path / "test_it.py", tmp_path / "go"
    file.write_text(FAILS.format(go=str(go)))
    in_ci = environment(CI="true", TMPDIR=str(tmp_path))
    with subprocess.Popen(command(file, *options), cwd=ROOT, env=in_ci, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        told = any("test_it.py::test_fails failed at its call: AssertionError: so it is told" in line for line in run.stdout)
        go.touch()
        assert told
        assert "1 failed, 1 passed" in run.stdout.read(), "the other test went on after the report"


def test_what_a_killed_run_left_is_cleaned_by_the_next_one(tmp_path: Path) -> None:
    file, told = tmp_path / "test_it.py", tmp_path / "told"
    in_memory = environment(**{WANTED: "true", "TMPDIR": str(tmp_path)})
    file.write_text(WRITES.format(told=str(told), seconds=60))
    with subprocess.Popen(command(file), cwd=ROOT, env=in_memory, stdout=subprocess.DEVNULL) as killed:
        while not told.exists():
            assert killed.poll() is None
            time.sleep(0.05)
        left = Path(told.read_text())
        if left == tmp_path:
            killed.kill()
            (pytest.fail if IN_CI else pytest.skip)("this user may not mount a file system of its own")
        file.write_text(WRITES.format(told=str(told), seconds=0))
        subprocess.run(command(file), cwd=ROOT, env=in_memory, check=True, capture_output=True)
        assert left.is_mount(), "a run that goes on keeps its own"
        killed.kill()
    assert left.is_mount()
    subprocess.run(command(file), cwd=ROOT, env=in_memory, check=True, capture_output=True)
    assert not left.exists()
    assert not any(path.is_mount() for path in tmp_path.iterdir())


def test_memory_that_no_process_shares_is_taken_away() -> None:
    folder, _ = SEGMENTS
    used, unused, new = (folder / f"psm_{uuid4().hex}" for _ in range(3))
    try:
        for path in (used, unused, new):
            path.write_bytes(b"shared")
        for path in (used, unused):
            os.utime(path, (time.time() - 2 * NEW_S,) * 2)
        with used.open("r+b") as file, mmap(file.fileno(), 0):
            remove_unused_segments()
            assert [path.exists() for path in (used, unused, new)] == [True, False, True]
    finally:
        for path in (used, unused, new):
            path.unlink(missing_ok=True)
