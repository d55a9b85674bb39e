"""What was watched of real servers, read back: which loads count, and the plots of them."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES, Scrape
from vllm_qualify.evidence.watched import chart, notes, problems, read_watched, series, value_of

CAPTURED = Path(__file__).parent / "captured" / "watched"
ENOUGH, QUEUED = (1795221538.0, 1795221558.4), (1795221773.0, 1795221792.6)
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


def set_values(folder: Path, since: int, **values: float) -> None:
    """Of every scrape from this line on; the keyword is one of WANTED's first names without `vllm:`."""
    keys = {next(key for key in first_values(folder) if key.startswith(f"vllm:{name}")): new for name, new in values.items()}
    change(folder / SCRAPES, lambda n, line: line | {"values": line["values"] | keys} if n >= since else line)


def first_values(folder: Path) -> Document:
    document: Document = json.loads((folder / SCRAPES).read_text().splitlines()[0])["values"]
    return document


def of_enough(folder: Path, clients: int = CLIENTS, max_num_seqs: int | None = 32) -> list[str]:
    return problems(folder, *ENOUGH, clients, max_num_seqs)


def the_one(reason: list[str]) -> str:
    assert len(reason) == 1, reason
    return reason[0]


def test_a_real_load_without_a_queue_counts(folder: Path) -> None:
    assert of_enough(folder) == []
    assert notes(folder, *ENOUGH) == []


def test_a_real_load_that_has_to_wait_counts_where_that_was_planned() -> None:
    assert problems(CAPTURED / "queued", *QUEUED, CLIENTS, 4) == []
    assert problems(CAPTURED / "queued", *QUEUED, CLIENTS, None) == []


def test_a_real_queue_counts_against_a_load_that_should_not_have_one() -> None:
    reason = the_one(problems(CAPTURED / "queued", *QUEUED, CLIENTS, 16))
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
def test_a_gpu_that_was_slowed_down_once_does_not_count(reason: str, folder: Path) -> None:
    with_gpu(folder, 5, clock_reasons=["sw_power_cap", reason])
    assert the_one(of_enough(folder)).startswith(
        f"GPU 0 was slowed down in 1 of 17 samples ({reason}): mend this host's cooling"
    )


def test_the_power_limit_is_only_noted(folder: Path) -> None:
    with_gpu(folder, 5, clock_reasons=["sw_power_cap"])
    assert of_enough(folder) == []
    assert the_one(notes(folder, *ENOUGH)).endswith("GPU 0: in 1 of 17 samples")


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"error": "GPU is lost", "clock_reasons": None}, "GPU is lost"), ({"clock_reasons": None}, "no reasons of its clocks")],
)
def test_a_gpu_that_tells_nothing_may_have_been_slowed_down(changes: Document, why: str, folder: Path) -> None:
    with_gpu(folder, -1, **changes)
    reason = the_one(of_enough(folder))
    assert reason.startswith("GPU 0 was read only 0 of 20 times (")
    assert why in reason


def test_scrapes_that_failed_are_counted_and_reported(folder: Path) -> None:
    change(folder / SCRAPES, lambda n, line: {"time": line["time"], "error": "ReadTimeout: timed out"} if n >= 1 else line)
    reason = the_one(of_enough(folder))
    assert reason.startswith("the server's metrics were read only 1 of 20 times (ReadTimeout: timed out): see what slows")


def test_a_tenth_of_the_scrapes_is_enough(folder: Path) -> None:
    change(folder / SCRAPES, lambda n, line: {"time": line["time"], "error": "ReadTimeout: timed out"} if n >= 2 else line)
    assert of_enough(folder) == []


def test_a_machine_that_was_not_looked_at_is_reported(folder: Path) -> None:
    change(folder / HOST_SAMPLES, lambda n, line: line if n < 1 else None)
    assert the_one(of_enough(folder)).startswith("the machine was looked at only 1 of 20 times")


def test_a_machine_with_gpus_is_looked_at_more_often(folder: Path) -> None:
    with_gpu(folder, -1, clock_reasons=[])
    change(folder / HOST_SAMPLES, lambda n, line: line if n < 9 else None)
    reasons = of_enough(folder)
    assert reasons[0].startswith("the machine was looked at only 9 of 20 times")


def test_a_load_at_another_time_was_not_watched(folder: Path) -> None:
    reasons = problems(folder, ENOUGH[0] + 3600, ENOUGH[1] + 3600, CLIENTS, 32)
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
    scrape = Scrape(time=1.0, values=values)
    assert value_of(scrape, "running") == 1.5
    assert value_of(scrape, "kv_cache_usage") == 1.25
    assert value_of(scrape, "waiting") is None


def test_the_course_of_a_real_load(folder: Path) -> None:
    course = series(folder, *ENOUGH)
    assert course.time_s[0] == 0
    assert course.time_s == sorted(course.time_s)
    assert course.running[3:6] == [16.0, 16.0, 0.0]
    assert set(course.waiting) == {0.0}
    assert course.kv_cache_usage[3] == 0.009770992366412212
    assert course.output_tok_s[0] is None
    scrapes = read_watched(folder).scrapes
    rate = (scrapes[4].values[TOKENS] - scrapes[3].values[TOKENS]) / (scrapes[4].time - scrapes[3].time)
    assert course.output_tok_s[4] == rate
    assert len({len(values) for values in course.model_dump().values()}) == 1


def test_a_failed_scrape_is_a_gap_in_the_course(folder: Path) -> None:
    change(folder / SCRAPES, lambda n, line: {"time": line["time"], "error": "gone"} if n == 4 else line)
    course = series(folder)
    assert (course.running[4], course.kv_cache_usage[4]) == (None, None)
    assert [value is None for value in course.output_tok_s[:8]] == [True, False, False, False, True, True, False, False]


def test_a_count_that_goes_back_makes_no_rate(folder: Path) -> None:
    set_values(folder, 9, generation_tokens_total=1.0)
    assert [value is None for value in series(folder).output_tok_s[:11]] == [True, *[False] * 8, True, False]


def test_a_course_of_nothing_is_empty(folder: Path) -> None:
    assert series(folder, 0, 1).model_dump() == {name: [] for name in series(folder).model_dump()}


def paths(svg: str) -> list[str]:
    """The charts' lines, without the axes and the legend. It is well-formed, or this raises."""
    drawing = ElementTree.fromstring(svg)  # noqa: S314  (our own text)
    every = [path.get("d") or "" for path in drawing.findall("{http://www.w3.org/2000/svg}path")]
    return every[1 : 1 + len(every) // 2]


def test_a_chart_of_a_real_load() -> None:
    course = series(CAPTURED / "queued", *QUEUED)
    svg = chart("requests", "req", course.time_s, {"running": course.running, "waiting": course.waiting})
    running, waiting = paths(svg)
    assert running.startswith("M56 136L")
    assert running.count("L") == waiting.count("L") == len(course.time_s) - 1
    # 12 waited at most, at the top; the end is at the right.
    assert " 24L" in waiting
    assert waiting.split("L")[-1].startswith("632 ")
    assert ">12<" in svg


def test_a_chart_breaks_its_line_where_a_value_is_missing() -> None:
    svg = chart("a", "s", [0.0, 1.0, 2.0, 3.0, 4.0], {"x": [1.0, 2.0, None, 2.0, None]})
    assert paths(svg) == ["M56 80L200 24M488 24h0"]


@pytest.mark.parametrize(
    ("largest", "written"),
    [
        (32.0, "32"),
        (9_999.0, "9999"),
        (9_999.7, "10k"),
        (10_000.0, "10k"),
        (12_346.0, "12.35k"),
        (999_999.0, "1M"),
        (1_200_000.0, "1.2M"),
        (3.2e9, "3.2G"),
        (0.25, "0.25"),
    ],
)
def test_a_charts_numbers_are_short_and_have_no_exponent(largest: float, written: str) -> None:
    svg = chart("a", "tok/s", [0.0, largest], {"x": [0.0, largest]})
    texts = [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314  (our own text)
    assert texts == ["a", written, "tok/s", "0", f"{written} s", "x"]


def test_a_chart_takes_its_words_as_words_and_brings_nothing_along() -> None:
    evil = '<script>"&'
    svg = chart(evil, evil, [0.0, 1.0], {evil: [1.0, 2.0]})
    root = ElementTree.fromstring(svg)  # noqa: S314  (our own text)
    assert root.get("aria-label") == evil
    assert [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")].count(evil) == 3
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "path", "g", "text"}
    assert (root.get("viewBox"), root.get("stroke")) == ("0 0 640 160", "currentColor")
    assert "href" not in svg
    assert "#" not in svg


@pytest.mark.parametrize("values", [[0.0, 0.0], [math.pi, None]])
def test_a_chart_of_one_level_or_one_value_is_drawn(values: list[float | None]) -> None:
    assert "nan" not in chart("a", "s", [0.0, 1.0], {"x": values})


@pytest.mark.parametrize(
    ("time_s", "lines"),
    [([0.0], {"x": []}), ([0.0], {"x": [None]}), ([], {}), ([0.0], {str(number): [1.0] for number in range(5)})],
)
def test_what_cannot_be_drawn_is_refused(time_s: list[float], lines: dict[str, list[float | None]]) -> None:
    with pytest.raises(ValueError, match="a chart"):
        chart("a", "s", time_s, lines)
