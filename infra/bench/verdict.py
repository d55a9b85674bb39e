"""The cost of a verdict: this project's flow beside the guides' commands typed by hand, and the orchestrator alone.

    .venv/bin/python -m infra.bench.verdict [--rounds N] [--cells 10 100 1000]

Both do the same work on the same server configuration of the reference model: one smoke prompt, as many questions as gsm8k has,
and a load as often as the reference recipe repeats it. They take turns, and the one that begins changes. The third way is the
flow with sequential accuracy, which ends as soon as its gate is decided. The server is held from its launch to its end. After
its first completion it idles while no request is under way; the idle share is of the time since then. Each way prints its
timeline: begin, end and duration of each step in s, and every gap of more than half a second in which the server idled. A flow
that did not pass, because the machine was busy, did the same work; it is marked. All takes some 30 minutes. The last line is
one JSON object.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, geometric_mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ruamel.yaml import YAML

from infra.bench import orchestrator, timeline
from infra.reference_model.problems import distinct_problems
from vllm_qualify.engine.environment import EngineEnvironment, find_engine
from vllm_qualify.engine.watch import Scrape, scrape_metrics
from vllm_qualify.evidence.measurement import StageEvidence
from vllm_qualify.evidence.serving import LAUNCHED
from vllm_qualify.recipe.loading import catalog_folder

HERE = Path(__file__).parent
SAMPLE_EVERY_S = 0.2
RUNNING, WAITING, ANSWERED = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success"
TOKENS = ("vllm:prompt_tokens", "vllm:generation_tokens")
# The command's exit code.
NOT_PASSED = 1
BY_HAND, FLOW, SEQUENTIAL = "by hand", "flow", "flow, sequential"
# As many as gsm8k's test set; the catalog's own 500 questions are of the same kind.
QUESTIONS, SEED = 1319, 20_001
REPEATS = 3
LOAD = {"input_len": 128, "output_len": 64, "max_concurrency": 16, "num_prompts": 384, "num_warmups": 16}


class Took(NamedTuple):
    """One way to do the work: times in s, and the share of the time since the first completion in which the server idled."""

    whole_s: float
    held_s: float
    ready_s: float
    idle_share: float
    timeline: tuple[str, ...] = ()
    passed: bool = True


class BenchPlace(NamedTuple):
    """Where one way works. All ways share the engine's answers about its options, which are asked once and kept."""

    folder: Path
    engines: Path
    port: int


def recipe(folder: Path, *, sequential: bool) -> Path:
    """The catalog's reference recipe with absolute paths, gates that need no baseline, and this load."""
    document: dict[str, Any] = YAML(typ="safe").load((catalog_folder() / "reference.yaml").read_text())
    reference = catalog_folder() / "reference"
    document["variants"] = {"bf16": document["variants"]["bf16"] | {"model": str(reference / "model")}}
    (task,) = document["accuracy"]
    task |= {"sequential": sequential, "num_questions": QUESTIONS}
    test = folder / "test.jsonl"
    asked = distinct_problems(random.Random(SEED), "held_out", QUESTIONS)
    test.write_text("".join(json.dumps(problem) + "\n" for problem in asked))
    task["questions"] = {"test": str(test), "shots": str(reference / "train.jsonl")}
    document["gates"] = [gate for gate in document["gates"] if "minimum" in gate]
    del document["likelihood"]
    document["contract"] = False  # by hand it is not asked
    document["gpu_types"]["cpu"]["starts"] = 1
    profile = document["gpu_types"]["cpu"]["profiles"]["balanced"]
    profile["load"] |= LOAD | {"repeats": REPEATS, "most_repeats": REPEATS}
    path = folder / "recipe.yaml"
    YAML(typ="safe").dump(document, path)
    return path


def by_hand(place: BenchPlace, engine: EngineEnvironment) -> Took:
    """The work by hand. Raises subprocess.CalledProcessError if a command failed."""
    document: dict[str, Any] = YAML(typ="safe").load(recipe(place.folder, sequential=False).read_text())
    (task,), serving = document["accuracy"], document["gpu_types"]["cpu"]
    model, profile = document["variants"]["bf16"]["model"], serving["profiles"]["balanced"]
    server = {"model": model, "served-model-name": ["reference"], "host": "127.0.0.1", "port": place.port}
    YAML(typ="safe").dump(server | serving["server"] | profile["server"], place.folder / "server.yaml")
    _write_task(place.folder, task["questions"])
    names = {
        "PORT": place.port,
        "MODEL": model,
        "TASK": "reference_gsm8k",
        "QUESTIONS": QUESTIONS,
        "SHOTS": task["num_fewshot"],
        "CONCURRENT": task["num_concurrent"],
        "MAX_GEN_TOKS": task["max_gen_toks"],
        "REPEATS": REPEATS,
        "INPUT_LEN": LOAD["input_len"],
        "OUTPUT_LEN": LOAD["output_len"],
        "CLIENTS": LOAD["max_concurrency"],
        "PROMPTS": LOAD["num_prompts"],
        "WARMUPS": LOAD["num_warmups"],
    }
    environment = {name: str(value) for name, value in names.items()} | serving["environment"]
    environment |= {"LM_EVAL": str(Path(sys.executable).parent / "lm_eval")}
    environment |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(place.folder / "datasets")}
    command = [HERE / "by_hand.sh", engine.python.parents[1], place.folder / "server.yaml", place.folder, place.folder]
    began = time.monotonic()
    with _polled(place.port) as samples:
        subprocess.run(command, env=os.environ | environment, check=True)
    launched, _, ended = map(float, (place.folder / "held").read_text().split())
    return _took(time.monotonic() - began, launched, ended, samples, timeline.by_hand(place.folder))


def _write_task(folder: Path, questions: dict[str, str]) -> None:
    import lm_eval.tasks

    usual = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"
    local = {"train": questions["shots"], "test": questions["test"]}
    task = {"include": str(usual), "task": "reference_gsm8k", "dataset_path": "json", "dataset_name": None}
    YAML(typ="safe").dump(task | {"dataset_kwargs": {"data_files": local}}, folder / "reference_gsm8k.yaml")


def flow(place: BenchPlace, *, sequential: bool) -> Took:
    """The work by the flow. Raises subprocess.CalledProcessError if it failed."""
    (place.folder / "engines").symlink_to(place.engines)
    command = [str(Path(sys.executable).parent / "vllm-qualify"), "run", str(recipe(place.folder, sequential=sequential))]
    environment = os.environ | {"VLLM_QUALIFY_HOME": str(place.folder)}
    began = time.monotonic()
    with _polled(place.port) as samples, (place.folder / "log").open("w") as log:
        command += ["--port", str(place.port)]
        done = subprocess.run(command, env=environment, check=False, stdout=log, stderr=log)
    if done.returncode not in (0, NOT_PASSED):
        raise subprocess.CalledProcessError(done.returncode, command, (place.folder / "log").read_text())
    whole_s = time.monotonic() - began
    (run,) = (place.folder / "runs").iterdir()
    held = StageEvidence.model_validate_json((run / "stages" / "serve.json").read_bytes())
    launched = float((run / "evidence" / "serve" / LAUNCHED).read_text())
    took = _took(whole_s, launched, held.started_at.timestamp() + held.duration_s, samples, timeline.of_flow(run))
    return took._replace(passed=done.returncode == 0)


@contextmanager
def _polled(port: int) -> Iterator[list[Scrape]]:
    """Samples of the server's request metrics, taken over and over during the block."""
    samples: list[Scrape] = []
    over = threading.Event()

    def poll() -> None:
        while not over.wait(SAMPLE_EVERY_S):
            samples.append(scrape_metrics(f"http://127.0.0.1:{port}/metrics", (RUNNING, WAITING, ANSWERED, *TOKENS)))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def _took(whole_s: float, launched: float, ended: float, samples: Sequence[Scrape], spans: Sequence[timeline.Span]) -> Took:
    since = [sample for sample in samples if _total(sample, ANSWERED) > 0]
    idle = [(earlier.time, later.time) for earlier, later in pairwise(since) if _idles(earlier, later)]
    ready, idle_s = since[0].time, sum(later - earlier for earlier, later in idle)
    lines = timeline.timetable(launched, ready, ended, spans, timeline.merged(idle))
    return Took(whole_s, ended - launched, ready - launched, idle_s / (since[-1].time - ready), tuple(lines))


def _idles(earlier: Scrape, later: Scrape) -> bool:
    """Whether the server idled between two samples.

    No request under way is not enough: a busy server can answer at the moment when a wave of requests has just ended. So its
    token counts must be unchanged too.
    """
    asked = _total(later, RUNNING) + _total(later, WAITING)
    return asked == 0 and all(_total(earlier, name) == _total(later, name) for name in TOKENS)


def _total(sample: Scrape, name: str) -> float:
    return sum(value for key, value in sample.values.items() if key.startswith(name))


def compare_ways(rounds: int) -> dict[str, list[Took]]:
    """Run every way `rounds` times, in turns, each in a folder of its own. Prints the result of each."""
    engine = find_engine()
    by_way: dict[str, list[Took]] = {BY_HAND: [], FLOW: [], SEQUENTIAL: []}
    with TemporaryDirectory(prefix="vllm-qualify-bench-") as name:
        engines = Path(name, "engines")
        engines.mkdir()
        # A first flow, not measured, asks the engine about the recipe. Its answer is kept, as after any user's first run.
        _turn(FLOW, Path(name, "asked"), engines, engine)
        for number in range(1, rounds + 1):
            for way in list(by_way) if number % 2 else reversed(by_way):
                took = _turn(way, Path(name, f"{way}-{number}".replace(", ", "-").replace(" ", "-")), engines, engine)
                by_way[way].append(took)
                _say(f"{number:5}  {_row(way, took)}")
                for line in took.timeline:
                    _say(line)
    return by_way


def _turn(way: str, folder: Path, engines: Path, engine: EngineEnvironment) -> Took:
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = BenchPlace(folder, engines, free.getsockname()[1])
    return by_hand(place, engine) if way == BY_HAND else flow(place, sequential=way == SEQUENTIAL)


def _row(way: str, took: Took) -> str:
    mark = "" if took.passed else "  not passed"
    return f"{way:18}{took.whole_s:9.1f}{took.held_s:9.1f}{took.ready_s:9.1f}{100 * took.idle_share:8.1f}{mark}"


def figures(by_way: dict[str, list[Took]], costs: Sequence[orchestrator.Cost]) -> dict[str, Any]:
    """Ratios are geometric means over the rounds."""
    held = {way: [took.held_s for took in each] for way, each in by_way.items()}
    ratios = {
        way: geometric_mean([ours / theirs for ours, theirs in zip(held[way], held[BY_HAND], strict=True)])
        for way in (FLOW, SEQUENTIAL)
    }
    return {
        "held_ratio": round(ratios[FLOW], 3),
        "idle_share": round(fmean(took.idle_share for took in by_way[FLOW]), 4),
        "sequential_held_ratio": round(ratios[SEQUENTIAL], 3),
        **orchestrator.figures(costs),
    }


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cells", type=int, nargs="+", default=list(orchestrator.CELLS))
    args = parser.parse_args()
    _say(f"{'round':5}  {'way':18}{'whole s':>9}{'held s':>9}{'ready s':>9}{'idle %':>8}")
    by_way = compare_ways(args.rounds)
    with TemporaryDirectory(prefix="vllm-qualify-bench-") as name:
        costs = []
        for cells in args.cells:
            folder = Path(name, str(cells))
            folder.mkdir()
            costs.append(orchestrator.measure(cells, folder))
    for line in orchestrator.table(costs):
        _say(line)
    print(json.dumps(figures(by_way, costs)))


if __name__ == "__main__":
    main()
