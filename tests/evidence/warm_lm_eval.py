"""lm-eval's workers, forked from a process that has imported lm-eval: its import takes longer than what most tests ask of it.

They are confined as the product confines them. What is left out is the guard, which tests/engine/test_process.py tries.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from vllm_qualify.engine import guard
from vllm_qualify.engine.confine import confining
from vllm_qualify.engine.confinement import NO_STATISTICS, Confinement
from vllm_qualify.engine.process import RunningProcess, open_log

SLOW = (
    *("lm_eval.evaluator", "lm_eval.models.openai_completions", "httpx", "PIL.Image", "ruamel.yaml"),
    # by datasets, when it opens a file
    *("multiprocessing.connection", "scipy.io"),
    *("vllm_qualify.engine.letter_box", "vllm_qualify.evidence.lm_eval_internals", "vllm_qualify.evidence.long.fitting"),
    *("vllm_qualify.evidence.thinking", "vllm_qualify.evidence.tools.scoring", "vllm_qualify.plan.questions"),
    "vllm_qualify.recipe.workload",
)
# Of SLOW, in this order: these read variables while they are imported.
READ_THE_ENVIRONMENT = ("huggingface_hub.constants", "datasets.config")


class Warm:
    """The process that all are forked from."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @contextmanager
    def guarded(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        rules: Confinement | None = None,
    ) -> Iterator[RunningProcess]:
        """As `process.guarded`, for a command that is a module of this Python."""
        _, option, *arguments = command
        assert option == "-m"
        state = log.with_suffix(".state")
        state.unlink(missing_ok=True)
        open_log(log).close()
        order = {
            "arguments": arguments,
            "environment": dict(environment),
            "log": str(log),
            "state": str(state),
            "rules": rules and json.loads(rules.model_dump_json()),
        }
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(order), file=self._process.stdin, flush=True)
        running = RunningProcess(guard_pid=int(self._process.stdout.readline()), state_file=state, log=log)
        while not state.exists():
            time.sleep(0.005)
        try:
            yield running
        finally:
            if running.exit_code() is None:
                _kill(json.loads(state.read_text())["pid"])

    def run(self, log: Path, *arguments: str) -> str:
        """What a module writes, to its end."""
        with self.guarded([sys.executable, "-m", *arguments], os.environ, log) as process:
            while process.exit_code() is None:
                time.sleep(0.01)
        assert process.exit_code() == 0, log.read_text()
        return log.read_text()


def _kill(pid: int) -> None:
    guard.signal_group(pid, signal.SIGKILL)
    # It may not have a group yet.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def warm() -> Iterator[Warm]:
    command, environment = [sys.executable, "-m", __name__], os.environ | NO_STATISTICS
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        # At the end of its orders it ends.
        yield Warm(process)


def main() -> None:
    """For each order, a line of JSON on standard input, start a process, and write the id of its guard."""
    for module in SLOW:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    for line in sys.stdin:
        order = json.loads(line)
        if not (pid := os.fork()):
            _guard(order)
        print(pid, flush=True)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _guard(order: dict[str, Any]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (pid := os.fork()):
        _work(order)
    state = Path(order["state"])
    guard.write_state(state, pid=pid)
    guard.write_state(state, pid=pid, exit_code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _work(order: dict[str, Any]) -> NoReturn:
    os.setsid()
    with open(os.devnull, "rb") as nothing, open_log(Path(order["log"])) as log:
        for stream, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[1:1] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    for module in READ_THE_ENVIRONMENT:
        importlib.reload(sys.modules[module])
    if order["rules"]:
        confining(order["rules"])()
    module, *arguments = order["arguments"]
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
