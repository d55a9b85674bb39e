"""Accuracy: one lm-eval task against the server's completions, in a process of its own, samples kept."""

import json
import sys
from importlib import metadata, util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml import YAML

from vllm_qualify.engine.process import Progress, guarded, quiet_environment, wait_for
from vllm_qualify.engine.server import Server
from vllm_qualify.errors import HostError
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, invalid, share_interval, valid
from vllm_qualify.recipe.metrics import METRICS
from vllm_qualify.recipe.model import Accuracy

STAGE = "accuracy"
TASKS = "tasks"


def measure(
    server: Server, settings: Accuracy, questions: tuple[Path, Path] | None, folder: Path, progress: Progress
) -> list[str]:
    """Run lm-eval; its own result file and samples go to `folder`. Returns the command.

    Raises:
        HostError: lm-eval failed or took longer than its time limit.
        ReleaseError: the server ended meanwhile.
    """
    if questions:
        _write_task(settings.task, *questions, folder / TASKS)
    command = command_of(server, settings, folder, local=questions is not None)
    with TemporaryDirectory(prefix="vllm-qualify-datasets-") as cache:
        # Local files are read anew each time: a cache could hold an older version of them.
        local = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": cache} if questions else {}
        environment = quiet_environment(local | {"OPENAI_API_KEY": "none"})
        with guarded(command, environment, folder / "lm-eval.log") as process:
            wait_for(process, settings.time_limit_s, server.check_alive, progress, STAGE)
    return command


def command_of(server: Server, settings: Accuracy, folder: Path, *, local: bool) -> list[str]:
    model_args = {
        "model": server.served_model_name,
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": settings.num_concurrent,
        "max_gen_toks": settings.max_gen_toks,
        # The server tokenizes: nothing on this side then needs torch or the model's tokenizer.
        "tokenizer_backend": "None",
        "tokenized_requests": "False",
    }
    return [
        *(sys.executable, "-m", "lm_eval", "run"),
        *("--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())),
        *("--tasks", settings.task),
        *("--num_fewshot", str(settings.num_fewshot)),
        *("--seed", str(settings.seed)),
        *("--output_path", str(folder / "results.json")),
        "--log_samples",
        *(("--include_path", str(folder / TASKS)) if local else ()),
    ]


def _write_task(task: str, test: Path, shots: Path, folder: Path) -> None:
    """The task as lm-eval has it, prompt and filters untouched, over local questions."""
    package = util.find_spec("lm_eval")
    original = Path(str(package and package.origin)).parent / "tasks" / task / f"{task}.yaml"
    # lm-eval skips a task file whose include is missing, and later says only that the task is not found.
    if not original.is_file():
        raise HostError(f"this lm-eval has no {original}", "use a task whose file has its name, like gsm8k", STAGE)
    folder.mkdir(parents=True, exist_ok=True)
    local = {
        "include": str(original),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"train": str(shots), "test": str(test)}},
    }
    YAML(typ="safe").dump(local, folder / f"{task}.yaml")


def tools() -> dict[str, str]:
    return {"lm-eval": metadata.version("lm-eval")}


def parse(folder: Path, settings: Accuracy) -> list[Measurement]:
    """One measurement per filter and declared metric, from lm-eval's own files; invalid unless every question was scored."""
    source = f"{folder.name}/results*.json"
    try:
        path = _only(folder, "results*.json")
        source = f"{folder.name}/{path.name}"
        results = json.loads(path.read_text())
        samples = _lines(_only(folder, f"samples_{settings.task}*.jsonl"))
        return [
            _measurement(metric, name, samples, results, settings, source)
            for metric, name in _scored(results["results"][settings.task])
        ]
    except UNUSABLE as error:
        return [invalid("exact_match", f"lm-eval left no usable result: {in_words(error)}", source)]


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ValueError(f"{len(found)} files {pattern} where one was expected")
    return found[0]


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines. Not by `splitlines`: lm-eval leaves U+2028, U+0085 and the like in a reply as they are."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _scored(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(metric, filter) of lm-eval's `exact_match,strict-match` keys, as far as the metric is declared."""
    pairs = [key.split(",", 1) for key in result if "," in key]
    scored = [(metric, name) for metric, name in pairs if metric in METRICS]
    if not scored:
        raise ValueError(f"no known metric among {list(result)}")
    return scored


def _measurement(
    metric: str, name: str, samples: list[dict[str, Any]], results: dict[str, Any], settings: Accuracy, source: str
) -> Measurement:
    rows = [row for row in samples if row["filter"] == name]
    problem = _problem(rows, results, settings)
    if problem:
        return invalid(metric, problem, source, filter=name, sample_count=len(rows))
    scores = [float(row[metric]) for row in rows]
    if not set(scores) <= {0.0, 1.0}:
        return invalid(metric, "a sample's score is neither 0 nor 1", source, filter=name, sample_count=len(rows))
    right, told = sum(scores), float(results["results"][settings.task][f"{metric},{name}"])
    # `not … <=`: NaN contradicts the samples too.
    if not abs(told - right / len(rows)) <= 1e-6:
        return invalid(metric, f"lm-eval's score {told} is not its samples' {right / len(rows)}", source, filter=name)
    return valid(metric, told, source, filter=name, sample_count=len(rows), interval=share_interval(round(right), len(rows)))


def _problem(rows: list[dict[str, Any]], results: dict[str, Any], settings: Accuracy) -> str | None:
    wanted, told = settings.num_questions, results["n-samples"][settings.task]["effective"]
    if told != wanted or len({row["doc_id"] for row in rows}) != wanted or len(rows) != wanted:
        return f"{len(rows)} samples of {wanted} questions (lm-eval counts {told})"
    empty = sum(not _reply(row).strip() for row in rows)
    return f"{empty} of {wanted} replies are empty" if empty else None


def _reply(row: dict[str, Any]) -> str:
    """What the model answered. A task by log-likelihood has numbers here, which are never empty."""
    reply = row["resps"][0][0]
    return "" if reply is None else str(reply)
