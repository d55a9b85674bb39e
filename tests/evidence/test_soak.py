"""What grows in a soak. The rounds are one of bench's own, with times, memory and failures changed by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_qualify.evidence.load.soak import Of, parse_soak, round_settings, soak_course
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.recipe.workload import Load, Soak

CAPTURED = json.loads((Path(__file__).parent / "captured" / "soak" / "bench.json").read_text())
LOAD = Load(input_len=16, output_len=4, max_concurrency=4, num_prompts=20, num_warmups=0, min_duration_s=1.0)
HALF = Soak(soak_min=40.0, soak_share=0.5)
BEGAN, ROUND_S, ROUNDS, ASKED = 1_795_600_000.0, 60.0, 40, 166
HOST, GPU, FAILED = "soak_host_memory_growth_mib_h", "soak_gpu_memory_growth_mib_h", "soak_failed_share"
TTFT, TPOT, ITL = (f"soak_{name}_growth_pct_h" for name in ("ttft", "tpot", "itl"))
LATENCIES, ALL = {TTFT, TPOT, ITL}, {HOST, GPU, TTFT, TPOT, ITL, FAILED}
Document = dict[str, Any]
Course = Callable[[float], float]


def flat(level: float) -> Course:
    """With some noise that is no trend."""
    return lambda hour: level * (1 + 0.01 * math.sin(1000 * hour))


def rising(level: float, per_hour: float) -> Course:
    return lambda hour: flat(level)(hour) + per_hour * hour


def page(tokens: float) -> str:
    name = "vllm:generation_tokens_total"
    return f'# TYPE vllm:generation_tokens counter\n{name}{{model_name="reference"}} {tokens}\n'


EVEN_MIB, EVEN_MS = flat(900.0), flat(5.0)


def soak_in(folder: Path, host: Course = EVEN_MIB, ttft: Course = EVEN_MS, failed: dict[int, int] | None = None) -> Path:
    """A soak of 40 rounds of a minute; `failed` has the failed requests of rounds."""
    folder.mkdir()
    (folder / "round.json").write_text(json.dumps({"num_prompts": ASKED}))
    for number in range(ROUNDS + 1):
        begin_s = (number - 1) * ROUND_S
        asked, lost = (ASKED if number else 20), (failed or {}).get(number, 0)
        means = {"mean_ttft_ms": ttft(begin_s / 3600), "mean_tpot_ms": flat(1.0)(begin_s), "mean_itl_ms": flat(1.0)(begin_s)}
        counts = {"num_prompts": asked, "completed": asked - lost, "failed": lost, "total_output_tokens": 4 * (asked - lost)}
        write(folder / f"bench-{number}.json", CAPTURED | means | counts | {"duration": 0.98 * ROUND_S + number / 1000})
        seen = [[BEGAN + begin_s + at, at / 100] for at in range(1, 60)]
        write(folder / f"client-{number}.json", {"cpu_s": seen, "max_rss_mib": 500})
    samples = [sample(BEGAN + at, host(at / 3600)) for at in range(int(ROUNDS * ROUND_S))]
    watched = folder / "watched"
    watched.mkdir()
    (watched / "host.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in samples))
    running = {'vllm:num_requests_running{engine="0"}': 1.0}
    scrapes = [{"time": each["time"], "values": running} for each in samples]
    (watched / "server-metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in scrapes))
    (folder / "metrics-before.txt").write_text(page(80))
    (folder / "metrics-after.txt").write_text(page(80 + 4 * (ROUNDS * ASKED - sum((failed or {}).values()))))
    return folder


def sample(at: float, rss_mib: float) -> Document:
    gpus: list[Document] = [{"index": index, "memory_used_mib": 70_000, "clock_reasons": []} for index in (0, 1)]
    server = {"cpu_s": 1.0, "rss_mib": rss_mib}
    return {
        "time": at,
        "cpu_share": 0.5,
        "load_1min": 1.0,
        "memory_available_mib": 9e5,
        "processes": {"server": server},
        "gpus": gpus,
    }


def write(path: Path, document: Document) -> None:
    path.write_text(json.dumps(document))


def change(folder: Path, name: str, **values: object) -> None:
    write(folder / name, json.loads((folder / name).read_text()) | values)


def measured(folder: Path, soak: Soak = HALF, load: Load = LOAD) -> dict[str, Measurement]:
    of = Of(load, soak, gpus=(0, 1), model="reference")
    return {row.metric: row for row in parse_soak(folder, of, Levels(false_fail=0.01), folder / "watched")}


def bounds(row: Measurement) -> tuple[float, float]:
    assert row.invalid_because is None, row.invalid_because
    assert row.interval is not None
    return row.interval.lower, row.interval.upper


def test_a_server_that_keeps_its_memory_and_its_speed_grows_by_nothing(tmp_path: Path) -> None:
    rows = measured(soak_in(tmp_path / "soak"))
    assert set(rows) == ALL
    for metric in (HOST, *LATENCIES):
        lower, upper = bounds(rows[metric])
        assert lower < 0 < upper
        assert rows[metric].sample_count == 36, "the first tenth is left out"
    assert bounds(rows[GPU]) == (0, 0)
    assert (rows[FAILED].value, rows[FAILED].sample_count) == (0, ROUNDS * ASKED)
    assert 0 < bounds(rows[FAILED])[1] < 0.001


def test_growth_is_found_by_hour(tmp_path: Path) -> None:
    """120 MiB an hour; and a TTFT that rises by 3 ms an hour from 5, which is 6.1 on average over the last 36 of 40 minutes."""
    rows = measured(soak_in(tmp_path / "soak", host=rising(900, 120), ttft=rising(5, 3)))
    assert rows[HOST].value == pytest.approx(120, rel=0.1)
    lower, upper = bounds(rows[HOST])
    assert 90 < lower < 120 < upper < 150
    assert rows[TTFT].value == pytest.approx(100 * 3 / 6.1, rel=0.1)
    assert bounds(rows[TTFT])[0] > 30
    assert bounds(rows[TPOT])[0] < 0 < bounds(rows[TPOT])[1]


def test_memory_of_several_gpus_counts_together(tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak")
    host = folder / "watched" / "host.jsonl"
    lines = [json.loads(line) for line in host.read_text().splitlines()]
    for second, line in enumerate(lines):
        line["gpus"][1]["memory_used_mib"] += second
    host.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert measured(folder)[GPU].value == pytest.approx(3600, rel=0.01)


def test_failures_are_counted_over_all_rounds(tmp_path: Path) -> None:
    failed = measured(soak_in(tmp_path / "soak", failed=dict.fromkeys(range(1, ROUNDS + 1), 2)))[FAILED]
    assert failed.value == pytest.approx(2 / ASKED)
    together = measured(soak_in(tmp_path / "together", failed={20: 2 * ROUNDS}))[FAILED]
    assert together.value == pytest.approx(2 / ASKED)
    assert bounds(together)[1] > bounds(failed)[1], "as many failures in one round tell less"
    assert bounds(together)[0] < bounds(failed)[0]


def test_where_all_fails_the_share_is_known_and_no_latency(tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak", failed=dict.fromkeys(range(30, ROUNDS + 1), ASKED))
    for number in range(30, ROUNDS + 1):
        change(folder, f"bench-{number}.json", mean_ttft_ms=0.0, duration=50 + number / 1000)
    rows = measured(folder)
    assert rows[FAILED].value == pytest.approx(11 / ROUNDS)
    assert "in 11 of 36 rounds no request completed, first in round 30" in str(rows[TTFT].invalid_because)
    assert rows[HOST].invalid_because is None


def gone(folder: Path) -> None:
    for number in range(16, ROUNDS + 1):
        (folder / f"bench-{number}.json").unlink()


def cut(folder: Path) -> None:
    for number in range(30, ROUNDS + 1):
        (folder / f"bench-{number}.json").unlink()


def copied(folder: Path) -> None:
    (folder / "bench-9.json").write_bytes((folder / "bench-8.json").read_bytes())


def in_reverse(folder: Path) -> None:
    change(folder, "client-9.json", cpu_s=json.loads((folder / "client-7.json").read_text())["cpu_s"])


@pytest.mark.parametrize(
    ("spoil", "because"),
    [
        (gone, "13 rounds after the warm-up"),
        (cut, "and soak_min is 40"),
        (copied, "a round is a copy of another one"),
        (in_reverse, "did not follow each other"),
        (lambda folder: (folder / "bench-7.json").unlink(), "No such file or directory: bench-7.json"),
        (lambda folder: (folder / "bench-7.json").write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / "client-7.json").unlink(), "client-7.json"),
        (lambda folder: (folder / "watched" / "host.jsonl").unlink(), "host.jsonl"),
        (lambda folder: (folder / "round.json").write_text('{"num_prompts": 100}'), "bench had num_prompts 166, not 100"),
        (lambda folder: change(folder, "bench-7.json", max_concurrency=4), "round 7: bench had max_concurrency 4, not 2"),
        (lambda folder: change(folder, "bench-7.json", model_id="other"), "round 7: bench had model_id other"),
        (lambda folder: change(folder, "bench-7.json", failed=1), "166 requests completed and 1 failed, of 166"),
        (lambda folder: change(folder, "bench-7.json", duration=math.inf), "took inf s"),
        (lambda folder: (folder / "metrics-after.txt").write_text(page(9000)), "the server counts 8920 generated tokens"),
        (lambda folder: (folder / "metrics-after.txt").write_text(page(10)), "it was started anew"),
        (lambda folder: (folder / "metrics-after.txt").write_text(""), "vllm:generation_tokens_total"),
    ],
)
def test_a_soak_whose_files_are_wrong_gives_nothing(spoil: Callable[[Path], object], because: str, tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak")
    spoil(folder)
    rows = measured(folder)
    assert set(rows) == ALL
    for row in rows.values():
        assert because in str(row.invalid_because)


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"mean_ttft_ms": math.nan}, "mean_ttft_ms is nan in a round"),
        ({"mean_ttft_ms": -1.0}, "mean_ttft_ms is -1.0 in a round"),
        ({"mean_ttft_ms": "5"}, "mean_ttft_ms is 5 in a round"),
    ],
)
def test_what_is_no_time_makes_its_latency_invalid(changed: Document, because: str, tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak")
    change(folder, "bench-9.json", **changed)
    rows = measured(folder)
    assert because in str(rows[TTFT].invalid_because)
    assert {metric for metric, row in rows.items() if row.invalid_because} == {TTFT}


def test_replies_that_were_cut_are_no_latency(tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak")
    change(folder, "bench-9.json", total_output_tokens=600)
    (folder / "metrics-after.txt").write_text(page(80 + 4 * ROUNDS * ASKED - 64))
    rows = measured(folder)
    assert {metric for metric, row in rows.items() if row.invalid_because} == LATENCIES
    assert "round 9: its replies have 600 tokens, and whole ones 664" in str(rows[ITL].invalid_because)


def test_a_busy_client_measures_itself(tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak")
    seen = [[BEGAN + 8 * ROUND_S + at, 0.95 * at] for at in range(1, 60)]
    change(folder, "client-9.json", cpu_s=seen)
    rows = measured(folder)
    assert {metric for metric, row in rows.items() if row.invalid_because} == LATENCIES
    assert "the client used 0.95 of a core in a round" in str(rows[TTFT].invalid_because)


def test_a_gpu_that_was_slowed_down_makes_latencies_invalid(tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak")
    host = folder / "watched" / "host.jsonl"
    lines = host.read_text().splitlines()
    hot = json.loads(lines[1000])
    hot["gpus"][0]["clock_reasons"] = ["hw_thermal_slowdown"]
    lines[1000] = json.dumps(hot)
    host.write_text("\n".join(lines) + "\n")
    rows = measured(folder)
    assert {metric for metric, row in rows.items() if row.invalid_because} == LATENCIES
    assert "GPU 0 was slowed down" in str(rows[TTFT].invalid_because)


def test_memory_that_nobody_saw_is_unknown(tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak")
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
    first, last = course.host_mib[0], course.host_mib[-1]
    assert first is not None
    assert last is not None
    assert last - first == pytest.approx(120 * 39 / 60, rel=0.02)
    assert course.gpu_mib == [140_000] * ROUNDS
    assert course.latency_ms["ttft"][-1] == pytest.approx(5 + 3 * 39 / 60)


def test_what_is_no_time_and_a_gpu_that_is_not_there_draw_nothing(tmp_path: Path) -> None:
    folder = soak_in(tmp_path / "soak")
    change(folder, "bench-7.json", mean_ttft_ms=math.nan)
    course = soak_course(folder, (), folder / "watched")
    assert [at for at, value in enumerate(course.latency_ms["ttft"], start=1) if value is None] == [7]
    assert set(course.gpu_mib) == {None}
