"""The command in a fork of a process that has imported what is slow already, which takes longer than what such commands do."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.warm.forks import Forks, Warm
from vllm_qualify.engine.confinement import NO_STATISTICS

SLOW = (
    *("great_expectations.expectations", "scipy.stats", "pandas", "sqlalchemy", "docker"),
    *(
        "vllm_qualify.cli.commands",
        "vllm_qualify.approval.actions",
        "vllm_qualify.evidence.serving",
        "vllm_qualify.runs.judging",
    ),
)
# Prefect reads the environment when it is imported. Without a server it has a folder of the command's own.
SERVER = "PREFECT_API_URL"
LIMIT_S, IDLE_S = 900.0, 600.0


def warm_run(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As `tests.qualified.run_cold` for the command: its arguments, and what differs in its environment."""
    wanted = dict(os.environ) | NO_STATISTICS | {"VLLM_QUALIFY_HOME": str(home)} | environment
    with TemporaryDirectory(prefix="vllm-qualify-warm-") as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        asked = {"name": "vllm-qualify", "arguments": arguments, "environment": wanted, "cwd": os.getcwd(), "files": [1, 2]}
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, out.open("wb") as stdout, err.open("wb") as stderr:
                (WITH_PREFECT if SERVER in wanted else WITHOUT).fork(asked, theirs, [stdout.fileno(), stderr.fileno()])
            ours.settimeout(LIMIT_S)
            try:
                code = ours.recv(8)
            except TimeoutError as error:
                raise subprocess.TimeoutExpired(arguments, LIMIT_S) from error
        assert code, "what forks the commands ended"
        return subprocess.CompletedProcess(
            arguments, int.from_bytes(code, "big", signed=True), out.read_text(), err.read_text()
        )


def _is_read(name: str) -> bool:
    return not name.startswith(("VLLM_QUALIFY_", "PYTEST_", "AWS_"))


WITHOUT = Forks(Warm(sys.executable, SLOW, IDLE_S), lambda name: _is_read(name) and not name.startswith("PREFECT_"))
WITH_PREFECT = Forks(Warm(sys.executable, SLOW, IDLE_S, ["vllm_qualify.cli.flow:flow_module"]), _is_read)
