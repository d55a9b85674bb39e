"""How long publishing, approving and finding take with few reports and with many, in a directory and in radosgw.

    .venv/bin/python -m infra.bench.scale [--few 100] [--many 10000] [--cells 1000] [--stores directory radosgw]

The two stores of a kind are measured in turns, and a ratio is one of medians: so other work on the machine hits both. The
small store has one cell for ten reports, as the large one. `list_s` is `approved list`. The last line is one JSON object.
Approvals are timed without the evidence being judged again, which takes seconds and depends on no store.

16 publishers begin together in the large store, in 5 turns. `publishers_ratio` is the slowest of all by the clock, over the
median of one alone on the idle machine. It says something only where each has a core: `cores` is how many there are.
`publishers_apart_ratio` is fair on any machine: it is over the median of 16 who begin together too, each in a store of its own,
so the waiting for cores is in both. `publishers_cpu_ratio` is the most of the cores' time that one needed, over one alone.
The times of the slowest, and of the one that needed most, are there for each turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from operator import truediv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from uuid import uuid4

from infra.bench.reports import MadeReport, Template, fill, numbered_cell, report_of, report_template
from tests.approval.builder import ADA, VALID_DAYS
from tests.s3 import BUCKET, SCRIPT, make_bucket, settings_in, start
from vllm_qualify.approval.actions import approve
from vllm_qualify.approval.index import read_index, read_row
from vllm_qualify.approval.layout import BOARD_KEY, INDEX_KEY, JSON, approvals_folder
from vllm_qualify.approval.matrix import matrix
from vllm_qualify.approval.published import read_run
from vllm_qualify.approval.signing import PrivateKey, new_key, private_key
from vllm_qualify.publish.layout import prepare
from vllm_qualify.publish.order import sequence_key
from vllm_qualify.publish.store import Store
from vllm_qualify.publish.stores import open_store
from vllm_qualify.runs.baseline import newest_baseline
from vllm_qualify.runs.publishing import publish_run
from vllm_qualify.runs.stored import published_run

REPORTS_OF_A_CELL = 10
ROUNDS = 15
PUBLISHERS = 16
TURNS = 5
LIMIT_S = 60.0
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


class Took(NamedTuple):
    """How long a publication took, by the clock and of the cores' time."""

    wall_s: float
    cpu_s: float


class Turn(NamedTuple):
    """The publications of 16 in one store, of 16 with a store each, and of one alone."""

    together: list[Took]
    apart: list[Took]
    alone: Took


def at_once(url: str, given: Template, cells: int) -> Iterator[Turn]:
    """16 publishers who begin together: in turns all in the large store, each in a store of its own, and one alone."""
    places = [numbered_cell(number % cells) for number in range(PUBLISHERS)]
    shared = [f"{url}/many"] * PUBLISHERS
    own = [f"{url}/own-{number}" for number in range(PUBLISHERS)]
    for name, cell in zip(own, places, strict=True):
        _copy(open_store(shared[0]), open_store(name), cell)
    for _ in range(TURNS):
        alone = _publish_together(given, shared[:1], places[:1])[0]
        yield Turn(_publish_together(given, shared, places), _publish_together(given, own, places), alone)


def publisher_figures(turns: list[Turn]) -> dict[str, object]:
    """The ratios are the worst of all turns."""
    slowest_s, most_cpu_s = ([max(map(figure, turn.together)) for turn in turns] for figure in (_wall_s, _cpu_s))
    alone_s, alone_cpu_s = (statistics.median(figure(turn.alone) for turn in turns) for figure in (_wall_s, _cpu_s))
    apart_s = [statistics.median(map(_wall_s, turn.apart)) for turn in turns]
    return {
        "publishers_ratio": round(max(slowest_s) / alone_s, 2),
        "publishers_apart_ratio": round(max(map(truediv, slowest_s, apart_s)), 2),
        "publishers_cpu_ratio": round(max(most_cpu_s) / alone_cpu_s, 2),
        "alone_ms": _ms(alone_s),
        "alone_cpu_ms": _ms(alone_cpu_s),
        "slowest_ms": list(map(_ms, slowest_s)),
        "most_cpu_ms": list(map(_ms, most_cpu_s)),
    }


def _copy(store: Store, own: Store, cell: str) -> None:
    """Give a new store what a publication in this cell reads: as large an index and board, and of the cells this one."""
    prepare(own)
    once = {*store.keys("evidence/"), *store.keys(approvals_folder(cell))}
    for key in sorted(once | {INDEX_KEY, BOARD_KEY, *store.keys(f"cells/{cell}/"), *store.keys(sequence_key(cell))}):
        own.put_new(key, store.get(key), JSON)


def _wall_s(took: Took) -> float:
    return took.wall_s


def _cpu_s(took: Took) -> float:
    return took.cpu_s


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def _publish_together(given: Template, urls: list[str], cells: list[str]) -> list[Took]:
    """One report of each cell, in its store, each by a process of its own. No report may be lost."""
    made, fork = [_new(cell) for cell in cells], get_context("fork")
    begin, answers = fork.Barrier(len(cells)), []
    for url, each in zip(urls, made, strict=True):
        answer, end = fork.Pipe(duplex=False)
        fork.Process(target=_publisher, args=(begin, end, url, given, each)).start()
        end.close()
        answers.append(answer)
    took = [Took(*answer.recv()) for answer in answers]
    for url, (cell, run_id) in zip(urls, made, strict=True):
        _require(open_store(url), cell, run_id)
    return took


def _publisher(begin: Barrier, answer: Connection, url: str, given: Template, made: MadeReport) -> None:
    """Publish a report once all are ready, and tell how long that took."""
    store = open_store(url)
    begin.wait(LIMIT_S)
    cpu_s = time.process_time()
    wall_s = _seconds(lambda: _publish(store, given, made))
    answer.send((wall_s, time.process_time() - cpu_s))


def _require(store: Store, cell: str, run_id: str) -> None:
    """The report is found, and in the indexes and on the board."""
    row, above = read_row(store, cell), next(line for line in read_index(store).cells if line.cell == cell)
    shown = [run_id in [line.run_id for line in row.reports], above.revision == row.revision, run_id in _board(store)]
    if not all(shown) or published_run(store, run_id).cell != cell:
        raise RuntimeError(f"run {run_id} of {cell} was lost")


def _board(store: Store) -> str:
    return store.get(BOARD_KEY).decode()


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


KINDS: Mapping[str, Callable[[Path], AbstractContextManager[str]]] = {"directory": _directory, "radosgw": _radosgw}


def measure(url: str, folder: Path, few: int, many: int, cells: int) -> dict[str, object]:
    """All figures of one kind of store."""
    new_key(folder / "key.pem")
    key, given = private_key((folder / "key.pem").read_text()), report_template(folder)
    sizes = {"few": (few, max(2, few * cells // many)), "many": (many, cells)}
    filled = {name: Filled(open_store(f"{url}/{name}"), count) for name, (_, count) in sizes.items()}
    for name, (reports, count) in sizes.items():
        took_s = _seconds(partial(fill, filled[name].store, given, reports, count, key))
        print(f"{reports} reports of {count} cells were made in {took_s:.0f} s", flush=True)
    costs = compare_stores(filled["few"], filled["many"], given, key)
    listed_s = round(list_s(filled["many"].store), 2)
    return {**costs, "list_s": listed_s, **publisher_figures(list(at_once(url, given, cells)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--cells", type=int, default=1000, help="of the large store")
    parser.add_argument("--stores", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    results: dict[str, object] = {"cores": len(os.sched_getaffinity(0))}
    for kind in given.stores:
        with TemporaryDirectory(prefix="vllm-qualify-scale-") as name, KINDS[kind](Path(name) / "store") as url:
            print(f"# {kind}", flush=True)
            results[kind] = measure(url, Path(name), given.few, given.many, given.cells)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
