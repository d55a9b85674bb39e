"""The command in a process of its own that has imported what is slow already, which takes longer than what such commands do."""

import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from vllm_qualify.cli import main
from vllm_qualify.engine.confinement import NO_STATISTICS

# Not Prefect, which reads the environment when it is imported.
SLOW = [
    *("great_expectations.expectations", "scipy.stats", "pandas", "sqlalchemy", "docker"),
    *(
        "vllm_qualify.cli.commands",
        "vllm_qualify.approval.actions",
        "vllm_qualify.evidence.serving",
        "vllm_qualify.runs.judging",
    ),
]
LIMIT_S = 900.0
FORKED = get_context("forkserver")
FORKED.set_forkserver_preload(SLOW)


def warm_run(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As `tests.qualified.run_cold` for the command: its arguments, and what differs in its environment."""
    with TemporaryDirectory(prefix="vllm-qualify-warm-") as folder, pytest.MonkeyPatch.context() as patch:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        # The server that all are forked from is started with the first of them.
        for name, value in NO_STATISTICS.items():
            patch.setenv(name, value)
        wanted = dict(os.environ) | {"VLLM_QUALIFY_HOME": str(home)} | environment
        process = FORKED.Process(target=_main, args=(arguments, wanted, out, err))
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, LIMIT_S)
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _main(arguments: tuple[str, ...], environment: Mapping[str, str], out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["vllm-qualify", *arguments]
    main()
