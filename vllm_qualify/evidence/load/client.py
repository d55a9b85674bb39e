"""Run a load: repeats of `vllm bench serve`, until its gates are decided or its budget is spent.

Bench's own warm-up asks its first prompt again and again, and the measured load then asks it once more. In a server's prefix
cache that prompt is already known. So a warm-up is a run of bench of its own, with prompts that no measured run has.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.engine import bench as benches
from vllm_qualify.engine.bench import Bench
from vllm_qualify.engine.bench_worker import TURNS
from vllm_qualify.engine.process import Progress
from vllm_qualify.engine.process_tree import engine_processes
from vllm_qualify.engine.server import Client, Server
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.load.ended import ENDED, Ended
from vllm_qualify.evidence.load.replay import TRACE, trace_of
from vllm_qualify.evidence.load.result import BESIDE, RESET
from vllm_qualify.evidence.load.warm_up import WARM_UP, typical, warm_up_of_both
from vllm_qualify.evidence.restarts import Processes, processes_path
from vllm_qualify.recipe.traces.trace import Trace
from vllm_qualify.recipe.workload import SEEDS, Load

# Bench's names of the two interfaces, and their paths.
APIS = {"completions": ("openai", "/v1/completions"), "chat": ("openai-chat", "/v1/chat/completions")}


# Before each prompt of a file that is asked in a warm-up. What begins otherwise has no block of a prefix cache in common.
WARM_UP_OPENING = "Warm-up: "


class Driven(NamedTuple):
    """A server and the bench that measures it.

    If the workload has a file of prompts, bench finds it at `prompts`, and at `warm_ups` what it asks to warm up. Of a workload
    with a `trace`, bench gets a file for each repeat.
    """

    server: Server
    bench: Bench
    prompts: str | None = None
    warm_ups: str | None = None
    trace: Trace | None = None


def driven_by(server: Server, bench: Bench, settings: Load, file: Path | None) -> Driven:
    """Bench beside a server, with a workload's file of prompts where bench finds it, or its trace. Raises HostError."""
    if file and settings.trace:
        return Driven(server, bench, trace=trace_of(settings, file))
    return Driven(server, bench, *_given(bench, file))


def _given(bench: Bench, prompts: Path | None) -> tuple[str | None, str | None]:
    """Where bench finds a workload's file of prompts, and that of its warm-ups; None if there is no file."""
    if prompts is None:
        return None, None
    return benches.give(bench, prompts), benches.give_text(bench, *_warm_ups(prompts))


def _warm_ups(prompts: Path) -> tuple[str, str]:
    """The name and the content of a file whose prompts are as long as those of `prompts`, and none of them."""
    rows = [json.loads(line) for line in prompts.read_bytes().splitlines()]
    return f"warm-up-{prompts.name}", "".join(f"{json.dumps({'prompt': WARM_UP_OPENING + row['prompt']})}\n" for row in rows)


class Made(NamedTuple):
    """How far a load is: its repeats, the longest of them in s, and the undecided gates, None if this was no look."""

    repeats: int
    longest_s: float
    undecided: Sequence[str] | None


class Following(NamedTuple):
    """Callbacks during a load. `undecided` gives the gates that more repeats could decide, and `on_repeat` gets each repeat.

    `ended` gets the reason if the budget ends the load. The clock is in s.
    """

    undecided: Callable[[], Sequence[str]]
    on_repeat: Callable[[Made], None]
    ended: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic


UNFOLLOWED = Following(undecided=list, on_repeat=lambda _: None, ended=lambda _: None)
"""Reports nothing, and ends the load after its first look."""


def measure_load(
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
    that a drift of the machine favours neither. Before the first repeat both are warmed up alike. Returns the commands.

    Raises:
        HostError: bench failed or took longer than its time limit.
        ReleaseError: a server ended meanwhile.
    """
    pairs = [(ours, folder)]
    if beside:
        (folder / BESIDE).mkdir(exist_ok=True)
        pairs.append((beside, folder / BESIDE))
    for driven, into in pairs:
        if driven.trace:
            (into / TRACE).write_bytes(driven.trace.body)
        benches.stop_preparing(driven.bench, settings.time_limit_s, driven.server.check_alive)
    if beside:
        _warm_up_both(pairs, settings)
    commands: list[list[str]] = []
    began, longest_s = following.clock(), 0.0
    for repeat in range(1, settings.looks[-1] + 1):
        started = following.clock()
        if ended := _over_budget(settings, repeat - 1, started - began, longest_s):
            (folder / ENDED).write_text(ended.model_dump_json(indent=2))
            following.ended(ended.because)
            break
        for turn, (driven, into) in enumerate(pairs if repeat % 2 else reversed(pairs)):
            on_request = _of_run(progress, (repeat - 1) * len(pairs) + turn, _known(settings, repeat) * len(pairs), settings)
            commands.append(run_repeat(driven, settings, into, repeat, on_request))
        longest_s = max(longest_s, following.clock() - started)
        undecided = following.undecided() if repeat in settings.looks else None
        following.on_repeat(Made(repeat, longest_s, undecided))
        if undecided is not None and not undecided:
            break
    return commands


def _over_budget(settings: Load, repeats: int, spent_s: float, longest_s: float) -> Ended | None:
    """The end of the load, if the budget allows no other repeat; else None. It always allows the first one."""
    if settings.time_budget_s is None or repeats == 0:
        return None
    ended = Ended(time_budget_s=settings.time_budget_s, repeats=repeats, spent_s=spent_s, longest_s=longest_s)
    return ended if ended.is_right else None


def prepare_prompts(bench: Bench, model: str, loads: Sequence[tuple[Load, Path, Path | None]]) -> None:
    """Have the prompts of loads made before `measure` needs them. Each load comes with its folder and its file of prompts.

    Repeats that are run in any case come first. Raises HostError if Docker Engine went away.
    """
    planned = []
    for settings, _, file in loads:
        if settings.trace:
            # Its prompts are drawn in no time: each token by itself, and none is decoded.
            continue
        into, (prompts, warm_ups) = benches.results_folder(bench), _given(bench, file)
        for repeat in range(1, settings.looks[-1] + 1):
            is_further = repeat > settings.looks[0]
            if settings.num_warmups:
                planned.append((is_further, warm_up_command(bench.client, model, settings, repeat, warm_ups)))
            planned.append((is_further, command_of(bench.client, model, settings, into, repeat, prompts)))
    benches.prepare_commands(bench, [command for _, command in sorted(planned, key=itemgetter(0))])


def run_repeat(
    driven: Driven, settings: Load, folder: Path, number: int, progress: Progress, request_rate: float | None = None
) -> list[str]:
    """Run bench once, as repeat `number`, into `folder`, and return its command. `request_rate` is in requests per second.

    Raises as `measure` does.
    """
    server, client = driven.server, driven.bench.client
    into = benches.results_folder(driven.bench)
    trace, prompts = driven.trace, driven.prompts
    if trace:
        prompts = benches.give_text(driven.bench, "trace.jsonl", trace.for_bench(settings.bench_seed(number)))
    command = command_of(client, server.served_model_name, settings, into, number, prompts, request_rate, trace)
    _warm_up(driven, settings, folder / f"warm-up-{number}.log", number)
    _forget_prefixes(server, folder / f"reset-{number}.txt")
    (folder / f"metrics-{number}-before.txt").write_text(server.metrics_page())
    before = engine_processes(server.process.commands())
    result, log = f"bench-{number}.json", folder / f"bench-{number}.log"
    benches.run_command(driven.bench, command, result, log, settings.time_limit_s, server.check_alive, progress)
    (folder / f"metrics-{number}-after.txt").write_text(server.metrics_page())
    processes = Processes(before=before, after=engine_processes(server.process.commands()))
    processes_path(folder, number).write_text(processes.model_dump_json())
    return benches.recorded(client, command)


def _warm_up_both(pairs: Sequence[tuple[Driven, Path]], settings: Load) -> None:
    """Ask all servers the same at the same time, so that they begin alike. Raises as `measure_load`."""
    is_broken_off = threading.Event()

    def check() -> None:
        if is_broken_off.is_set():
            raise HostError("the warm-up of the other server was broken off", "see the first error", benches.STAGE)
        for driven, _ in pairs:
            driven.server.check_alive()

    with ThreadPoolExecutor(len(pairs)) as pool:
        running = [pool.submit(_warm_up_one, driven, settings, folder, check) for driven, folder in pairs]
        try:
            for each in as_completed(running):
                # The first error ends the other one's too.
                each.result()
        except BaseException:
            is_broken_off.set()
            raise


def _warm_up_one(driven: Driven, settings: Load, folder: Path, check: Callable[[], None]) -> None:
    bench, asked = driven.bench, warm_up_of_both(settings, driven.trace)
    into = benches.results_folder(bench)
    command = command_of(bench.client, driven.server.served_model_name, asked, into, WARM_UP, driven.warm_ups)
    (folder / f"metrics-{WARM_UP}-before.txt").write_text(driven.server.metrics_page())
    log = folder / f"warm-up-{WARM_UP}.log"
    benches.run_command(bench, command, f"bench-{WARM_UP}.json", log, settings.time_limit_s, check, _untold)
    (folder / f"metrics-{WARM_UP}-after.txt").write_text(driven.server.metrics_page())


def _warm_up(driven: Driven, settings: Load, log: Path, number: int) -> None:
    server, bench = driven.server, driven.bench
    if settings.num_warmups == 0:
        return
    asked = settings if driven.trace is None else typical(driven.trace, settings)
    command = warm_up_command(bench.client, server.served_model_name, asked, number, driven.warm_ups)
    benches.run_command(bench, command, None, log, settings.time_limit_s, server.check_alive, _untold)


def _untold(_done: int, _total: int) -> None:
    """A warm-up is no progress of the load."""


def _forget_prefixes(server: Server, log: Path) -> None:
    """Empty the prefix cache. Only a server with VLLM_SERVER_DEV_MODE allows that; the server's counters show any hits."""
    answer = server.post(RESET)
    log.write_text(f"{RESET} {answer}\n")


def _known(settings: Load, repeat: int) -> int:
    """How many repeats are certain while repeat number `repeat` runs."""
    return next(look for look in settings.looks if look >= repeat)


def _of_run(progress: Progress, before: int, runs: int, settings: Load) -> Progress:
    def on_request(done: int, total: int) -> None:
        if total == settings.num_prompts:
            progress(before * total + done, runs * total)

    return on_request


def command_of(
    client: Client,
    model: str,
    settings: Load,
    folder: str,
    repeat: int,
    prompts: str | None = None,
    request_rate: float | None = None,
    trace: Trace | None = None,
) -> list[str]:
    """Bench's command. `prompts` is where the client finds the workload's file, if it has one.

    With a rate, in requests per second, the number of requests under way has no limit, which would hold requests back unseen.
    `request_rate` goes before that of the load. A `trace` has its own times; `prompts` is then where the client finds it.
    Typed by hand, the command of a load with turns asks each of them as a chat of its own: `bench_worker` puts chats together.
    """
    rate = settings.request_rate if request_rate is None else request_rate
    paced = ["--max-concurrency", str(settings.max_concurrency)]
    if rate is not None:
        paced = ["--request-rate", str(rate), "--burstiness", str(settings.burstiness)]
    if trace:
        paced = ["--self-timed"]
    return [
        *_asking(client, model, settings, prompts, trace),
        *("--num-prompts", str(settings.num_prompts)),
        *paced,
        # Each repeat has its own seed: the same prompts again would measure the prefix cache.
        *("--seed", str(settings.bench_seed(repeat))),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *(("--goodput", *(f"{name}:{limit}" for name, limit in settings.slo.wanted.items())) if settings.slo else ()),
        *(("--metadata", f"{TURNS}{settings.turns}") if settings.turns > 1 else ()),
        *("--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", f"bench-{repeat}.json"),
    ]


def warm_up_command(client: Client, model: str, settings: Load, repeat: int, prompts: str | None = None) -> list[str]:
    """Bench's command of a repeat's warm-up. `prompts` is where the client finds the file for it, if the load has a file."""
    return [
        *_asking(client, model, settings, prompts),
        *("--num-prompts", str(settings.num_warmups)),
        *("--max-concurrency", str(settings.max_concurrency)),
        *("--seed", str(SEEDS + settings.bench_seed(repeat))),
    ]


def _asking(client: Client, model: str, settings: Load, prompts: str | None, trace: Trace | None = None) -> list[str]:
    """What a load's commands have in common: who is asked, and with what kind of prompts."""
    backend, endpoint = APIS[settings.api]
    return [
        *(client.program, "bench", "serve"),
        *("--backend", backend, "--endpoint", endpoint, "--base-url", client.url),
        *("--model", model, "--tokenizer", client.model),
        *(("--trust-remote-code",) if client.trust_remote_code else ()),
        *(_random(settings) if prompts is None else _of_trace(prompts, trace) if trace else _of_file(prompts, settings)),
        "--ignore-eos",
        # Both would ask the first of the measured prompts before it is measured.
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0"),
        # Without it the server's default would count, which differs by model and by version of bench.
        *("--temperature", "0"),
    ]


def _random(settings: Load) -> list[str]:
    lengths = ["--random-input-len", str(settings.input_len), "--random-output-len", str(settings.output_len)]
    spread = ["--random-range-ratio", str(settings.length_spread)] if settings.length_spread else []
    shared = ["--random-prefix-len", str(settings.shared_prefix_len)] if settings.shared_prefix_len else []
    return ["--dataset-name", "random", *lengths, *spread, *shared]


def _of_trace(file: str, trace: Trace) -> list[str]:
    blocks = ["--timed-trace-chunk-hash-size", str(trace.block_tok), "--timed-trace-sec-multiplier", "1"]
    return ["--dataset-name", "timed_trace", "--dataset-path", file, *blocks]


def _of_file(prompts: str, settings: Load) -> list[str]:
    """Options for the prompts of a file, sent as they are: in a chat the server applies its template, so bench must not."""
    options = ["--custom-output-len", str(settings.output_len), "--skip-chat-template"]
    return ["--dataset-name", "custom", "--dataset-path", prompts, *options]
