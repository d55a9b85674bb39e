"""A soak as bench left it: its rounds are one of bench's own, with times, memory and failures changed by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.builders.loads import CAPTURED_FOLDER
from vllm_qualify.recipe.load import Load

BENCH = json.loads((CAPTURED_FOLDER / "soak" / "bench.json").read_text())
LOAD = Load(input_len=16, output_len=4, max_concurrency=4, num_prompts=20, num_warmups=0, min_duration_s=1.0)
BEGAN, ROUND_S, ROUNDS, ASKED = 1_795_600_000.0, 60.0, 40, 166
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
        write_json(folder / f"bench-{number}.json", BENCH | means | counts | {"duration": 0.98 * ROUND_S + number / 1000})
        seen = [[BEGAN + begin_s + at, at / 100] for at in range(1, 60)]
        write_json(folder / f"client-{number}.json", {"cpu_s": seen, "max_rss_mib": 500})
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
    host = {"time": at, "cpu_share": 0.5, "load_1min": 1.0, "memory_available_mib": 9e5}
    return host | {"processes": {"server": {"cpu_s": 1.0, "rss_mib": rss_mib}}, "gpus": gpus}


def write_json(path: Path, document: Document) -> None:
    path.write_text(json.dumps(document))


def change_json(folder: Path, name: str, **values: object) -> None:
    write_json(folder / name, json.loads((folder / name).read_text()) | values)
