"""Accuracy: lm-eval asks the server the questions of tasks, in random blocks and repeatedly. All samples are kept."""

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from vllm_qualify.engine.confinement import Confined, confined, folders_here
from vllm_qualify.engine.letter_box import copy_matching, read_plain
from vllm_qualify.engine.process import (
    TAIL_BYTES,
    Progress,
    RunningProcess,
    await_result,
    guarded,
    tail,
    text_of,
)
from vllm_qualify.engine.server import Server, Starting
from vllm_qualify.errors import HostError, RecipeError, writing
from vllm_qualify.evidence.answers import (
    MOST_QUESTIONS,
    Answer,
    Answered,
    QuestionBlock,
    finished,
    planned,
    read_answers,
    steps,
)
from vllm_qualify.evidence.lm_eval_worker import (
    GENERATES,
    JOB,
    ORDER,
    TASK,
    TRIED,
    Job,
    Order,
    TaskReply,
    Tried,
    write_whole,
)
from vllm_qualify.evidence.measurement import UNUSABLE, Measurement, in_words, interval_of_means, invalid, share_interval, valid
from vllm_qualify.evidence.reply_tokens import COUNT, SUM, reply_tokens
from vllm_qualify.evidence.restarts import Moment, restart_problems
from vllm_qualify.evidence.sequential import Levels, Sides, sides
from vllm_qualify.evidence.texts import ends_in_loop
from vllm_qualify.evidence.thinking import REPLIES, read_replies, without_answers
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.metrics import ANSWER_TOKENS, LOOPING, METRICS, OTHER_SCRIPT, UNTHINKING
from vllm_qualify.recipe.values import Frozen

STAGE = "accuracy"
WORKER = "vllm_qualify.evidence.lm_eval_worker"
LOG = "lm-eval.log"
# lm-eval's own files of a step, and what it did not count.
WRITTEN = ("results_*.json", "samples_*.jsonl", TRIED, REPLIES)
# The typed answers of a task, next to the raw files that they are read from.
ANSWERS = "answers.jsonl"
BEFORE, AFTER = "metrics-before.txt", "metrics-after.txt"
TRUNCATED = "truncated_answers"
# Faults of an answer's text, by the field of an answer that has it.
FAULTS = {LOOPING: "ends_in_loop", OTHER_SCRIPT: "in_other_script"}
# A filter that found no answer: the score is no share of right ones, whoever is to blame.
FOUND_NOTHING = "found an answer in none of the"
FILTER_REMEDY = (
    "read a few in the samples; if they are answers, give the gate another filter, or have the prompt ask for the form that "
    "the filter reads; if they are not, the model or its chat template is broken"
)
NO_ANSWERS = "the task compares likelihoods and asks for no answers"
# vLLM's counter of answered requests, by their finish reason.
SUCCEEDED, REASON, CUT = "vllm:request_success_total", "finished_reason", "length"
CLOSED = re.compile(r"PermissionError: \[Errno 13\] Permission denied: (\S.{,500})")
# vLLM's words, where a request has tools and it was started without a parser of calls.
NO_PARSER = "tool choice requires --enable-auto-tool-choice"
BAR = re.compile(r"Requesting API:[^\r\n]*?(\d+)/(\d+) \[")


class LmEval(Frozen):
    """An lm-eval process with the task that it has loaded or is loading: only ids and paths, no handle."""

    task: TaskPlan
    process: RunningProcess
    letter_box: Path
    command: list[str]

    def check(self) -> None:
        """Check that lm-eval still works.

        Raises:
            RecipeError: it has refused the task, or the task's own files read others that are closed to them, or the server
                cannot call tools.
            HostError: it has ended.
        """
        if self.has_task_reply():
            self.task_reply()
        if (exit_code := self.process.exit_code()) is None:
            return
        log = tail(self.process.log)
        if self.task.folder and (denied := CLOSED.findall("\n".join(log))):
            problem, place = f"a file of its task_folder opens {denied[-1]}, which is closed to it", f"{STAGE}.{self.task.name}"
            raise RecipeError(problem, f"move that file into {self.task.folder}, which lm-eval may read", place, log)
        if NO_PARSER in text_of(self.process.log, TAIL_BYTES):
            problem, remedy = "the server has no parser of tool calls", "give it tool-call-parser and enable-auto-tool-choice"
            raise RecipeError(problem, remedy, f"{STAGE}.{self.task.name}", log)
        raise HostError(f"lm-eval ended with exit code {exit_code}", "see the last lines of its log", STAGE, log)

    def has_task_reply(self) -> bool:
        return (self.letter_box / TASK).exists()

    def task_reply(self) -> TaskReply:
        """What lm-eval says about the task. Raises RecipeError if it refuses the task."""
        reply = TaskReply.model_validate_json(read_plain(self.letter_box / TASK) or b"")
        if reply.problem:
            raise RecipeError(reply.problem, reply.remedy, f"{STAGE}.{self.task.name}")
        return reply


@contextmanager
def loading(starting: Starting, model: str, task: TaskPlan, folder: Path) -> Iterator[LmEval]:
    """Run lm-eval during the block. It loads the task, for which the server need not answer yet. Its log is in `folder`."""
    with writing(STAGE):
        folder.mkdir(parents=True)
    with TemporaryDirectory(prefix="vllm-qualify-lm-eval-") as name:
        letter_box = Path(name)
        write_whole(letter_box / JOB, _job(starting.url, model, task))
        command = [sys.executable, "-m", WORKER, name]
        with (
            surroundings(task, letter_box) as confinement,
            guarded(command, confinement.environment, folder / LOG, rules=confinement.rules) as process,
        ):
            yield LmEval(task=task, process=process, letter_box=letter_box, command=command)


class Asking:
    """A task that is being asked. Its steps are asked in their order, as many as are wanted."""

    def __init__(self, run: "_Run", all_steps: list[QuestionBlock]) -> None:
        self.steps = all_steps
        self._run = run

    def ask(self, step: QuestionBlock) -> None:
        """Ask the questions of a step. lm-eval's own files go to the step's folder.

        Raises:
            HostError: lm-eval failed or took longer than its time limit.
            RecipeError: the server lacks what the task needs.
            ReleaseError: the server ended meanwhile.
        """
        run, folder, name = self._run, self._run.folder / step.folder, f"{time.monotonic_ns():020d}"
        folder.mkdir()
        (folder / BEFORE).write_text(run.server.metrics_page())
        log_from = run.lm_eval.process.log.stat().st_size
        write_whole(run.lm_eval.letter_box / f"{name}.{ORDER}", Order(questions=step.questions, seeded_by=step.seeded_by))
        run.await_file(f"{name}.done", log_from)
        with writing(STAGE):
            copy_matching(run.lm_eval.letter_box / name, folder, WRITTEN)
        (folder / AFTER).write_text(run.server.metrics_page())


def prepare_task(server: Server, lm_eval: LmEval, folder: Path, progress: Progress, start: int = 1) -> Asking:
    """Prepare the task to be asked in this start of the server. Files of an earlier try in `folder` are removed.

    `progress` gets the requests of the step that is being asked.

    Raises:
        RecipeError: lm-eval has no such task, or cannot score a group as one task, or has fewer questions than are asked.
        HostError, ReleaseError: as `Asking.ask`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = _Run(server, lm_eval, folder, progress)
    run.await_file(TASK, 0)
    reply = lm_eval.task_reply()
    write_whole(folder / TASK, reply)
    return Asking(run, [step._replace(start=start) for step in _steps(lm_eval.task, reply)])


def _job(url: str, model: str, task: TaskPlan) -> Job:
    settings = task.settings
    test, shots = (*(task.questions or ()), None, None)[:2]
    return Job(
        task=task.name,
        api=settings.api,
        model=model,
        url=url,
        num_fewshot=settings.num_fewshot,
        num_concurrent=task.num_concurrent,
        max_gen_toks=settings.max_gen_toks,
        gen_kwargs=task.gen_kwargs,
        system_prompt=settings.system_prompt,
        think_end=settings.think_end,
        is_sampled=task.sampling is not None,
        seed=settings.seed,
        # lm-eval must not give up an answer that comes within the step's time limit.
        timeout_s=math.ceil(settings.time_limit_s) + 1,
        task_folder=task.folder,
        test=test,
        shots=shots,
        context_tok=settings.context_tok,
        num_questions=settings.num_questions,
        reply_tok=settings.long_reply_tok,
    )


@contextmanager
def surroundings(task: TaskPlan, letter_box: Path) -> Iterator[Confined]:
    """What lm-eval may read, write and reach, and its variables: a task of one's own can bring functions, which run in it."""
    # A cache could hold an older version of local files, so each process has a cache of its own.
    is_local = bool(task.questions or task.settings.context_tok)
    local = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(letter_box / "datasets")} if is_local else {}
    # A missing reply is written as an empty one, whatever the caller's environment says.
    variables = local | {"OPENAI_API_KEY": "none", "LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER": ""}
    readable, listable = folders_here()
    named = [*([task.folder] if task.folder else []), *(task.questions or ())]
    kinds = {"downloads": not is_local, "is_trusting": task.folder is not None}
    with confined(variables, named, readable, [letter_box], listable, **kinds) as confinement:
        yield confinement


def _steps(task: TaskPlan, reply: TaskReply) -> list[QuestionBlock]:
    wanted = task.settings.num_questions
    if wanted > reply.available:
        problem = f"the recipe asks {wanted} questions, and the task has {reply.available}"
        raise RecipeError(problem, f"lower it to {reply.available} or less", f"{STAGE}.{task.name}.num_questions")
    if reply.available > MOST_QUESTIONS:
        problem = f"the task has {reply.available:,} questions, and may have {MOST_QUESTIONS:,}"
        raise RecipeError(problem, "name one of its tasks, or a smaller one", f"{STAGE}.{task.name}")
    return steps(task.settings, reply.available, task.repetitions, sequential=task.sequential)


class _Run(NamedTuple):
    """A task's run: the server, the lm-eval that asks it, and the folder for the answers."""

    server: Server
    lm_eval: LmEval
    folder: Path
    progress: Progress

    def await_file(self, name: str, log_from: int) -> None:
        """Wait for a file in the letter box. Meanwhile report the requests that lm-eval's log counts after byte `log_from`."""
        lm_eval, shown = self.lm_eval, None

        def arrived() -> bool | None:
            nonlocal shown
            is_there = (lm_eval.letter_box / name).exists()
            if not is_there:
                self.server.check_alive()
                lm_eval.check()
            shown = self._show(log_from, shown)
            return is_there or None

        await_result(arrived, lm_eval.task.settings.time_limit_s, lm_eval.task.name, STAGE, lm_eval.process.log)

    def _show(self, log_from: int, shown: tuple[int, int] | None) -> tuple[int, int] | None:
        log = self.lm_eval.process.log
        new = min(log.stat().st_size - log_from, TAIL_BYTES)
        bars = BAR.findall(text_of(log, new)) if new else []
        now = (int(bars[-1][0]), int(bars[-1][1])) if bars else shown
        if now and now != shown:
            self.progress(*now)
        return now


def prompts(folder: Path, most: int) -> list[str]:
    """Prompts of a task that generates text, from its folder. A chat gives none, because its prompts are messages.

    Raises:
        OSError, ValueError, LookupError: a file is not as lm-eval writes it.
    """
    asked: list[str] = []
    for path in sorted(folder.glob("r1-b1/samples_*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n")[:most]:
            arguments = json.loads(line)["arguments"]["gen_args_0"] if line and "gen_args_0" in line else {}
            asked += [arguments["arg_0"]] if isinstance(arguments.get("arg_0"), str) else []
    return asked


def lm_eval_tools() -> dict[str, str]:
    return {"lm-eval": metadata.version("lm-eval")}


def parse_task(folder: Path, task: TaskPlan, levels: Levels) -> list[Measurement]:
    """One measurement per filter and declared score, and those of the answers themselves, from the files of a task's folder.

    A question that was asked several times counts with the mean of its answers; an empty one is wrong. All measurements are
    invalid unless lm-eval's files are complete and nearly every question was answered, and those of a filter are if it found
    no answer at all. `levels` are those of the intervals.
    """
    inside = f"{folder.parent.name}/{folder.name}"
    source = f"{inside}/r*-b*"
    try:
        answered = read_answers(folder, task)
        information, look = _looks(folder, task)
        problem = _unanswered(answered.answers, task, folder) or _too_seldom(answered.answers, task)
        if problem := problem or _restarted(folder, task):
            keys: list[tuple[str, str | None]] = [*answered.keys, *((metric, None) for metric in _of_answers(task))]
            asked = len({answer.question for answer in answered.answers})
            return [invalid(key, problem, source, task=task.name, filter=name, sample_count=asked) for key, name in keys]
        answered, done = _of_the_look(answered, finished(folder, task), task)
        rows = [
            _score(
                metric,
                name,
                answered,
                folder,
                sides(METRICS[metric].direction, levels, information, look),
                source,
                is_sampled=task.least_repetitions > 1,
            )
            for metric, name in answered.keys
        ]
    except UNUSABLE as error:
        because = f"lm-eval left no usable result: {in_words(error)}"
        return [invalid(metric, because, source, task=task.name) for metric in ("exact_match", *_of_answers(task))]
    at = sides(METRICS[TRUNCATED].direction, levels, information, look)
    rows += [_truncated(answered, folder, done, at, source), _tokens(answered, folder, done, at, source)]
    rows += [_faults(metric, answered, folder, task, at, source) for metric in FAULTS]
    return rows + _unthinking(answered, task, at, source)


def _of_answers(task: TaskPlan) -> list[str]:
    """The metrics of the answers that each run of the task has."""
    return [TRUNCATED, ANSWER_TOKENS, *FAULTS, *([UNTHINKING] if task.settings.think_end else [])]


def asked_again(folder: Path, task: TaskPlan) -> str:
    """In words, how many requests of a task failed and were asked again; empty if none did, or if an older run did not count.

    Raises one of UNUSABLE: a file is not as it was written.
    """
    paths = [path for step in finished(folder, task) if (path := folder / step.folder / TRIED).exists()]
    tried = [Tried.model_validate_json(path.read_bytes()) for path in paths]
    failed = sum(each.failed for each in tried)
    if not failed:
        return ""
    most = max(each.most_tries for each in tried)
    return f"{failed:,} requests failed, and lm-eval asked again: it tries each {most} times at most, and keeps the reply"


def thought_without_answers(folder: Path, task: TaskPlan) -> str:
    """In words, how many replies have thinking and no answer; empty if none has. Raises one of UNUSABLE."""
    return without_answers([folder / step.folder for step in finished(folder, task)])


def _looks(folder: Path, task: TaskPlan) -> tuple[list[int], int]:
    """The number of questions at each planned look, and which look this is.

    Looks are after each block of the first repetition, or where more samples are wanted, only when all are there.
    """
    if task.least_repetitions > 1:
        return [task.settings.num_questions], 0
    first = [step for step in planned(folder, task) if step.repetition == 1]
    done = sum(step.repetition == 1 for step in finished(folder, task))
    return list(accumulate(len(step.questions) for step in first)), done - 1


def _of_the_look(answered: Answered, done: list[QuestionBlock], task: TaskPlan) -> tuple[Answered, list[QuestionBlock]]:
    """Where more samples are wanted, only these: what is asked again for a comparison would be a further look at full level.

    Looked at after each further block, 10 to 17 % of scores at their bound failed in simulations, where 5 % are meant.
    """
    if task.least_repetitions == 1:
        return answered, done
    kept = [answer for answer in answered.answers if answer.repetition <= task.least_repetitions]
    steps_kept = [step for step in done if step.repetition <= task.least_repetitions]
    return answered.model_copy(update={"answers": kept}), steps_kept


def _restarted(folder: Path, task: TaskPlan) -> str | None:
    """That the server was started anew while it was asked. Pages that cannot be read, or of other engines, do not tell."""
    moments = [
        Moment(f"the {edge} of {step.folder}", page.read_text(errors="replace"))
        for step in finished(folder, task)
        for edge, page in (("start", folder / step.folder / BEFORE), ("end", folder / step.folder / AFTER))
        if page.exists()
    ]
    with suppress(*UNUSABLE):
        return next(iter(restart_problems(moments)), None)
    return None


def _unanswered(answers: list[Answer], task: TaskPlan, folder: Path) -> str | None:
    empty, most = sum(answer.unanswered for answer in answers), task.settings.max_unanswered
    # The limit is a share of all planned questions, so that one empty reply in the first block is not too many.
    if empty == len(answers) or empty > most * max(len(answers), task.settings.num_questions):
        why = thought_without_answers(folder, task)
        return f"{empty} of {len(answers)} replies are empty, and max_unanswered is {most:g}{why and f'; {why}'}"
    return None


def _too_seldom(answers: list[Answer], task: TaskPlan) -> str | None:
    least, wanted = task.least_repetitions, task.least_repetitions * task.settings.num_questions
    if least > 1 and len(answers) < wanted:
        return f"{len(answers)} answers, where {wanted} are wanted: samples_per_question is {least}"
    return None


def _score(
    metric: str, name: str, answered: Answered, folder: Path, at: Sides, source: str, *, is_sampled: bool
) -> Measurement:
    by_question: dict[int, list[float]] = {}
    for answer in answered.answers:
        by_question.setdefault(answer.question, []).append(answer.score(f"{metric},{name}"))
    if all(name in answer.nothing_by for answer in answered.answers):
        because = f"the filter {name} {FOUND_NOTHING} {len(answered.answers):,} replies: {FILTER_REMEDY}"
        return invalid(metric, because, source, task=answered.task, filter=name, sample_count=len(by_question))
    means = [math.fsum(scores) / len(scores) for scores in by_question.values()]
    return valid(
        metric,
        math.fsum(means) / len(means),
        source,
        task=answered.task,
        filter=name,
        sample_count=len(means),
        interval=interval_of_means(means, len(answered.answers), at)
        if is_sampled
        else share_interval(math.fsum(means), len(means), at),
        traced_to=_lines_of(json.dumps(f"{metric},{name}", ensure_ascii=False), folder),
    )


def _lines_of(key: str, folder: Path) -> list[str]:
    """The lines in which lm-eval gives its own score of each step."""
    traces = []
    for path in sorted(folder.glob("r*-b*/results_*.json")):
        lines = path.read_text(encoding="utf-8").split("\n")
        numbers = [number for number, line in enumerate(lines, start=1) if line.strip().startswith(f"{key}:")]
        # Of a group there is one for each member: where they begin is enough.
        traces.append(_trace(path, folder, numbers[0] if numbers else 1))
    return traces


def _trace(path: Path, folder: Path, number: int) -> str:
    return f"{path.relative_to(folder.parent.parent).as_posix()}:{number}"


def _truncated(answered: Answered, folder: Path, done: list[QuestionBlock], at: Sides, source: str) -> Measurement:
    """The share of cut answers, by the server's counters before and after each step. Likelihoods have no answers to cut."""
    try:
        if answered.output_type != GENERATES:
            raise ValueError(NO_ANSWERS)
        gains = [_gain(folder / step.folder, len(step.questions)) for step in done]
        traced_to = [trace for step in done for trace in _cut_lines(folder / step.folder / AFTER, folder)]
    except UNUSABLE as error:
        return invalid(TRUNCATED, f"it is not known how many answers were cut: {in_words(error)}", source, task=answered.task)
    cut, of = (math.fsum(gain) for gain in zip(*gains, strict=True))
    # A question that is asked again is no further sample.
    questions = len({answer.question for answer in answered.answers})
    return valid(
        TRUNCATED,
        cut / of,
        source,
        task=answered.task,
        sample_count=questions,
        interval=share_interval(cut / of * questions, questions, at),
        traced_to=traced_to,
    )


def _tokens(answered: Answered, folder: Path, done: list[QuestionBlock], at: Sides, source: str) -> Measurement:
    """The answers' mean number of tokens, by the server's counters. Likelihoods have no answers to count."""
    try:
        if answered.output_type != GENERATES:
            raise ValueError(NO_ANSWERS)
        pages = [[(folder / step.folder / name).read_text() for name in (BEFORE, AFTER)] for step in done]
        steps = [(before, after, len(step.questions), step.folder) for (before, after), step in zip(pages, done, strict=True)]
        counted = reply_tokens(steps)
    except UNUSABLE as error:
        because = f"it is not known how many tokens the answers have: {in_words(error)}"
        return invalid(ANSWER_TOKENS, because, source, task=answered.task)
    questions = len({answer.question for answer in answered.answers})
    return valid(
        ANSWER_TOKENS,
        counted.mean,
        source,
        task=answered.task,
        sample_count=questions,
        interval=counted.interval(questions, at),
        traced_to=[
            trace for step in done for trace in _lines_with(folder / step.folder / AFTER, folder, (f"{SUM}{{", f"{COUNT}{{"))
        ],
    )


def _faults(metric: str, answered: Answered, folder: Path, task: TaskPlan, at: Sides, source: str) -> Measurement:
    """The share of answers with a fault of their text."""
    try:
        looping = _looping_thoughts(answered, folder, task) if metric == LOOPING else set()
    except UNUSABLE as error:
        return invalid(metric, f"what was thought cannot be read: {in_words(error)}", source, task=answered.task)
    faulty = [getattr(answer, FAULTS[metric]) for answer in answered.answers]
    if None in faulty:
        return invalid(metric, NO_ANSWERS, source, task=answered.task)
    loops = [(answer.step, answer.prompt_hash) in looping for answer in answered.answers]
    return _share(metric, answered, [any(each) for each in zip(faulty, loops, strict=True)], at, source)


def _unthinking(answered: Answered, task: TaskPlan, at: Sides, source: str) -> list[Measurement]:
    """The share of answers without thinking; nothing where the task has no `think_end` and no answer has thinking.

    A reply that never came has none.
    """
    if not (task.settings.think_end or any(answer.has_thinking for answer in answered.answers)):
        return []
    if answered.output_type != GENERATES:
        return [invalid(UNTHINKING, NO_ANSWERS, source, task=answered.task)]
    if lacking := sum(answer.has_thinking is None and not answer.unanswered for answer in answered.answers):
        because = f"{lacking} of {len(answered.answers)} answers have no reply of their own in {REPLIES}"
        return [invalid(UNTHINKING, because, source, task=answered.task)]
    return [_share(UNTHINKING, answered, [not answer.has_thinking for answer in answered.answers], at, source)]


def _share(metric: str, answered: Answered, faulty: list[bool], at: Sides, source: str) -> Measurement:
    """The share of faulty answers; of a question that was asked several times, the mean of its answers."""
    by_question: dict[int, list[bool]] = {}
    for answer, is_faulty in zip(answered.answers, faulty, strict=True):
        by_question.setdefault(answer.question, []).append(is_faulty)
    total = math.fsum(sum(each) / len(each) for each in by_question.values())
    return valid(
        metric,
        total / len(by_question),
        source,
        task=answered.task,
        sample_count=len(by_question),
        interval=share_interval(total, len(by_question), at),
        traced_to=list(
            dict.fromkeys(f"{source.rpartition('/')[0]}/{answer.traced_to.rpartition(':')[0]}" for answer in answered.answers)
        ),
    )


def _looping_thoughts(answered: Answered, folder: Path, task: TaskPlan) -> set[tuple[str, str]]:
    """The replies with thinking that ends in a loop, by the step and the prompt's hash. Their answer may be empty.

    Raises one of UNUSABLE, also if a reply was not kept.
    """
    replies = [(step.folder, reply) for step in finished(folder, task) for reply in read_replies(folder / step.folder)]
    kept = {(step, reply.prompt_hash) for step, reply in replies}
    if answered.output_type == GENERATES and task.keeps_replies:
        # An empty answer may be of a reply that could not be read.
        lacking = [each for each in answered.answers if not each.unanswered and (each.step, each.prompt_hash) not in kept]
        if lacking:
            raise ValueError(f"{len(lacking)} answers have no reply in {REPLIES}")
    return {(step, reply.prompt_hash) for step, reply in replies if reply.thinking and ends_in_loop(reply.thinking)}


def _gain(folder: Path, questions: int) -> tuple[float, float]:
    """The number of a step's requests that ended at the token limit, and of all that ended."""
    before, after = (_ended((folder / name).read_text()) for name in (BEFORE, AFTER))
    missing = [when for when, counted in (("before", before), ("after", after)) if CUT not in counted]
    if missing:
        raise ValueError(f"the server's /metrics {missing[0]} {folder.name} has no {SUCCEEDED} with {REASON} {CUT}")
    gains = {reason: after.get(reason, 0.0) - before.get(reason, 0.0) for reason in before.keys() | after.keys()}
    total = math.fsum(gains.values())
    if not (min(gains.values()) >= 0 and questions <= total < math.inf):
        raise ValueError(f"the server counts {total:g} answers to the {questions} questions of {folder.name}")
    return gains[CUT], total


def _ended(text: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == SUCCEEDED:
                reason = sample.labels.get(REASON, "")
                totals[reason] = totals.get(reason, 0.0) + sample.value
    return totals


def _cut_lines(path: Path, folder: Path) -> list[str]:
    return _lines_with(path, folder, (f"{SUCCEEDED}{{",), f'{REASON}="{CUT}"')


def _lines_with(path: Path, folder: Path, beginnings: tuple[str, ...], wanted: str = "") -> list[str]:
    lines = path.read_text().split("\n")
    return [
        _trace(path, folder, number)
        for number, line in enumerate(lines, start=1)
        if line.startswith(beginnings) and wanted in line
    ]
