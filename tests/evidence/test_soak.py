"""What grows in a soak. The rounds are one of bench's own, with times, memory and failures changed by hand."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.loads import bounds_of, load_server
from tests.builders.soaks import ASKED, BEGAN, LOAD, ROUND_S, ROUNDS, Document, change_json, page, rising, soak_in
from vllm_qualify.evidence.load.soak import parse_soak, round_settings, soak_course
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.searches import Soak

HALF = Soak(soak_min=40.0, soak_share=0.5)
HOST, GPU, FAILED = "soak_host_memory_growth_mib_h", "soak_gpu_memory_growth_mib_h", "soak_failed_share"
TTFT, TPOT, ITL = (f"soak_{name}_growth_pct_h" for name in ("ttft", "tpot", "itl"))
LATENCIES, ALL = {TTFT, TPOT, ITL}, {HOST, GPU, TTFT, TPOT, ITL, FAILED}


def measured(folder: Path, soak: Soak = HALF, load: Load = LOAD) -> dict[str, Measurement]:
    rows = parse_soak(folder, load, soak, load_server(gpus=(0, 1)), Levels(false_fail=0.01))
    return {row.metric: row for row in rows}


def invalid_ones(rows: dict[str, Measurement]) -> set[str]:
    return {metric for metric, row in rows.items() if row.invalid_because}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return soak_in(tmp_path / "soak")


def change_host(folder: Path, change: Callable[[int, Document], None]) -> None:
    """Change the samples of the machine in place, each by its second."""
    host = folder / "watched" / "host.jsonl"
    lines = [json.loads(line) for line in host.read_text().splitlines()]
    for second, line in enumerate(lines):
        change(second, line)
    host.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_server_that_keeps_its_memory_and_its_speed_grows_by_nothing(folder: Path) -> None:
    rows = measured(folder)
    assert set(rows) == ALL
    for metric in (HOST, *LATENCIES):
        lower, upper = bounds_of(rows[metric])
        assert lower < 0 < upper
        assert rows[metric].sample_count == 36, "the first tenth is left out"
    assert bounds_of(rows[GPU]) == (0, 0)
    assert (rows[FAILED].value, rows[FAILED].sample_count) == (0, ROUNDS * ASKED)
    assert 0 < bounds_of(rows[FAILED])[1] < 0.001


def test_growth_is_found_by_hour(tmp_path: Path) -> None:
    """120 MiB an hour; and a TTFT that rises by 3 ms an hour from 5, which is 6.1 on average over the last 36 of 40 minutes."""
    rows = measured(soak_in(tmp_path / "soak", host=rising(900, 120), ttft=rising(5, 3)))
    assert rows[HOST].value == pytest.approx(120, rel=0.1)
    lower, upper = bounds_of(rows[HOST])
    assert 90 < lower < 120 < upper < 150
    assert rows[TTFT].value == pytest.approx(100 * 3 / 6.1, rel=0.1)
    assert bounds_of(rows[TTFT])[0] > 30
    assert bounds_of(rows[TPOT])[0] < 0 < bounds_of(rows[TPOT])[1]


def test_memory_of_several_gpus_counts_together(folder: Path) -> None:
    def grow(second: int, line: Document) -> None:
        line["gpus"][1]["memory_used_mib"] += second

    change_host(folder, grow)
    assert measured(folder)[GPU].value == pytest.approx(3600, rel=0.01)


def test_failures_are_counted_over_all_rounds(tmp_path: Path) -> None:
    failed = measured(soak_in(tmp_path / "soak", failed=dict.fromkeys(range(1, ROUNDS + 1), 2)))[FAILED]
    assert failed.value == pytest.approx(2 / ASKED)
    together = measured(soak_in(tmp_path / "together", failed={20: 2 * ROUNDS}))[FAILED]
    assert together.value == pytest.approx(2 / ASKED)
    assert bounds_of(together)[1] > bounds_of(failed)[1], "as many failures in one round tell less"
    assert bounds_of(together)[0] < bounds_of(failed)[0]


def test_where_all_fails_the_share_is_known_and_no_latency(tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak", failed=dict.fromkeys(range(30, ROUNDS + 1), ASKED))
    for number in range(30, ROUNDS + 1):
        change_json(folder, f"bench-{number}.json", mean_ttft_ms=0.0, duration=50 + number / 1000)
    rows = measured(folder)
    assert rows[FAILED].value == pytest.approx(11 / ROUNDS)
    assert "in 11 of 36 rounds no request completed, first in round 30" in str(rows[TTFT].invalid_because)
    assert rows[HOST].invalid_because is None


def end_after(folder: Path, last: int) -> None:
    for number in range(last + 1, ROUNDS + 1):
        (folder / f"bench-{number}.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "because"),
    [
        (lambda folder: end_after(folder, 15), "13 rounds after the warm-up"),
        (lambda folder: end_after(folder, 29), "and soak_min is 40"),
        (lambda folder: shutil.copy(folder / "bench-8.json", folder / "bench-9.json"), "a round is a copy of another one"),
        (lambda folder: shutil.copy(folder / "client-7.json", folder / "client-9.json"), "did not follow each other"),
        (lambda folder: (folder / "bench-7.json").unlink(), "No such file or directory: bench-7.json"),
        (lambda folder: (folder / "bench-7.json").write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / "client-7.json").unlink(), "client-7.json"),
        (lambda folder: (folder / "watched" / "host.jsonl").unlink(), "host.jsonl"),
        (lambda folder: (folder / "round.json").write_text('{"num_prompts": 100}'), "bench had num_prompts 166, not 100"),
        (lambda folder: change_json(folder, "bench-7.json", max_concurrency=4), "round 7: bench had max_concurrency 4, not 2"),
        (lambda folder: change_json(folder, "bench-7.json", model_id="other"), "round 7: bench had model_id other"),
        (lambda folder: change_json(folder, "bench-7.json", failed=1), "166 requests completed and 1 failed, of 166"),
        (lambda folder: change_json(folder, "bench-7.json", duration=math.inf), "took inf s"),
        (lambda folder: (folder / "metrics-after.txt").write_text(page(9000)), "the server counts 8920 generated tokens"),
        (lambda folder: (folder / "metrics-after.txt").write_text(page(10)), "it was started anew"),
        (lambda folder: (folder / "metrics-after.txt").write_text(""), "vllm:generation_tokens_total"),
    ],
)
def test_a_soak_whose_files_are_wrong_gives_nothing(spoil: Callable[[Path], object], because: str, folder: Path) -> None:
    spoil(folder)
    rows = measured(folder)
    assert set(rows) == ALL
    for row in rows.values():
        assert because in str(row.invalid_because)


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (-1.0, "-1.0"), ("5", "5")])
def test_what_is_no_time_makes_its_latency_invalid(value: float | str, shown: str, folder: Path) -> None:
    change_json(folder, "bench-9.json", mean_ttft_ms=value)
    rows = measured(folder)
    assert f"mean_ttft_ms is {shown} in a round" in str(rows[TTFT].invalid_because)
    assert invalid_ones(rows) == {TTFT}


def cut_replies(folder: Path) -> None:
    change_json(folder, "bench-9.json", total_output_tokens=600)
    (folder / "metrics-after.txt").write_text(page(80 + 4 * ROUNDS * ASKED - 64))


def keep_client_busy(folder: Path) -> None:
    change_json(folder, "client-9.json", cpu_s=[[BEGAN + 8 * ROUND_S + at, 0.95 * at] for at in range(1, 60)])


def heat_gpu(folder: Path) -> None:
    def heat(second: int, line: Document) -> None:
        if second == 1000:
            line["gpus"][0]["clock_reasons"] = ["hw_thermal_slowdown"]

    change_host(folder, heat)


@pytest.mark.parametrize(
    ("spoil", "because"),
    [
        (cut_replies, "round 9: its replies have 600 tokens, and whole ones 664"),
        (keep_client_busy, "the client used 0.95 of a core in a round"),
        (heat_gpu, "GPU 0 was slowed down"),
    ],
)
def test_what_spoils_latencies_makes_them_alone_invalid(folder: Path, spoil: Callable[[Path], None], because: str) -> None:
    spoil(folder)
    rows = measured(folder)
    assert invalid_ones(rows) == LATENCIES
    assert all(because in str(rows[latency].invalid_because) for latency in LATENCIES)


def test_memory_that_nobody_saw_is_unknown(folder: Path) -> None:
    host = folder / "watched" / "host.jsonl"
    host.write_text(host.read_text().replace('"server"', '"other"').replace('"index": 1', '"index": 3'))
    rows = measured(folder)
    for metric in (HOST, GPU):
        assert "the memory is known in 0 of 36 rounds" in str(rows[metric].invalid_because)
    assert rows[TTFT].invalid_because is None


def test_a_soak_is_a_part_of_the_clients_or_of_the_rate() -> None:
    part = round_settings(LOAD, Soak(soak_min=1.0, soak_share=0.1), 30, 3)
    assert (part.max_concurrency, part.request_rate, part.num_prompts) == (1, None, 30)
    paced = Load(input_len=16, output_len=4, max_concurrency=1, num_prompts=20, num_warmups=0, request_rate=8.0)
    at_a_rate = round_settings(paced, Soak(soak_min=1.0, soak_share=0.25), 30, 3)
    assert at_a_rate.request_rate == 2.0
    assert part.seed > LOAD.seed + 100_000, "none of its prompts is one of the load's"


def test_the_course_has_a_point_for_each_round(tmp_path: Path) -> None:
    """Memory that rises by 120 MiB an hour, over 39 minutes from the first round's middle to the last one's."""
    folder = soak_in(tmp_path / "soak", host=lambda hour: 900 + 120 * hour, ttft=lambda hour: 5 + 3 * hour)
    course = soak_course(folder, (0, 1), folder / "watched")
    assert len(course.time_s) == len(course.host_mib) == len(course.latency_ms["tpot"]) == ROUNDS
    assert (course.time_s[0], course.time_s[-1]) == pytest.approx((0, 39 * 60), abs=1)
    host_mib = [each for each in course.host_mib if each is not None]
    assert len(host_mib) == ROUNDS
    assert host_mib[-1] - host_mib[0] == pytest.approx(120 * 39 / 60, rel=0.02)
    assert course.gpu_mib == [140_000] * ROUNDS
    assert course.latency_ms["ttft"][-1] == pytest.approx(5 + 3 * 39 / 60)


def test_what_is_no_time_and_a_gpu_that_is_not_there_draw_nothing(folder: Path) -> None:
    change_json(folder, "bench-7.json", mean_ttft_ms=math.nan)
    course = soak_course(folder, (), folder / "watched")
    assert [at for at, value in enumerate(course.latency_ms["ttft"], start=1) if value is None] == [7]
    assert set(course.gpu_mib) == {None}
