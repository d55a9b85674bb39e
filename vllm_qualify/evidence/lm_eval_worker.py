"""lm-eval in a process of its own, which measures one task block by block and so imports and loads only once.

`accuracy.Asking` puts its orders as files into a folder, the letter box, which is all that the worker may write to. The
worker's first answer is `task.json`: what the task is, or why it cannot be measured. For each `NAME.order` the worker writes
lm-eval's own files into the folder NAME, and then `NAME.done`. It ends with an exit code other than 0 as soon as anything goes
wrong.
"""

import dataclasses
import hashlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn

import httpx
from pydantic import JsonValue
from ruamel.yaml import YAML

from vllm_qualify.engine.letter_box import write_plain
from vllm_qualify.recipe.values import Count, CountOrNone, Frozen
from vllm_qualify.recipe.workload import SEEDS, Accuracy

TASK, JOB, ORDER, TRIED = "task.json", "job.json", "order", "tried.json"
# How often lm-eval asks at most for a reply whose request failed: its own default, here written down.
MOST_TRIES = 3
POLL_S = 0.02
# With it, the usual budget of a recipe, a task keeps a budget of its own.
USUAL_BUDGET = Accuracy.model_fields["max_gen_toks"].default
GENERATES = "generate_until"


class Job(Frozen):
    """What is asked, of which server, and how. `test` and `shots` are local questions that replace the task's own."""

    task: str
    api: Literal["completions", "chat"]
    model: str
    url: str
    num_fewshot: int
    num_concurrent: int
    max_gen_toks: int
    gen_kwargs: dict[str, JsonValue] = {}
    system_prompt: str | None = None
    is_sampled: bool = False
    seed: int
    timeout_s: int
    task_folder: Path | None = None
    test: Path | None = None
    shots: Path | None = None


class Order(Frozen):
    """A block of questions, by their place in the task's data, and what the seeds of its sampled answers differ by."""

    questions: list[int]
    seeded_by: str = ""


class Tried(Frozen):
    """What lm-eval does not count itself: the requests of a block that failed and were asked again, and its limit of tries."""

    failed: CountOrNone
    most_tries: Count = MOST_TRIES


class TaskReply(Frozen):
    """The worker's first answer: how many questions the task has, or `problem` and `remedy` if it refuses the task."""

    available: int = 0
    problem: str = ""
    remedy: str = ""


def write_whole(path: Path, document: Frozen) -> None:
    """Write a file so that a reader sees either all of it or no file."""
    write_plain(path, document.model_dump_json(indent=2).encode())


def main(letter_box: Path) -> None:
    job = Job.model_validate_json((letter_box / JOB).read_bytes())
    worker = _Worker(job, letter_box)
    while True:
        for path in sorted(letter_box.glob(f"*.{ORDER}")):
            order = Order.model_validate_json(path.read_bytes())
            path.unlink()
            worker.measure(order, path.with_suffix(""))
            path.with_suffix(".done").touch()
        # The two talk by files, because the guard uses the worker's standard input.
        time.sleep(POLL_S)


class _MadeError(Exception):
    """lm-eval has made the prompts of a task, and must stop there."""


class _Worker:
    def __init__(self, job: Job, letter_box: Path) -> None:
        # Import everything that the first block needs while the server loads.
        import lm_eval.evaluator
        import lm_eval.models.openai_completions  # noqa: F401  (imported for its own sake)
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import setup_logging

        setup_logging("INFO")
        self.job, self.letter_box, self.failed, self.seeded_by = job, letter_box, 0, ""
        # A manager without lm-eval's task names: to know them all, lm-eval reads 14,000 files.
        self.manager = TaskManager(include_defaults=False)
        _keep_templates()
        self._seed()
        self.task = self._load()
        if job.api == "chat" and not self._generates:
            self._refuse(
                f"lm-eval cannot measure {job.task} by chat: it compares likelihoods, which chat does not give",
                "set api to completions",
            )
        self._check_sampling()
        if getattr(self.task, "UNSAFE_CODE", False):
            self._refuse(f"{job.task} runs code that the model writes on this machine", "choose another task")
        _keep_questions(self.task)
        _keep_prompts(self.task)
        self._tell(TaskReply(available=len(self.task.eval_docs)))
        if self._generates:
            self._make_prompts()

    def _check_sampling(self) -> None:
        if not self.job.is_sampled:
            return
        if not self._generates:
            self._refuse(f"{self.job.task} compares likelihoods, and samples no answers", "leave sampling out")
        if (repeats := self.task.get_config("repeats") or 1) > 1:
            # They would have the same prompt and the same seed, and so the same answer.
            self._refuse(
                f"{self.job.task} itself asks each question {repeats} times", "leave sampling out: the task has its own"
            )

    def _seed(self) -> None:
        """Set the seeds as lm-eval does before it loads a task: some tasks shuffle their choices while they load."""
        import numpy as np

        random.seed(self.job.seed)
        np.random.seed(self.job.seed)

    def _tell(self, reply: TaskReply) -> None:
        write_whole(self.letter_box / TASK, reply)

    def _refuse(self, problem: str, remedy: str) -> NoReturn:
        self._tell(TaskReply(problem=problem, remedy=remedy))
        sys.exit(f"{problem}: {remedy}")

    def _load(self) -> Any:
        path = self._file()
        if self.job.test:
            path = self._over_local_questions(path)
        return next(iter(self.manager.load([str(path)])["tasks"].values()))

    def _file(self) -> Path:
        """The task's YAML file. One in `task_folder` takes precedence over lm-eval's own."""
        from lm_eval.tasks import TaskManager

        task, folder = self.job.task, self.job.task_folder
        manager = TaskManager(include_path=folder, include_defaults=False)
        if task not in manager.task_index:
            if usual := _usual_file(task):
                return usual
            manager = TaskManager(include_path=folder)
        if task not in manager.task_index:
            where = f"lm-eval {metadata.version('lm-eval')}" + (f" and {folder}" if folder else "")
            self._refuse(f"there is no task '{task}' in {where}", "`lm-eval ls tasks` lists lm-eval's")
        if task not in manager.all_subtasks:
            members = sorted(set(_members(manager, task)))
            some = ", ".join(members[:8]) + (f" and {len(members) - 8} others" if len(members) > 8 else "")
            self._refuse(f"'{task}' is a group of {len(members)} tasks", f"name one or more of its tasks: {some}")
        return Path(manager.task_index[task].yaml_path)

    def _over_local_questions(self, original: Path) -> Path:
        """Write a task file with local questions. Prompt and filters stay those of lm-eval's task."""
        path = self.letter_box / "tasks" / f"{self.job.task}.yaml"
        path.parent.mkdir(exist_ok=True)
        local = {
            "include": str(original),
            "task": self.job.task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"train": str(self.job.shots), "test": str(self.job.test)}},
        }
        YAML(typ="safe").dump(local, path)
        return path

    def _make_prompts(self) -> None:
        """Prepare what a block needs without a server: lm-eval begins a block, and is stopped once it has the prompts."""
        with suppress(_MadeError):
            self._evaluate([], None)

    def measure(self, order: Order, folder: Path) -> None:
        from lm_eval.loggers import EvaluationTracker

        task = self.job.task
        folder.mkdir()
        tracker = EvaluationTracker(output_path=str(folder / "results.json"))
        self.failed, self.seeded_by = 0, order.seeded_by
        results = self._evaluate(order.questions, tracker)
        write_whole(folder / TRIED, Tried(failed=self.failed))
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        tracker.save_results_samples(task_name=task, samples=samples[task])
        # lm-eval only logs that it could not save them.
        if not (any(folder.glob("results_*.json")) and any(folder.glob("samples_*.jsonl"))):
            sys.exit("lm-eval could not save its results")

    def _evaluate(self, questions: list[int], tracker: Any) -> Any:
        """Run lm-eval on the questions. Without questions it only makes the prompts, and raises _MadeError."""
        from lm_eval import simple_evaluate

        task, seed = self.job.task, self.job.seed
        return simple_evaluate(
            model=self.model,
            # lm-eval only records these: the model is built already
            model_args=self.model_args,
            tasks=[self.task],
            task_manager=self.manager,
            # lm-eval takes the n-th of them for the task's n-th, so they must be in ascending order
            samples={task: sorted(questions)},
            num_fewshot=self.job.num_fewshot,
            gen_kwargs=self._gen_kwargs or None,
            system_instruction=self.job.system_prompt,
            apply_chat_template=self.job.api == "chat",
            evaluation_tracker=tracker,
            # we compute the intervals ourselves
            bootstrap_iters=0,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )

    @property
    def _gen_kwargs(self) -> dict[str, Any]:
        """What goes over the task's own. lm-eval lets a task's own budget go over the model's, which is the recipe's."""
        own = self.task.get_config("generation_kwargs") or {}
        named = next((name for name in ("max_tokens", "max_gen_toks") if name in own), None)
        budget = {named: self.job.max_gen_toks} if named and self.job.max_gen_toks != USUAL_BUDGET else {}
        return self.job.gen_kwargs | budget

    @cached_property
    def model(self) -> Any:
        """lm-eval's model, built on first use: for likelihoods it asks the server, which need not answer before a block."""
        from lm_eval.api.registry import get_model

        model = get_model("local-chat-completions" if self.job.api == "chat" else "local-completions")(**self.model_args)
        if model.tokenizer is not None:
            # All choices of a question share its prompt, and each call is a request to the server.
            model.tokenizer.encode = lru_cache(maxsize=64)(model.tokenizer.encode)
        self._count_failed(model)
        if self.job.is_sampled:
            self._seed_requests(model)
        return model

    def _seed_requests(self, model: Any) -> None:
        """Give each question a seed of its own, and another one each time that it is asked.

        lm-eval sends one seed with all requests. Then a question would get the same answer again, and what chance does to one
        question it would do to the others.
        """
        make = model._create_payload

        def seeded(messages: Any, **named: Any) -> Any:
            about = json.dumps([self.job.seed, self.seeded_by, messages]).encode()
            return make(messages, **named) | {"seed": int.from_bytes(hashlib.sha256(about).digest()[:8]) % SEEDS}

        model._create_payload = seeded

    def _count_failed(self, model: Any) -> None:
        """Count the calls that do not return: lm-eval asks again after each, and keeps only the last reply."""
        call, call_at_once = model.model_call, model.amodel_call

        def counted(*given: Any, **named: Any) -> Any:
            self.failed += 1
            reply = call(*given, **named)
            self.failed -= 1
            return reply

        async def counted_at_once(*given: Any, **named: Any) -> Any:
            self.failed += 1
            reply = await call_at_once(*given, **named)
            self.failed -= 1
            return reply

        model.model_call, model.amodel_call = counted, counted_at_once

    @cached_property
    def model_args(self) -> dict[str, Any]:
        chat = self.job.api == "chat"
        return {
            "model": self.job.model,
            "base_url": f"{self.job.url}/v1/{'chat/' if chat else ''}completions",
            "num_concurrent": self.job.num_concurrent,
            "max_gen_toks": self.job.max_gen_toks,
            # With its default of 300 s, lm-eval would give up a long answer and ask again.
            "timeout": self.job.timeout_s,
            "max_retries": MOST_TRIES,
            **(self._without_tokens() if self._generates else self._servers_tokens()),
        }

    @property
    def _generates(self) -> bool:
        return bool(self.task.get_config("output_type") == GENERATES)

    def _without_tokens(self) -> dict[str, Any]:
        """The server tokenizes, so the worker needs neither torch nor the model's tokenizer."""
        return {"tokenizer_backend": None, "tokenized_requests": False}

    def _servers_tokens(self) -> dict[str, Any]:
        """Likelihoods need tokens: the server gives them, and its longest context. lm-eval's default for that is 2,048."""
        from lm_eval.utils import check_remote_tokenizer_support

        if not check_remote_tokenizer_support(self.job.url):
            self._refuse(
                f"{self.job.task} compares likelihoods, for which lm-eval needs the server's tokenizer; it reports none",
                "add `enable-tokenizer-info-endpoint: true` to the server's options",
            )
        reply = httpx.post(f"{self.job.url}/tokenize", json={"model": self.job.model, "prompt": "one"}, timeout=60).json()
        return {"tokenizer_backend": "remote", "tokenized_requests": True, "max_length": reply["max_model_len"]}


def _usual_file(task: str) -> Path | None:
    """lm-eval's own file of a task, if it has the usual name. To search all of lm-eval's files would take 11 s."""
    import lm_eval.tasks

    path = Path(lm_eval.tasks.__file__).parent / task / f"{task}.yaml"
    return path if path.is_file() and f"task: {task}" in path.read_text().splitlines() else None


def _members(manager: Any, name: str) -> Iterable[str]:
    entry = manager.task_index.get(name)
    if entry is None or name in manager.all_subtasks:
        yield name
        return
    listed = (entry.cfg or {}).get("task", []) if name in manager.all_groups else entry.tags
    for member in listed:
        named = member if isinstance(member, str) else member.get("task", member.get("group"))
        if isinstance(named, str):
            yield from _members(manager, named)


def _keep_templates() -> None:
    """Keep compiled templates: lm-eval compiles a task's templates again for each question, while the server idles."""
    from lm_eval.utils import env

    env.from_string = lru_cache(maxsize=256)(env.from_string)


def _keep_questions(task: Any) -> None:
    """Keep the questions: some tasks prepare them again, with shuffled choices, at each access."""
    questions = task.eval_docs
    setattr(task, "test_docs" if task.has_test_docs() else "validation_docs", lambda: questions)


def _keep_prompts(task: Any) -> None:
    """Give each question the prompt that it has when lm-eval asks the whole task.

    lm-eval draws the examples of the prompts one after another. If it drew them for one block alone, they would depend on the
    block.
    """
    build = task.build_all_requests
    whole: dict[int, list[Any]] = {}

    def build_block(*, samples: list[int], **others: Any) -> None:
        if not whole:
            build(samples=None, **others)
            for request in task.instances:
                whole.setdefault(request.doc_id, []).append(request)
        if not samples:
            raise _MadeError
        task._instances = [
            dataclasses.replace(request, metadata=(request.task_name, place, request.repeats), resps=[], filtered_resps={})
            for place, question in enumerate(samples)
            for request in whole[question]
        ]

    task.build_all_requests = build_block


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.captureWarnings(True)
    main(Path(sys.argv[1]))
