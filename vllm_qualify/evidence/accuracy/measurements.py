"""Measurements of a task, from the samples and counts that its blocks left."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from vllm_qualify.engine.metrics_page import samples_of
from vllm_qualify.evidence.accuracy.answers import Answered
from vllm_qualify.evidence.accuracy.blocks import QuestionBlock, read_finished, read_planned
from vllm_qualify.evidence.accuracy.letters import GENERATES, TRIED, Tried
from vllm_qualify.evidence.accuracy.lm_eval_process import AFTER, BEFORE
from vllm_qualify.evidence.accuracy.reply_tokens import COUNT, SUM, reply_tokens
from vllm_qualify.evidence.accuracy.samples import read_answers
from vllm_qualify.evidence.accuracy.texts import ends_in_loop
from vllm_qualify.evidence.accuracy.thinking import REPLIES, read_replies
from vllm_qualify.evidence.measurement import (
    UNUSABLE,
    Interval,
    Measurement,
    in_words,
    interval_of_means,
    invalid,
    share_interval,
    valid,
)
from vllm_qualify.evidence.restarts import Moment, restart_problems
from vllm_qualify.evidence.sequential import Levels, Sides, sides
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.metrics import ANSWER_TOKENS, LOOPING, LOST_BY_FORM, METRICS, OTHER_SCRIPT, UNREAD, UNTHINKING

TRUNCATED = "truncated_answers"
# Faults of an answer's text, by the field of an answer that has it.
FAULTS = {LOOPING: "ends_in_loop", OTHER_SCRIPT: "in_other_script"}
# Less is not told.
LEAST_FORM = 0.002
NO_READING = "the expected answers are neither numbers nor letters of choices, which are all that a second reading knows"
# A filter that found no answer: the score is no share of right ones, whoever is to blame.
FOUND_NOTHING = "found an answer in none of the"
FILTER_REMEDY = (
    "read a few in the samples; if they are answers, give the gate another filter, or have the prompt ask for the form that "
    "the filter reads; if they are not, the model or its chat template is broken"
)
NO_ANSWERS = "the task compares likelihoods and asks for no answers"
# vLLM's counter of answered requests, by their finish reason.
SUCCEEDED, REASON, CUT = "vllm:request_success_total", "finished_reason", "length"


class _Look(NamedTuple):
    """What is measured at one look at a task: its answers, the steps that they are from, and the interval's sides."""

    folder: Path
    source: str
    task: TaskPlan
    answered: Answered
    steps: list[QuestionBlock]
    levels: Levels
    information: list[float]
    number: int

    @property
    def questions(self) -> int:
        """How many there are. One that is asked again is no further sample."""
        return len({answer.question for answer in self.answered.answers})

    def means(self, values: Sequence[float]) -> list[float]:
        """The mean of each question's answers, which have these values."""
        by_question: defaultdict[int, list[float]] = defaultdict(list)
        for answer, value in zip(self.answered.answers, values, strict=True):
            by_question[answer.question].append(value)
        return [math.fsum(each) / len(each) for each in by_question.values()]

    def sides(self, metric: str) -> Sides:
        return sides(METRICS[metric].direction, self.levels, self.information, self.number)

    def invalid(self, metric: str, because: str, **others: object) -> Measurement:
        return invalid(metric, because, self.source, task=self.task.name, **others)

    def valid(self, metric: str, value: float, interval: Interval, traced_to: list[str], **others: object) -> Measurement:
        about = {"task": self.task.name, "sample_count": self.questions, "interval": interval, "traced_to": traced_to}
        return valid(metric, value, self.source, **about, **others)

    def pages(self) -> list[tuple[str, str, int, str]]:
        """The server's /metrics before and after each step, its number of questions, and its name. Raises one of UNUSABLE."""
        if self.answered.output_type != GENERATES:
            raise ValueError(NO_ANSWERS)
        found = []
        for step in self.steps:
            before, after = ((self.folder / step.folder / name).read_text() for name in (BEFORE, AFTER))
            found.append((before, after, len(step.questions), step.folder))
        return found


def parse_task(folder: Path, task: TaskPlan, levels: Levels) -> list[Measurement]:
    """One measurement per filter and declared score, and those of the answers themselves, from the files of a task's folder.

    A question that was asked several times counts with the mean of its answers; an empty one is wrong. All measurements are
    invalid unless lm-eval's files are complete and nearly every question was answered, and those of a filter are if it found
    no answer at all. `levels` are those of the intervals.
    """
    source = f"{folder.parent.name}/{folder.name}/r*-b*"
    of_answers = [TRUNCATED, ANSWER_TOKENS, *FAULTS, UNREAD, LOST_BY_FORM, *([UNTHINKING] if task.settings.think_end else [])]
    try:
        answered, finished = read_answers(folder, task), read_finished(folder, task)
        look = _Look(folder, source, task, answered, finished, levels, *_planned_looks(folder, task))
        if problem := _find_problem(look):
            keys: list[tuple[str, str | None]] = [*answered.keys, *((metric, None) for metric in of_answers)]
            return [look.invalid(key, problem, filter=name, sample_count=look.questions) for key, name in keys]
        look = _keep_look(look)
        rows = [_measure_score(metric, name, look) for metric, name in answered.keys]
    except UNUSABLE as error:
        because = f"lm-eval left no usable result: {in_words(error)}"
        return [invalid(metric, because, source, task=task.name) for metric in ("exact_match", *of_answers)]
    rows += [_measure_truncated(look), _measure_tokens(look)]
    rows += [_measure_faults(metric, look) for metric in FAULTS]
    return [*rows, *_measure_form(look), *_measure_unthinking(look)]


def describe_retries(folder: Path, task: TaskPlan) -> str:
    """In words, how many requests of a task failed and were asked again; empty if none did.

    Raises one of UNUSABLE: a file is not as it was written.
    """
    paths = [path for step in read_finished(folder, task) if (path := folder / step.folder / TRIED).exists()]
    tried = [Tried.model_validate_json(path.read_bytes()) for path in paths]
    failed = sum(each.failed for each in tried)
    if not failed:
        return ""
    most = max(each.most_tries for each in tried)
    return f"{failed:,} requests failed, and lm-eval asked again: it tries each {most} times at most, and keeps the reply"


def describe_missing_answers(folder: Path, task: TaskPlan) -> str:
    """In words, how many replies have thinking and no answer; empty if none has. Raises one of UNUSABLE."""
    replies = [reply for step in read_finished(folder, task) for reply in read_replies(folder / step.folder)]
    thoughts = [reply for reply in replies if reply.is_empty and reply.thinking]
    cut = sum(reply.finish_reason == CUT for reply in thoughts)
    # vLLM looks for `stop` in the thoughts, too, and lm-eval sends a task's `until` as that.
    stopped = [reply.stop_reason for reply in thoughts if reply.finish_reason != CUT and reply.stop_reason]
    only = len(thoughts) - cut - len(stopped)
    reasons = [f"{cut:,} {'was' if cut == 1 else 'were'} cut while still thinking"] if cut else []
    if stopped:
        most = max(set(stopped), key=stopped.count)
        ended = f"{len(stopped):,} {'was' if len(stopped) == 1 else 'were'} ended in the thinking by the stop text {most!r}"
        reasons.append(f"{ended}: set stop: [] for this task")
    reasons += [f"{only:,} ended without an answer after the thinking"] if only else []
    return f"of {len(replies):,} replies, {' and '.join(reasons)}" if reasons else ""


def _planned_looks(folder: Path, task: TaskPlan) -> tuple[list[float], int]:
    """The number of questions at each planned look, and which look this is.

    Looks are after each block of the first repetition, or where more samples are wanted, only when all are there.
    """
    if task.least_repetitions > 1:
        return [task.settings.num_questions], 0
    first = [step for step in read_planned(folder, task) if step.repetition == 1]
    done = sum(step.repetition == 1 for step in read_finished(folder, task))
    return list(accumulate(len(step.questions) for step in first)), done - 1


def _keep_look(look: _Look) -> _Look:
    """Where more samples are wanted, only these: what is asked again for a comparison would be a further look at full level.

    Looked at after each further block, 10 to 17 % of scores at their bound failed in simulations, where 5 % are meant.
    """
    least = look.task.least_repetitions
    if least == 1:
        return look
    kept = [answer for answer in look.answered.answers if answer.repetition <= least]
    steps = [step for step in look.steps if step.repetition <= least]
    return look._replace(answered=look.answered.model_copy(update={"answers": kept}), steps=steps)


def _find_problem(look: _Look) -> str | None:
    """Why the answers are no result: too many are empty, too few are there, or the server was started anew meanwhile."""
    answers, settings, samples = look.answered.answers, look.task.settings, look.task.least_repetitions
    empty, most = sum(answer.unanswered for answer in answers), settings.max_unanswered
    # The limit is a share of all planned questions, so that one empty reply in the first block is not too many.
    if empty == len(answers) or empty > most * max(len(answers), settings.num_questions):
        why = describe_missing_answers(look.folder, look.task)
        return f"{empty} of {len(answers)} replies are empty, and max_unanswered is {most:g}{why and f'; {why}'}"
    wanted = samples * settings.num_questions
    if samples > 1 and len(answers) < wanted:
        return f"{len(answers)} answers, where {wanted} are wanted: samples_per_question is {samples}"
    moments = [
        Moment(f"the {edge} of {step.folder}", page.read_text(errors="replace"))
        for step in look.steps
        for edge, page in (("start", look.folder / step.folder / BEFORE), ("end", look.folder / step.folder / AFTER))
        if page.exists()
    ]
    # Pages that cannot be read, or of other engines, do not tell.
    with suppress(*UNUSABLE):
        return next(iter(restart_problems(moments)), None)
    return None


def _measure_score(metric: str, name: str, look: _Look) -> Measurement:
    answers = look.answered.answers
    if all(name in answer.nothing_by for answer in answers):
        because = f"the filter {name} {FOUND_NOTHING} {len(answers):,} replies: {FILTER_REMEDY}"
        return look.invalid(metric, because, filter=name, sample_count=look.questions)
    means, at = look.means([answer.score(f"{metric},{name}") for answer in answers]), look.sides(metric)
    is_sampled = look.task.least_repetitions > 1
    return look.valid(
        metric,
        math.fsum(means) / len(means),
        interval_of_means(means, len(answers), at) if is_sampled else share_interval(math.fsum(means), len(means), at),
        _trace_scores(json.dumps(f"{metric},{name}", ensure_ascii=False), look.folder),
        filter=name,
        finding=_form_words(f"{metric},{name}", math.fsum(means) / len(means), look),
    )


def _form_words(key: str, score: float, look: _Look) -> str:
    """How much higher the score would be if a second reading counted; empty if by less than LEAST_FORM."""
    answers = look.answered.answers
    if any(answer.reads_right is None for answer in answers):
        return ""
    lost = [bool(answer.reads_right) and not answer.score(key) for answer in answers]
    share = math.fsum(look.means(lost)) / look.questions
    if share < LEAST_FORM:
        return ""
    what = f"{share:.1%} of the replies seem right in a form that this filter does not read"
    return f"{what}: read so, the score is {score + share:.1%} and not {score:.1%}; that would be form and not knowledge"


def _trace_scores(key: str, folder: Path) -> list[str]:
    """The lines in which lm-eval gives its own score of each step."""
    traces = []
    for path in sorted(folder.glob("r*-b*/results_*.json")):
        lines = path.read_text(encoding="utf-8").split("\n")
        numbers = [number for number, line in enumerate(lines, start=1) if line.strip().startswith(f"{key}:")]
        # Of a group there is one for each member: where they begin is enough.
        traces.append(_trace_line(path, folder, numbers[0] if numbers else 1))
    return traces


def _trace_line(path: Path, folder: Path, number: int) -> str:
    return f"{path.relative_to(folder.parent.parent).as_posix()}:{number}"


def _measure_truncated(look: _Look) -> Measurement:
    """The share of cut answers, by the server's counters before and after each step. Likelihoods have no answers to cut."""
    try:
        gains = [_count_ended(*pages) for pages in look.pages()]
        traced_to = _trace_pages(look, (f"{SUCCEEDED}{{",), f'{REASON}="{CUT}"')
    except UNUSABLE as error:
        return look.invalid(TRUNCATED, f"it is not known how many answers were cut: {in_words(error)}")
    cut, ended = (math.fsum(gain) for gain in zip(*gains, strict=True))
    interval = share_interval(cut / ended * look.questions, look.questions, look.sides(TRUNCATED))
    return look.valid(TRUNCATED, cut / ended, interval, traced_to)


def _measure_tokens(look: _Look) -> Measurement:
    """The answers' mean number of tokens, by the server's counters. Likelihoods have no answers to count."""
    try:
        counted = reply_tokens(look.pages())
    except UNUSABLE as error:
        return look.invalid(ANSWER_TOKENS, f"it is not known how many tokens the answers have: {in_words(error)}")
    interval = counted.interval(look.questions, look.sides(ANSWER_TOKENS))
    return look.valid(ANSWER_TOKENS, counted.mean, interval, _trace_pages(look, (f"{SUM}{{", f"{COUNT}{{")))


def _measure_faults(metric: str, look: _Look) -> Measurement:
    try:
        looping = _looping_thoughts(look) if metric == LOOPING else set()
    except UNUSABLE as error:
        return look.invalid(metric, f"what was thought cannot be read: {in_words(error)}")
    answers = look.answered.answers
    faulty = [getattr(answer, FAULTS[metric]) for answer in answers]
    if None in faulty:
        return look.invalid(metric, NO_ANSWERS)
    loops = [(answer.step, answer.prompt_hash) in looping for answer in answers]
    return _measure_share(metric, look, [any(each) for each in zip(faulty, loops, strict=True)])


def _measure_form(look: _Look) -> list[Measurement]:
    """What filters make of the replies' form: the share that no filter could read, and that which is right read otherwise."""
    answers, filters = look.answered.answers, {name for _, name in look.answered.keys}
    if look.answered.output_type != GENERATES:
        return [look.invalid(metric, NO_ANSWERS) for metric in (UNREAD, LOST_BY_FORM)]
    unread = _measure_share(UNREAD, look, [filters <= set(answer.nothing_by) for answer in answers])
    lost = [answer.is_lost_by_form for answer in answers]
    if None in lost:
        return [unread, look.invalid(LOST_BY_FORM, NO_READING)]
    return [unread, _measure_share(LOST_BY_FORM, look, [bool(each) for each in lost])]


def _measure_unthinking(look: _Look) -> list[Measurement]:
    """The share of answers without thinking; nothing where the task has no `think_end` and no answer has thinking.

    A reply that never came has none.
    """
    answers = look.answered.answers
    if not (look.task.settings.think_end or any(answer.has_thinking for answer in answers)):
        return []
    if look.answered.output_type != GENERATES:
        return [look.invalid(UNTHINKING, NO_ANSWERS)]
    if lacking := sum(answer.has_thinking is None and not answer.unanswered for answer in answers):
        return [look.invalid(UNTHINKING, f"{lacking} of {len(answers)} answers have no reply of their own in {REPLIES}")]
    return [_measure_share(UNTHINKING, look, [not answer.has_thinking for answer in answers])]


def _measure_share(metric: str, look: _Look, faulty: list[bool]) -> Measurement:
    total, inside = math.fsum(look.means(faulty)), look.source.rpartition("/")[0]
    traced_to = dict.fromkeys(f"{inside}/{answer.traced_to.rpartition(':')[0]}" for answer in look.answered.answers)
    interval = share_interval(total, look.questions, look.sides(metric))
    return look.valid(metric, total / look.questions, interval, list(traced_to))


def _looping_thoughts(look: _Look) -> set[tuple[str, str]]:
    """The replies with thinking that ends in a loop, by the step and the prompt's hash. Their answer may be empty.

    Raises one of UNUSABLE, also if a reply was not kept.
    """
    steps = read_finished(look.folder, look.task)
    replies = [(step.folder, reply) for step in steps for reply in read_replies(look.folder / step.folder)]
    kept = {(step, reply.prompt_hash) for step, reply in replies}
    if look.answered.output_type == GENERATES and look.task.keeps_replies:
        # An empty answer may be of a reply that could not be read.
        answers = [each for each in look.answered.answers if not each.unanswered]
        if lacking := sum((each.step, each.prompt_hash) not in kept for each in answers):
            raise ValueError(f"{lacking} answers have no reply in {REPLIES}")
    return {(step, reply.prompt_hash) for step, reply in replies if reply.thinking and ends_in_loop(reply.thinking)}


def _count_ended(page_before: str, page_after: str, questions: int, step: str) -> tuple[float, float]:
    """The number of a step's requests that ended at the token limit, and of all that ended."""
    before, after = _read_ended(page_before), _read_ended(page_after)
    missing = [when for when, counted in (("before", before), ("after", after)) if CUT not in counted]
    if missing:
        raise ValueError(f"the server's /metrics {missing[0]} {step} has no {SUCCEEDED} with {REASON} {CUT}")
    gains = {reason: after.get(reason, 0.0) - before.get(reason, 0.0) for reason in before.keys() | after.keys()}
    total = math.fsum(gains.values())
    if not (min(gains.values()) >= 0 and questions <= total < math.inf):
        raise ValueError(f"the server counts {total:g} answers to the {questions} questions of {step}")
    return gains[CUT], total


def _read_ended(page: str) -> dict[str, float]:
    totals: defaultdict[str, float] = defaultdict(float)
    for sample in samples_of(page, lambda _: True):
        if sample.name == SUCCEEDED:
            totals[sample.labels.get(REASON, "")] += sample.value
    return totals


def _trace_pages(look: _Look, beginnings: tuple[str, ...], wanted: str = "") -> list[str]:
    """The lines that begin so and have the `wanted` text, in the page of metrics after each step."""
    return [
        _trace_line(path, look.folder, number)
        for path in [look.folder / step.folder / AFTER for step in look.steps]
        for number, line in enumerate(path.read_text().split("\n"), start=1)
        if line.startswith(beginnings) and wanted in line
    ]
