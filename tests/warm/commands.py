"""The command in a fork of a process that has imported what is slow already, which takes longer than what such commands do."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.warm.forks import Forks, Warm, ask, write_stand_in
from tests.warm.lm_eval import FOLDER
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
LIMIT_S, IDLE_S = 900.0, 1500.0
WITHOUT, WITH_PREFECT = "commands", "commands-with-prefect"


def warm_run(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As `tests.qualified.run_cold` for the command: its arguments, and what differs in its environment."""
    wanted = dict(os.environ) | NO_STATISTICS | {"VLLM_QUALIFY_HOME": str(home)} | environment
    with TemporaryDirectory(prefix="vllm-qualify-warm-") as folder, socket.socket(socket.AF_UNIX) as line:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        asked = {"name": "vllm-qualify", "arguments": arguments, "environment": wanted, "cwd": os.getcwd(), "files": [1, 2]}
        line.connect(str(Path(os.environ[FOLDER], WITH_PREFECT if SERVER in wanted else WITHOUT)))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            ask(line, asked, [stdout.fileno(), stderr.fileno()])
        line.settimeout(LIMIT_S)
        try:
            code = line.recv(8)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(arguments, LIMIT_S) from error
        assert code, "what forks the commands ended"
        return subprocess.CompletedProcess(
            arguments, int.from_bytes(code, "big", signed=True), out.read_text(), err.read_text()
        )


def warm_start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """What stands for the command, for a test that does something while it runs. A SIGINT is not passed on."""
    program = folder / "vllm-qualify"
    write_stand_in(program, Path(os.environ[FOLDER], WITH_PREFECT if SERVER in os.environ else WITHOUT))
    return subprocess.Popen([program, *arguments], env=os.environ | NO_STATISTICS, **options)


def forks() -> dict[str, Forks]:
    """By the name of their socket."""
    use_forks = ["tests.warm.lm_eval:use"]
    without = Warm(sys.executable, SLOW, IDLE_S, use_forks)
    with_prefect = Warm(sys.executable, SLOW, IDLE_S, ["vllm_qualify.cli.flow:flow_module", *use_forks])
    return {
        WITHOUT: Forks(without, lambda name: _is_read(name) and not name.startswith("PREFECT_")),
        WITH_PREFECT: Forks(with_prefect, _is_read),
    }


def _is_read(name: str) -> bool:
    return not name.startswith(("VLLM_", "PYTEST_", "AWS_", "DOCKER_", "COLUMNS", "LINES"))
