"""lm-eval in a process of its own, which measures one task block by block and so imports and loads only once.

`accuracy.Asking` puts its orders as files into a folder, the letter box, which is all that the worker may write to. The
worker's first answer is `task.json`: what the task is, or why it cannot be measured. For each `NAME.order` the worker writes
lm-eval's own files into the folder NAME, and then `NAME.done`. It ends with an exit code other than 0 as soon as anything goes
wrong.
"""

import hashlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import httpx
from pydantic import JsonValue, model_validator
from ruamel.yaml import YAML

from vllm_qualify.engine.letter_box import write_plain
from vllm_qualify.evidence import lm_eval_internals as internals
from vllm_qualify.evidence.long import fitting
from vllm_qualify.evidence.members import Member, config_hash, parts_of
from vllm_qualify.evidence.pictures import WRITE_IT_SO, Pictures, UnusablePictureError
from vllm_qualify.evidence.thinking import REPLIES, Reply, apart
from vllm_qualify.evidence.tools import questions, scoring
from vllm_qualify.plan.questions import SUFFIX, file_of
from vllm_qualify.recipe.values import Count, CountOrNone, Frozen
from vllm_qualify.recipe.workload import SEEDS, USUAL_TOKENS

TASK, JOB, ORDER, TRIED = "task.json", "job.json", "order", "tried.json"
# How often lm-eval asks at most for a reply whose request failed: its own default, here written down.
MOST_TRIES = 3
POLL_S = 0.02
GENERATES = "generate_until"


class Job(Frozen):
    """What is asked, of which server, and how.

    `test` and `shots` are local questions that replace the task's own: a file, or a folder with a file for each task. With
    `context_tok` the questions are made: `num_questions`, of so many tokens with replies of at most `reply_tok`.
    """

    task: str
    api: Literal["completions", "chat"]
    model: str
    url: str
    num_fewshot: int
    num_concurrent: int
    max_gen_toks: int | None
    gen_kwargs: dict[str, JsonValue] = {}
    system_prompt: str | None = None
    think_end: str | None = None
    is_sampled: bool = False
    seed: int
    timeout_s: int
    task_folder: Path | None = None
    test: Path | None = None
    shots: Path | None = None
    context_tok: int | None = None
    num_questions: int = 0
    reply_tok: int = 0


class Order(Frozen):
    """A block of questions, by their place in the task's data, and what the seeds of its sampled answers differ by."""

    questions: list[int]
    seeded_by: str = ""


class Tried(Frozen):
    """What lm-eval does not count itself: the requests of a block that failed and were asked again, and its limit of tries."""

    failed: CountOrNone
    most_tries: Count = MOST_TRIES


class TaskReply(Frozen):
    """The worker's first answer: how many questions the task has, or `problem` and `remedy` if it refuses the task.

    A group has members. Their questions are one list, in the order of the members.
    """

    available: int = 0
    members: tuple[Member, ...] = ()
    problem: str = ""
    remedy: str = ""

    @model_validator(mode="after")
    def _is_of_its_members(self) -> Self:
        if self.members and self.available != sum(member.questions for member in self.members):
            raise ValueError(f"{self.available} questions, where the members have others in all")
        if len({member.name for member in self.members}) != len(self.members):
            raise ValueError("a member is there twice")
        return self


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


class _Worker:
    def __init__(self, job: Job, letter_box: Path) -> None:
        # Import everything that the first block needs while the server loads.
        import lm_eval.evaluator
        import lm_eval.models.openai_completions  # noqa: F401  (imported for its own sake)
        from lm_eval.utils import setup_logging

        setup_logging("INFO")
        self.job, self.letter_box, self.failed, self.seeded_by = job, letter_box, 0, ""
        self.replies: list[Reply] = []
        self.pictures: Pictures | None = None
        internals.keep_templates()
        self._seed()
        self.found = self._find()
        # The task whose questions are being read; empty while all are.
        self.reading = ""
        self.members: list[Member] = []
        with self._refusing_what_lacks():
            self._prepare()

    def _prepare(self) -> None:
        self.tasks = self._load()
        self._check_tasks()
        for name, task in self.tasks.items():
            self.reading = name
            if self.pictures:
                internals.take_pictures(task, self.pictures)
            internals.keep_questions(task)
            internals.keep_prompts(task, self.pictures)
        if self.found.is_group:
            self._introduce_members()
        else:
            self._tell(TaskReply(available=len(self._first.eval_docs)))
            if self._generates:
                self._make_prompts()

    @contextmanager
    def _refusing_what_lacks(self) -> Iterator[None]:
        """Refuse a task with packages that are not installed, and local questions without the fields that it reads."""
        from datasets.exceptions import DatasetGenerationError
        from jinja2 import UndefinedError

        try:
            yield
        except (ImportError, AssertionError) as error:
            extra = internals.extra_of(error)
            if extra is None and not isinstance(error, ImportError):
                raise
            with_extra = f"`pip install 'lm-eval[{extra}]'`" if extra else "install it"
            self._refuse(f"{self.job.task} needs a package that is not installed: {error}", f"{with_extra} where this runs")
        except questions.QuestionsError as error:
            where = self._place or "its own data"
            self._refuse(f"{self.job.task} cannot be asked from {where}: {error}", 'see docs/accuracy.md, "Tools"')
        except UnusablePictureError as error:
            place = f"{self._place}, " if self.job.test else ""
            self._refuse(f"{self.job.task} cannot be asked: {place}{error}", WRITE_IT_SO)
        except (KeyError, UndefinedError, DatasetGenerationError) as error:
            if not self.job.test:
                raise
            why = error.__cause__ or error
            what = f"{type(why).__name__}: {why}".strip().splitlines()[0][:300]
            self._refuse(
                f"{self.job.task} does not find its fields in {self._place}: {what}",
                "write JSON lines with the fields of the task's own data; if there are shots, both files have the same ones",
            )

    @property
    def _place(self) -> str:
        """The file of local questions that is at fault, and its folder if the task has one; empty if there is neither."""
        given = self.job.test
        if given is None or not given.is_dir():
            return given.name if given else ""
        at = self.reading or self._unreadable()
        return f"{given.name}/{at}{SUFFIX}" if at else given.name

    def _unreadable(self) -> str:
        """The first task of a group that cannot be loaded by itself; empty if all can."""
        from datasets.exceptions import DatasetGenerationError
        from jinja2 import UndefinedError

        for name in self.found.names:
            try:
                self.found.manager.load([name])
            except (KeyError, UndefinedError, DatasetGenerationError, questions.QuestionsError):
                return name
        return ""

    @property
    def _first(self) -> Any:
        """The task; of a group its first member, for what all of them have in common."""
        return next(iter(self.tasks.values()))

    def _check_tasks(self) -> None:
        if self.job.api == "chat" and not self._generates:
            self._refuse(
                f"lm-eval cannot measure {self.job.task} by chat: it compares likelihoods, which chat does not give",
                "set api to completions",
            )
        if self.job.api == "completions" and self._calls_tools:
            self._refuse(f"{self.job.task} calls tools, which only a chat can", "set api to chat")
        self._check_sampling()
        self._check_pictures()
        for name, task in self.tasks.items():
            if getattr(task, "UNSAFE_CODE", False):
                self._refuse(f"{name} runs code that the model writes on this machine", "choose another task")

    def _check_pictures(self) -> None:
        if any(map(internals.has_sounds, self.tasks.values())):
            self._refuse(f"{self.job.task} has sounds, which this project cannot send", "choose another task")
        having = list(map(internals.has_pictures, self.tasks.values()))
        if not any(having):
            return
        if not all(having):
            self._refuse(f"only some tasks of '{self.job.task}' have pictures", "measure these as a group of their own")
        if self.job.api != "chat":
            self._refuse(f"{self.job.task} has pictures, which only a chat can show", "set api to chat")
        if self.job.num_fewshot and any(internals.needs_shots(task, self.job.num_fewshot) for task in self.tasks.values()):
            self._refuse(f"{self.job.task} has pictures, which lm-eval leaves out of solved examples", "set num_fewshot to 0")
        self.pictures = Pictures()

    def _introduce_members(self) -> None:
        """Tell the members of a group. How they ask is known once lm-eval has made their prompts."""
        empty = [name for name, task in self.tasks.items() if not len(task.eval_docs)]
        if empty:
            problem = f"of the group '{self.job.task}', {', '.join(empty[:8])} has no questions"
            self._refuse(problem, "give it some, or measure a group of your own in a task_folder, without it")
        self._make_prompts()
        self.members = [
            Member(
                name=name,
                questions=len(task.eval_docs),
                task_version=internals.version_of(task),
                config_hash=config_hash(internals.record_of(task)),
                output_type=task.get_config("output_type"),
            )
            for name, task in self.tasks.items()
        ]
        self._tell(TaskReply(available=sum(member.questions for member in self.members), members=tuple(self.members)))

    def _check_sampling(self) -> None:
        if not self.job.is_sampled:
            return
        if not self._generates:
            self._refuse(f"{self.job.task} compares likelihoods, and samples no answers", "leave sampling out")
        for name, task in self.tasks.items():
            if (repeats := task.get_config("repeats") or 1) > 1:
                # They would have the same prompt and the same seed, and so the same answer.
                self._refuse(f"{name} itself asks each question {repeats} times", "leave sampling out: the task has its own")

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

    def _find(self) -> internals.Found:
        task, folder = self.job.task, self._made(self.job.context_tok) if self.job.context_tok else self.job.task_folder
        try:
            found = internals.find(task, folder)
        except internals.UnusableGroupError as error:
            self._refuse(error.problem, error.remedy)
        if found is None:
            where = f"lm-eval {metadata.version('lm-eval')}" + (f" and {folder}" if folder else "")
            self._refuse(f"there is no task '{task}' in {where}", "`lm-eval ls tasks` lists lm-eval's")
        return found

    def _made(self, context_tok: int) -> Path:
        """The folder of a task whose questions are made now, since only the server can count their tokens."""
        job, folder = self.job, self.letter_box / "long"
        try:
            tokenizer = fitting.Tokenizer(job.url, job.model)
            documents = fitting.fitted(tokenizer, context_tok, job.reply_tok, self._around(), job.seed, job.num_questions)
        except fitting.UnfitError as error:
            self._refuse(f"{job.task} cannot be asked: {error.problem}", error.remedy)
        fitting.write_task(job.task, documents, folder)
        return folder

    def _around(self) -> dict[str, Any]:
        """A request of `/tokenize` for a prompt of one word, with all that is around it when it is asked."""
        if self.job.api == "completions":
            return {"prompt": "one"}
        system = [{"role": "system", "content": self.job.system_prompt}] if self.job.system_prompt else []
        given, effort = self.job.gen_kwargs.get("chat_template_kwargs"), self.job.gen_kwargs.get("reasoning_effort")
        own = given if isinstance(given, dict) else {}
        return {
            "messages": [*system, {"role": "user", "content": "one"}],
            "chat_template_kwargs": own | ({"reasoning_effort": effort} if effort else {}),
        }

    def _load(self) -> dict[str, Any]:
        """The task by its name, or the members of a group by theirs."""
        if self.job.test:
            self._use_local_questions()
        try:
            tasks = internals.load(self.found, self.job.task)
        except internals.UnusableGroupError as error:
            self._refuse(error.problem, error.remedy)
        if self.job.test:
            self._check_local_questions(tasks)
        return tasks

    def _check_local_questions(self, tasks: dict[str, Any]) -> None:
        for name, task in tasks.items():
            if not file_of(self.job.shots, name) and internals.needs_shots(task, self.job.num_fewshot):
                place = f" as {self.job.shots / name}{SUFFIX}" if self.job.shots else " as questions.shots"
                self._refuse(f"{name} needs solved examples", f"give them{place}, or set num_fewshot to 0")

    def _check_files(self, folder: Path | None, *, all_needed: bool) -> None:
        """Refuse a folder with files of other tasks, or, where all tasks need one, without some."""
        if folder is None or not folder.is_dir():
            return
        there, wanted = {path.name for path in folder.iterdir()}, {f"{name}{SUFFIX}" for name in self.found.names}
        if other := sorted(there - wanted):
            problem = f"{folder / other[0]} is of no task of {self.job.task}"
            self._refuse(problem, f"remove it, or correct its name: {', '.join(sorted(wanted)[:3])}, …")
        if all_needed and (lacking := sorted(wanted - there)):
            problem = f"{folder} lacks {len(lacking)} of {len(wanted)} tasks of {self.job.task}: {', '.join(lacking[:3])}"
            self._refuse(problem, "add them, or measure a group of your own in a task_folder, without them")

    def _use_local_questions(self) -> None:
        """Write task files with local questions. Prompts and filters stay those of lm-eval's tasks."""
        self._check_files(self.job.test, all_needed=True)
        self._check_files(self.job.shots, all_needed=False)
        folder = self.letter_box / "tasks"
        folder.mkdir()
        for name in self.found.names:
            entry = self.found.manager.task_index[name]
            test, shots = file_of(self.job.test, name), file_of(self.job.shots, name)
            local = {
                "include": str(entry.yaml_path),
                "task": name,
                "dataset_path": "json",
                "dataset_name": None,
                **internals.local_data(entry.cfg, str(test), str(shots) if shots else None),
            }
            entry.yaml_path = folder / f"{name}.yaml"
            YAML(typ="safe").dump(local, entry.yaml_path)

    def _make_prompts(self) -> None:
        """Prepare what a block needs without a server: lm-eval begins a block of each task, and is stopped at its prompts."""
        model = self.model if self._generates else internals.model_without_server()
        for name in self.tasks:
            self.reading = name
            with suppress(internals.MadeError):
                self._evaluate({name: []}, None, model, {})

    def measure(self, order: Order, folder: Path) -> None:
        from lm_eval.loggers import EvaluationTracker

        folder.mkdir()
        tracker = EvaluationTracker(output_path=str(folder / "results.json"))
        self.failed, self.seeded_by, self.replies = 0, order.seeded_by, []
        asked = self._by_task(order.questions)
        results = self._evaluate(asked, tracker, self.model, self.model_args)
        write_whole(folder / TRIED, Tried(failed=self.failed))
        if self._generates:
            write_plain(folder / REPLIES, "".join(f"{reply.model_dump_json()}\n" for reply in self.replies).encode())
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for name in asked:
            tracker.save_results_samples(task_name=name, samples=samples[name])
        # lm-eval only logs that it could not save them.
        if not any(folder.glob("results_*.json")) or len(list(folder.glob("samples_*.jsonl"))) != len(asked):
            sys.exit("lm-eval could not save its results")

    def _by_task(self, questions: list[int]) -> dict[str, list[int]]:
        """The questions of each task, in ascending order: lm-eval takes the n-th of them for the task's n-th."""
        if not self.members:
            return {self.job.task: sorted(questions)}
        return {part.member.name: part.questions for part in parts_of(self.members, questions)}

    def _evaluate(self, asked: dict[str, list[int]], tracker: Any, model: Any, model_args: dict[str, Any]) -> Any:
        """Run lm-eval on questions of some tasks. Without questions it only makes the prompts, and raises MadeError.

        `model_args` are only recorded: the model is built already.
        """
        from lm_eval import simple_evaluate

        seed = self.job.seed
        return simple_evaluate(
            model=model,
            model_args=model_args,
            tasks=[self.tasks[name] for name in asked],
            task_manager=self.found.manager,
            samples=asked,
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
        if self.job.max_gen_toks is None:
            return self.job.gen_kwargs
        own = [task.get_config("generation_kwargs") or {} for task in self.tasks.values()]
        named = {next((name for name in ("max_tokens", "max_gen_toks") if name in each), None) for each in own}
        return self.job.gen_kwargs | {name: self.job.max_gen_toks for name in named if name}

    @cached_property
    def model(self) -> Any:
        """lm-eval's model, built on first use: for likelihoods it asks the server, which need not answer before a block."""
        from lm_eval.api.registry import get_model

        model = get_model("local-chat-completions" if self.job.api == "chat" else "local-completions")(**self.model_args)
        internals.keep_tokens(model)
        internals.count_failed(model, self._count)
        if self._calls_tools:
            # First of all: what follows sees the prompt as lm-eval hashes it.
            internals.send_tools(model, questions.request_of)
        if self.pictures:
            internals.send_pictures(model, self.pictures)
        if self._generates:
            internals.read_replies(model, self._read)
        if self.job.is_sampled:
            internals.seed_requests(model, self._seed_of)
        return model

    def _read(self, prompt: str, choice: dict[str, Any], text: str | None) -> str | None:
        reply, answer = apart(prompt, choice, text, self.job.think_end)
        if self._calls_tools:
            answer = scoring.text_of(choice, answer)
            reply = reply.model_copy(update={"is_empty": not (answer or "").strip()})
        self.replies.append(reply)
        return answer

    def _seed_of(self, messages: Any) -> int:
        """The seed of a question's answer: one of its own, and another one each time that it is asked."""
        about = json.dumps([self.job.seed, self.seeded_by, messages]).encode()
        return int.from_bytes(hashlib.sha256(about).digest()[:8]) % SEEDS

    def _count(self, calls: int) -> None:
        self.failed += calls

    @cached_property
    def model_args(self) -> dict[str, Any]:
        chat = self.job.api == "chat"
        return {
            "model": self.job.model,
            "base_url": f"{self.job.url}/v1/{'chat/' if chat else ''}completions",
            "num_concurrent": self.job.num_concurrent,
            "max_gen_toks": self.job.max_gen_toks or USUAL_TOKENS,
            # With its default of 300 s, lm-eval would give up a long answer and ask again.
            "timeout": self.job.timeout_s,
            "max_retries": MOST_TRIES,
            **(self._without_tokens() if self._generates else self._servers_tokens()),
        }

    @property
    def _generates(self) -> bool:
        return bool(self._first.get_config("output_type") == GENERATES)

    @cached_property
    def _calls_tools(self) -> bool:
        return internals.calls_tools(self._first)

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


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.captureWarnings(True)
    main(Path(sys.argv[1]))
