"""In CI and `make test-quick`, what tests write lies in memory: a file on a disk takes ten times as much of a core to make."""

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ci import IN_CI

# At most: what is not written takes no memory. A whole run writes some 4 GB, most of it Docker's.
SIZE = "12g"
WANTED = "TESTS_IN_MEMORY"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Elsewhere the folders of failed tests stay for people to look at. All processes of pytest-xdist have the first one's."""
    if (IN_CI or WANTED in os.environ) and "PYTEST_XDIST_WORKER" not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="vq-"))
        config.add_cleanup(_in_memory(folder))


def _in_memory(folder: Path) -> Callable[[], None]:
    """Where this user may mount it; else it stays a folder of the disk. Returns what takes it away."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=1777", "tmpfs", str(folder)]
    is_mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    patch = pytest.MonkeyPatch()
    if is_mounted:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)

    def undo() -> None:
        patch.undo()
        if is_mounted:
            # A process that is still ending may have a file of it open.
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)
        folder.rmdir()

    return undo
