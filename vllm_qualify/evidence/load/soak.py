"""A soak: rounds of a part of the load, one after another for a long time, and what grows meanwhile.

Each round is a run of bench. Its mean of a latency is one value of a series, and so is the mean memory during it: samples of
every half second would be too much alike. A first run, which does not count, shows how many requests a round must have. The
first part of the soak is left out too: a server that was just loaded in another way still changes.

Bench keeps no details of a round's requests. In hours of them they would take gigabytes.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_qualify.engine import bench as benches
from vllm_qualify.engine.kinds.base import EngineKind
from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.server import STAGE as SERVE
from vllm_qualify.engine.server import ServerPlan
from vllm_qualify.engine.watch import HOST_SAMPLES, HostSample
from vllm_qualify.evidence.load import agreement
from vllm_qualify.evidence.load.client import Driven, command_of
from vllm_qualify.evidence.load.problems import CLIENT_CORES_ALLOWED, CLIENT_REMEDY, ClientUse, counters_of
from vllm_qualify.evidence.measurement import UNUSABLE, Interval, Measurement, around, in_words, invalid, share_interval, valid
from vllm_qualify.evidence.sequential import Levels, Sides, sides_at_once
from vllm_qualify.evidence.trend import LEAST_VALUES, slope_of
from vllm_qualify.evidence.watched import read_host, watched_in, watched_problems
from vllm_qualify.recipe.load import LEAST_PROMPTS_PER_CLIENT, Load
from vllm_qualify.recipe.metrics import FAILED_SHARE, GPU_GROWTH, HOST_GROWTH, LATENCY_GROWTHS
from vllm_qualify.recipe.searches import Soak
from vllm_qualify.recipe.values import Count, Frozen, Number

STAGE = "soak"
PLANNED, PAGES = "round.json", ("metrics-before.txt", "metrics-after.txt")
# A soak has about so many rounds, and more if they would be longer than ROUND_S.
ROUNDS, ROUND_S = 80, 600.0
# A round that is as long as its time limit would be an error. A slower server must not come near.
OF_TIME_LIMIT = 0.25
LEAST_REQUESTS = 20
# The share of the soak that is left out at its begin, and the share of `soak_min` that the rounds must fill.
WARM_UP, LEAST_SOAKED = 0.1, 0.95
# More than all seeds of other loads on the same server but those of warm-ups.
SEEDS_APART = 1_000_000
TELL_EVERY = 10
HOUR_S = 3600.0
REMEDY = "raise soak_min"

ReadMemory = Callable[[HostSample], float | None]
"""A memory in MiB by a sample; None if it is not known."""


class Planned(Frozen):
    """How many requests each round has."""

    num_prompts: Count


def measure_soak(
    driven: Driven, settings: Load, soak: Soak, folder: Path, tell: Tell, clock: Callable[[], float] = time.monotonic
) -> list[list[str]]:
    """Run rounds until the soak's time is over. Round N is written to `bench-N.json`; 0 is the one before the soak.

    Returns the commands of the first two runs: all others have only other seeds. Raises HostError if bench failed, or a round
    took longer than the load's time limit, ReleaseError if the server ended meanwhile.
    """
    benches.stop_preparing(driven.bench, settings.time_limit_s, driven.server.check_alive)
    least = _least_requests(settings, soak)
    commands = [_run_round(driven, settings, soak, least, folder, 0)]
    planned = Planned(num_prompts=_plan_requests(settings, soak, least, folder))
    (folder / PLANNED).write_text(planned.model_dump_json())
    (folder / PAGES[0]).write_text(driven.server.metrics_page())
    began, number = clock(), 0
    while (spent_s := clock() - began) < soak.duration_s:
        if number % TELL_EVERY == 0:
            tell(f"soak: {spent_s / 60:,.0f} of {soak.soak_min:g} min, {number} rounds")
        number += 1
        commands.append(_run_round(driven, settings, soak, planned.num_prompts, folder, number))
    (folder / PAGES[1]).write_text(driven.server.metrics_page())
    return commands[:2]


def _least_requests(settings: Load, soak: Soak) -> int:
    clients, _ = soak.clients_and_rate(settings)
    return max(LEAST_REQUESTS, LEAST_PROMPTS_PER_CLIENT * clients)


def _plan_requests(settings: Load, soak: Soak, least: int, folder: Path) -> int:
    """How many requests take as long as a round should, by the rate or by how fast the first run was."""
    round_s = min(soak.duration_s / ROUNDS, ROUND_S, OF_TIME_LIMIT * settings.time_limit_s)
    _, rate = soak.clients_and_rate(settings)
    if rate is None:
        rate = float(json.loads((folder / "bench-0.json").read_text())["request_throughput"])
    # A file has no more prompts than the load asks.
    most = settings.num_prompts if settings.prompts else math.inf
    return int(min(most, max(least, math.ceil(rate * round_s))))


def round_settings(settings: Load, soak: Soak, num_prompts: int, number: int) -> Load:
    clients, rate = soak.clients_and_rate(settings)
    seed = settings.seed + SEEDS_APART + number
    part = {"max_concurrency": clients, "request_rate": rate, "num_prompts": num_prompts, "seed": seed, "slo": None}
    return settings.model_copy(update=part)


def _run_round(driven: Driven, settings: Load, soak: Soak, num_prompts: int, folder: Path, number: int) -> list[str]:
    bench, server, name = driven.bench, driven.server, f"bench-{number}"
    asked, into = round_settings(settings, soak, num_prompts, number), benches.results_folder(bench)
    whole = command_of(bench.client, server.served_model_name, asked, into, 1, driven.prompts)
    command = [*(part for part in whole[:-1] if part != "--save-detailed"), f"{name}.json"]
    limit_s, log = settings.time_limit_s, folder / f"{name}.log"
    benches.run_command(bench, command, f"{name}.json", log, limit_s, server.check_alive, benches.no_progress)
    return benches.typed_command(bench.client, command)


@dataclass(frozen=True)
class Round:
    """A round by its files. Times are in s since 1970; `cores` is how busy its client was, None if it was too short."""

    number: int
    result: dict[str, Any]
    began: float
    ended: float
    cores: float | None

    @property
    def middle_h(self) -> float:
        return (self.began + self.ended) / 2 / HOUR_S

    def latency_ms(self, latency: str) -> float | None:
        """Its mean; None if that is no time."""
        value = self.result[f"mean_{latency}_ms"]
        return value if type(value) is float and 0 < value < math.inf else None


def parse_soak(folder: Path, settings: Load, soak: Soak, server: ServerPlan, levels: Levels) -> list[Measurement]:
    source, watched = f"{STAGE}/bench-*.json", watched_in(folder, folder.parent / SERVE)
    memory = _memory_readers(server.gpus)
    names = [*memory, *LATENCY_GROWTHS.values(), FAILED_SHARE]
    try:
        planned = Planned.model_validate_json((folder / PLANNED).read_bytes())
        first, *rounds = _read_rounds(folder, 0)
        # Those that began in the warm-up do not count.
        begin_s = rounds[0].began + WARM_UP * (rounds[-1].ended - rounds[0].began) if rounds else 0.0
        counted = [each for each in rounds if each.began >= begin_s]
        sizes = [_least_requests(settings, soak), *[planned.num_prompts] * len(rounds)]
        loads = [round_settings(settings, soak, size, number) for number, size in enumerate(sizes)]
        problems = [*_round_problems([first, *rounds], loads, server.served_model_name)]
        problems += _soaked_problems(counted, rounds, soak)
        if problems := problems or _counter_problems(folder, rounds, server.engine_kind):
            return [invalid(name, "; ".join(problems), source) for name in names]
        host = read_host(watched)
    except UNUSABLE as error:
        return [invalid(name, f"the soak left no usable evidence: {in_words(error)}", source) for name in names]
    spoiled = [*_reply_problems(counted, settings), *_busy_problems(counted, watched)]
    return [
        *(_measure_memory(name, counted, host, read, levels) for name, read in memory.items()),
        *_latency_growths(counted, spoiled, levels, source),
        _failed_share(rounds, levels, source),
    ]


def _memory_readers(gpus: Sequence[int]) -> dict[str, ReadMemory]:
    """How the server's memory is read, by metric; that of its GPUs only if it has some."""

    def read_host_mib(sample: HostSample) -> float | None:
        server = sample.processes.get("server")
        return server.rss_mib if server else None

    def read_gpus_mib(sample: HostSample) -> float | None:
        """The used memory of all GPUs; None if that of one is not known."""
        used = {gpu.index: gpu.memory_used_mib for gpu in sample.gpus}
        each = [used.get(gpu) for gpu in gpus]
        return float(sum(mib for mib in each if mib is not None)) if None not in each else None

    return {HOST_GROWTH: read_host_mib, **({GPU_GROWTH: read_gpus_mib} if gpus else {})}


class SoakCourse(Frozen):
    """A soak's rounds for plots: the time of each one's middle since the first one's, and its means; None where not known."""

    time_s: list[Number]
    host_mib: list[Number | None]
    gpu_mib: list[Number | None]
    latency_ms: dict[str, list[Number | None]]


def soak_course(folder: Path, gpus: Sequence[int], watched: Path) -> SoakCourse:
    """All rounds of a soak, also those of the warm-up. Raises one of UNUSABLE."""
    rounds, host = _read_rounds(folder, 1), read_host(watched)
    if len(rounds) < LEAST_VALUES:
        raise ValueError(f"{len(rounds)} rounds")
    memory = {metric: _round_means(rounds, host, read) for metric, read in _memory_readers(gpus).items()}
    return SoakCourse(
        time_s=[HOUR_S * (each.middle_h - rounds[0].middle_h) for each in rounds],
        host_mib=memory[HOST_GROWTH],
        gpu_mib=memory.get(GPU_GROWTH, [None] * len(rounds)),
        latency_ms={name: [each.latency_ms(name) for each in rounds] for name in LATENCY_GROWTHS},
    )


def _read_rounds(folder: Path, first: int) -> list[Round]:
    """The rounds from the first on. Raises one of UNUSABLE."""
    rounds = []
    for number in range(first, sum(1 for _ in folder.glob("bench-*.json"))):
        result = json.loads((folder / f"bench-{number}.json").read_text())
        use = ClientUse.model_validate_json((folder / f"client-{number}.json").read_bytes())
        ended, duration = use.cpu_s[-1][0], float(result["duration"])
        if not 0 < duration < math.inf:
            raise ValueError(f"round {number} took {duration} s")
        rounds.append(Round(number, result, ended - duration, ended, use.cores(ended - duration, ended)))
    return rounds


def _round_problems(rounds: Sequence[Round], loads: Sequence[Load], model: str) -> Iterator[str]:
    for each, load in zip(rounds, loads, strict=True):
        if other := agreement.setting_problems(each.result, load, model):
            yield f"round {each.number}: bench had {', '.join(other)}"
        completed, failed, wanted = each.result["completed"], each.result["failed"], load.num_prompts
        if not (completed >= 0 and failed >= 0 and completed + failed == wanted):
            yield f"round {each.number}: {completed} requests completed and {failed} failed, of {wanted}"


def _soaked_problems(counted: Sequence[Round], rounds: Sequence[Round], soak: Soak) -> Iterator[str]:
    if len(counted) < LEAST_VALUES:
        yield f"{len(counted)} rounds after the warm-up, and a slope needs {LEAST_VALUES}: {REMEDY}"
        return
    soaked_s = rounds[-1].ended - rounds[0].began
    if soaked_s < LEAST_SOAKED * soak.duration_s:
        yield f"its rounds took {soaked_s:,.0f} s, and soak_min is {soak.soak_min:g}"
    if any(other.ended <= one.ended for one, other in pairwise(rounds)):
        yield "its rounds did not follow each other in time"
    times = [(each.result["mean_ttft_ms"], each.result["duration"]) for each in rounds]
    if len(set(times)) < len(times):
        yield "a round is a copy of another one"


def _counter_problems(folder: Path, rounds: Sequence[Round], kind: EngineKind) -> list[str]:
    """Where the server's counters disagree with bench. Of requests that failed it may have made tokens too.

    Raises one of UNUSABLE.
    """
    if "generation_tokens" not in kind.counters:
        return []
    samples, counted = counters_of(*(folder / page for page in PAGES))
    name = kind.total("generation_tokens")
    if problems := agreement.counter_resets(*samples) or counted.missing([name]):
        return problems
    generated, reported = counted.gained(name), sum(each.result["total_output_tokens"] for each in rounds)
    is_right = generated >= reported if any(each.result["failed"] for each in rounds) else generated == reported
    return [] if is_right else [f"the server counts {generated:g} generated tokens, and bench {reported:g}"]


def _measure_memory(
    metric: str, rounds: Sequence[Round], host: Sequence[HostSample], read: ReadMemory, levels: Levels
) -> Measurement:
    source = f"{STAGE}/watched/{HOST_SAMPLES}"
    pairs = zip(rounds, _round_means(rounds, host, read), strict=True)
    means = [(each.middle_h, mean) for each, mean in pairs if mean is not None]
    if len(means) < LEAST_VALUES:
        because = f"the memory is known in {len(means)} of {len(rounds)} rounds, and a slope needs {LEAST_VALUES}: {REMEDY}"
        return invalid(metric, because, source)
    return _measure_growth(metric, means, levels, source, in_percent=False)


def _round_means(rounds: Sequence[Round], host: Sequence[HostSample], read: ReadMemory) -> list[float | None]:
    known = [(sample.time, value) for sample in host if (value := read(sample)) is not None]
    # With the pause before it: a short round may have no sample of its own.
    since = [rounds[0].began, *(each.ended for each in rounds[:-1])]
    during = ([mib for at, mib in known if begin <= at <= each.ended] for begin, each in zip(since, rounds, strict=True))
    return [statistics.fmean(values) if values else None for values in during]


def _latency_growths(rounds: Sequence[Round], problems: Sequence[str], levels: Levels, source: str) -> Iterator[Measurement]:
    """Invalid with `problems`."""
    for latency, metric in LATENCY_GROWTHS.items():
        values = [(each.middle_h, value) for each in rounds if (value := each.latency_ms(latency)) is not None]
        wrong = [each.result[f"mean_{latency}_ms"] for each in rounds if each.latency_ms(latency) is None]
        if because := problems or ([f"mean_{latency}_ms is {wrong[0]} in a round, which is no time"] if wrong else []):
            yield invalid(metric, "; ".join(because), source)
        else:
            yield _measure_growth(metric, values, levels, source, in_percent=True)


def _reply_problems(rounds: Sequence[Round], settings: Load) -> Iterator[str]:
    if empty := [each.number for each in rounds if not each.result["completed"]]:
        yield f"in {len(empty)} of {len(rounds)} rounds no request completed, first in round {empty[0]}"
    if settings.length_spread:
        return
    for each in rounds:
        whole, tokens = each.result["completed"] * settings.output_len, each.result["total_output_tokens"]
        if tokens != whole:
            yield f"round {each.number}: its replies have {tokens} tokens, and whole ones {whole}"
            return


def _busy_problems(rounds: Sequence[Round], watched: Path) -> Iterator[str]:
    """What makes latencies those of the client or of a machine that was slowed down."""
    busiest = max((each.cores for each in rounds if each.cores is not None), default=None)
    if busiest is not None and busiest > CLIENT_CORES_ALLOWED:
        yield f"the client used {busiest:.2f} of a core in a round, so that it measured itself: {CLIENT_REMEDY}"
    yield from watched_problems(watched, rounds[0].began, rounds[-1].ended)


def _measure_growth(
    metric: str, series: Sequence[tuple[float, float]], levels: Levels, source: str, *, in_percent: bool
) -> Measurement:
    try:
        slope = slope_of(*zip(*series, strict=True))
    except UNUSABLE as error:
        return invalid(metric, in_words(error), source)
    times = 100 / slope.mean if in_percent else 1.0
    ends = slope.interval(sides_at_once(metric, levels))
    interval = around(times * slope.per_time, times * ends.lower, times * ends.upper)
    return valid(metric, times * slope.per_time, source, sample_count=len(series), interval=interval)


def _failed_share(rounds: Sequence[Round], levels: Levels, source: str) -> Measurement:
    """The share of all requests. If failures come together, the differences between rounds tell, and not the requests."""
    failed, asked = ([each.result[name] for each in rounds] for name in ("failed", "num_prompts"))
    at, share = sides_at_once(FAILED_SHARE, levels), sum(failed) / sum(asked)
    of_requests = share_interval(sum(failed), sum(asked), at)
    of_rounds = _bound_share([one / whole for one, whole in zip(failed, asked, strict=True)], at)
    lower, upper = min(of_requests.lower, of_rounds.lower), max(of_requests.upper, of_rounds.upper)
    return valid(FAILED_SHARE, share, source, sample_count=sum(asked), interval=around(share, lower, upper))


def _bound_share(shares: Sequence[float], at: Sides) -> Interval:
    """Bounds of the rounds' mean share by its slow waves; the slope's error, times the length of the soak, is such an error."""
    slope = slope_of(range(len(shares)), shares)
    error = slope.error * math.sqrt((len(shares) ** 2 - 1) / 12)
    ends = slope.model_copy(update={"per_time": slope.mean, "error": error}).interval(at)
    return Interval(lower=min(1.0, max(0.0, ends.lower)), upper=min(1.0, max(0.0, ends.upper)))
