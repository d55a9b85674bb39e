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
from typing import Any, NamedTuple

from vllm_qualify.engine import bench as benches
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.process import Tell
from vllm_qualify.engine.watch import HOST_SAMPLES, HostSample
from vllm_qualify.evidence.load import agreement
from vllm_qualify.evidence.load.agreement import Asked
from vllm_qualify.evidence.load.client import Driven, command_of
from vllm_qualify.evidence.load.problems import CLIENT_CORES_ALLOWED, CLIENT_REMEDY, ClientUse, counters_of
from vllm_qualify.evidence.measurement import UNUSABLE, Interval, Measurement, around, in_words, invalid, share_interval, valid
from vllm_qualify.evidence.sequential import Levels, Sides, sides_of
from vllm_qualify.evidence.trend import LEAST_VALUES, slope_of
from vllm_qualify.evidence.watched import problems as watched_problems
from vllm_qualify.evidence.watched import read_host
from vllm_qualify.recipe.metrics import FAILED_SHARE, GPU_GROWTH, HOST_GROWTH, LATENCY_GROWTHS, METRICS
from vllm_qualify.recipe.serving import VLLM, EngineName
from vllm_qualify.recipe.values import Count, Frozen, Number
from vllm_qualify.recipe.workload import LEAST_PROMPTS_PER_CLIENT, Load, Soak

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


class Planned(Frozen):
    """How many requests each round has."""

    num_prompts: Count


def measure_soak(
    driven: Driven, settings: Load, soak: Soak, folder: Path, tell: Tell, clock: Callable[[], float] = time.monotonic
) -> list[list[str]]:
    """Run rounds until the soak's time is over. Round N is written to `bench-N.json`; 0 is the one before the soak.

    Returns the commands of the first two runs: all others have only other seeds.

    Raises:
        HostError: bench failed, or a round took longer than the load's time limit.
        ReleaseError: the server ended meanwhile.
    """
    benches.stop_preparing(driven.bench, settings.time_limit_s, driven.server.check_alive)
    least = _least_requests(settings, soak)
    commands = [_run_round(driven, settings, soak, least, folder, 0)]
    planned = Planned(num_prompts=_requests(settings, soak, least, folder))
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
    clients, _ = soak.of(settings)
    return max(LEAST_REQUESTS, LEAST_PROMPTS_PER_CLIENT * clients)


def _requests(settings: Load, soak: Soak, least: int, folder: Path) -> int:
    """How many requests take as long as a round should, by the rate or by how fast the first run was."""
    round_s = min(soak.duration_s / ROUNDS, ROUND_S, OF_TIME_LIMIT * settings.time_limit_s)
    _, rate = soak.of(settings)
    if rate is None:
        rate = float(json.loads((folder / "bench-0.json").read_text())["request_throughput"])
    # A file has no more prompts than the load asks.
    most = settings.num_prompts if settings.prompts else math.inf
    return int(min(most, max(least, math.ceil(rate * round_s))))


def round_settings(settings: Load, soak: Soak, num_prompts: int, number: int) -> Load:
    """The load of a round."""
    clients, rate = soak.of(settings)
    seed = settings.seed + SEEDS_APART + number
    part = {"max_concurrency": clients, "request_rate": rate, "num_prompts": num_prompts, "seed": seed, "slo": None}
    return settings.model_copy(update=part)


def _run_round(driven: Driven, settings: Load, soak: Soak, num_prompts: int, folder: Path, number: int) -> list[str]:
    client, server = driven.bench.client, driven.server
    asked, into = round_settings(settings, soak, num_prompts, number), benches.results_folder(driven.bench)
    whole = command_of(client, server.served_model_name, asked, into, 1, driven.prompts)
    name = f"bench-{number}.json"
    command = [*(part for part in whole[:-1] if part != "--save-detailed"), name]
    log = folder / f"bench-{number}.log"
    benches.run_command(driven.bench, command, name, log, settings.time_limit_s, server.check_alive, _untold)
    return benches.recorded(client, command)


def _untold(_done: int, _total: int) -> None:
    """A round is told as a whole."""


class Of(NamedTuple):
    """What a soak was asked: the load that it is a part of, the server's kind, its GPUs, its model's name."""

    settings: Load
    soak: Soak
    kind: EngineName = VLLM
    gpus: Sequence[int] = ()
    model: str | None = None


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


def parse_soak(folder: Path, of: Of, levels: Levels, watched: Path) -> list[Measurement]:
    """One measurement for each metric of a soak. `watched` is the folder with what was watched of the server meanwhile."""
    source = f"{STAGE}/bench-*.json"
    names = [HOST_GROWTH, *([GPU_GROWTH] if of.gpus else []), *LATENCY_GROWTHS.values(), FAILED_SHARE]
    try:
        planned = Planned.model_validate_json((folder / PLANNED).read_bytes())
        rounds = [_read_round(folder, number) for number in range(_count(folder) + 1)]
        counted = _counted(rounds[1:])
        if problems := [*_round_problems(rounds, planned, of), *_soaked_problems(counted, rounds[1:], of.soak)]:
            return [invalid(name, "; ".join(problems), source) for name in names]
        if problems := _counter_problems(folder, rounds[1:], of.kind):
            return [invalid(name, "; ".join(problems), source) for name in names]
        host = read_host(watched)
    except UNUSABLE as error:
        return [invalid(name, f"the soak left no usable evidence: {in_words(error)}", source) for name in names]
    memory = [_memory(HOST_GROWTH, counted, host, _host_mib, levels)]
    memory += [_memory(GPU_GROWTH, counted, host, lambda sample: _gpu_mib(sample, of.gpus), levels)] if of.gpus else []
    return [*memory, *_latencies(counted, of, watched, levels, source), _failed(rounds[1:], levels, source)]


class SoakCourse(Frozen):
    """A soak's rounds for plots: the time of each one's middle since the first one's, and its means; None where not known."""

    time_s: list[Number]
    host_mib: list[Number | None]
    gpu_mib: list[Number | None]
    latency_ms: dict[str, list[Number | None]]


def soak_course(folder: Path, gpus: Sequence[int], watched: Path) -> SoakCourse:
    """All rounds of a soak, also those of the warm-up. Raises one of UNUSABLE."""
    rounds, host = [_read_round(folder, number) for number in range(1, _count(folder) + 1)], read_host(watched)
    if len(rounds) < LEAST_VALUES:
        raise ValueError(f"{len(rounds)} rounds")
    return SoakCourse(
        time_s=[HOUR_S * (each.middle_h - rounds[0].middle_h) for each in rounds],
        host_mib=_round_means(rounds, host, _host_mib),
        gpu_mib=_round_means(rounds, host, lambda sample: _gpu_mib(sample, gpus)) if gpus else [None] * len(rounds),
        latency_ms={name: [_time_of(each, name) for each in rounds] for name in LATENCY_GROWTHS},
    )


def _time_of(each: Round, latency: str) -> float | None:
    value = each.result[f"mean_{latency}_ms"]
    return value if type(value) is float and 0 < value < math.inf else None


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.glob("bench-*.json")) - 1


def _read_round(folder: Path, number: int) -> Round:
    """Raises one of UNUSABLE."""
    result = json.loads((folder / f"bench-{number}.json").read_text())
    use = ClientUse.model_validate_json((folder / f"client-{number}.json").read_bytes())
    ended, duration = use.cpu_s[-1][0], float(result["duration"])
    if not 0 < duration < math.inf:
        raise ValueError(f"round {number} took {duration} s")
    return Round(number, result, ended - duration, ended, use.cores(ended - duration, ended))


def _counted(rounds: Sequence[Round]) -> list[Round]:
    """The rounds without those that began in the warm-up."""
    if not rounds:
        return []
    begin, end = rounds[0].began, rounds[-1].ended
    return [each for each in rounds if each.began >= begin + WARM_UP * (end - begin)]


def _round_problems(rounds: Sequence[Round], planned: Planned, of: Of) -> Iterator[str]:
    for each in rounds:
        wanted = planned.num_prompts if each.number else _least_requests(of.settings, of.soak)
        asked = round_settings(of.settings, of.soak, wanted, each.number)
        other = [
            f"{name} {each.result[name]}, not {value}"
            for name, value in Asked(asked, of.model, asked.request_rate).settings.items()
            if each.result[name] != value
        ]
        if other:
            yield f"round {each.number}: bench had {', '.join(other)}"
        completed, failed = each.result["completed"], each.result["failed"]
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


def _counter_problems(folder: Path, rounds: Sequence[Round], kind: EngineName) -> list[str]:
    """Where the server's counters disagree with bench. Of requests that failed it may have made tokens too.

    Raises one of UNUSABLE.
    """
    if "generation_tokens" not in KINDS[kind].counters:
        return []
    samples, counted = counters_of(*(folder / page for page in PAGES))
    name = KINDS[kind].total("generation_tokens")
    if problems := agreement.went_back(*samples) or counted.missing([name]):
        return problems
    generated, reported = counted.gained(name), sum(each.result["total_output_tokens"] for each in rounds)
    is_right = generated >= reported if any(each.result["failed"] for each in rounds) else generated == reported
    return [] if is_right else [f"the server counts {generated:g} generated tokens, and bench {reported:g}"]


def _memory(
    metric: str, rounds: Sequence[Round], host: Sequence[HostSample], of: Callable[[HostSample], float | None], levels: Levels
) -> Measurement:
    source = f"{STAGE}/watched/{HOST_SAMPLES}"
    pairs = zip(rounds, _round_means(rounds, host, of), strict=True)
    means = [(each.middle_h, mean) for each, mean in pairs if mean is not None]
    if len(means) < LEAST_VALUES:
        because = f"the memory is known in {len(means)} of {len(rounds)} rounds, and a slope needs {LEAST_VALUES}: {REMEDY}"
        return invalid(metric, because, source)
    return _growth(metric, means, levels, source, in_percent=False)


def _round_means(
    rounds: Sequence[Round], host: Sequence[HostSample], of: Callable[[HostSample], float | None]
) -> list[float | None]:
    known = [(sample.time, value) for sample in host if (value := of(sample)) is not None]
    # With the pause before it: a short round may have no sample of its own.
    since = [rounds[0].began, *(each.ended for each in rounds[:-1])]
    during = ([mib for at, mib in known if begin <= at <= each.ended] for begin, each in zip(since, rounds, strict=True))
    return [statistics.fmean(values) if values else None for values in during]


def _host_mib(sample: HostSample) -> float | None:
    server = sample.processes.get("server")
    return server.rss_mib if server else None


def _gpu_mib(sample: HostSample, gpus: Sequence[int]) -> float | None:
    """The used memory of all GPUs; None if that of one is not known."""
    used = {gpu.index: gpu.memory_used_mib for gpu in sample.gpus}
    each = [used.get(gpu) for gpu in gpus]
    return float(sum(mib for mib in each if mib is not None)) if None not in each else None


def _latencies(rounds: Sequence[Round], of: Of, watched: Path, levels: Levels, source: str) -> Iterator[Measurement]:
    problems = [*_reply_problems(rounds, of.settings), *_busy_problems(rounds, of, watched)]
    for latency, metric in LATENCY_GROWTHS.items():
        key = f"mean_{latency}_ms"
        values = [(each.middle_h, each.result[key]) for each in rounds]
        wrong = [value for _, value in values if type(value) is not float or not 0 < value < math.inf]
        if because := problems or ([f"{key} is {wrong[0]} in a round, which is no time"] if wrong else []):
            yield invalid(metric, "; ".join(because), source)
        else:
            yield _growth(metric, values, levels, source, in_percent=True)


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


def _busy_problems(rounds: Sequence[Round], of: Of, watched: Path) -> Iterator[str]:
    """What makes latencies those of the client or of a machine that was slowed down."""
    busiest = max((each.cores for each in rounds if each.cores is not None), default=None)
    if busiest is not None and busiest > CLIENT_CORES_ALLOWED:
        yield f"the client used {busiest:.2f} of a core in a round, so that it measured itself: {CLIENT_REMEDY}"
    clients, _ = of.soak.of(of.settings)
    yield from watched_problems(watched, rounds[0].began, rounds[-1].ended, clients, None, kind=KINDS[of.kind])


def _growth(
    metric: str, series: Sequence[tuple[float, float]], levels: Levels, source: str, *, in_percent: bool
) -> Measurement:
    try:
        slope = slope_of(*zip(*series, strict=True))
    except UNUSABLE as error:
        return invalid(metric, in_words(error), source)
    times = 100 / slope.mean if in_percent else 1.0
    ends = slope.interval(_sides(metric, levels))
    interval = around(times * slope.per_time, times * ends.lower, times * ends.upper)
    return valid(metric, times * slope.per_time, source, sample_count=len(series), interval=interval)


def _failed(rounds: Sequence[Round], levels: Levels, source: str) -> Measurement:
    """The share of all requests. If failures come together, the differences between rounds tell, and not the requests."""
    failed, asked = ([each.result[name] for each in rounds] for name in ("failed", "num_prompts"))
    at, share = _sides(FAILED_SHARE, levels), sum(failed) / sum(asked)
    of_requests = share_interval(sum(failed), sum(asked), at)
    of_rounds = _between([one / whole for one, whole in zip(failed, asked, strict=True)], at)
    lower, upper = min(of_requests.lower, of_rounds.lower), max(of_requests.upper, of_rounds.upper)
    return valid(FAILED_SHARE, share, source, sample_count=sum(asked), interval=around(share, lower, upper))


def _between(shares: Sequence[float], at: Sides) -> Interval:
    """Bounds of the rounds' mean share by its slow waves; the slope's error, times the length of the soak, is such an error."""
    slope = slope_of(range(len(shares)), shares)
    error = slope.error * math.sqrt((len(shares) ** 2 - 1) / 12)
    ends = slope.model_copy(update={"per_time": slope.mean, "error": error}).interval(at)
    return Interval(lower=min(1.0, max(0.0, ends.lower)), upper=min(1.0, max(0.0, ends.upper)))


def _sides(metric: str, levels: Levels) -> Sides:
    return sides_of(METRICS[metric].direction, levels.false_pass, levels.false_fail)
