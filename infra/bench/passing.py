"""Cells that pass without a server: a recipe with any number of cells, and stages that write evidence at once.

The evidence is small and like a real run's. All the rest is the product's own: tasks, parsing, judging, publishing.
"""

import hashlib
import importlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ruamel.yaml import YAML

from vllm_qualify.drift.asking import Subject
from vllm_qualify.drift.candidate import Candidate
from vllm_qualify.engine.bench import Bench
from vllm_qualify.engine.process import Progress, RunningProcess
from vllm_qualify.engine.server import Client, Server, config_text
from vllm_qualify.engine.watch import HOST_SAMPLES, SCRAPES, HostSample, Scrape
from vllm_qualify.evidence import smoke
from vllm_qualify.evidence.accuracy import lm_eval_process
from vllm_qualify.evidence.accuracy.blocks import QuestionBlock, plan_steps
from vllm_qualify.evidence.accuracy.letters import GENERATES, TASK, TaskReply
from vllm_qualify.evidence.accuracy.lm_eval_process import LmEval
from vllm_qualify.evidence.contract.exchange import EXCHANGES
from vllm_qualify.evidence.load import result, steady
from vllm_qualify.evidence.load.client import Driven
from vllm_qualify.evidence.serving import Served
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.accuracy import USUAL_TOKENS, Smoke
from vllm_qualify.recipe.load import Load
from vllm_qualify.recipe.loading import catalog_folder
from vllm_qualify.recipe.tables import EngineJudgement, ProbeAnswer, table_of

Document = dict[str, Any]
VERSION = "0.32.0+cpu"
QUESTIONS, REQUESTS, CLIENTS, TOKENS = 40, 40, 4, 8
FILTERS = ("strict-match", "flexible-extract")
# As vLLM says what it serves, once it has parsed its options.
SERVES = (
    "(EngineCore pid=1) INFO 11-23 05:00:00 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model={model!r}, speculative_config=None, tokenizer={model!r}, skip_tokenizer_init=False, revision=None, "
    "tokenizer_revision=None, trust_remote_code=False, dtype=torch.bfloat16, seed=0"
)
PAGE = """\
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0"}} 0.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{engine="0"}} {prompt_tok}.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0"}} {generation_tok}.0
# TYPE vllm:request_success counter
vllm:request_success_total{{engine="0",finished_reason="stop"}} {answered}.0
vllm:request_success_total{{engine="0",finished_reason="length"}} 0.0
"""


def recipe(cells: int) -> Document:
    """A recipe like the reference: one GPU type with a profile for each cell. No two cells share a server."""
    model = catalog_folder() / "reference" / "model"
    return {
        "name": "orchestrator",
        "description": "As many cells as wanted, none of which is served.",
        "served_model_name": "reference",
        "variants": {"bf16": {"model": str(model)}},
        "gpu_types": {
            "cpu": {
                "default_variant": "bf16",
                "server": {"dtype": "bfloat16", "max-model-len": 2048, "no-enable-prefix-caching": True},
                "profiles": {f"p{number}": _profile(number) for number in range(1, cells + 1)},
            }
        },
        "smoke": {"prompt": "How many?", "max_tokens": TOKENS},
        "accuracy": [{"task": "gsm8k", "num_questions": QUESTIONS}],
        "gates": [{"metric": "exact_match", "filter": FILTERS[0], "minimum": 0.75, "unit": "fraction"}],
    }


def _profile(number: int) -> Document:
    lengths = {"input_len": 16, "output_len": TOKENS, "max_concurrency": CLIENTS, "num_prompts": REQUESTS}
    return {
        "server": {"max-num-seqs": number},
        "paths": False,
        "load": {**lengths, "num_warmups": 0, "repeats": 2, "most_repeats": 2, "min_duration_s": 0.01},
        "gates": [
            {"metric": "output_throughput_tok_s", "minimum": 10, "unit": "tok/s"},
            {"metric": "ttft_p50_ms", "maximum": 30000, "unit": "ms"},
            {"metric": "tpot_p50_ms", "maximum": 3000, "unit": "ms"},
        ],
    }


def write_bench_recipe(cells: int, path: Path) -> Path:
    YAML(typ="safe").dump(recipe(cells), path)
    return path


def write_engine(folder: Path) -> Path:
    """An engine environment that lists its packages and can do nothing else."""
    identity = {"python": "3.11", "packages": {"vllm": VERSION}, "files_sha256": "0" * 64, "changed_files": []}
    (folder / "bin").mkdir(parents=True)
    for name, does in (("python", f"echo '{json.dumps(identity)}'"), ("vllm", "exit 1")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


@contextmanager
def passing() -> Iterator[None]:
    """Within the block every stage passes at once. Only what is replaced here is not the product's own."""
    stubs = {
        "vllm_qualify.drift.check.ask_candidate": _ask,
        "tasks.measure.serve": _serving,
        "vllm_qualify.evidence.smoke.measure_smoke": _smoke,
        "vllm_qualify.evidence.contract.measure.measure_contract": _contract,
        "vllm_qualify.evidence.accuracy.lm_eval_process.prepare_task": _asking,
        "vllm_qualify.evidence.load.client.measure_load": _load,
    }
    with ExitStack() as patched:
        for name, stub in stubs.items():
            importlib.import_module(name.rpartition(".")[0])
            patched.enter_context(patch(name, stub))
        yield


def _ask(
    _: Candidate, subjects: Sequence[Subject], *__: object, **___: object
) -> tuple[ProbeAnswer, dict[str, EngineJudgement]]:
    taken = EngineJudgement(parsed=True, refused=None, unclear=None)
    answer = ProbeAnswer(**table_of(VERSION).model_dump(), build="cpu", servers=[taken] * len(subjects))
    return answer, {subject.cell: taken for subject in subjects}


@contextmanager
def _serving(plan: CellPlan, folder: Path, *_: object, **_named: object) -> Iterator[Served]:
    log, url = folder / "server.log", "http://127.0.0.1:8000"
    (folder / "server.yaml").write_text(config_text(plan.server, 8000))
    log.write_text(f"{SERVES.format(model=plan.server.model)}\n")
    for name in (SCRAPES, HOST_SAMPLES):
        (folder / name).touch()
    # This process stands for the server and its tools, since it is alive.
    process = RunningProcess(guard_pid=os.getpid(), state_file=folder / "server.state", log=log)
    client = Client(program="vllm", python="python3", url=url, model=plan.server.model)
    yield Served(
        server=Server(
            url=url,
            served_model_name=plan.server.served_model_name,
            process=process,
            command=["vllm", "serve"],
            startup_s=12.5,
            client=client,
        ),
        bench=Bench(client=client, process=process, letter_box=str(folder)),
        lm_eval={
            task.name: LmEval(task=task, process=process, letter_box=folder, command=["lm_eval"]) for task in plan.accuracy
        },
    )


def _smoke(server: Server, settings: Smoke, folder: Path, drawn: str) -> None:
    model = server.served_model_name
    usage = {"prompt_tokens": 5, "completion_tokens": settings.max_tokens, "total_tokens": 5 + settings.max_tokens}
    reply = {"model": model, "choices": [{"text": " It is 7.", "finish_reason": "length"}], "usage": usage}
    answered = [{"status": 200, "body": json.dumps(reply)}] * smoke.ASKS
    (folder / smoke.MODELS).write_text(json.dumps({"status": 200, "body": json.dumps({"data": [{"id": model}]})}))
    for name, prompt in ((smoke.REPLIES, settings.prompt), (smoke.DRAWN_REPLIES, smoke.drawn_prompt(drawn))):
        request = smoke.smoke_request(settings, model, prompt)
        (folder / name).write_text(json.dumps({"request": request, "answers": answered}))


def _contract(*given: Any) -> None:
    """What vLLM answered."""
    _, _, _, folder = given
    shutil.copy(Path(__file__).parents[2] / "tests" / "evidence" / "captured" / "contract" / EXCHANGES, folder)


class _Asking:
    """As `lm_eval_process.Asking`; every answer is right."""

    def __init__(self, task: TaskPlan, folder: Path) -> None:
        self.steps = plan_steps(task.settings, QUESTIONS, task.repetitions, sequential=task.sequential)
        self._task, self._folder = task, folder

    def ask(self, step: QuestionBlock) -> None:
        folder, count = self._folder / step.folder, len(step.questions)
        folder.mkdir()
        rows = [_row(question, name) for name in FILTERS for question in step.questions]
        (folder / f"samples_{self._task.name}_1.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (folder / "results_1.json").write_text(json.dumps(_results(self._task, count), indent=2))
        (folder / lm_eval_process.BEFORE).write_text(PAGE.format(answered=0, prompt_tok=0, generation_tok=0))
        (folder / lm_eval_process.AFTER).write_text(PAGE.format(answered=count, prompt_tok=0, generation_tok=0))


def _asking(_: Server, lm_eval: LmEval, folder: Path, __: Progress, ___: int) -> _Asking:
    folder.mkdir(parents=True)
    (folder / TASK).write_text(TaskReply(available=QUESTIONS).model_dump_json(indent=2))
    return _Asking(lm_eval.task, folder)


def _results(plan: TaskPlan, count: int) -> Document:
    task, asked = plan.name, plan.settings
    address = f"http://127.0.0.1:8000/v1/{'chat/' if asked.api == 'chat' else ''}completions"
    arguments = {"base_url": address, "max_gen_toks": asked.max_gen_toks or USUAL_TOKENS}
    return {
        "results": {task: {f"exact_match,{name}": 1.0 for name in FILTERS}},
        "configs": {task: {"task": task, "output_type": GENERATES}},
        "config": {"model_args": arguments, "gen_kwargs": plan.gen_kwargs},
        "system_instruction": asked.system_prompt,
        "versions": {task: 3.0},
        "n-samples": {task: {"original": QUESTIONS, "effective": count}},
        "lm_eval_version": "0.4.13",
    }


def _row(question: int, name: str) -> Document:
    prompt, target = f"Question: the one at place {question}?\nAnswer:", f"#### {question}"
    document = {"question": prompt, "answer": target}
    return {
        "doc_id": question,
        "doc": document,
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": prompt}},
        "resps": [[f" It is {question}.\n{target}"]],
        "filtered_resps": [str(question)],
        "filter": name,
        "doc_hash": _sha(json.dumps(document, indent=2)),
        "prompt_hash": _sha(prompt),
        "target_hash": _sha(target),
        "exact_match": 1.0,
    }


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _load(_: Driven, settings: Load, folder: Path, *__: object) -> list[list[str]]:
    for repeat in range(1, settings.looks[-1] + 1):
        (folder / f"bench-{repeat}.json").write_text(json.dumps(_bench(settings, repeat)))
        for when, times in (("before", 0), ("after", settings.num_prompts)):
            (folder / f"metrics-{repeat}-{when}.txt").write_text(_page(settings, times))
        _watch(folder, repeat)
    return [["vllm", "bench", "serve"]] * settings.looks[-1]


def _watch(folder: Path, repeat: int) -> None:
    """Write the samples of one repeat that took the last second: client, server and machine."""
    times = [time.time() - 1 + tenth / 10 for tenth in range(11)]
    used = {"cpu_s": [[at, 1.0] for at in times], "max_rss_mib": 300}
    (folder / f"client-{repeat}.json").write_text(json.dumps(used))
    values = {'vllm:num_requests_running{engine="0"}': CLIENTS, 'vllm:num_requests_waiting{engine="0"}': 0}
    with (folder.parent / "serve" / SCRAPES).open("a") as scrapes, (folder.parent / "serve" / HOST_SAMPLES).open("a") as host:
        for at in times:
            scrapes.write(f"{Scrape(time=at, values=values).model_dump_json()}\n")
            host.write(f"{HostSample(time=at, cpu_share=0.5, load_1min=1.0, memory_available_mib=1000).model_dump_json()}\n")


def _page(settings: Load, answered: int) -> str:
    lengths = {"prompt_tok": settings.input_len or 0, "generation_tok": settings.output_len}
    return PAGE.format(answered=answered, **{name: answered * length for name, length in lengths.items()})


def _bench(settings: Load, repeat: int) -> Document:
    """A result of bench whose requests are equally long, and go to the clients in turn. Each repeat is a little slower."""
    count, clients, slower = settings.num_prompts, settings.max_concurrency, 1 + repeat / 100
    ttft, gaps = 0.02 * slower, [0.005 * slower] * (settings.output_len - 1)
    latency = ttft + sum(gaps)
    duration = count / clients * latency + (clients - 1) * 0.001
    began = repeat * 2 * duration
    result: Document = {
        "backend": "openai",
        "model_id": "reference",
        "num_prompts": count,
        "request_rate": "inf",
        "max_concurrency": clients,
        "start_times": [began + request // clients * latency + request % clients * 0.001 for request in range(count)],
        "ttfts": [ttft] * count,
        "itls": [gaps] * count,
        "input_lens": [settings.input_len] * count,
        "output_lens": [settings.output_len] * count,
        "total_input_tokens": count * (settings.input_len or 0),
        "total_output_tokens": count * settings.output_len,
        "generated_texts": ["text"] * count,
        "errors": [""] * count,
        "completed": count,
        "failed": 0,
        "duration": duration,
    }
    whole = steady.whole_window(steady.requests_of(result, clients), result["duration"])
    return result | {_key(name): value for name, value in steady.figures_of(whole, None).items()}


def _key(name: str) -> str:
    """The name that bench gives a metric."""
    latency, statistic, unit = name.split("_") if name not in result.KEYS else ("", "", "")
    return result.KEYS.get(name, f"{statistic}_{latency}_{unit}")
