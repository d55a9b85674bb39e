"""The cost of the orchestrator itself: the real flow, tasks, judging, reports and publishing, around stages that do nothing.

    .venv/bin/python -m infra.bench.orchestrator [--cells 10 100 1000]

Each number of cells runs in a process of its own, with Prefect's server beside it as for `vllm-qualify run`, and publishes to
a new directory. Seconds, CPU seconds and memory are those of both processes. They are taken when a cell's load begins, and
count from the last of the first few cells to the last of all, so that imports and other work at the start are not in them.
Memory is resident memory. It varies: with ten cells that can be most of the result. The last line is one JSON object.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

from infra.bench.passing import passing, write_bench_recipe, write_engine
from vllm_qualify.engine.confinement import NO_STATISTICS
from vllm_qualify.evidence.load import client

ROOT = Path(__file__).parents[2]
CELLS, FIRST_FEW = (10, 100, 1000), 5
ONE = "--one"
TICKS, PAGE_BYTES, MIB = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE"), 2**20


class UsageMark(NamedTuple):
    """A moment of a run: the time, and the CPU time and memory that its processes have used until then."""

    at: float
    cpu_s: float
    mib: float


class Cost(NamedTuple):
    """The cost of a cell in a run of `cells`, and the seconds before the first counted cell."""

    cells: int
    passed: int
    seconds: float
    cpu_s: float
    mib: float
    before_s: float


def measure(cells: int, folder: Path) -> Cost:
    """Qualify `cells` cells in a new process. `folder` gets its home, with the store in it.

    Raises:
        subprocess.CalledProcessError: the flow failed; `stderr` is its log.
    """
    write_bench_recipe(cells, folder / "recipe.yaml")
    places = {"VLLM_QUALIFY_HOME": str(folder / "home"), "VLLM_QUALIFY_ENGINE": str(write_engine(folder / "engine"))}
    # Without the caller's own Prefect server: it is not the one to measure.
    environment = {name: value for name, value in (os.environ | NO_STATISTICS).items() if not name.startswith("PREFECT_API")}
    command = [sys.executable, "-m", "infra.bench.orchestrator", ONE, str(folder / "recipe.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=environment | places, capture_output=True, text=True, check=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def run_here(recipe: Path) -> Cost:
    """Qualify the cells of a recipe that `write_recipe` wrote, in this process."""
    command: Any = importlib.import_module("vllm_qualify.cli.flow")
    command.set_up_prefect()
    began = mark()
    flow: Any = importlib.import_module("flows.qualify")
    with passing(), _marked() as marks:
        published = flow.run_qualification(flow.QualifyRelease(recipe=str(recipe)))
    left_out = min(FIRST_FEW, len(marks) - 1)
    first, last, counted = marks[left_out - 1], marks[-1], len(marks) - left_out
    return Cost(
        cells=len(published),
        passed=sum(run.passed for run in published),
        seconds=(last.at - first.at) / counted,
        cpu_s=(last.cpu_s - first.cpu_s) / counted,
        mib=(last.mib - first.mib) / counted,
        before_s=first.at - began.at,
    )


@contextmanager
def _marked() -> Iterator[list[UsageMark]]:
    """The marks of the cells, each made as its load begins."""
    marks: list[UsageMark] = []
    measured = client.measure_load

    def marking(*arguments: Any) -> list[list[str]]:
        marks.append(mark())
        return measured(*arguments)

    with patch("vllm_qualify.evidence.load.client.measure_load", marking):
        yield marks


def mark() -> UsageMark:
    """The time and the use of this process and all its descendants."""
    stats = _stats()
    ours = {os.getpid()}
    # One pass for each generation: a child can have a lower id than its parent.
    while more := {pid for pid, stat in stats.items() if int(stat[1]) in ours} - ours:
        ours |= more
    ticks = sum(int(stats[pid][11]) + int(stats[pid][12]) for pid in ours)
    return UsageMark(time.monotonic(), ticks / TICKS, sum(int(stats[pid][21]) for pid in ours) * PAGE_BYTES / MIB)


def _stats() -> dict[int, list[str]]:
    """The fields of /proc/PID/stat from the state on, of every process."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stats[int(path.name)] = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            # The process ended meanwhile.
            continue
    return stats


def table(costs: Sequence[Cost]) -> Iterator[str]:
    """One line for each number of cells. All columns but the last are per cell."""
    yield f"{'cells':>6}{'passed':>10}{'seconds':>10}{'CPU s':>9}{'MiB':>8}{'s before':>10}"
    for cost in costs:
        spent = f"{cost.seconds:10.3f}{cost.cpu_s:9.3f}{cost.mib:8.3f}{cost.before_s:10.1f}"
        yield f"{cost.cells:6}{cost.passed:10}{spent}"


def figures(costs: Sequence[Cost]) -> dict[str, dict[str, float]]:
    return {
        "seconds_per_cell": {str(cost.cells): round(cost.seconds, 4) for cost in costs},
        "mib_per_cell": {str(cost.cells): round(cost.mib, 4) for cost in costs},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=CELLS)
    parser.add_argument(ONE, type=Path, metavar="RECIPE", help="only these cells, in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_here(args.one)._asdict()))
        return
    costs = []
    for cells in args.cells:
        with TemporaryDirectory(prefix="vllm-qualify-bench-") as folder:
            costs.append(measure(cells, Path(folder)))
    for line in table(costs):
        print(line)
    print(json.dumps(figures(costs)))


if __name__ == "__main__":
    main()
