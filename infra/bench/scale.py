"""How long publishing, approving and finding take with few reports and with many, in a directory and in radosgw.

    .venv/bin/python -m infra.bench.scale [--few 100] [--many 10000] [--cells 1000] [--stores directory radosgw]

The two stores of a kind are measured in turns, and a ratio is one of medians: so other work on the machine hits both. The
small store has one cell for ten reports, as the large one. `list_s` is `approved list`. `publishers` is the slowest of 16
publishers at once in the large store, over one alone; `publishers_cpu` is the same of the CPU time that each needed, for the
time waits for cores as soon as there are more publishers than those. The last line is one JSON object. Approvals are timed
without the evidence being judged again, which takes seconds and depends on no store.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple
from uuid import uuid4

from infra.bench.reports import MadeReport, Template, fill, numbered_cell, report_of, report_template
from tests.approval.builder import ADA, VALID_DAYS
from tests.s3 import BUCKET, SCRIPT, make_bucket, settings_in, start
from vllm_qualify.approval.actions import approve
from vllm_qualify.approval.index import read_row
from vllm_qualify.approval.matrix import matrix
from vllm_qualify.approval.published import read_run
from vllm_qualify.approval.signing import PrivateKey, new_key, private_key
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.runs.baseline import newest_baseline
from vllm_qualify.runs.publishing import publish_run
from vllm_qualify.runs.stored import published_run

REPORTS_OF_A_CELL = 10
ROUNDS = 15
PUBLISHERS = 16
PUBLISH_ONE, READY = "--publish-one", "ready"
# How many keys a page of a list has, as of S3 itself. The tests' gateway has short pages.
PAGE = "1000"


class Filled(NamedTuple):
    """A store with that many cells."""

    store: Store
    cells: int


def compare_stores(few: Filled, many: Filled, given: Template, key: PrivateKey) -> dict[str, float]:
    """The ratios of the medians, large over small."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ("publish", "approve", "find", "baseline")}
    for number in range(ROUNDS + 1):
        for side, filled in enumerate((few, many)):
            cell = numbered_cell((number * 7) % filled.cells)
            for name, took_s in _timed(filled.store, cell, given, key):
                # The first round warms up.
                times[name][side].extend([took_s] if number else [])
    medians = {name: [statistics.median(side) for side in sides] for name, sides in times.items()}
    for name, (before, after) in medians.items():
        print(f"{name:10} {1000 * before:8.1f} ms {1000 * after:8.1f} ms", flush=True)
    return {f"{name}_ratio": round(after / before, 2) for name, (before, after) in medians.items()}


def _timed(store: Store, cell: str, given: Template, key: PrivateKey) -> Iterator[tuple[str, float]]:
    made = _new(cell)
    yield "publish", _seconds(lambda: _publish(store, given, made))
    yield "find", _seconds(lambda: published_run(store, made.run_id))
    run = read_run(store, cell, made.run_id)
    yield "approve", _seconds(lambda: approve(store, run, ADA, VALID_DAYS, key, datetime.now(UTC)))
    yield "baseline", _seconds(lambda: newest_baseline(store, cell))


def _new(cell: str) -> MadeReport:
    return MadeReport(cell, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:6]}")


def _publish(store: Store, given: Template, made: MadeReport) -> None:
    published = publish_run(report_of(given, made), given.run, store)
    if published.index_problem:
        raise RuntimeError(published.index_problem)


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def list_s(store: Store) -> float:
    today = datetime.now(UTC).date()
    return min(_seconds(lambda: matrix(store, today)) for _ in range(3))


def at_once(url: str, folder: Path, cells: int) -> dict[str, float]:
    """Publishers in processes of their own, first one alone, then all at once; every report must be in its cell's index."""
    alone = [_publishers(url, folder, [numbered_cell(number)])[0] for number in range(3)]
    together = _publishers(url, folder, [numbered_cell(number % cells) for number in range(PUBLISHERS)])
    return _ratio("publishers", alone, together, lambda took: took.wall_s) | _ratio(
        "publishers_cpu", alone, together, lambda took: took.cpu_s
    )


def _ratio(
    name: str, alone: list["StoreTimes"], together: list["StoreTimes"], figure: Callable[["StoreTimes"], float]
) -> dict[str, float]:
    one, many = statistics.median(map(figure, alone)), [figure(took) for took in together]
    print(f"{name:14} {1000 * min(many):.0f} to {1000 * max(many):.0f} ms, one alone {1000 * one:.0f} ms", flush=True)
    return {name: round(max(many) / one, 2)}


class StoreTimes(NamedTuple):
    """How long a publication took, by the clock and of the cores' time."""

    wall_s: float
    cpu_s: float


def _publishers(url: str, folder: Path, cells: list[str]) -> list[StoreTimes]:
    """Each has imported everything before the first begins: so nothing but publishing is timed."""
    made = [_new(cell) for cell in cells]
    command = [sys.executable, "-m", "infra.bench.scale", PUBLISH_ONE, url, str(folder)]
    running = [subprocess.Popen([*command, *each], stdin=PIPE, stdout=PIPE, text=True) for each in made]
    for process in running:
        if _output(process).readline().strip() != READY:
            raise RuntimeError("a publisher did not start")
    took = [StoreTimes(*map(float, answer.split())) for answer in _all_at_once(running)]
    store = open_store(url)
    for cell, run_id in made:
        row = read_row(store, cell)
        if run_id not in [line.run_id for line in row.reports] or published_run(store, run_id).cell != cell:
            raise RuntimeError(f"run {run_id} of {cell} was lost")
    return took


def _all_at_once(running: list[subprocess.Popen[str]]) -> list[str]:
    """Let all processes begin, and wait for the last line of each."""
    for process in running:
        if process.stdin:
            process.stdin.write("begin\n")
            process.stdin.flush()
    return [process.communicate()[0].splitlines()[-1] for process in running]


def _output(process: subprocess.Popen[str]) -> IO[str]:
    if process.stdout is None:
        raise RuntimeError("the output of a publisher is not read")
    return process.stdout


def publish_one(url: str, folder: str, cell: str, run_id: str) -> None:
    """Publish a report once a line is read, and print how long it took in seconds, by the clock and of the cores' time."""
    given, store = report_template(Path(folder) / uuid4().hex), open_store(url)
    made = MadeReport(cell, run_id)
    report_of(given, made)
    print(READY, flush=True)
    sys.stdin.readline()
    cpu_s = time.process_time()
    wall_s = _seconds(lambda: _publish(store, given, made))
    print(wall_s, time.process_time() - cpu_s)


@contextmanager
def _directory(folder: Path) -> Iterator[str]:
    yield folder.as_uri()


@contextmanager
def _radosgw(folder: Path) -> Iterator[str]:
    os.environ["RADOSGW_PAGE"] = PAGE
    started = start(folder)
    if started.returncode:
        raise RuntimeError(f"radosgw did not start: {started.stderr[-600:]}")
    try:
        settings = settings_in(folder / "env")
        make_bucket(settings)
        os.environ.update(settings)
        yield f"s3://{BUCKET}"
    finally:
        subprocess.run([SCRIPT, "stop", folder], capture_output=True, check=True)


KINDS: Mapping[str, Callable[[Path], object]] = {"directory": _directory, "radosgw": _radosgw}


def measure(url: str, folder: Path, few: int, many: int, cells: int) -> dict[str, float]:
    """All figures of one kind of store."""
    new_key(folder / "key.pem")
    key, given = private_key((folder / "key.pem").read_text()), report_template(folder)
    sizes = {"few": (few, max(2, few * cells // many)), "many": (many, cells)}
    filled = {name: Filled(open_store(f"{url}/{name}"), count) for name, (_, count) in sizes.items()}
    for name, (reports, count) in sizes.items():
        took_s = _seconds(partial(fill, filled[name].store, given, reports, count, key))
        print(f"{reports} reports of {count} cells were made in {took_s:.0f} s", flush=True)
    costs = compare_stores(filled["few"], filled["many"], given, key)
    return costs | {"list_s": round(list_s(filled["many"].store), 2)} | at_once(f"{url}/many", folder, cells)


def main() -> None:
    if sys.argv[1:2] == [PUBLISH_ONE]:
        return publish_one(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--cells", type=int, default=1000, help="of the large store")
    parser.add_argument("--stores", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    results = {}
    for kind in given.stores:
        with TemporaryDirectory(prefix="vllm-qualify-scale-") as name, KINDS[kind](Path(name) / "store") as url:
            print(f"# {kind}", flush=True)
            results[kind] = measure(url, Path(name), given.few, given.many, given.cells)
    print(json.dumps(results))
    return None


if __name__ == "__main__":
    main()
