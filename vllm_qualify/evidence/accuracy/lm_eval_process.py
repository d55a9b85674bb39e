"""lm-eval as a process beside the server, which asks the questions of a task in random blocks and repeatedly."""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_qualify.engine.confinement import Confined, confining_process, folders_here
from vllm_qualify.engine.letter_box import copy_matching, read_plain
from vllm_qualify.engine.process import TAIL_BYTES, Progress, RunningProcess, await_result, running_guarded, tail, text_of
from vllm_qualify.engine.server import Server, Starting
from vllm_qualify.errors import RecipeError, writing
from vllm_qualify.evidence.accuracy.blocks import MOST_QUESTIONS, QuestionBlock, read_planned
from vllm_qualify.evidence.accuracy.ended import STAGE, explain_end
from vllm_qualify.evidence.accuracy.letters import JOB, ORDER, TASK, TRIED, Job, Order, TaskReply, write_whole
from vllm_qualify.evidence.accuracy.picture_limits import NO_LIMITS, PictureLimits
from vllm_qualify.evidence.accuracy.thinking import REPLIES
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.values import Frozen

WORKER = "vllm_qualify.evidence.accuracy.lm_eval_worker"
LOG = "lm-eval.log"
# lm-eval's own files of a step, and what it did not count.
WRITTEN = ("results_*.json", "samples_*.jsonl", TRIED, REPLIES)
# The typed answers of a task, next to the raw files that they are read from.
ANSWERS = "answers.jsonl"
BEFORE, AFTER = "metrics-before.txt", "metrics-after.txt"
BAR = re.compile(r"Requesting API:[^\r\n]*?(\d+)/(\d+) \[")


class LmEval(Frozen):
    """An lm-eval process with the task that it has loaded or is loading: only ids and paths, no handle."""

    task: TaskPlan
    process: RunningProcess
    letter_box: Path
    command: list[str]

    def check(self) -> None:
        """Check that lm-eval still works.

        Raises RecipeError if it has refused the task, or the task's own files read others that are closed to them, or the
        server refuses what the task asks; HubError if the data did not come; HostError if it has ended otherwise.
        """
        if self.has_task_reply():
            self.task_reply()
        if (exit_code := self.process.exit_code()) is None:
            return
        raise explain_end(text_of(self.process.log), exit_code, self.task, tail(self.process.log))

    def has_task_reply(self) -> bool:
        return (self.letter_box / TASK).exists()

    def task_reply(self) -> TaskReply:
        """What lm-eval says about the task. Raises RecipeError if it refuses the task."""
        reply = TaskReply.model_validate_json(read_plain(self.letter_box / TASK) or b"")
        if reply.problem:
            raise RecipeError(reply.problem, reply.remedy, f"{STAGE}.{self.task.name}")
        return reply


@contextmanager
def running_lm_eval(
    starting: Starting, model: str, task: TaskPlan, folder: Path, pictures: PictureLimits = NO_LIMITS
) -> Iterator[LmEval]:
    """Run lm-eval during the block. It loads the task, for which the server need not answer yet. Its log is in `folder`."""
    with writing(STAGE):
        folder.mkdir(parents=True)
    with TemporaryDirectory() as name:
        letter_box = Path(name)
        write_whole(letter_box / JOB, Job(task=task, url=starting.url, model=model, pictures=pictures))
        command = [sys.executable, "-m", WORKER, name]
        with (
            confining_lm_eval(task, letter_box) as confinement,
            running_guarded(command, confinement.environment, folder / LOG, rules=confinement.rules) as process,
        ):
            yield LmEval(task=task, process=process, letter_box=letter_box, command=command)


class Asking:
    """A task that is being asked, with its evidence in `folder`. Its steps are asked in their order, as many as are wanted.

    `progress` gets the requests of the repetition that is being asked.
    """

    def __init__(self, server: Server, lm_eval: LmEval, folder: Path, progress: Progress) -> None:
        self.server, self.lm_eval, self.folder, self.progress = server, lm_eval, folder, progress
        self.steps: list[QuestionBlock] = []

    def ask(self, step: QuestionBlock) -> None:
        """Ask the questions of a step. lm-eval's own files go to the step's folder.

        Raises HostError if lm-eval failed or took longer than its time limit; RecipeError if the server lacks what the task
        needs; ReleaseError if the server ended meanwhile.
        """
        folder, letter_box, name = self.folder / step.folder, self.lm_eval.letter_box, f"{time.monotonic_ns():020d}"
        folder.mkdir()
        (folder / BEFORE).write_text(self.server.metrics_page())
        log_from = self.lm_eval.process.log.stat().st_size
        write_whole(letter_box / f"{name}.{ORDER}", Order(questions=step.questions, seeded_by=step.seeded_by, drawn=step.drawn))
        self.await_file(f"{name}.done", log_from, self._progress_of(step))
        with writing(STAGE):
            copy_matching(letter_box / name, folder, WRITTEN)
        (folder / AFTER).write_text(self.server.metrics_page())

    def _progress_of(self, step: QuestionBlock) -> Progress:
        """Counts the requests of a step among all of its repetition. Each repetition after the first is named."""
        of_repetition = [each for each in self.steps if each.repetition == step.repetition] or [step]
        before = sum(len(each.questions) for each in of_repetition if each.block < step.block)
        whole, part = sum(len(each.questions) for each in of_repetition), f"repetition {step.repetition}"

        def on_request(done: int, total: int, _part: str = "", /) -> None:
            # A question may have several requests, such as one for each choice.
            per_question = total / len(step.questions)
            self.progress(round(before * per_question) + done, round(whole * per_question), part if step.repetition > 1 else "")

        return on_request

    def await_file(self, name: str, log_from: int, progress: Progress) -> None:
        """Wait for a file in the letter box. Meanwhile report the requests that lm-eval's log counts after byte `log_from`."""
        lm_eval, log, shown, read_to = self.lm_eval, self.lm_eval.process.log, None, log_from

        def arrived() -> bool | None:
            nonlocal shown, read_to
            is_there = (lm_eval.letter_box / name).exists()
            if not is_there:
                self.server.check_alive()
                lm_eval.check()
            size = log.stat().st_size
            # Nothing is read again while nothing is added. A bar may have been read in part before, so all since then is read.
            bars = BAR.findall(text_of(log, min(size - log_from, TAIL_BYTES))) if size > read_to else []
            read_to = size
            if bars and bars[-1] != shown:
                shown = bars[-1]
                done, total = map(int, shown)
                progress(done, total)
            return is_there or None

        await_result(arrived, lm_eval.task.settings.time_limit_s, lm_eval.task.name, STAGE, log)


def prepare_task(server: Server, lm_eval: LmEval, folder: Path, progress: Progress, start: int = 1) -> Asking:
    """Prepare the task to be asked in this start of the server. Files of an earlier try in `folder` are removed.

    Raises RecipeError if lm-eval has no such task, or cannot score a group as one task, or has fewer questions than are asked;
    HostError and ReleaseError as `Asking.ask`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    asking, task = Asking(server, lm_eval, folder, progress), lm_eval.task
    asking.await_file(TASK, 0, progress)
    reply = lm_eval.task_reply().model_copy(update={"order": task.order})
    write_whole(folder / TASK, reply)
    wanted, available, place = task.settings.num_questions, reply.available, f"{STAGE}.{task.name}"
    if wanted > available:
        problem = f"the recipe asks {wanted} questions, and the task has {available}"
        raise RecipeError(problem, f"lower it to {available} or less", f"{place}.num_questions")
    if available > MOST_QUESTIONS:
        problem = f"the task has {available:,} questions, and may have {MOST_QUESTIONS:,}"
        raise RecipeError(problem, "name one of its tasks, or a smaller one", place)
    asking.steps = read_planned(folder, task, start)
    return asking


@contextmanager
def confining_lm_eval(task: TaskPlan, letter_box: Path) -> Iterator[Confined]:
    """What lm-eval may read, write and reach, and its variables: a task of one's own can bring functions, which run in it."""
    # A cache could hold an older version of local files, so each process has a cache of its own.
    is_local = bool(task.questions or task.settings.context_tok)
    local = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(letter_box / "datasets")} if is_local else {}
    # A missing reply is written as an empty one, whatever the caller's environment says.
    answering = {"OPENAI_API_KEY": "none", "LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER": ""}
    variables = local | answering | {"TOKENIZERS_PARALLELISM": "false"}
    readable, listable = folders_here()
    named = [*([task.folder] if task.folder else []), *(task.questions or ())]
    kinds = {"downloads": not is_local, "is_trusting": task.folder is not None}
    with confining_process(variables, named, readable, [letter_box], listable, **kinds) as confinement:
        yield confinement


def read_prompts(folder: Path, most: int) -> list[str]:
    """Prompts of a task that generates text, from its folder. A chat gives none, because its prompts are messages.

    Raises OSError, ValueError or LookupError if a file is not as lm-eval writes it.
    """
    asked: list[str] = []
    for path in sorted(folder.glob("r1-b1/samples_*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n")[:most]:
            arguments = json.loads(line)["arguments"]["gen_args_0"] if line and "gen_args_0" in line else {}
            asked += [arguments["arg_0"]] if isinstance(arguments.get("arg_0"), str) else []
    return asked


def lm_eval_tools() -> dict[str, str]:
    return {"lm-eval": metadata.version("lm-eval")}
