"""Scores made again from the kept replies: a sample's own score is the word of whoever wrote the file.

Only by what lm-eval itself has of a task, never by the record of its configuration in the results: that is a publisher's word
too, and a pattern of a publisher's could take for ever, or find an answer in anything.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_qualify.evidence.accuracy.answers import number_lines
from vllm_qualify.evidence.accuracy.blocks import read_finished, split_by_member
from vllm_qualify.evidence.accuracy.letters import TASK, TaskReply
from vllm_qualify.evidence.accuracy.lm_eval_internals import OwnScoring, TooLongError, own_scoring
from vllm_qualify.evidence.accuracy.samples import find_only_file, find_samples
from vllm_qualify.evidence.measurement import UNUSABLE, in_words
from vllm_qualify.plan.cell import TaskPlan
from vllm_qualify.recipe.metrics import METRICS

Row = dict[str, Any]


def can_be_scored_again(folder: Path, task: TaskPlan) -> bool:
    """Whether lm-eval's own task, or each member of its group, tells how a reply is scored. Raises one of UNUSABLE."""
    reply = TaskReply.model_validate_json((folder / TASK).read_bytes())
    names = [member.name for member in reply.members] or [task.name]
    # A file in the recipe's folder may have taken the place of lm-eval's.
    return task.folder is None and all(own_scoring(name) for name in names)


def find_wrong_score(folder: Path, task: TaskPlan, start: int) -> str:
    """The first sample of a task that says another thing than its reply gives, in words; empty if none does."""
    inside = Path("accuracy") / folder.name
    try:
        for path, config in _list_files(folder, task, start):
            inside = path.relative_to(folder.parent.parent)
            rows = [(number, json.loads(line)) for number, line in number_lines(path.read_bytes())]
            scoring = OwnScoring(config, rows[0][1]["doc"])
            problems = (_find_problem(row, scoring, f"{inside.as_posix()}:{number}") for number, row in rows)
            if problem := next(filter(None, problems), ""):
                return problem
    except UNUSABLE as error:
        return f"{inside.as_posix()} cannot be scored again: {in_words(error)}"
    return ""


def _list_files(folder: Path, task: TaskPlan, start: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of samples, each with how its task scores."""
    reply = TaskReply.model_validate_json((folder / TASK).read_bytes())
    for step in read_finished(folder, task, start):
        parts = split_by_member(step, task, reply)
        paths = find_samples(find_only_file(folder / step.folder, "results_*.json"), parts)
        for path, part in zip(paths, parts, strict=True):
            if config := own_scoring(part.task):
                yield path, config


def _find_problem(row: Row, scoring: OwnScoring, place: str) -> str:
    question, name = row["doc_id"], row["filter"]
    try:
        again = scoring.score(row["doc"], row["resps"], name)
    except TooLongError as error:
        # No wanted answer is that long: it is wrong.
        is_wrong = not any(row[metric] for metric in _scores_in(row))
        return "" if is_wrong else f"question {question} is right by {name} in {place}, and has {error}"
    except UNUSABLE as error:
        return f"question {question} in {place} cannot be scored again by {name}: {in_words(error)}"
    if row["target"] != again.target:
        return f"the target of question {question} is {row['target']!r} in {place}, and its document gives {again.target!r}"
    if row["filtered_resps"] != again.found:
        found = f"what {name} found for question {question} is {row['filtered_resps']!r}"
        return f"{found} in {place}, and its reply gives {again.found!r}"
    for metric in _scores_in(row):
        if row[metric] != again.scores.get(metric):
            said = f"the {metric} of question {question} by {name} is {row[metric]!r} in {place}"
            return f"{said}, and its reply gives {again.scores.get(metric)!r}"
    return ""


def _scores_in(row: Row) -> list[str]:
    return [name for name in row if name in METRICS and METRICS[name].is_score]
