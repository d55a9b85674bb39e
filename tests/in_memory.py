"""In CI and `make test-quick`, what tests write lies in memory: a file on a disk takes ten times as much of a core to make.

A run that is killed leaves its memory taken, and services that run there. The next one takes both away.
"""

import fcntl
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.ci import IN_CI

# At most: what is not written takes no memory. A whole run writes some 4 GB, most of it Docker's.
SIZE = "12g"
WANTED = "TESTS_IN_MEMORY"
# Whoever has this file locked uses the folder that it is in.
LOCK = "used-by-a-run"
INFRA = Path(__file__).parents[1] / "infra"
SERVICES = {"vllm-qualify-docker": "docker.sh", "vq-radosgw-*": "radosgw.sh", "vllm-qualify-postgres-*": "postgresql.sh"}
# Memory that processes share, as Python names it; a killed server leaves some. A new one may not be mapped yet.
SEGMENTS, NEW_S = (Path("/dev/shm"), "psm_*"), 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Elsewhere the folders of failed tests stay for people to look at. All processes of pytest-xdist have the first one's."""
    if (IN_CI or WANTED in os.environ) and "PYTEST_XDIST_WORKER" not in os.environ:
        _end_left_runs()
        remove_unused_segments()
        _put_into_memory(config, Path(tempfile.mkdtemp(prefix="vq-")))


def _end_left_runs() -> None:
    """Take away the folders in memory of runs that were killed, and what runs there."""
    for folder in _left_folders():
        for pattern, script in SERVICES.items():
            for place in folder.glob(pattern):
                subprocess.run([INFRA / script, "stop", place], capture_output=True, check=False)
        _unmount(folder)


def remove_unused_segments() -> None:
    """Remove what no process shares any more."""
    folder, pattern = SEGMENTS
    mapped = _mapped()
    for segment in folder.glob(pattern):
        with suppress(FileNotFoundError):
            about = segment.stat()
            if str(segment) not in mapped and about.st_uid == os.getuid() and time.time() - about.st_mtime > NEW_S:
                segment.unlink()


def _mapped() -> set[str]:
    """The files in shared memory that processes use."""
    found = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it ended, or is another user's
            found.update(re.findall(rf"{SEGMENTS[0]}/\S+", maps.read_text()))
    return found


def _left_folders() -> Iterator[Path]:
    for line in Path("/proc/mounts").read_text().splitlines():
        folder = Path(line.split()[1])
        with suppress(OSError):  # it is no run's, or still used
            if folder.parent == Path(tempfile.gettempdir()):
                with (folder / LOCK).open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder


def _put_into_memory(config: pytest.Config, folder: Path) -> None:
    """Where this user may mount it; else it stays a folder of the disk."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=1777", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        config.add_cleanup(folder.rmdir)
        return
    config.add_cleanup(lambda: _unmount(folder))
    lock = (folder / LOCK).open("w")
    config.add_cleanup(lock.close)
    fcntl.flock(lock, fcntl.LOCK_EX)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setenv("TMPDIR", str(folder))
    patch.setattr(tempfile, "tempdir", None)


def _unmount(folder: Path) -> None:
    """With what is mounted in it. A process that is still ending may have a file of it open."""
    subprocess.run(["umount", "--recursive", "--lazy", str(folder)], capture_output=True, check=False)
    with suppress(OSError):
        folder.rmdir()
