"""What every qualification needs of this machine, asked before anything is started."""

import os
import socket
from tempfile import TemporaryFile, gettempdir

from vllm_qualify.errors import HostError

STAGE = "check"
LOOPBACK_LIMIT_S = 2.0
LEAST_TEMPORARY_BYTES = 2**20


def check_host() -> None:
    """Raises HostError if temporary files cannot be written, or a process here cannot reach another one by 127.0.0.1."""
    _check_temporary_folder()
    _check_loopback()


def _check_temporary_folder() -> None:
    # Python itself would go to another folder, but not all tools that get this variable.
    folder = os.environ.get("TMPDIR") or gettempdir()
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(LEAST_TEMPORARY_BYTES))
    except OSError as error:
        problem = f"no temporary file can be written in {folder}: {error.strerror}"
        raise HostError(
            problem, "free space there and check its permissions, or set TMPDIR to another folder", STAGE
        ) from error


def _check_loopback() -> None:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), LOOPBACK_LIMIT_S),
        ):
            pass
    except OSError as error:
        problem = f"no connection within this machine, by 127.0.0.1: {error.strerror or error}"
        raise HostError(problem, "bring the loopback interface up: ip link set lo up", STAGE) from error
