"""What was watched of real servers, read back: which loads count, and the course of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders.loads import load_server
from tests.builders.watched import CAPTURED, ENOUGH, QUEUED
from vllm_qualify.engine.kinds.base import CounterName
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES, Scrape
from vllm_qualify.evidence.watched import QueueLimit, notes, read_watched, series, value_of, watched_problems

CLIENTS = 16
ONE = '{engine="0",model_name="reference"}'
TOKENS = f"vllm:generation_tokens_total{ONE}"
GPU = {"index": 0, "clock_reasons": ["gpu_idle"]}

Document = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CAPTURED / "enough", tmp_path / "enough")


def change(path: Path, edit: Callable[[int, Document], Document | None]) -> None:
    """Edit each line by its number; None removes it."""
    edited = [edit(number, json.loads(line)) for number, line in enumerate(path.read_text().splitlines())]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in edited if line is not None))


def limit_of(max_num_seqs: int | None, span: tuple[float, float] = QUEUED, clients: int = CLIENTS) -> QueueLimit:
    server = load_server({} if max_num_seqs is None else {"max-num-seqs": max_num_seqs})
    return QueueLimit(server, clients, since=span[0])


def of_enough(folder: Path, clients: int = CLIENTS, max_num_seqs: int | None = 32) -> list[str]:
    return watched_problems(folder, *ENOUGH, limit_of(max_num_seqs, ENOUGH, clients))


def the_one(reason: list[str]) -> str:
    assert len(reason) == 1, reason
    return reason[0]


def test_a_real_load_without_a_queue_counts(folder: Path) -> None:
    assert of_enough(folder) == []
    assert notes(folder, *ENOUGH) == []


def test_a_real_queue_counts_against_a_load_that_should_not_have_one() -> None:
    for planned in (limit_of(4), limit_of(None), None):
        assert watched_problems(CAPTURED / "queued", *QUEUED, planned) == []
    reason = the_one(watched_problems(CAPTURED / "queued", *QUEUED, limit_of(16)))
    assert reason.startswith("on average 72% of the requests in the server waited, although 16 clients are no more than its")
    assert "max-num-seqs 16: raise max-num-batched-tokens or gpu-memory-utilization" in reason


def test_a_wave_that_one_sample_sees_waiting_is_no_queue(folder: Path) -> None:
    change(folder / SCRAPES, lambda n, line: seen(line, running=4, waiting=12) if n == 4 else line)
    assert sum(value_of(one, "waiting") or 0 for one in read_watched(folder).scrapes) == 12
    assert of_enough(folder) == []


def seen(line: Document, **counts: float) -> Document:
    return line | {"values": line["values"] | {f"vllm:num_requests_{name}{ONE}": float(new) for name, new in counts.items()}}


@pytest.mark.parametrize(("waiting", "is_queue"), [(1, False), (2, True)])
def test_a_tenth_may_wait(waiting: int, is_queue: bool, folder: Path) -> None:
    change(folder / SCRAPES, lambda _, line: seen(line, running=15, waiting=waiting))
    assert [reason.partition(" of the")[0] for reason in of_enough(folder)] == (["on average 12%"] if is_queue else [])


def with_gpu(folder: Path, at: int, **changes: object) -> None:
    change(folder / HOST_SAMPLES, lambda n, line: line | {"gpus": [GPU | changes if n == at or at < 0 else GPU]})


@pytest.mark.parametrize("reason", ["hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"])
def test_a_gpu_that_was_slowed_down_once_does_not_count_and_the_power_limit_is_only_noted(reason: str, folder: Path) -> None:
    with_gpu(folder, 5, clock_reasons=["sw_power_cap"])
    assert of_enough(folder) == []
    assert the_one(notes(folder, *ENOUGH)).endswith("GPU 0: in 1 of 17 samples")
    with_gpu(folder, 5, clock_reasons=["sw_power_cap", reason])
    slowed = f"GPU 0 was slowed down in 1 of 17 samples ({reason}): mend this host's cooling"
    assert the_one(of_enough(folder)).startswith(slowed)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"error": "GPU is lost", "clock_reasons": None}, "GPU is lost"), ({"clock_reasons": None}, "no reasons of its clocks")],
)
def test_a_gpu_that_tells_nothing_may_have_been_slowed_down(changes: Document, why: str, folder: Path) -> None:
    with_gpu(folder, -1, **changes)
    reason = the_one(of_enough(folder))
    assert reason.startswith("GPU 0 was read only 0 of 20 times (")
    assert why in reason


@pytest.mark.parametrize(
    ("answered", "reasons"),
    [(1, ["the server's metrics were read only 1 of 20 times (ReadTimeout: timed out): see what slows"]), (2, [])],
)
def test_a_tenth_of_the_scrapes_is_enough(answered: int, reasons: list[str], folder: Path) -> None:
    failed = {"error": "ReadTimeout: timed out"}
    change(folder / SCRAPES, lambda n, line: {"time": line["time"]} | failed if n >= answered else line)
    assert [reason.partition(" this machine")[0] for reason in of_enough(folder)] == reasons


@pytest.mark.parametrize(("looks", "has_gpus"), [(1, False), (9, True)])
def test_a_machine_that_was_seldom_looked_at_is_reported_sooner_if_it_has_gpus(
    looks: int, has_gpus: bool, folder: Path
) -> None:
    if has_gpus:
        with_gpu(folder, -1, clock_reasons=[])
    change(folder / HOST_SAMPLES, lambda n, line: line if n < looks else None)
    assert the_one(of_enough(folder)).startswith(f"the machine was looked at only {looks} of 20 times")


def test_a_load_at_another_time_was_not_watched(folder: Path) -> None:
    reasons = watched_problems(folder, ENOUGH[0] + 3600, ENOUGH[1] + 3600)
    assert [message.partition(": see")[0] for message in reasons] == [
        "the server's metrics were read only 0 of 20 times",
        "the machine was looked at only 0 of 20 times",
    ]


def test_the_last_line_of_a_killed_run_may_be_torn(folder: Path) -> None:
    path = folder / SCRAPES
    path.write_text(path.read_text()[:-20])
    assert len(read_watched(folder).scrapes) == 16
    assert of_enough(folder) == []


@pytest.mark.parametrize("name", [SCRAPES, HOST_SAMPLES])
@pytest.mark.parametrize("text", [None, "{}\n", '{"time": "now"}\n', "\x00\n"])
def test_files_that_cannot_be_read_are_a_problem_and_no_exception(name: str, text: str | None, folder: Path) -> None:
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    assert the_one(of_enough(folder)).startswith("what was watched during the load cannot be read: ")
    assert the_one(notes(folder, *ENOUGH)).startswith("what was watched during the load cannot be read: ")


def test_values_of_several_engines_are_added_and_the_fullest_cache_counts() -> None:
    names = ("num_requests_running", "kv_cache_usage_perc")
    values = {f'vllm:{name}{{engine="{engine}"}}': 0.25 + engine for name in names for engine in (0, 1)}
    meanings: list[CounterName] = ["running", "kv_cache_usage", "waiting"]
    assert [value_of(Scrape(time=1.0, values=values), each) for each in meanings] == [1.5, 1.25, None]


def test_the_course_of_a_real_load(folder: Path) -> None:
    course = series(folder, *ENOUGH)
    assert course.time_s == sorted(course.time_s)
    assert (course.time_s[0], course.output_tok_s[0]) == (0, None)
    assert (course.running[3:6], set(course.waiting)) == ([16.0, 16.0, 0.0], {0.0})
    assert course.kv_cache_usage[3] == 0.009770992366412212
    before, after = read_watched(folder).scrapes[3:5]
    assert course.output_tok_s[4] == (after.values[TOKENS] - before.values[TOKENS]) / (after.time - before.time)
    assert len({len(values) for values in course.model_dump().values()}) == 1


def test_a_failed_scrape_and_a_count_that_goes_back_are_gaps_in_the_course(folder: Path) -> None:
    change(folder / SCRAPES, lambda n, line: {"time": line["time"], "error": "gone"} if n == 4 else line)
    change(folder / SCRAPES, lambda n, line: line | {"values": line["values"] | {TOKENS: 1.0}} if n >= 9 else line)
    course = series(folder)
    assert (course.running[4], course.kv_cache_usage[4]) == (None, None)
    assert [at for at, rate in enumerate(course.output_tok_s[:11]) if rate is None] == [0, 4, 5, 9]
    assert series(folder, 0, 1).model_dump() == {name: [] for name in course.model_dump()}
