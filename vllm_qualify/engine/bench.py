"""`vllm bench serve` beside a server, in a process that stays: a new start takes 10 s to 20 s, in which a GPU is idle."""

import inspect
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pydantic import SerializeAsAny

from vllm_qualify.engine import bench_worker
from vllm_qualify.engine.bench_worker import MARK, tokens_name
from vllm_qualify.engine.launchers.registry import launcher_of
from vllm_qualify.engine.process import PROGRESS, Progress, Running, await_result, tail, text_of
from vllm_qualify.engine.server import Client
from vllm_qualify.engine.watch import steady_clock_arguments
from vllm_qualify.errors import HostError, writing
from vllm_qualify.lazy import Lazy
from vllm_qualify.recipe.values import Frozen

if TYPE_CHECKING:
    from vllm_qualify import answers
else:
    answers = Lazy("vllm_qualify.answers")

STAGE = "load"


class Bench(Frozen):
    """The client's process: ids and places, no handle. It takes its orders from `letter_box`, a folder where it runs."""

    client: Client
    process: SerializeAsAny[Running]
    letter_box: str


@contextmanager
def running_bench(client: Client, log: Path) -> Iterator[Bench]:
    """Run the client's process within the block, its output in `log`. It needs no server yet.

    Raises HostError if it cannot be started.
    """
    launcher = launcher_of(client)
    with launcher.letter_box(client) as letter_box:
        # As text, since its file is not where the client runs.
        command = [
            client.python,
            "-u",
            "-c",
            inspect.getsource(bench_worker),
            letter_box,
            answers.AGENT,
            *steady_clock_arguments(),
        ]
        with launcher.run(client, command, letter_box, log, STAGE) as process:
            yield Bench(client=client, process=process, letter_box=letter_box)


def results_folder(bench: Bench) -> str:
    """The folder where a command must write the results that `run_command` copies."""
    return launcher_of(bench.client).results_folder(bench.client, bench.letter_box)


def typed_command(client: Client, command: list[str]) -> list[str]:
    """The command as a person would type it on this machine."""
    return launcher_of(client).typed_command(client, command)


def run_command(
    bench: Bench,
    command: list[str],
    result: str | None,
    log: Path,
    time_limit_s: float,
    check: Callable[[], None],
    progress: Progress,
) -> None:
    """Run a command, `vllm bench serve …`, to its end. `log` gets what it printed.

    Afterwards the file `result` of its `results_folder`, `tokens-….json` with the tokens of its texts, and `client-….json` with
    what the client used, are beside `log`. None is without a `result`.

    Raises HostError if it failed, took longer than `time_limit_s`, or Docker Engine went away; and whatever `check` raises.
    """
    name, place = f"{time.monotonic_ns():020d}", log.parent.name
    log_from = bench.process.log.stat().st_size
    _write_order(bench, f"{name}.order", json.dumps(_bench_arguments(command)), place)
    done = _await_order(bench, name, log_from, time_limit_s, check, progress, place)
    with writing(str(log)):
        log.write_text(_read_since(bench.process.log, log_from))
        if result is None:
            return
        log.with_name(f"client-{log.stem.rpartition('-')[2]}.json").write_text(done)
    for file in (result, tokens_name(result)):
        launcher_of(bench.client).fetch(bench.client, f"{results_folder(bench)}/{file}", log.with_name(file), place)


def prepare_commands(bench: Bench, commands: Iterable[list[str]]) -> None:
    """Let the client make the prompts of later commands in advance, in this order, while it runs no command.

    Call `stop_preparing` before anything is measured. Raises HostError if Docker Engine went away.
    """
    planned = json.dumps([_bench_arguments(command) for command in commands])
    _write_order(bench, f"{time.monotonic_ns():020d}.ahead", planned, STAGE)


def stop_preparing(bench: Bench, time_limit_s: float, check: Callable[[], None]) -> None:
    """Stop making prompts in advance, which would disturb a measurement. Raises HostError, and whatever `check` raises."""
    name, log_from = f"{time.monotonic_ns():020d}", bench.process.log.stat().st_size
    _write_order(bench, f"{name}.ahead", "[]", STAGE)
    _await_order(bench, name, log_from, time_limit_s, check, no_progress, STAGE)


def _bench_arguments(command: list[str]) -> list[str]:
    return command[command.index("serve") + 1 :]


def no_progress(_done: int, _total: int, _part: str = "", /) -> None:
    """The progress of a run that is a small part of its stage is not reported."""


def give_file(bench: Bench, file: Path) -> str:
    """Bring a local file to where the client runs. Returns its path there. Raises HostError."""
    with writing(str(file)):
        return launcher_of(bench.client).give(bench.client, file, bench.letter_box, STAGE)


def give_text(bench: Bench, name: str, text: str) -> str:
    """Write a text into a file where the client runs. Returns its path there. Raises HostError."""
    with TemporaryDirectory() as folder, writing(name):
        file = Path(folder) / name
        file.write_text(text)
        return launcher_of(bench.client).give(bench.client, file, bench.letter_box, STAGE)


def _write_order(bench: Bench, name: str, text: str, place: str) -> None:
    launcher_of(bench.client).put(bench.client, f"{bench.letter_box}/{name}", text.encode(), place)


def _read_since(log: Path, log_from: int) -> str:
    return text_of(log, max(0, log.stat().st_size - log_from))


def _await_order(
    bench: Bench, name: str, log_from: int, time_limit_s: float, check: Callable[[], None], progress: Progress, place: str
) -> str:
    """Wait for the end of an order. Returns what the worker says then."""
    wanted = re.compile(rf"^{re.escape(MARK)} {name} (\{{.*\}})$", re.MULTILINE)
    shown = (0, 0)

    def answer() -> str | None:
        nonlocal shown
        written = _read_since(bench.process.log, log_from)
        counts = PROGRESS.findall(written[-4096:]) or PROGRESS.findall(written)
        if counts and (now := (int(counts[-1][0]), int(counts[-1][1]))) != shown:
            shown = now
            progress(*now)
        if match := wanted.search(written):
            return match[1]
        check()
        if (end := bench.process.end()) is not None:
            problem = f"vllm bench serve ended with exit code {end.exit_code}"
            raise HostError(problem, "see the last lines of its log", place, tail(bench.process.log))
        return None

    return await_result(answer, time_limit_s, place, place, bench.process.log)
