"""Looks at the answers of a cell beside those of another run."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np

from vllm_qualify.evidence import starts
from vllm_qualify.evidence.accuracy import blocks
from vllm_qualify.evidence.accuracy.answers import Answer, Answered
from vllm_qualify.evidence.sequential import levels_for
from vllm_qualify.judge import paired
from vllm_qualify.judge.between import Counts
from vllm_qualify.judge.compare.noise import find_history
from vllm_qualify.judge.compare.places import BASELINE, UnlikeError, find_other_run, largest_loss, read_further_starts
from vllm_qualify.judge.paired import Record
from vllm_qualify.plan.cell import CellPlan, TaskPlan
from vllm_qualify.recipe.gates import Gate


def look_at_answers(
    gate: Gate, plan: CellPlan, evidence: Path, task: TaskPlan
) -> tuple[paired.AnswersLook, Answered, Answered]:
    """The look at all answers of the cell, with the other run's and the cell's. Raises one of UNUSABLE if there is none.

    The first start is looked at after each block of questions, and further ones when they have asked every question.
    """
    other = find_other_run(gate, plan)
    folder = evidence / BASELINE / other.folder
    new, old = starts.answers_of(plan, evidence, task), _read_counting_answers(folder, gate, task)
    if problem := find_difference(old, new, other.word):
        raise UnlikeError(problem)
    questions = list_questions(old.answers)
    theirs = paired.answers_by_question(make_record(drop_unanswered(old), gate, questions))
    if theirs.spare == 0:
        raise UnlikeError(f"the {other.word} was asked each question once, so the noise is unknown: establish it anew")
    ours = make_record(new.answers, gate, questions)
    repetitions = max(task.settings.most_repetitions, *ours.repetition + 1)
    steps = blocks.plan_steps(task.settings, len(questions), repetitions, sequential=task.sequential)
    # The numbers of answers after which the gates are looked at.
    planned = np.cumsum([len(step.questions) for step in steps]).tolist()
    first, *others = np.bincount(ours.start).tolist()
    if first not in planned:
        raise UnlikeError(f"{first} answers, where the gates are looked at after {planned}")
    taken = [asked for asked in planned if asked <= first]
    taken += [first + further for further in np.cumsum(others).tolist()]
    # The last look that there can be is at the last start that may be made.
    most = len(planned) if plan.starts == starts.FIRST else len(taken) + plan.starts - starts.FIRST - len(others)
    growing = (paired.answers_by_question(ours.first_answers(asked)) for asked in taken)
    history = find_history(plan, gate).get("start")
    # If each build is started once, what differs between starts is not in the comparison, and the measurement says so.
    over_starts = plan.starts > starts.FIRST or len(theirs.starts.shifts) > 1 or history is not None
    about = (largest_loss(gate), levels_for(plan), most, history)
    *_, last = paired.looks(theirs, growing, *about, over_starts=over_starts, most_starts=plan.starts)
    return last, old, new


def _read_counting_answers(folder: Path, gate: Gate, task: TaskPlan) -> Answered:
    """The answers of the run whose files are in `folder`, from all its starts that count. Raises one of UNUSABLE."""
    kept = starts.kept_answers(folder, task.name)
    invalid_ones = {row.start for row in read_further_starts(folder, gate) if row.invalid_because}
    return kept.model_copy(update={"answers": [answer for answer in kept.answers if answer.start not in invalid_ones]})


def find_difference(old: Answered, new: Answered, of: str) -> str | None:
    """Why the answers of two builds do not belong to the same questions, or None."""
    if (old.task_version, old.config_hash) != (new.task_version, new.config_hash):
        return f"the task {new.task} is not the {of}'s: its prompts or its scoring changed"
    hashes = attrgetter("doc_hash", "prompt_hash", "target_hash")
    before = {answer.question: hashes(answer) for answer in old.answers}
    other = sorted({answer.question for answer in new.answers if before.get(answer.question) != hashes(answer)})
    return f"{len(other)} questions are not the {of}'s, or have other prompts: {other[:5]}" if other else None


def score_key(gate: Gate) -> str:
    """The name of a gate's score among the scores of an answer."""
    return f"{gate.metric},{gate.filter}"


def group_by_question(answers: Iterable[Answer]) -> dict[int, list[Answer]]:
    by_question: dict[int, list[Answer]] = {}
    for answer in answers:
        by_question.setdefault(answer.question, []).append(answer)
    return by_question


def list_questions(answers: Iterable[Answer]) -> list[int]:
    return sorted({answer.question for answer in answers})


def make_record(answers: Sequence[Answer], gate: Gate, questions: Sequence[int]) -> Record:
    """The answers' scores in their order. An empty answer counts as wrong."""
    places = {question: place for place, question in enumerate(questions)}
    topics = {answer.question: answer.topic for answer in answers}
    has_topics = None not in topics.values() and topics.keys() == places.keys()
    return Record(
        question=np.array([places[answer.question] for answer in answers], dtype=np.int64),
        score=np.array([answer.score(score_key(gate)) for answer in answers], dtype=np.float64),
        repetition=_number_values([(answer.start, answer.repetition) for answer in answers]),
        start=_number_values([answer.start for answer in answers]),
        questions=len(questions),
        topics=_number_values([topics[question] for question in questions]) if has_topics else None,
    )


def _number_values(values: Sequence[object]) -> Counts:
    """The values as numbers from 0, in the order in which they appear."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def drop_unanswered(baseline: Answered) -> list[Answer]:
    """A baseline's answers without the empty ones, which would make it easier to match if they counted as wrong."""
    return [answer for answer in baseline.answers if not answer.unanswered]
