"""Loads as bench left them, changed by hand, and what is measured of them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_qualify.engine.environment import EngineEnvironment
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.evidence.load import steady
from vllm_qualify.evidence.load.figures import LoadChecks, parse_load
from vllm_qualify.evidence.load.result import key_of
from vllm_qualify.evidence.measurement import Measurement
from vllm_qualify.evidence.sequential import Levels
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.serving import VLLM, EngineName, ServerArguments

CAPTURED_FOLDER = Path(__file__).parents[1] / "evidence" / "captured"
CAPTURED = CAPTURED_FOLDER / "load"
ABOUT = {"input_len": 16, "output_len": 8, "max_concurrency": 4, "num_prompts": 40, "num_warmups": 4}
SETTINGS = Load.model_validate(
    {**ABOUT, "repeats": 2, "most_repeats": 2, "min_duration_s": 0.01, "slo": {"ttft_ms": 20.0, "tpot_ms": 6.0}}
)
# The server may run as many requests as there are clients.
ARGUMENTS: ServerArguments = {"max-num-seqs": 4}
# Of 5 % each, so that with two gates no side has more.
LEVELS = Levels()

# Over the steady states of bench-1.json and bench-2.json: requests 4 to 35, and 16 to 35. None: too few for this percentile.
REPEATS: dict[str, list[float] | None] = {
    "request_throughput_req_s": [63.00220224383387, 64.75824134754826],
    "output_throughput_tok_s": [502.54100383558114, 522.9227988814522],
    "total_throughput_tok_s": [1530.2644279381211, 1584.9579569812436],
    "ttft_mean_ms": [22.777219468480325, 22.280852950643748],
    "ttft_p50_ms": [21.192429499933496, 21.763229502539616],
    "ttft_p90_ms": None,
    "ttft_p99_ms": None,
    "tpot_mean_ms": [5.696424107164993, 5.554327050049323],
    "tpot_p50_ms": [5.413366428131536, 5.70640714327705],
    "tpot_p90_ms": None,
    "tpot_p99_ms": None,
    "itl_mean_ms": [5.696424107164993, 5.554327050049324],
    "itl_p50_ms": [5.29772950176266, 5.5456035006500315],
    "itl_p90_ms": None,
    "itl_p99_ms": None,
    "e2el_mean_ms": [62.652188218635274, 61.16114230098901],
    "e2el_p50_ms": [61.29543449787889, 62.77394050266594],
    "e2el_p90_ms": None,
    "e2el_p99_ms": None,
    "goodput_req_s": [11.812912920718851, 9.713736202132239],
}
MEASURED = [name for name, repeats in REPEATS.items() if repeats]
HITS, PEAK = "prefix_hit_share", "peak_output_chunks_per_s"
# Between two chunks that are read at once, in s.
SHORT = 1e-6

Document = dict[str, Any]


def load_server(
    arguments: ServerArguments = ARGUMENTS, kind: EngineName = VLLM, gpus: Sequence[int] = (), model: str = "reference"
) -> ServerPlan:
    engine = EngineEnvironment(python=Path("/engine/bin/python"))
    about = {"model": "org/model", "revision": "0123abc", "environment": {}, "startup_timeout_s": 60.0, "kind": kind}
    return ServerPlan(engine=engine, served_model_name=model, arguments=arguments, gpus=list(gpus), **about)


LOAD_SERVER = load_server()


def measure(
    folder: Path, settings: Load = SETTINGS, server: ServerPlan = LOAD_SERVER, levels: Levels = LEVELS, **checks: Any
) -> dict[str, Measurement]:
    return {row.metric: row for row in parse_load(folder, settings, levels, server, LoadChecks(**checks))}


def with_settings(**changes: Any) -> Load:
    """The captured load's settings with others in their place."""
    return SETTINGS.model_copy(update=changes)


def read_result(folder: Path, repeat: int = 2) -> Document:
    result: Document = json.loads((folder / f"bench-{repeat}.json").read_text())
    return result


def bounds_of(row: Measurement | None) -> tuple[float, float]:
    """Of a measurement's interval, which it must have."""
    assert row is not None
    assert row.interval is not None, row.invalid_because
    return row.interval.lower, row.interval.upper


def change(folder: Path, repeat: int = 2, **fields: Any) -> None:
    """Set keys of a repeat's result; `...` removes one."""
    result = read_result(folder, repeat) | fields
    kept = {name: value for name, value in result.items() if value is not ...}
    (folder / f"bench-{repeat}.json").write_text(json.dumps(kept))


def count(folder: Path, when: str, repeat: int = 2, **counters: Any) -> None:
    """Set counters of a /metrics page, by the names above without `vllm:` and `_total`; None removes one."""
    path = folder / f"metrics-{repeat}-{when}.txt"
    for short, number in counters.items():
        name = f"vllm:{short}_total"
        kept = [line for line in path.read_text().splitlines() if name not in line]
        new = [] if number is None else [f"# TYPE {name} counter", f'{name}{{engine="0",model_name="reference"}} {number}']
        path.write_text("\n".join([*kept, *new, ""]))


def scale(folder: Path, repeat: int, slower: float) -> None:
    """The same repeat, all of it so many times slower."""
    result = read_result(folder, repeat)
    times = {name: [each * slower for each in result[name]] for name in ("ttfts", "latencies", "start_times", "queue_times")}
    itls = [[gap * slower for gap in gaps] for gaps in result["itls"]]
    latencies = {name: value * slower for name, value in result.items() if name.endswith("_ms")}
    rates = {name: result[name] / slower for name in ("request_throughput", "output_throughput", "total_token_throughput")}
    change(folder, repeat, **times, **latencies, **rates, itls=itls, duration=result["duration"] * slower)


def read_at_once(result: Document, first: int) -> Document:
    """A result as it is where each reply's first chunk is read together with so many after it, and bench's figures of it."""
    moved = [sum(gap - SHORT for gap in gaps[:first]) for gaps in result["itls"]]
    itls = [[SHORT] * len(gaps[:first]) + gaps[first:] for gaps in result["itls"]]
    ttfts = [ttft + late for ttft, late in zip(result["ttfts"], moved, strict=True)]
    lengths = np.array(result["output_lens"])
    latencies = np.array([ttft + sum(gaps) for ttft, gaps in zip(ttfts, itls, strict=True)])
    tpots = (latencies - ttfts) / np.maximum(lengths - 1, 1)
    times = {"ttft": np.array(ttfts), "tpot": tpots, "itl": np.concatenate(itls), "e2el": latencies}
    changed = result | {"ttfts": ttfts, "itls": itls}
    for latency, each in times.items():
        percentiles = {f"p{percent}_{latency}_ms": 1000 * float(np.percentile(each, percent)) for percent in (50, 90, 99)}
        changed |= percentiles | {f"mean_{latency}_ms": 1000 * float(each.mean())}
    return changed


def copy_repeat(folder: Path, repeat: int, of: int) -> None:
    """Another repeat with nearly the same times, long after the one that it is made of."""
    for name in ("bench-{}.json", "metrics-{}-before.txt", "metrics-{}-after.txt"):
        shutil.copy(folder / name.format(of), folder / name.format(repeat))
    result = read_result(folder, of)
    times = {name: [time + 1e-9 * repeat for time in result[name]] for name in ("ttfts", "latencies")}
    change(folder, repeat, start_times=[start + 100_000.0 * repeat for start in result["start_times"]], **times)


def trtllm_page(folder: Path, repeat: int, when: str, counters: dict[str, float]) -> None:
    lines = []
    for short, number in counters.items():
        name = f"trtllm_{short}_total"
        label = 'finished_reason="length",' if short == "request_success" else ""
        lines += [f"# TYPE {name} counter", f'{name}{{{label}engine_type="pytorch",model_name="reference"}} {number}']
    (folder / f"metrics-{repeat}-{when}.txt").write_text("\n".join([*lines, ""]))


def by_metric(
    folder: Path, settings: Load = SETTINGS, levels: Levels = LEVELS, watched: Path | None = None
) -> dict[str, Measurement]:
    rows = measure(folder, settings, levels=levels, watched=watched)
    assert settings.shares_prefixes or HITS not in rows
    rows = {name: row for name, row in rows.items() if name not in (HITS, PEAK)}
    assert list(rows) == [name for name in REPEATS if settings.slo or name != "goodput_req_s"]
    return rows


def with_goodput_of_none(folder: Path, repeats: tuple[int, ...]) -> Measurement:
    """An SLO that no request met in these repeats."""
    for repeat in repeats:
        scale(folder, repeat, 2.0)
        assert min(read_result(folder, repeat)["ttfts"]) > 0.02
        change(folder, repeat, request_goodput=0.0)
    return by_metric(folder)["goodput_req_s"]


def restated(result: Document) -> Document:
    """A result with all that bench itself would have made of its requests: it agrees with itself in every sum and mean."""
    requests = steady.requests_of(result, 4)
    figures = steady.figures_of(steady.whole_window(requests, result["duration"]), SETTINGS.slo, as_bench=True)
    totals = {"total_input_tokens": sum(result["input_lens"]), "total_output_tokens": sum(result["output_lens"])}
    return result | {key_of(name): value for name, value in figures.items()} | totals
