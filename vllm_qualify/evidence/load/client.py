"""Run a load: repeats of `vllm bench serve`, until its gates are decided or its budget is spent.

Bench's own warm-up asks its first prompt again and again, and the measured load then asks it once more. In a server's prefix
cache that prompt is already known. So a warm-up is a run of bench of its own, with prompts that no measured run has.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
from vllm_qualify.evidence.load.result import APIS, BESIDE, RESET, metrics_pages
from vllm_qualify.evidence.load.warm_up import WARM_UP, typical_load, warm_up_of_both
from vllm_qualify.evidence.restarts import Processes, processes_path
from vllm_qualify.recipe.load import SEEDS, Load
from vllm_qualify.recipe.traces.trace import Trace

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
    return Driven(server, bench, *_give_prompts(bench, file))


def _give_prompts(bench: Bench, prompts: Path | None) -> tuple[str | None, str | None]:
    """Where bench finds a workload's file of prompts, and that of its warm-ups, which has none of them; None without a file."""
    if prompts is None:
        return None, None
    rows = [json.loads(line) for line in prompts.read_bytes().splitlines()]
    warm_ups = "".join(f"{json.dumps({'prompt': WARM_UP_OPENING + row['prompt']})}\n" for row in rows)
    return benches.give_file(bench, prompts), benches.give_text(bench, f"warm-up-{prompts.name}", warm_ups)


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
    ours: Driven, settings: Load, folder: Path, progress: Progress, following: Following, beside: Driven | None = None
) -> list[list[str]]:
    """Run repeats until nothing is undecided at one of `settings.looks`. Bench writes its result of repeat N to `bench-N.json`.

    The longest repeat so far tells whether another one would end within the budget. If not, it is not begun, and ENDED says so.
    The budget's time begins with the first repeat.

    With `beside`, the baseline, each repeat runs on that too, into the folder BESIDE. The two take turns in going first, so
    that a drift of the machine favours neither. Before the first repeat both are warmed up alike. Returns the commands.
    Raises HostError if bench failed or took longer than its time limit, ReleaseError if a server ended meanwhile.
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
        if settings.time_budget_s is not None and repeat > 1:
            done = {"repeats": repeat - 1, "spent_s": started - began, "longest_s": longest_s}
            if (ended := Ended(time_budget_s=settings.time_budget_s, **done)).is_right:
                (folder / ENDED).write_text(ended.model_dump_json(indent=2))
                following.ended(ended.because)
                break
        for turn, (driven, into) in enumerate(pairs if repeat % 2 else reversed(pairs)):
            # So many repeats are certain now.
            certain = next(look for look in settings.looks if look >= repeat)
            before = (repeat - 1) * len(pairs) + turn
            on_request = _progress_of_run(progress, before, certain * len(pairs), settings)
            commands.append(run_repeat(driven, settings, into, repeat, on_request))
        longest_s = max(longest_s, following.clock() - started)
        undecided = following.undecided() if repeat in settings.looks else None
        following.on_repeat(Made(repeat, longest_s, undecided))
        if undecided is not None and not undecided:
            break
    return commands


def prepare_prompts(bench: Bench, model: str, loads: Sequence[tuple[Load, Path, Path | None]]) -> None:
    """Have the prompts of loads made before they are measured. Each load comes with its folder and its file of prompts.

    Repeats that are run in any case come first. Raises HostError if Docker Engine went away.
    """
    certain, further = list[list[str]](), list[list[str]]()
    for settings, _, file in loads:
        if settings.trace:
            # Its prompts are drawn in no time: each token by itself, and none is decoded.
            continue
        into, (prompts, warm_ups) = benches.results_folder(bench), _give_prompts(bench, file)
        for repeat in range(1, settings.looks[-1] + 1):
            planned = certain if repeat <= settings.looks[0] else further
            if settings.num_warmups:
                planned.append(warm_up_command(bench.client, model, settings, repeat, warm_ups))
            planned.append(command_of(bench.client, model, settings, into, repeat, prompts))
    benches.prepare_commands(bench, [*certain, *further])


def run_repeat(driven: Driven, settings: Load, folder: Path, number: int, progress: Progress) -> list[str]:
    """Run bench once, as repeat `number`, into `folder`, and return its command. Raises QualifyError."""
    server, bench, trace, prompts = driven.server, driven.bench, driven.trace, driven.prompts
    client, model, limit_s = bench.client, server.served_model_name, settings.time_limit_s
    into, result = benches.results_folder(bench), f"bench-{number}.json"
    if trace:
        prompts = benches.give_text(bench, "trace.jsonl", trace.for_bench(settings.bench_seed(number)))
    command = command_of(client, model, settings, into, number, prompts, trace)
    page_before, page_after = metrics_pages(folder, number)
    if settings.num_warmups:
        asked, log = typical_load(trace, settings) if trace else settings, folder / f"warm-up-{number}.log"
        warm_up = warm_up_command(client, model, asked, number, driven.warm_ups)
        benches.run_command(bench, warm_up, None, log, limit_s, server.check_alive, benches.no_progress)
    # Only a server with VLLM_SERVER_DEV_MODE empties its prefix cache; the server's counters show any hits.
    (folder / f"reset-{number}.txt").write_text(f"{RESET} {server.post(RESET)}\n")
    page_before.write_text(server.metrics_page())
    before = engine_processes(server.process.commands())
    benches.run_command(bench, command, result, folder / f"bench-{number}.log", limit_s, server.check_alive, progress)
    page_after.write_text(server.metrics_page())
    processes = Processes(before=before, after=engine_processes(server.process.commands()))
    processes_path(folder, number).write_text(processes.model_dump_json())
    return benches.typed_command(client, command)


def _warm_up_both(pairs: Sequence[tuple[Driven, Path]], settings: Load) -> None:
    """Ask all servers the same at the same time, so that they begin alike. Raises QualifyError."""
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
    page_before, page_after = metrics_pages(folder, WARM_UP)
    page_before.write_text(driven.server.metrics_page())
    log = folder / f"warm-up-{WARM_UP}.log"
    benches.run_command(bench, command, f"bench-{WARM_UP}.json", log, settings.time_limit_s, check, benches.no_progress)
    page_after.write_text(driven.server.metrics_page())


def _progress_of_run(progress: Progress, before: int, runs: int, settings: Load) -> Progress:
    def on_request(done: int, total: int, _part: str = "", /) -> None:
        if total == settings.num_prompts:
            progress(before * total + done, runs * total)

    return on_request


def command_of(
    client: Client, model: str, settings: Load, folder: str, repeat: int, prompts: str | None = None, trace: Trace | None = None
) -> list[str]:
    """Bench's command. `prompts` is where the client finds the workload's file, if it has one.

    With a rate the number of requests under way has no limit, which would hold requests back unseen. A `trace` has its own
    times; `prompts` is then where the client finds it. Typed by hand, the command of a load with turns asks each of them as a
    chat of its own: `bench_worker` puts chats together.
    """
    paced = ["--max-concurrency", str(settings.max_concurrency)]
    if settings.request_rate is not None:
        paced = ["--request-rate", str(settings.request_rate), "--burstiness", str(settings.burstiness)]
    if trace:
        paced = ["--self-timed"]
    return [
        *_common_options(client, model, settings, prompts, trace),
        *("--num-prompts", str(settings.num_prompts)),
        *paced,
        # Each repeat has its own seed: the same prompts again would measure the prefix cache.
        *("--seed", str(settings.bench_seed(repeat))),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *(("--goodput", *(f"{name}:{limit}" for name, limit in settings.slo.limits_ms.items())) if settings.slo else ()),
        *(("--metadata", f"{TURNS}{settings.turns}") if settings.turns > 1 else ()),
        *("--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", f"bench-{repeat}.json"),
    ]


def warm_up_command(client: Client, model: str, settings: Load, repeat: int, prompts: str | None = None) -> list[str]:
    """Bench's command of a repeat's warm-up. `prompts` is where the client finds the file for it, if there is one."""
    return [
        *_common_options(client, model, settings, prompts),
        *("--num-prompts", str(settings.num_warmups)),
        *("--max-concurrency", str(settings.max_concurrency)),
        *("--seed", str(SEEDS + settings.bench_seed(repeat))),
    ]


def _common_options(client: Client, model: str, settings: Load, prompts: str | None, trace: Trace | None = None) -> list[str]:
    backend, endpoint = APIS[settings.api]
    return [
        *(client.program, "bench", "serve"),
        *("--backend", backend, "--endpoint", endpoint, "--base-url", client.url),
        *("--model", model, "--tokenizer", client.model),
        *(("--trust-remote-code",) if client.trust_remote_code else ()),
        *_prompt_options(settings, prompts, trace),
        "--ignore-eos",
        # Both would ask the first of the measured prompts before it is measured.
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0"),
        # Without it the server's default would count, which differs by model and by version of bench.
        *("--temperature", "0"),
    ]


def _prompt_options(settings: Load, prompts: str | None, trace: Trace | None) -> list[str]:
    if prompts is None:
        lengths = ["--random-input-len", str(settings.input_len), "--random-output-len", str(settings.output_len)]
        spread = ["--random-range-ratio", str(settings.length_spread)] if settings.length_spread else []
        shared = ["--random-prefix-len", str(settings.shared_prefix_len)] if settings.shared_prefix_len else []
        return ["--dataset-name", "random", *lengths, *spread, *shared]
    if trace:
        blocks = ["--timed-trace-chunk-hash-size", str(trace.block_tok), "--timed-trace-sec-multiplier", "1"]
        return ["--dataset-name", "timed_trace", "--dataset-path", prompts, *blocks]
    # Sent as they are: in a chat the server applies its template, so bench must not.
    options = ["--custom-output-len", str(settings.output_len), "--skip-chat-template"]
    return ["--dataset-name", "custom", "--dataset-path", prompts, *options]
