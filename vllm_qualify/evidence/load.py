"""Load: `vllm bench serve` with random prompts, repeated, with the server's counters before and after each repeat."""

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from vllm_qualify.engine import bench as benches
from vllm_qualify.engine.bench import Bench
from vllm_qualify.engine.kind import KINDS
from vllm_qualify.engine.kinds.base import Conditions, Counted, Totals
from vllm_qualify.engine.kinds.vllm import WENT_BACK
from vllm_qualify.engine.process import Progress
from vllm_qualify.engine.server import Client, Server
from vllm_qualify.evidence import steady
from vllm_qualify.evidence.measurement import (
    UNUSABLE,
    Interval,
    Measurement,
    around,
    geometric_mean,
    in_words,
    invalid,
    repeat_interval,
    share_interval,
    valid,
)
from vllm_qualify.evidence.memory import Memory, digest_of
from vllm_qualify.evidence.repeats import interval_over_looks
from vllm_qualify.evidence.sequential import Levels, Sides
from vllm_qualify.evidence.watched import problems as watched_problems
from vllm_qualify.recipe.metrics import GOODPUT, METRICS, least_requests
from vllm_qualify.recipe.serving import VLLM, EngineName, ServerArguments
from vllm_qualify.recipe.values import Count, CountOrNone, Frozen, Number, Seconds
from vllm_qualify.recipe.workload import Load

STAGE = "load"
PREEMPTIONS = KINDS[VLLM].total("preemptions")
RESET = "/reset_prefix_cache"
# Bench's names of the two interfaces, and their paths.
APIS = {"completions": ("openai", "/v1/completions"), "chat": ("openai-chat", "/v1/chat/completions")}
# Bench's names of the metrics that are no latency. `_key` builds those of latencies.
KEYS = {
    "request_throughput_req_s": "request_throughput",
    "output_throughput_tok_s": "output_throughput",
    "total_throughput_tok_s": "total_token_throughput",
    GOODPUT: "request_goodput",
    "acceptance_length_tok": "spec_decode_acceptance_length",
}
ACCEPTANCE = "acceptance_length_tok"
# Metrics that need two servers, one with a draft model and one without. One run of bench cannot give them.
NOT_OF_ONE_SERVER = ("speculative_speedup",)
OUTPUT = "output_throughput_tok_s"
# How far bench's own figures may differ from those of its requests.
CONTRADICTION_ALLOWED = 0.01
# The first repeat is far off if it differs so much from the others' mean, and by so many times their spread.
FAR_OFF, FAR_OFF_SPREADS = 0.25, 5.0
# A thread that is this busy makes its next request late, and sees a reply late.
CLIENT_CORES_ALLOWED = 0.9
CLIENT_REMEDY = "run the client on a faster host, or several clients"
# The share of a repeat that the client's samples must cover: in less of it, its use of the CPU says little about the rest.
LEAST_SEEN = 0.5
# The folder, in the stage's folder, of a baseline that was measured in turns.
BESIDE = "beside"
# The file in the stage's folder that says that the budget ended the load.
ENDED = "ended.json"
WHOLE = ", over whole runs with their ramp-up and tail"
# The long ones of bench's lists: a number for each token, and each reply's text.
LONG_LISTS = ("itls", "generated_texts")
# The results remembered for a file are small. No load has more repeats.
RESULTS = Memory(files=256)

Remembered = TypeVar("Remembered")


class Driven(NamedTuple):
    """A server, the bench that measures it, and where bench finds the workload's file of prompts, if it has one."""

    server: Server
    bench: Bench
    prompts: str | None = None


class Made(NamedTuple):
    """How far a load is: its repeats, the longest of them in s, and the undecided gates, None if this was no look."""

    repeats: int
    longest_s: float
    undecided: Sequence[str] | None


class Following(NamedTuple):
    """Callbacks during a load. `undecided` gives the gates that more repeats could decide, and `told` gets each repeat.

    `ended` gets the reason if the budget ends the load. The clock is in s.
    """

    undecided: Callable[[], Sequence[str]]
    told: Callable[[Made], None]
    ended: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic


UNFOLLOWED = Following(undecided=list, told=lambda _: None, ended=lambda _: None)
"""Reports nothing, and ends the load after its first look."""


class Ended(Frozen):
    """`ended.json`: how many repeats a load had when its budget ended it, and how long these took, in s."""

    time_budget_s: Seconds
    repeats: Count
    spent_s: Seconds
    longest_s: Seconds

    @property
    def is_right(self) -> bool:
        """Whether another repeat would have exceeded the budget."""
        return self.spent_s + self.longest_s > self.time_budget_s

    @property
    def because(self) -> str:
        done = f"{self.repeats} repeat{'s' if self.repeats > 1 else ''} in {self.spent_s:.0f} s"
        return f"time_budget_s {self.time_budget_s:g} ended the load after {done}: another may take {self.longest_s:.0f} s"


def measure(
    ours: Driven,
    settings: Load,
    folder: Path,
    progress: Progress,
    following: Following,
    beside: Driven | None = None,
) -> list[list[str]]:
    """Run repeats until nothing is undecided at one of `settings.looks`. Bench writes its result of repeat N to `bench-N.json`.

    The longest repeat so far tells whether another one would end within the budget. If not, it is not begun, and ENDED says so.
    The budget's time begins with the first repeat.

    With `beside`, the baseline, each repeat runs on that too, into the folder BESIDE. The two take turns in going first, so
    that a drift of the machine favours neither. Returns the commands.

    Raises:
        HostError: bench failed or took longer than its time limit.
        ReleaseError: a server ended meanwhile.
    """
    pairs = [(ours, folder)]
    if beside:
        (folder / BESIDE).mkdir(exist_ok=True)
        pairs.append((beside, folder / BESIDE))
    for driven, _ in pairs:
        benches.settle(driven.bench, settings.time_limit_s, driven.server.check_alive)
    commands: list[list[str]] = []
    began, longest_s = following.clock(), 0.0
    for repeat in range(1, settings.looks[-1] + 1):
        started = following.clock()
        if ended := _over_budget(settings, repeat - 1, started - began, longest_s):
            (folder / ENDED).write_text(ended.model_dump_json(indent=2))
            following.ended(ended.because)
            break
        for turn, (driven, into) in enumerate(pairs if repeat % 2 else reversed(pairs)):
            told = _of_run(progress, (repeat - 1) * len(pairs) + turn, _known(settings, repeat) * len(pairs), settings)
            commands.append(run(driven, settings, into, repeat, told))
        longest_s = max(longest_s, following.clock() - started)
        undecided = following.undecided() if repeat in settings.looks else None
        following.told(Made(repeat, longest_s, undecided))
        if undecided is not None and not undecided:
            break
    return commands


def _over_budget(settings: Load, repeats: int, spent_s: float, longest_s: float) -> Ended | None:
    """The end of the load, if the budget allows no other repeat; else None. It always allows the first one."""
    if settings.time_budget_s is None or repeats == 0:
        return None
    found = Ended(time_budget_s=settings.time_budget_s, repeats=repeats, spent_s=spent_s, longest_s=longest_s)
    return found if found.is_right else None


def prepare(bench: Bench, model: str, loads: Sequence[tuple[Load, Path, Path | None]]) -> None:
    """Have the prompts of loads made before `measure` needs them. Each load comes with its folder and its file of prompts.

    Repeats that are run in any case come first. Raises HostError if Docker Engine went away.
    """
    planned = []
    for settings, folder, file in loads:
        into, prompts = benches.results_folder(bench.client, folder), benches.give(bench, file) if file else None
        for repeat in range(1, settings.looks[-1] + 1):
            command = command_of(bench.client, model, settings, into, repeat, prompts)
            planned.append((repeat > settings.looks[0], command))
    benches.prepare(bench, [command for _, command in sorted(planned, key=itemgetter(0))])


def run(
    driven: Driven, settings: Load, folder: Path, number: int, progress: Progress, request_rate: float | None = None
) -> list[str]:
    """Run bench once, as repeat `number`, into `folder`, and return its command. `request_rate` is in requests per second.

    Raises as `measure` does.
    """
    server, client = driven.server, driven.bench.client
    into = benches.results_folder(client, folder)
    command = command_of(client, server.served_model_name, settings, into, number, driven.prompts, request_rate)
    _forget_prefixes(server, folder / f"reset-{number}.txt")
    (folder / f"metrics-{number}-before.txt").write_text(server.metrics_page())
    result, log = f"bench-{number}.json", folder / f"bench-{number}.log"
    benches.run(driven.bench, command, result, log, settings.time_limit_s, server.check_alive, progress)
    (folder / f"metrics-{number}-after.txt").write_text(server.metrics_page())
    return benches.recorded(client, command)


def _forget_prefixes(server: Server, told: Path) -> None:
    """Empty the prefix cache. Only a server with VLLM_SERVER_DEV_MODE allows that; the server's counters show any hits."""
    answer = server.post(RESET)
    told.write_text(f"{RESET} {answer}\n")


def _known(settings: Load, repeat: int) -> int:
    """How many repeats are certain while repeat number `repeat` runs."""
    return next(look for look in settings.looks if look >= repeat)


def _of_run(progress: Progress, before: int, runs: int, settings: Load) -> Progress:
    def told(done: int, total: int) -> None:
        if total == settings.num_prompts:
            progress(before * total + done, runs * total)

    return told


def command_of(
    client: Client,
    model: str,
    settings: Load,
    folder: str,
    repeat: int,
    prompts: str | None = None,
    request_rate: float | None = None,
) -> list[str]:
    """Bench's command. `prompts` is where the client finds the workload's file, if it has one.

    With a rate, in requests per second, the number of requests under way has no limit, which would hold requests back unseen.
    """
    backend, endpoint = APIS[settings.api]
    return [
        *(client.program, "bench", "serve"),
        *("--backend", backend, "--endpoint", endpoint, "--base-url", client.url),
        *("--model", model, "--tokenizer", client.model),
        *(("--trust-remote-code",) if client.trust_remote_code else ()),
        *(_random(settings) if prompts is None else _of_file(prompts, settings)),
        "--ignore-eos",
        *("--num-prompts", str(settings.num_prompts)),
        *(
            ("--max-concurrency", str(settings.max_concurrency))
            if request_rate is None
            else ("--request-rate", f"{request_rate:g}")
        ),
        *("--num-warmups", str(settings.num_warmups)),
        # Without it the server's default would count, which differs by model and by version of bench.
        *("--temperature", "0"),
        # Each repeat has its own seed: the same prompts again would measure the prefix cache.
        *("--seed", str(settings.seed + repeat - 1)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *(("--goodput", *(f"{name}:{limit}" for name, limit in settings.slo.wanted.items())) if settings.slo else ()),
        *("--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", f"bench-{repeat}.json"),
    ]


def _random(settings: Load) -> list[str]:
    lengths = ["--random-input-len", str(settings.input_len), "--random-output-len", str(settings.output_len)]
    spread = ["--random-range-ratio", str(settings.length_spread)] if settings.length_spread else []
    return ["--dataset-name", "random", *lengths, *spread]


def _of_file(prompts: str, settings: Load) -> list[str]:
    """Options for the prompts of a file, sent as they are: in a chat the server applies its template, so bench must not."""
    options = ["--custom-output-len", str(settings.output_len), "--skip-chat-template"]
    return ["--dataset-name", "custom", "--dataset-path", prompts, *options]


@dataclass(frozen=True)
class Repeat:
    """A repeat as bench left it. `path` is that of its result file in the evidence folder.

    A big load's file takes seconds to read, so results from it are remembered for as long as the file is the same.
    """

    number: int
    path: str
    text: str

    @cached_property
    def result(self) -> Any:
        """All that bench wrote. Raises ValueError if it is not JSON."""
        return json.loads(self.text)

    @property
    def about(self) -> Any:
        """The result without its LONG_LISTS. Raises ValueError."""
        return self.remembered("about", lambda: _without_long_lists(self.result))

    def line_of(self, key: str) -> str:
        """The line of a key in the result file, as `path:line`; only the path if the file does not have the key."""
        line = self.remembered(("line", key), lambda: _line_of(self.text, key))
        return self.path if line is None else f"{self.path}:{line}"

    def steady(self, settings: Load, is_open: bool = False) -> "Steady":
        """The same as `steady_of` for the repeat's result."""
        what = ("steady", settings.model_dump_json(), is_open)
        return self.remembered(what, lambda: steady_of(self.result, settings, is_open))

    def remembered(self, what: Hashable, find: Callable[[], Remembered]) -> Remembered:
        """The same as `Memory.find`, for the result file."""
        return RESULTS.find(self._digest, what, find)

    @cached_property
    def _digest(self) -> bytes:
        return digest_of(self.text.encode(errors="surrogatepass"))


def _without_long_lists(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    return {name: value for name, value in result.items() if name not in LONG_LISTS}


def _line_of(text: str, key: str) -> int | None:
    """The first line with a key. One regular expression for all would take long in a long text."""
    name, colon, at = f'"{key}"', re.compile(r"\s*:"), -1
    while (at := text.find(name, at + 1)) >= 0:
        if text[at - 1 : at] != "\\" and colon.match(text, at + len(name)):
            # Bench writes only one line, and to check for that is quicker than to count.
            return 1 if text.find("\n", 0, at) < 0 else text.count("\n", 0, at) + 1
    return None


@dataclass(frozen=True)
class Steady:
    """What a repeat measured in its steady state, and over how many requests. `untold` says why metrics have no value."""

    values: dict[str, float]
    requests: int
    rebuilt: bool
    untold: dict[str, str]


@dataclass(frozen=True)
class OverLooks:
    """The looks at a load, for its intervals. It has `count` repeats, of which the first `left_out` were warm-up."""

    levels: Levels
    looks: range
    count: int
    left_out: int

    def interval(self, metric: str, value: float, at_look: Callable[[int, Sides], Interval | None]) -> Interval | None:
        """As `interval_over_looks`."""
        direction = METRICS[metric].direction
        return interval_over_looks(value, at_look, direction, self.levels, self.looks, self.count, left_out=self.left_out)


class ClientUse(Frozen):
    """`client-N.json`: the client thread's CPU seconds so far, as pairs of the time in s since 1970 and these seconds."""

    cpu_s: list[tuple[Number, Number]] = Field(min_length=1)
    max_rss_mib: CountOrNone

    def cores(self, began: float, ended: float) -> float | None:
        """How many cores the thread used on average between two times; None if the samples cover too little of it."""
        seen = [sample for sample in self.cpu_s if began <= sample[0] <= ended]
        if len(seen) < 2:
            return None
        (first, before), (last, after) = seen[0], seen[-1]
        seen_s = last - first
        return (after - before) / seen_s if seen_s >= LEAST_SEEN * (ended - began) else None


def parse(
    folder: Path,
    settings: Load,
    levels: Levels,
    kind: EngineName = VLLM,
    arguments: ServerArguments | None = None,
    watched: Path | None = None,
) -> list[Measurement]:
    """One measurement per load metric, over the steady state of every repeat. All are invalid if any repeat is.

    A first repeat that is far off the others counts as warm-up.

    `folder` is the stage's or its BESIDE. `kind` and `arguments` are the server's: kinds name their counters differently, and a
    feature that a server does not count must be switched off. `watched` is the folder with what was watched of the server, None
    if nothing was.

    If the budget ended a load before the first look, its values have no interval.
    """
    place = f"{folder.parent.name}/{folder.name}" if folder.name == BESIDE else folder.name
    source = f"{place}/bench-*.json"
    try:
        count = count_of(folder)
        repeats = [read(folder, place, number) for number in range(1, count + 1)]
        ended, why_not = _end(folder.parent if folder.name == BESIDE else folder, count, settings)
        found, problems = _examined(folder, repeats, settings, kind, arguments or {}, watched)
        if problems := why_not + problems:
            return [invalid(name, "; ".join(problems), source) for name in _names(settings, repeats)]
        if problem := first_repeat_problem([each.values[OUTPUT] for each in found]):
            repeats, found = repeats[1:], found[1:]
            source += f" without the first: {problem}"
        if any(each.rebuilt for each in found):
            source += ", the requests' start times from their latencies"
        source += WHOLE if settings.window == "whole" else ""
        over, because = OverLooks(levels, settings.looks, count, count - len(repeats)), ended.because if ended else None
        measured = [_measurement(name, repeats, found, over, source) for name in _names(settings, repeats)]
        return [row if row.invalid_because else row.model_copy(update={"ended_because": because}) for row in measured]
    except UNUSABLE as error:
        return [invalid(name, f"bench left no usable result: {in_words(error)}", source) for name in _names(settings, [])]


def count_of(folder: Path) -> int:
    """The number of repeats in a folder that `parse` takes. Raises OSError."""
    return max(_numbers(folder), default=0)


def _numbers(folder: Path) -> list[int]:
    names = [re.fullmatch(r"bench-([1-9]\d*)\.json", path.name) for path in folder.iterdir()]
    return [int(name[1]) for name in names if name]


def read(folder: Path, place: str, number: int) -> Repeat:
    """Read a repeat from a folder, whose path in the evidence is `place`. Raises one of UNUSABLE."""
    text = (folder / f"bench-{number}.json").read_text()
    repeat = Repeat(number, f"{place}/bench-{number}.json", text)
    # This raises an error if the file is cut.
    _ = repeat.about
    return repeat


def _names(settings: Load, repeats: Sequence[Repeat]) -> list[str]:
    """The metrics of a load: goodput only with an SLO, the acceptance length only for a server with a draft model."""
    names = [metric.name for metric in METRICS.values() if metric.stage == STAGE and metric.name not in NOT_OF_ONE_SERVER]
    drafted = any(isinstance(repeat.about, dict) and KEYS[ACCEPTANCE] in repeat.about for repeat in repeats)
    unasked = {*(() if settings.slo else (GOODPUT,)), *(() if drafted else (ACCEPTANCE,))}
    return [name for name in names if name not in unasked]


def _examined(
    folder: Path,
    repeats: Sequence[Repeat],
    settings: Load,
    kind: EngineName,
    arguments: ServerArguments,
    watched: Path | None,
) -> tuple[list[Steady], list[str]]:
    """What the repeats measured, and the problems for which they do not count."""
    found: list[Steady] = []
    problems: list[str] = []
    for repeat in repeats:
        told = problems_of(folder, repeat, settings, kind, arguments, watched)
        try:
            # The steady state of a repeat with problems does not matter.
            found += [] if told else [repeat.steady(settings)]
        except steady.UnsteadyError as error:
            told = [str(error)]
        problems += [f"repeat {repeat.number}: {problem}" for problem in told]
    return found, problems


def problems_of(
    folder: Path,
    repeat: Repeat,
    settings: Load,
    kind: EngineName,
    arguments: ServerArguments,
    watched: Path | None = None,
    *,
    may_queue: bool = False,
) -> list[str]:
    """Why a repeat in a folder does not count, by its requests, its server's counters, its client and what was watched.

    `watched` is as `parse` takes it. If requests `may_queue`, a queue is no reason. Raises one of UNUSABLE.
    """
    at_once = None if may_queue else KINDS[kind].most_requests(arguments)
    return [
        *request_problems(repeat.about, settings),
        *_server_problems(folder, repeat.number, settings, kind, arguments),
        *_problems_meanwhile(folder, repeat, settings, kind, at_once, watched),
    ]


def preemptions(folder: Path, number: int) -> int:
    """How many preemptions the server counted during a repeat. Raises one of UNUSABLE."""
    before, after = _pages(folder, number)
    counted = Counted(before, after)
    if missing := counted.missing([PREEMPTIONS]):
        raise ValueError(missing[0])
    gained = int(counted.gained(PREEMPTIONS))
    if gained < 0:
        raise ValueError(WENT_BACK)
    return gained


def _end(stage: Path, count: int, settings: Load) -> tuple[Ended | None, list[str]]:
    """How the budget ended a load, None if it did not; and the problems if the load must not end after `count` repeats."""
    path = stage / ENDED
    if not path.exists():
        return None, [] if count in settings.looks else [_count_problem(count, settings)]
    try:
        found = Ended.model_validate_json(path.read_bytes())
    except UNUSABLE as error:
        return None, [f"{ENDED} is no end of a load: {in_words(error)}"]
    planned = (settings.time_budget_s, count)
    if (found.time_budget_s, found.repeats) != planned or not found.is_right or count >= settings.looks[-1]:
        told = f"it says: {found.because}"
        return None, [f"{ENDED} is not of this load of {count} repeats and time_budget_s {settings.time_budget_s}: {told}"]
    return found, []


def _count_problem(count: int, settings: Load) -> str:
    least, most = settings.looks[0], settings.looks[-1]
    return f"{count} of at least {least} repeats" if count < least else f"{count} repeats of at most {most}"


def first_repeat_problem(values: Sequence[float]) -> str | None:
    """Why the first of several repeats is left out: by its output throughput, the server had not warmed up. Else None.

    The other repeats still count: something else on the machine may have been the cause.
    """
    if len(values) < 3 or not all(0 < value < math.inf for value in values):
        return None
    first, *others = (math.log(value) for value in values)
    apart, spread = abs(first - statistics.fmean(others)), max(others) - min(others)
    if apart <= math.log(1 + FAR_OFF) or apart <= FAR_OFF_SPREADS * spread:
        return None
    least, most = min(values[1:]), max(values[1:])
    return f"its {values[0]:.4g} tok/s are far off the others' {least:.4g} to {most:.4g}, more num_warmups may help"


def steady_of(result: dict[str, Any], settings: Load, is_open: bool = False) -> Steady:
    """What the requests of a result show. `is_open` says that they were sent at a rate, and not when others ended.

    Over a whole run the figures are the same as bench's own, but computed from its requests.

    Raises:
        steady.UnsteadyError: the requests have no steady state, or contradict bench's own figures.
        steady.OverloadError: they were sent faster than the server can answer.
    """
    requests = steady.requests_of(result, settings.max_concurrency)
    whole = steady.figures(steady.whole(requests, float(result["duration"])), settings.slo, as_bench=True)
    for name, value in whole.items():
        told = float(result[_key(name)])
        # `not … <=`: NaN contradicts its requests too.
        if not abs(told - value) <= CONTRADICTION_ALLOWED * abs(value):
            compared = f"{_key(name)} is {told:g}, and by them {value:g}"
            raise steady.UnsteadyError(f"bench's own figure contradicts its requests: {compared}")
    if settings.window == "whole":
        return Steady(whole, len(requests.starts), requests.rebuilt, {})
    if settings.api == "chat":
        requests = requests.without_openings()
    window = steady.find_open(requests) if is_open else steady.find(requests, settings.max_concurrency)
    untold = steady.untold(window, settings.slo)
    values = {name: value for name, value in steady.figures(window, settings.slo).items() if name not in untold}
    return Steady(values, window.count, requests.rebuilt, untold)


def request_problems(result: dict[str, Any], settings: Load) -> list[str]:
    """Why the requests of one of bench's results do not count. Raises one of UNUSABLE.

    Even if every request failed, bench exits with 0, and then writes 0.0 for the latencies.
    """
    asked, completed, failed = settings.num_prompts, result["completed"], result["failed"]
    problems = []
    if completed != asked or failed != 0:
        problems.append(f"{completed} of {asked} requests completed, {failed} failed")
    lengths = result["output_lens"]
    if len(lengths) != asked:
        problems.append(f"{len(lengths)} lengths of {asked} replies")
    least = math.floor(settings.output_len * (1 - settings.length_spread))
    most = math.ceil(settings.output_len * (1 + settings.length_spread))
    other = sum(not least <= length <= most for length in lengths)
    if other:
        problems.append(f"{other} replies do not have {least if least == most else f'{least} to {most}'} tokens")
    # `not … <=`: NaN is no duration.
    if not settings.min_duration_s <= result["duration"] < math.inf:
        remedy = f": {steady.REMEDY}" if math.isfinite(result["duration"]) else ""
        problems.append(f"it lasted {result['duration']:.1f} s, under min_duration_s {settings.min_duration_s:g}{remedy}")
    return problems


def _problems_meanwhile(
    folder: Path, repeat: Repeat, settings: Load, kind: EngineName, at_once: int | None, watched: Path | None
) -> list[str]:
    """The problems during the measured part of a repeat, which is its end: the warm-ups come before it.

    `at_once` is how many requests the server runs without a queue, None if a queue does not matter.
    """
    duration = repeat.about["duration"]
    if not 0 < duration < math.inf:
        # `request_problems` reports it.
        return []
    try:
        use = ClientUse.model_validate_json((folder / f"client-{repeat.number}.json").read_bytes())
    except UNUSABLE as error:
        # Older runs, in which nothing was watched, have no such file.
        return [f"nobody knows when its client was busy, and how much: {in_words(error)}"] if watched else []
    ended, _ = use.cpu_s[-1]
    began = ended - duration
    of_client = _client_problems(use.cores(began, ended), watched is not None)
    if watched is None or not KINDS[kind].tells_its_queue:
        return of_client
    queues_from = began + repeat.remembered(
        ("ramp-up", settings.model_dump_json()), lambda: _ramp_up_s(repeat.result, settings)
    )
    return [
        *of_client,
        *watched_problems(watched, began, ended, settings.max_concurrency, at_once, queues_from=queues_from, kind=KINDS[kind]),
    ]


def _ramp_up_s(result: dict[str, Any], settings: Load) -> float:
    """How long a whole run's first wave waits in prefill. Its figures include that, and in a short run it is a large part."""
    if settings.window != "whole":
        return 0.0
    try:
        took_s = steady.ramp_up_s(steady.requests_of(result, settings.max_concurrency), settings.max_concurrency)
    except steady.UnsteadyError:
        # `steady_of` raises it too.
        return 0.0
    return took_s if math.isfinite(took_s) else 0.0


def _client_problems(cores: float | None, must_be_known: bool) -> list[str]:
    if cores is None:
        return ["the client was seen too seldom to know how busy it was: measure again"] if must_be_known else []
    if cores > CLIENT_CORES_ALLOWED:
        return [f"the client used {cores:.2f} of a core, so that it measured itself: {CLIENT_REMEDY}"]
    return []


def _server_problems(folder: Path, number: int, settings: Load, kind: EngineName, arguments: ServerArguments) -> list[str]:
    before, after = _pages(folder, number)
    under = Conditions(
        arguments,
        settings.num_prompts,
        random_prompts=settings.prompts is None,
        was_emptied=_was_emptied(folder / f"reset-{number}.txt"),
    )
    return KINDS[kind].load_problems(Counted(before, after), under)


def _pages(folder: Path, number: int) -> tuple[Totals, Totals]:
    before, after = (_counters((folder / f"metrics-{number}-{when}.txt").read_text()) for when in ("before", "after"))
    return before, after


def _was_emptied(reset: Path) -> bool:
    """Whether the prefix cache was emptied, by the file that `run` wrote. If that is missing, it was not."""
    try:
        return reset.read_text().split() == [RESET, "200"]
    except (OSError, ValueError):
        return False


def _counters(text: str) -> Totals:
    """Totals by name, summed over their labels."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def _key(name: str) -> str:
    """Bench's own name of a metric, over the whole run."""
    if name in KEYS:
        return KEYS[name]
    latency, statistic, unit = name.split("_")
    return f"{statistic}_{latency}_{unit}"


def _measurement(name: str, repeats: Sequence[Repeat], found: Sequence[Steady], over: OverLooks, source: str) -> Measurement:
    traced_to = [repeat.line_of(_key(name)) for repeat in repeats]
    if name == ACCEPTANCE:
        return _acceptance(repeats, over, source, traced_to)
    least, needed = min(each.requests for each in found), least_requests(name)
    if least < needed:
        where = "whole run" if source.endswith(WHOLE) else "steady state"
        told = f"{least} requests in a repeat's {where}, and {name} needs {needed}: {steady.REMEDY}"
        return invalid(name, told, source, traced_to=traced_to)
    pairs = zip(repeats, found, strict=True)
    untold = [f"repeat {repeat.number}: {each.untold[name]}" for repeat, each in pairs if name in each.untold]
    if untold:
        return invalid(name, "; ".join(untold), source, traced_to=traced_to)
    values = [each.values[name] for each in found]
    others = {"sample_count": sum(each.requests for each in found), "traced_to": traced_to}
    if name == GOODPUT and 0 in values:
        return _goodput_with_none(found, over, source, **others)
    return _over_repeats(name, values, over, source, **others)


def _acceptance(repeats: Sequence[Repeat], over: OverLooks, source: str, traced_to: list[str]) -> Measurement:
    """The acceptance length, by the server's own counters over all of every repeat: requests do not show it."""
    values = [float(told) for repeat in repeats if (told := repeat.about.get(KEYS[ACCEPTANCE])) is not None]
    if len(values) < len(repeats):
        because = f"only {len(values)} of {len(repeats)} repeats have {KEYS[ACCEPTANCE]}"
        return invalid(ACCEPTANCE, because, source, traced_to=traced_to)
    count = sum(int(repeat.about["completed"]) for repeat in repeats)
    return _over_repeats(ACCEPTANCE, values, over, source, sample_count=count, traced_to=traced_to)


def _over_repeats(name: str, repeats: Sequence[float], over: OverLooks, source: str, **others: object) -> Measurement:
    if not all(math.isfinite(value) and value > 0 for value in repeats):
        return invalid(name, f"repeats gave {list(repeats)}, which is no measured time or rate", source)
    value = geometric_mean(repeats)
    interval = over.interval(name, value, lambda used, at: repeat_interval(repeats[:used], at))
    return valid(name, value, source, repeats=list(repeats), interval=interval, **others)


def _goodput_with_none(found: Sequence[Steady], over: OverLooks, source: str, **others: object) -> Measurement:
    """Goodput if in some repeat no request met the SLO: zero has no logarithm, so goodput is taken as a share of the requests.

    All requests of a repeat can miss the SLO for one reason. So a repeat is one trial, and its score is its share. The chance
    of an error is split between the bounds of the share and of the rate.
    """
    goods, rates = ([each.values[name] for each in found] for name in (GOODPUT, "request_throughput_req_s"))
    value = statistics.fmean(goods)
    interval = over.interval(GOODPUT, value, lambda used, at: _of_shares(goods[:used], rates[:used], at))
    return valid(GOODPUT, value, source, repeats=goods, interval=interval, **others)


def _of_shares(goods: Sequence[float], rates: Sequence[float], at: Sides) -> Interval | None:
    half = Sides(at.below / 2, at.above / 2)
    rate = repeat_interval(rates, half)
    if rate is None:
        return None
    share = share_interval(sum(good / rate for good, rate in zip(goods, rates, strict=True)), len(goods), half)
    return around(statistics.fmean(goods), share.lower * rate.lower, share.upper * rate.upper)
