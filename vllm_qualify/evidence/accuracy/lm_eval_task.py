"""A task of lm-eval as the worker loads it: found by its name, given its questions, and refused if it cannot be measured."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from datasets.exceptions import DatasetGenerationError
from jinja2 import UndefinedError
from ruamel.yaml import YAML

from vllm_qualify.evidence.accuracy import lm_eval_internals as internals
from vllm_qualify.evidence.accuracy.letters import GENERATES, TASK, Job, RefusedError, TaskReply, write_whole
from vllm_qualify.evidence.accuracy.local_questions import JSON, Readable, make_readable
from vllm_qualify.evidence.accuracy.long import fitting
from vllm_qualify.evidence.accuracy.pictures import WRITE_IT_SO, Pictures, UnusablePictureError
from vllm_qualify.evidence.accuracy.tools import questions
from vllm_qualify.plan.questions import SUFFIX, file_of

# What lm-eval raises of local questions that lack what a task reads.
UNREADABLE = (KeyError, UndefinedError, DatasetGenerationError)


class LoadedTask:
    """The task of a job. Whatever keeps it from being measured is told in the letter box, and ends this process."""

    tasks: dict[str, Any]
    """The task by its name, or the members of a group by theirs."""

    def __init__(self, job: Job, letter_box: Path) -> None:
        self.job, self.name, self.settings, self.letter_box = job, job.task.name, job.task.settings, letter_box
        self.pictures: Pictures | None = None
        self.reading = ""
        """The task whose questions are being read; empty while all are."""
        try:
            self.found = self._find_task()
        except RefusedError as error:
            self.refuse(error.problem, error.remedy)

    def load(self) -> None:
        if self.job.test:
            self._write_local_tasks()
        self.tasks = internals.load_tasks(self.found, self.name)
        self._check_tasks()
        for name, task in self.tasks.items():
            self.reading = name
            internals.keep_questions(task, self.pictures)
            internals.keep_prompts(task, self.pictures)

    @contextmanager
    def refusing_faults(self) -> Iterator[None]:
        """Refuse a task with packages that are not installed, and local questions without the fields that it reads."""
        try:
            yield
        except RefusedError as error:
            self.refuse(error.problem, error.remedy)
        except (ImportError, AssertionError) as error:
            extra = internals.extra_of(error)
            if extra is None and not isinstance(error, ImportError):
                raise
            with_extra = f"`pip install 'lm-eval[{extra}]'`" if extra else "install it"
            self.refuse(f"{self.name} needs a package that is not installed: {error}", f"{with_extra} where this runs")
        except questions.QuestionsError as error:
            where = self._faulty_file or "its own data"
            self.refuse(f"{self.name} cannot be asked from {where}: {error}", 'see docs/accuracy.md, "Tools"')
        except UnusablePictureError as error:
            place = f"{self._faulty_file}, " if self.job.test else ""
            self.refuse(f"{self.name} cannot be asked: {place}{error}", WRITE_IT_SO)
        except UNREADABLE as error:
            if not self.job.test:
                raise
            why = error.__cause__ or error
            what = f"{type(why).__name__}: {why}".strip().splitlines()[0][:300]
            self.refuse(
                f"{self.name} does not find its fields in {self._faulty_file}: {what}",
                "write JSON lines with the fields of the task's own data; if there are shots, both files have the same ones",
            )

    @property
    def _faulty_file(self) -> str:
        """The file of local questions that is at fault, and its folder if the task has one; empty if there is neither."""
        test = self.job.test
        if test is None or not test.is_dir():
            return test.name if test else ""
        task = self.reading or self._find_unreadable()
        return f"{test.name}/{task}{SUFFIX}" if task else test.name

    def _find_unreadable(self) -> str:
        """The first task of a group that cannot be loaded by itself; empty if all can."""
        for name in self.found.names:
            try:
                self.found.manager.load([name])
            except (*UNREADABLE, questions.QuestionsError):
                return name
        return ""

    @property
    def first(self) -> Any:
        """The task; of a group its first member, for what all of them have in common."""
        return next(iter(self.tasks.values()))

    @property
    def generates(self) -> bool:
        return bool(self.first.get_config("output_type") == GENERATES)

    @property
    def calls_tools(self) -> bool:
        return internals.says_tools(self.first.get_config("metadata"))

    def _check_tasks(self) -> None:
        job, api, is_sampled = self.job, self.settings.api, self.job.task.sampling is not None
        for name in self._needing_shots if job.test else []:
            if not file_of(job.shots, name):
                place = f"{job.shots / name}{SUFFIX}" if job.shots else "questions.shots"
                self.refuse(f"{name} needs solved examples", f"give them as {place}, or set num_fewshot to 0")
        if api == "chat" and not self.generates:
            problem = f"lm-eval cannot measure {self.name} by chat: it compares likelihoods, which chat does not give"
            self.refuse(problem, "set api to completions")
        if api == "completions" and self.calls_tools:
            self.refuse(f"{self.name} calls tools, which only a chat can", "set api to chat")
        if is_sampled and not self.generates:
            self.refuse(f"{self.name} compares likelihoods, and samples no answers", "leave sampling out")
        for name, task in self.tasks.items():
            repeats = task.get_config("repeats") or 1
            if is_sampled and repeats > 1:
                # They would have the same prompt and the same seed, and so the same answer.
                self.refuse(f"{name} itself asks each question {repeats} times", "leave sampling out: the task has its own")
            if getattr(task, "UNSAFE_CODE", False):
                self.refuse(f"{name} runs code that the model writes on this machine", "choose another task")
        self._check_pictures()

    @property
    def _needing_shots(self) -> list[str]:
        return [name for name, task in self.tasks.items() if internals.needs_shots(task, self.settings.num_fewshot)]

    def _check_pictures(self) -> None:
        name, tasks = self.name, self.tasks.values()
        if any(task.get_config("doc_to_audio") is not None for task in tasks):
            self.refuse(f"{name} has sounds, which this project cannot send", "choose another task")
        having = [task.get_config("doc_to_image") is not None for task in tasks]
        if not any(having):
            return
        if not all(having):
            self.refuse(f"only some tasks of '{name}' have pictures", "measure these as a group of their own")
        if self.settings.api != "chat":
            self.refuse(f"{name} has pictures, which only a chat can show", "set api to chat")
        if self._needing_shots:
            self.refuse(f"{name} has pictures, which lm-eval leaves out of solved examples", "set num_fewshot to 0")
        self.pictures = Pictures(self.job.pictures)

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        self.tell(TaskReply(problem=problem, remedy=remedy))
        sys.exit(f"{problem}: {remedy}")

    def tell(self, reply: TaskReply) -> None:
        write_whole(self.letter_box / TASK, reply)

    def _find_task(self) -> internals.Found:
        context_tok = self.settings.context_tok
        folder = self._write_long_task(context_tok) if context_tok else self.job.task.folder
        found = internals.find_task(self.name, folder)
        if found is None:
            where = f"lm-eval {metadata.version('lm-eval')}" + (f" and {folder}" if folder else "")
            self.refuse(f"there is no task '{self.name}' in {where}", "`lm-eval ls tasks` lists lm-eval's")
        return found

    def _write_long_task(self, context_tok: int) -> Path:
        """The folder of a task whose questions are made now, since only the server can count their tokens."""
        settings, folder = self.settings, self.letter_box / "long"
        try:
            tokenizer, around = fitting.Tokenizer(self.job.url, self.job.model), self._empty_prompt()
            reply_tok, asked = settings.long_reply_tok, settings.num_questions
            documents = fitting.fit_documents(tokenizer, context_tok, reply_tok, around, settings.seed, asked)
        except RefusedError as error:
            self.refuse(f"{self.name} cannot be asked: {error.problem}", error.remedy)
        fitting.write_task(self.name, documents, folder)
        return folder

    def _empty_prompt(self) -> dict[str, Any]:
        """A request of `/tokenize` for a prompt of one word, with all that is around it when it is asked."""
        settings = self.settings
        if settings.api == "completions":
            return {"prompt": "one"}
        system = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt else []
        effort = {"reasoning_effort": settings.reasoning_effort} if settings.reasoning_effort else {}
        messages = [*system, {"role": "user", "content": "one"}]
        return {"messages": messages, "chat_template_kwargs": settings.chat_template_kwargs | effort}

    def _check_folder(self, folder: Path | None, *, all_needed: bool) -> None:
        """Refuse a folder with files of other tasks, or, where all tasks need one, without some."""
        if folder is None or not folder.is_dir():
            return
        there, wanted = {path.name for path in folder.iterdir()}, {f"{name}{SUFFIX}" for name in self.found.names}
        if other := sorted(there - wanted):
            problem = f"{folder / other[0]} is of no task of {self.name}"
            self.refuse(problem, f"remove it, or correct its name: {', '.join(sorted(wanted)[:3])}, …")
        if all_needed and (lacking := sorted(wanted - there)):
            problem = f"{folder} lacks {len(lacking)} of {len(wanted)} tasks of {self.name}: {', '.join(lacking[:3])}"
            self.refuse(problem, "add them, or measure a group of your own in a task_folder, without them")

    def _write_local_tasks(self) -> None:
        """Write task files with local questions. Prompts and filters stay those of lm-eval's tasks."""
        self._check_folder(self.job.test, all_needed=True)
        self._check_folder(self.job.shots, all_needed=False)
        folder = self.letter_box / "tasks"
        folder.mkdir()
        for name in self.found.names:
            entry = self.found.manager.task_index[name]
            files = [file for given in (self.job.test, self.job.shots) if (file := file_of(given, name))]
            # What has a reader of its own gets the files as they are.
            own = "custom_dataset" in entry.cfg
            form, (test, *shots) = Readable(JSON, files) if own else make_readable(files, folder, name)
            local = {
                "include": str(entry.yaml_path),
                "task": name,
                "dataset_path": form,
                "dataset_name": None,
                **internals.local_data(entry.cfg, str(test), str(shots[0]) if shots else None),
            }
            entry.yaml_path = folder / f"{name}.yaml"
            YAML(typ="safe").dump(local, entry.yaml_path)
